"""Gates: thresholds on known figures, and regressions against an older verification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mnnsmith.errors import UsageError
from mnnsmith.verify.gates import Thresholds, judge, require_same_model
from mnnsmith.verify.measure.intervals import mean_interval, rate_interval
from mnnsmith.verify.measure.metrics import histogram
from mnnsmith.verify.results import (
    FORMAT,
    Check,
    Figures,
    Gate,
    Interval,
    StatisticalFigures,
    Subject,
    Verification,
)

BLOCKS = 68
# The texts' own differences: far larger than those between two bundles.
HARDNESS = np.exp(np.random.default_rng(0).normal(0, 0.8, BLOCKS))


def statistics(kl: np.ndarray, loss: np.ndarray, top1: float, **fields: Any) -> StatisticalFigures:
    rates = np.clip(top1 + np.random.default_rng(1).normal(0, 0.03, BLOCKS), 0, 1)
    interval = mean_interval(loss)
    known: dict[str, Any] = {
        "reference": "stand-in",
        "text_sha256": "ab" * 32,
        "tokens": 32 * BLOCKS,
        "block_tokens": 32,
        "kl": mean_interval(kl, low=0.0),
        "kl_median": 0.0,
        "kl_p99": 0.0,
        "kl_max": 1.0,
        "top1": rate_interval(rates, 32),
        "top5": Interval(1.0, 0.99, 1.0),
        "perplexity": 20.0,
        "reference_perplexity": 19.0,
        "loss_increase": interval,
        "perplexity_increase": Interval(
            *(float(np.expm1(x)) for x in (interval.mean, interval.low, interval.high))
        ),
        "block_kl": tuple(kl.tolist()),
        "block_loss_increase": tuple(loss.tolist()),
        "block_top1": tuple(rates.tolist()),
        "kl_histogram": histogram(kl),
        "sections": (),
        "greedy_tokens": 16,
        "greedy": (None,),
        "sample": (),
    }
    return StatisticalFigures(**{**known, **fields})


def verification(
    figures: StatisticalFigures | None = None,
    status: Any = "passed",
    source: str = "org/model",
    **subject: Any,
) -> Verification:
    known: dict[str, Any] = {
        "bundle": "b",
        "model_type": "llama",
        "recipe": "w4g32",
        "source": source,
        "source_revision": None,
        "files": {},
        "device": "local",
        "settings": {},
    }
    checks = (
        Check("exact", status, "", 1.0),
        Check("statistical", "skipped" if figures is None else "passed", "", 1.0),
    )
    return Verification(
        FORMAT, "0", "3.6.1", "2026-01-01", "quick", 1.0, Subject(**{**known, **subject}), checks,
        (), Figures(statistical=figures),
    )  # fmt: skip


def usual(scale: float = 1.0, noise: float = 0.02, seed: int = 2, **fields: Any) -> Verification:
    random = np.random.default_rng(seed)
    kl = 0.02 * HARDNESS * scale * (1 + noise * random.normal(size=BLOCKS))
    loss = 0.005 * HARDNESS * scale + 0.004 * random.normal(size=BLOCKS)
    return verification(statistics(kl, loss, 0.95, **fields))


def by_limit(gates: tuple[Gate, ...]) -> dict[str, bool]:
    return {gate.name.removeprefix("baseline "): gate.passed for gate in gates}


def test_thresholds_compare_the_mean() -> None:
    found = usual()
    figures = found.figures.statistical
    assert figures is not None
    kl, top1 = figures.kl.mean, figures.top1.mean
    increase = figures.perplexity_increase.mean
    for shift, passes in ((1.001, True), (0.999, False)):
        limits = Thresholds(kl * shift, min(1.0, top1 / shift), increase * shift)
        gates = judge(found, limits)
        assert [gate.name for gate in gates] == ["max-kl", "min-top1", "max-ppl-increase"]
        assert {gate.passed for gate in gates} == {passes}
        # So near the mean, the text is too short to be sure.
        assert all("within the noise" in gate.found for gate in gates)
    sure = judge(found, Thresholds(max_kl=10.0, min_top1=0.1, max_ppl_increase=5.0))
    assert not any("within the noise" in gate.found for gate in sure)
    assert judge(found, Thresholds()) == ()


@pytest.mark.parametrize(
    "limits",
    [{"max_kl": -0.1}, {"max_kl": float("nan")}, {"min_top1": 95}, {"min_top1": float("inf")},
     {"max_ppl_increase": float("inf")}],
)  # fmt: skip
def test_limits_that_cannot_be_meant_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="must be a number"):
        Thresholds(**limits)


def test_a_gate_without_its_figures_fails_and_says_so() -> None:
    """After the work, nothing is raised: the files of the result are to be written."""
    (gate,) = judge(verification(), Thresholds(max_kl=0.1))
    assert not gate.passed and gate.name == "max-kl" and "not measured" in gate.found
    gates = {gate.name: gate for gate in judge(verification(), Thresholds(), usual())}
    assert list(gates) == ["baseline checks", "baseline KL", "baseline loss", "baseline top-1"]
    assert not any(gate.passed for gate in gates.values())
    assert gates["baseline checks"].found == "statistical is skipped"
    assert all(gate.passed for gate in judge(usual(), Thresholds(), verification()))


def test_the_same_bundle_is_no_regression() -> None:
    assert all(gate.passed for gate in judge(usual(), Thresholds(), usual()))


def test_pairs_see_what_intervals_cannot() -> None:
    """8 % more KL: far within both intervals, far beyond the noise of the pairs."""
    old, new = usual(), usual(1.08, seed=3)
    a, b = old.figures.statistical, new.figures.statistical
    assert a is not None and b is not None and b.kl.mean < a.kl.high
    gates = by_limit(judge(new, Thresholds(), old))
    assert gates["KL"] is False
    assert gates["loss"] and gates["top-1"] and gates["checks"]
    # On another text there are no pairs, and so no proof.
    other = replace(new, figures=Figures(statistical=replace(b, text_sha256="00" * 32)))
    assert by_limit(judge(other, Thresholds(), old))["KL"]


def test_better_and_a_little_worse_pass() -> None:
    assert all(gate.passed for gate in judge(usual(0.5), Thresholds(), usual()))
    # One percent, without any noise: sure, and of no consequence.
    assert by_limit(judge(usual(1.01, noise=0), Thresholds(), usual(noise=0)))["KL"]
    assert not by_limit(judge(usual(1.03, noise=0), Thresholds(), usual(noise=0)))["KL"]


def test_noise_alone_rarely_fails() -> None:
    alarms = sum(
        not by_limit(judge(usual(noise=0.2, seed=seed), Thresholds(), usual(noise=0.2, seed=0)))[
            "KL"
        ]
        for seed in range(100, 400)
    )
    assert alarms / 300 < 0.12


def test_a_large_loss_fails_in_all_ways() -> None:
    gates = by_limit(judge(usual(4.0), Thresholds(), usual()))
    assert not gates["KL"] and not gates["loss"]
    old, new = usual(), usual(4.0, text_sha256="00" * 32)
    assert not by_limit(judge(new, Thresholds(), old))["KL"]
    figures = new.figures.statistical
    assert figures is not None
    worse = replace(figures, top1=Interval(0.90, 0.89, 0.91))
    gates = by_limit(judge(replace(new, figures=Figures(statistical=worse)), Thresholds(), old))
    assert not gates["top-1"]


def test_a_check_that_passed_and_fails_is_a_regression() -> None:
    gates = judge(verification(usual().figures.statistical, "failed"), Thresholds(), usual())
    (gate,) = [gate for gate in gates if not gate.passed]
    assert gate.name == "baseline checks" and gate.found == "exact failed"
    # One that failed before, too, is none.
    old = verification(usual().figures.statistical, "failed")
    assert all(gate.passed for gate in judge(old, Thresholds(), old))


@pytest.mark.parametrize(("now", "words"), [("skipped", "is skipped"), (None, "did not run")])
def test_a_check_that_stopped_running_is_a_regression(now: Any, words: str) -> None:
    found = verification(usual().figures.statistical, now)
    if now is None:
        found = replace(found, checks=found.checks[1:])
    (gate,) = [gate for gate in judge(found, Thresholds(), usual()) if not gate.passed]
    assert gate.name == "baseline checks" and gate.found == f"exact {words}"


def test_top1_is_compared_in_pairs() -> None:
    """Two points less in every block: far within intervals as wide as blocks differ."""
    random = np.random.default_rng(5)
    before = np.clip(random.normal(0.8, 0.15, BLOCKS), 0.05, 1)
    old, new = (
        verification(replace(
            statistics(HARDNESS, HARDNESS, 0.9),
            block_top1=tuple(rates.tolist()),
            top1=rate_interval(rates, 32),
        ))
        for rates in (before, before - 0.02)
    )  # fmt: skip
    assert by_limit(judge(new, Thresholds(), old))["top-1"] is False
    assert by_limit(judge(old, Thresholds(), new))["top-1"] is True


def test_a_baseline_of_another_model_is_refused() -> None:
    """Before the work, by `verify`."""
    old, here = usual().subject, usual().subject
    for changed in (replace(old, model_type="qwen3"), replace(old, source="org/other")):
        with pytest.raises(UsageError, match="another model"):
            require_same_model(here, changed)
    # Where a checkout lies does not matter.
    require_same_model(here, replace(old, source="/home/a/model/"))


def test_another_original_fails_with_its_reason() -> None:
    gates = judge(usual(reference_perplexity=19.5), Thresholds(), usual())
    assert [(gate.name, gate.passed) for gate in gates] == [
        ("baseline checks", True), ("baseline original", False),
    ]  # fmt: skip
    assert "19.5000: it is another revision, or stand-in" in gates[1].found


def test_sentences_of_a_regression() -> None:
    gates = {gate.name: gate for gate in judge(usual(1.5), Thresholds(), usual())}
    gate = gates["baseline KL"]
    assert gate.limit.startswith("KL worse by at most ") and not gate.passed
    assert gate.found.startswith("worse by 0.0") and gate.found.endswith("(block by block)")
    same = judge(usual(), Thresholds(), usual())
    assert same[1].found == "the same (block by block)"
