"""The statistical check: figures against an injected difference of known size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnnsmith.api import Engine, convert, prepare
from mnnsmith.errors import UsageError
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.verify.checks.statistical import check_statistical
from mnnsmith.verify.context import Context
from mnnsmith.verify.output.results_json import non_finite
from mnnsmith.verify.references.transformers_reference import open_transformers
from mnnsmith.verify.texts.windows import cut_windows, shipped_sections
from verify_stand_ins import StandInEngine, StandInReference, stand_in_context, true_logits

# The token of "e", often the right one.
K, DELTA = 105, 1.7


def raised(logits: np.ndarray, positions: np.ndarray, engine: StandInEngine) -> np.ndarray:
    logits[:, K] += np.float32(DELTA)
    return logits


def test_figures_are_those_of_the_injected_difference(tmp_path: Path) -> None:
    """One logit raised by d: KL = log(1 - p + p e^d) - p d, and the loss follows alike."""
    context = stand_in_context(tmp_path, StandInEngine(raised))
    outcome = check_statistical(context)
    found = outcome.figures
    assert found is not None and non_finite(found) is None
    tokenizer = TextTokenizer(context.bundle.tokenizer_json())
    cut = cut_windows(shipped_sections(), tokenizer, "quick", 2048)
    kl, increase, losses, top1 = [], [], [], []
    for window in cut.windows:
        x = true_logits(window.inputs).astype(np.float64)
        p = np.exp(x - x.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        grown = np.log(1 - p[:, K] + p[:, K] * math.exp(DELTA))
        kl += (grown - p[:, K] * DELTA).tolist()
        increase += (grown - DELTA * (window.targets == K)).tolist()
        losses += (-np.log(p[np.arange(len(p)), window.targets])).tolist()
        y = x.copy()
        y[:, K] += np.float32(DELTA)
        top1 += (x.argmax(1) == y.argmax(1)).tolist()
    assert sum(int((window.targets == K).sum()) for window in cut.windows) > 50
    assert found.tokens == len(kl) == sum(section.tokens for section in found.sections)
    assert found.kl.mean == pytest.approx(np.mean(kl), rel=1e-5)
    assert found.kl_median == pytest.approx(np.median(kl), rel=1e-5)
    assert found.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-5)
    assert found.kl_max == pytest.approx(max(kl), rel=1e-5)
    assert found.loss_increase.mean == pytest.approx(np.mean(increase), abs=1e-6)
    assert found.perplexity_increase.mean == pytest.approx(math.expm1(np.mean(increase)), abs=1e-6)
    assert found.reference_perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    ratio = found.perplexity / found.reference_perplexity
    assert ratio - 1 == pytest.approx(found.perplexity_increase.mean, rel=1e-6)
    assert 0.3 < found.top1.mean < 1 and found.top1.mean == pytest.approx(np.mean(top1))
    np.testing.assert_allclose(found.block_kl, np.reshape(kl, (-1, 32)).mean(1), rtol=1e-5)
    np.testing.assert_allclose(
        found.block_loss_increase, np.reshape(increase, (-1, 32)).mean(1), atol=1e-6
    )
    assert sum(found.kl_histogram.counts) == found.tokens
    # As shipped: no setting of the bundle is replaced.
    assert not {"memory", "precision", "config"} & set(context.open_engine.opened_with)  # type: ignore[attr-defined]


def test_an_equal_bundle_has_no_difference(tmp_path: Path) -> None:
    outcome = check_statistical(stand_in_context(tmp_path, StandInEngine()))
    found = outcome.figures
    assert found is not None and outcome.findings == ()
    assert found.kl_max == 0 and found.top1.mean == found.top5.mean == 1
    assert found.loss_increase.mean == 0 and set(found.greedy) == {None}
    assert len(found.greedy) == 4 and found.greedy_tokens == 16
    assert "".join(t.text for t in found.sample[:64]) in shipped_text("english-story")
    assert len(found.sample) == 128


def shipped_text(name: str) -> str:
    return next(section.text for section in shipped_sections() if section.name == name)


def test_the_greedy_answer_leaves_where_the_engine_does(tmp_path: Path) -> None:
    """From position 30 on it gives another token: the 7th after a prompt of 24."""

    def late(logits: np.ndarray, positions: np.ndarray, engine: StandInEngine) -> np.ndarray:
        logits[positions >= 29] *= -1
        return logits

    found = check_statistical(stand_in_context(tmp_path, StandInEngine(late))).figures
    assert found is not None and found.greedy == (6, 6, 6, 6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_no_number_is_named(tmp_path: Path, value: float) -> None:
    def broken(logits: np.ndarray, positions: np.ndarray, engine: StandInEngine) -> np.ndarray:
        if engine.cache[:9] == beginning:
            logits[positions == 17, 5] = value
        return logits

    context = stand_in_context(tmp_path, StandInEngine(broken))
    beginning = TextTokenizer(context.bundle.tokenizer_json()).encode("/* A ring")
    assert len(beginning) == 9
    outcome = check_statistical(context)
    assert outcome.figures is None
    (finding,) = outcome.findings
    assert finding.severity == "error" and finding.where == "c, token 17"


def test_another_model_fails(tmp_path: Path) -> None:
    def other(logits: np.ndarray, positions: np.ndarray, engine: StandInEngine) -> np.ndarray:
        return np.ascontiguousarray(logits[:, ::-1])

    outcome = check_statistical(stand_in_context(tmp_path, StandInEngine(other)))
    assert [finding.severity for finding in outcome.findings] == ["error"]
    assert "hardly the same model" in outcome.findings[0].message


def test_a_dead_model_fails(tmp_path: Path) -> None:
    """All logits equal: it agrees with nobody, though no logit is greater than another."""
    outcome = check_statistical(
        stand_in_context(tmp_path, StandInEngine(lambda logits, *_: np.zeros_like(logits)))
    )
    assert outcome.figures is not None and outcome.figures.top1.mean < 0.1
    assert [finding.severity for finding in outcome.findings] == ["error"]


def test_a_costly_recipe_is_a_warning(tmp_path: Path) -> None:
    outcome = check_statistical(
        stand_in_context(tmp_path, StandInEngine(lambda logits, *_: 0.65 * logits))
    )
    assert outcome.figures is not None and 0.1 < outcome.figures.kl.mean < 1
    assert [finding.severity for finding in outcome.findings] == ["warning"]


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    engine = StandInEngine(lambda logits, *_: np.ascontiguousarray(logits[:, :-4]))
    with pytest.raises(UsageError, match="256 logits a token, the reference 260"):
        check_statistical(stand_in_context(tmp_path, engine))


def test_a_text_of_the_user_takes_the_place(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text("2024-05-01 GET /index.html 200\n" * 200)
    reference = StandInReference()
    context = stand_in_context(tmp_path / "b", StandInEngine(), reference, texts=(file,))
    outcome = check_statistical(context)
    assert outcome.figures is not None
    assert [section.name for section in outcome.figures.sections] == ["log.txt"]
    assert "".join(t.text for t in outcome.figures.sample) in file.read_text()
    assert [f.severity for f in outcome.findings] == ["note"]
    tokenizer = TextTokenizer(context.bundle.tokenizer_json())
    for row in (row for ids in reference.runs for row in ids):
        assert tokenizer.decode(row[:24].tolist()) in file.read_text()


def test_one_saved_run_serves_every_bundle_and_the_quick_level(tmp_path: Path) -> None:
    """What a run for one bundle asked of the reference is all that one for another needs."""

    def asked(
        engine: StandInEngine, level: str, held: Sequence[np.ndarray] = ()
    ) -> StandInReference:
        reference = StandInReference(held=held)
        check_statistical(stand_in_context(tmp_path, engine, reference, level=level))  # type: ignore[arg-type]
        return reference

    quick, full = (asked(StandInEngine(), level).runs for level in ("quick", "full"))
    for engine in (StandInEngine(), StandInEngine(raised)):
        asked(engine, "quick", quick)
        asked(engine, "quick", full)
        asked(engine, "full", full)
    with pytest.raises(AssertionError):
        asked(StandInEngine(), "full", quick)


@pytest.mark.engine
@pytest.mark.reference
def test_a_real_bundle_as_shipped(tmp_path: Path) -> None:
    """The figures of a quantized bundle are those of its own logits and transformers'."""
    from exact import Pair, log_softmax
    from peaky import CASES, make_checkpoint

    pair = Pair(tmp_path / "source", make_checkpoint(CASES["llama-bias"], tmp_path / "source"))
    kl = {}
    for recipe in ("w8g32", "w4g32"):
        bundle = convert(pair.folder, tmp_path / recipe, recipe=recipe)
        original = prepare(pair.folder, recipe=recipe)

        def reference(weights: str, original: Any = original) -> Any:
            assert weights == "original"
            return open_transformers(original.checkpoint, original.model, threads=2)

        found = check_statistical(Context(bundle, original, "quick", Engine, reference)).figures
        assert found is not None and non_finite(found) is None
        tokenizer = TextTokenizer(bundle.tokenizer_json())
        window = cut_windows(shipped_sections(), tokenizer, "quick", 2048).windows[0]
        with Engine(bundle.path) as engine:
            logits = engine.forward(window.inputs.tolist(), all_positions=True)
        p = log_softmax(pair.logits(window.inputs.tolist()))
        q = log_softmax(logits.astype(np.float64))
        blocks = (np.exp(p) * (p - q)).sum(-1).reshape(-1, 32).mean(1)
        np.testing.assert_allclose(found.block_kl[: blocks.size], blocks, rtol=1e-3)
        kl[recipe] = found.kl
    assert 0 < kl["w8g32"].high < kl["w4g32"].low
