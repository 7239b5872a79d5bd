"""Verifications made up for tests of what reads them: numbers that look like real ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mnnsmith.verify.results import (
    FORMAT,
    Check,
    ExactCase,
    ExactFigures,
    Figures,
    Finding,
    Gate,
    Histogram,
    Interval,
    LayerFigures,
    RangeFigures,
    SectionFigures,
    StatisticalFigures,
    StoredWeight,
    Subject,
    TextFigures,
    TokenScore,
    ValueDifference,
    ValueRange,
    Verification,
    VisionFigures,
    WeightFigures,
)

LAYERS = 30
HOSTILE = "<b>&amp; | `x`\n\x1b[2J \x07 ]]> \"q\" 'z' é 東京 \ufffe end"


def verification(
    bundle: str = "smol-w4",
    recipe: str = "w4g32-head8",
    kl: float = 0.002,
    *,
    fails: bool = False,
    sees: bool = False,
) -> Verification:
    """One result; `kl` scales its errors.  fails: with a fault in block 7 and a gate that fails.

    sees: with a tower of twelve blocks.
    """
    random = np.random.default_rng(7)
    findings = (
        (Finding("error", "layer7/attention/mix", "differs by 0.31", "Convert the model again."),)
        if fails
        else ()
    )
    checks = (
        Check("files", "passed", "6 files are unchanged", 0.2),
        Check("weights", "passed", "211 matrices are within half a step", 1.9),
        Check("tokens", "passed", "12425 texts give the same ids", 3.0,
              (Finding("note", "engine", "34 texts differ, as the conversion said"),)),
        Check("template", "skipped", "the model has none", 0.0),
        Check("exact", "passed", "5 cases, KL at most 3.1e-10", 6.3),
        Check("statistical", "passed", f"KL {kl:.3g}", 14.2),
        Check("layers", "failed" if fails else "passed", "30 blocks", 9.0, findings),
        Check("ranges", "passed", "at most 9512", 3.1,
              (Finding("warning", "layer3/mlp/act", "9512 is near", "See docs."),)),
    )  # fmt: skip
    gates = (
        Gate("max-kl", "0.01", f"{kl:.4f}", kl <= 0.01),
        Gate("min-top1", "0.9", "0.964", True),
    )
    figures = Figures(
        _weights(random),
        TextFigures(12425, 0, 34),
        TextFigures(14, 0, 0),
        ExactFigures(
            "transformers 5.24.0, float32", "high",
            (ExactCase("prompt", 128, 3e-6, 3.1e-10, True),), 3.1e-10,
        ),
        statistical(kl),
        _layers(random, kl, fails),
        _ranges(random),
        _vision(kl, fails) if sees else None,
    )  # fmt: skip
    subject = Subject(
        bundle, "llama", recipe, "SmolLM2-135M-Instruct", None,
        {"llm.mnn": "0" * 64, "llm.mnn.weight": "f" * 64}, "local",
        {"memory": "low", "precision": "low", "threads": "2"},
    )  # fmt: skip
    return Verification(
        FORMAT, "0.2.0", "3.6.1", "2026-01-02T03:04:05Z", "quick", 38.2, subject, checks, gates,
        figures,
    )  # fmt: skip


def judged(
    *, gates: tuple[Gate, ...] | None = None, checks: tuple[Check, ...] | None = None
) -> Verification:
    """A failed one: a finding of every severity, a skipped check, a gate that does not hold."""
    found = (
        Finding("error", "tokenizer.mtok", HOSTILE, "Convert the model again."),
        Finding("warning", "layer 3", "close to the limit"),
        Finding("note", "config.json", "edited since the conversion"),
    )
    if checks is None:
        checks = (
            Check("files", "passed", "8 files are whole", 0.5),
            Check("tokens", "failed", "3 of 12425 texts differ", 4.25, found),
            Check("layers", "skipped", "not asked for", 0.0),
        )
    if gates is None:
        gates = (
            Gate("max-kl", "0.05", "0.0312 (0.0287 to 0.0337)", True),
            Gate("min-top1", "0.95", "0.912 (0.899 to 0.925)", False),
        )
    return replace(verification(), checks=checks, gates=gates)


def statistical(kl: float = 0.002) -> StatisticalFigures:
    """Those of `verification`."""
    return _statistical(np.random.default_rng(8), kl)


def _weights(random: np.random.Generator) -> WeightFigures:
    made = [
        StoredWeight("lm_head", "model.embed_tokens.weight", "w8g64", "head", None, 28311552,
                     30081024, 0.004, 0.5)
    ]  # fmt: skip
    for layer in range(LAYERS):
        for role, part, size in (("attention", "q", 331776), ("mlp", "down", 884736)):
            error = 0.06 + 0.02 * float(random.random())
            made.append(
                StoredWeight(
                    f"layer{layer}/{role}/{part}", f"model.layers.{layer}.{part}.weight", "w4g32",
                    role, layer, size, size * 5 // 8, error, 0.5,
                )
            )  # fmt: skip
    return WeightFigures(tuple(made))


def _statistical(random: np.random.Generator, kl: float) -> StatisticalFigures:
    spread = kl * np.exp(1.2 * random.standard_normal(1024) - 0.7)
    edges = 10.0 ** np.arange(-8, 1.25, 0.25)
    counts, _ = np.histogram(np.clip(spread, edges[0], edges[-1]), edges)
    blocks = spread.reshape(-1, 32).mean(1)
    words = (
        "The", " smith", " set", " the", " hammer", " down", ",", " wiped", " his", " hands",
        " and", " said", ":\n", "def", " forge", "(", "steel", "):\n", "    return", " <b>", "\n",
    )  # fmt: skip
    sample = tuple(
        TokenScore(
            word, float(spread[i] * 20), word if i % 5 else " other", word, 1.0 + 0.1 * i, 1.1
        )
        for i, word in enumerate(words * 4)
    )
    return StatisticalFigures(
        reference="transformers 5.24.0, float32",
        text_sha256="a" * 64,
        tokens=1024,
        block_tokens=32,
        kl=Interval(kl, kl * 0.9, kl * 1.1),
        kl_median=kl / 2,
        kl_p99=kl * 9,
        kl_max=kl * 30,
        top1=Interval(0.964, 0.955, 0.973),
        top5=Interval(0.998, 0.995, 1.0),
        perplexity=20.51,
        reference_perplexity=20.4,
        loss_increase=Interval(0.0054, 0.001, 0.0098),
        perplexity_increase=Interval(0.0054, 0.001, 0.0098),
        block_kl=tuple(float(b) for b in blocks),
        block_loss_increase=tuple(float(b) for b in random.normal(0.005, 0.01, 32)),
        block_top1=tuple(float(b) for b in np.clip(random.normal(0.964, 0.03, 32), 0, 1)),
        kl_histogram=Histogram(tuple(map(float, edges)), tuple(map(int, counts))),
        sections=(
            SectionFigures("English", 400, kl, 0.97, 18.0, 17.9),
            SectionFigures("Chinese", 300, kl * 1.4, 0.95, 33.0, 32.6),
            SectionFigures("code | Python", 324, kl * 0.8, 0.98, 6.1, 6.1),
        ),
        greedy_tokens=32,
        greedy=(None, 17, 29),
        sample=sample,
    )


def _layers(random: np.random.Generator, kl: float, fails: bool) -> LayerFigures:
    exact, shipped = [], []
    for layer in range(LAYERS):
        for kind in ("attention", "mlp", "residual"):
            name = f"layer{layer}/{kind}"
            wrong = fails and layer >= 7
            noise = 1 + 0.3 * float(random.random())
            error = 0.3 if wrong else 2e-7 * (layer + 1) * noise
            exact.append(_difference(name, layer, kind, error, 1e-4))
            shipped.append(_difference(name, layer, kind, kl**0.5 * (0.3 + layer / 20) * noise))
    return LayerFigures(
        "transformers 5.24.0, float32", 64, tuple(exact), tuple(shipped),
        "layer7/attention" if fails else None,
        (_difference("layer7/attention/mix", 7, "attention", 0.31, 1e-4),) if fails else (),
    )  # fmt: skip


def _vision(kl: float, fails: bool) -> VisionFigures:
    exact = [_difference("embeddings", -1, "residual", 3e-7, 5e-5)]
    for layer in range(12):
        for kind in ("attention", "mlp", "residual"):
            wrong = fails and layer >= 7
            error = 0.2 if wrong else 2e-7 * (layer + 1)
            exact.append(_difference(f"vision{layer}/{kind}", layer, kind, error, 1e-4))
    exact.append(_difference("connector", None, "connector", 3e-6, 6e-4))
    shipped = [replace(value, error=kl**0.5, allowed=None) for value in exact]
    return VisionFigures(
        "transformers 5.24.0, float32", 9, 0, 2, tuple(exact), tuple(shipped),
        "vision7/attention" if fails else None, (),
        (ExactCase("one picture", 400, 3e-6, 2.2e-9, True),), 2.2e-9,
        Interval(kl, kl * 0.8, kl * 1.2), Interval(0.95, 0.94, 0.96), 384,
    )  # fmt: skip


def _difference(
    name: str, layer: int | None, kind: str, error: float, allowed: float | None = None
) -> ValueDifference:
    decibels = float(-20 * np.log10(error))
    return ValueDifference(
        name, layer, kind, 1 - error**2 / 2, error, decibels, error, 1.0, allowed
    )


def _ranges(random: np.random.Generator) -> RangeFigures:
    values = tuple(
        ValueRange(f"layer{i}/mlp/act", i, float(9512 if i == 3 else 40 + 20 * random.random()), 3,
                   17)
        for i in range(LAYERS)
    )  # fmt: skip
    return RangeFigures(256, 65504.0, values)
