"""A whole verification with every kind of figure, as tests of its readers and writers need it."""

from __future__ import annotations

from mnnsmith.verify.results import (
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
    WeightFigures,
)

HOSTILE = "<b>&amp; | `x`\n\x1b[2J \x07 ]]> \"q\" 'z' é 東京 \ufffe end"


def difference(name: str, layer: int | None, error: float) -> ValueDifference:
    return ValueDifference(name, layer, "residual", 0.9999, error, 51.5, 0.25, 1.5, 1e-3)


def statistical() -> StatisticalFigures:
    return StatisticalFigures(
        reference="transformers 5.24.0, float32",
        text_sha256="ab" * 32,
        tokens=2048,
        block_tokens=64,
        kl=Interval(0.0312, 0.0287, 0.0337),
        kl_median=0.011,
        kl_p99=0.31,
        kl_max=1.75,
        top1=Interval(0.912, 0.899, 0.925),
        top5=Interval(0.991, 0.987, 0.995),
        perplexity=18.9,
        reference_perplexity=18.2,
        loss_increase=Interval(0.0377, 0.0301, 0.0453),
        perplexity_increase=Interval(0.0384, 0.0306, 0.0463),
        block_kl=(0.03, 0.0324),
        block_loss_increase=(0.036, 0.0394),
        block_top1=(0.91, 0.914),
        kl_histogram=Histogram((0.0, 0.01, 0.1, 1.0), (900, 1000, 148)),
        sections=(
            SectionFigures("english", 1024, 0.028, 0.92, 15.0, 14.5),
            SectionFigures("code | c", 1024, 0.034, 0.90, 23.0, 22.0),
        ),
        greedy_tokens=32,
        greedy=(None, 17),
        sample=(TokenScore(HOSTILE, 0.02, " Paris", " Paris", 1.2, 1.1),),
    )


def verification(
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
    return Verification(
        format=1,
        mnnsmith="0.3.0",
        engine="3.6.1",
        date="2026-11-30T20:42:32Z",
        level="quick",
        seconds=42.5,
        subject=Subject(
            "smollm2", "llama", "w4g32-head8", "smol-hf", None, {"llm.mnn": "cd" * 32},
            "local", {"memory": "low", "precision": "low", "threads": "2"},
        ),
        checks=checks,
        gates=gates,
        figures=Figures(
            weights=WeightFigures((
                StoredWeight("layer0/mlp/down", "model.layers.0.mlp.down_proj.weight", "w4g32",
                             "mlp", 0, 884736, 497664, 0.08, 0.5),
                StoredWeight("head", "lm_head.weight", "fp16", "head", None, 100, 200, 0.0, None),
            )),
            tokens=TextFigures(12425, 0, 3),
            template=TextFigures(14, 0, 1),
            exact=ExactFigures("transformers 5.24.0, float32", "high",
                               (ExactCase("prompt", 300, 2e-5, 1e-10, True),), 1e-10),
            statistical=statistical(),
            layers=LayerFigures(
                "transformers 5.24.0, float32", 64, (difference("layer0/residual", 0, 1e-6),),
                (difference("layer0/residual", 0, 0.02),), None, (),
            ),
            ranges=RangeFigures(512, 65504.0, (ValueRange("layer0/mlp", 0, 412.5, 17, 3),)),
        ),
    )  # fmt: skip
