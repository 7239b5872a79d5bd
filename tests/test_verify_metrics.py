"""Metrics against plain sums of exact numbers, and intervals against simulated truth."""

from __future__ import annotations

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

from mnnsmith.verify.measure import intervals, metrics
from mnnsmith.verify.results import Interval


def test_kl_and_losses_are_those_of_known_distributions() -> None:
    """Powers of two, so that every probability is exact and the sums are done by hand."""
    p = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 8), Fraction(1, 8)]
    q = [Fraction(1, 8), Fraction(1, 8), Fraction(1, 4), Fraction(1, 2)]
    expected = float(sum(a * Fraction(round(math.log2(a / b))) for a, b in zip(p, q, strict=True)))
    logits = np.log2([[float(x) for x in q]]) * math.log(2) + 7
    reference = np.log2([[float(x) for x in p]]) * math.log(2) - 300
    rows = metrics.score_rows(logits, reference, np.array([2]))
    assert rows.kl[0] == pytest.approx(expected * math.log(2), rel=1e-12)
    assert rows.loss[0] == pytest.approx(math.log(4), rel=1e-12)
    assert rows.reference_loss[0] == pytest.approx(math.log(8), rel=1e-12)
    assert (rows.best[0], rows.reference_best[0], rows.rank[0]) == (3, 0, 2)
    # The other way round it is another number: 1/8 log 1/4 + 1/8 log 1/2 + 1/4 log 2 + 1/2 log 4.
    assert metrics.divergence(reference, logits)[0] == pytest.approx(0.875 * math.log(2))
    assert metrics.divergence(logits, reference)[0] == pytest.approx(0.875 * math.log(2))


def test_kl_is_not_symmetric() -> None:
    p, q = np.log([[0.9, 0.05, 0.05]]), np.log([[0.4, 0.3, 0.3]])
    assert metrics.divergence(q, p)[0] == pytest.approx(
        0.9 * math.log(2.25) + 0.1 * math.log(1 / 6)
    )
    assert metrics.divergence(p, q)[0] == pytest.approx(0.4 * math.log(4 / 9) + 0.6 * math.log(6))


def test_rows_equal_brute_force() -> None:
    random = np.random.default_rng(0)
    for vocabulary in (3, 17, 300):
        reference = random.normal(0, 4, (40, vocabulary)).astype(np.float32)
        logits = (reference + random.normal(0, 1, reference.shape)).astype(np.float32)
        targets = random.integers(0, vocabulary, 40)
        rows = metrics.score_rows(logits, reference, targets)
        for i in range(40):
            p = [math.exp(float(x)) for x in reference[i]]
            q = [math.exp(float(x)) for x in logits[i]]
            p, q = [x / math.fsum(p) for x in p], [x / math.fsum(q) for x in q]
            kl = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            assert rows.kl[i] == pytest.approx(kl, rel=1e-9)
            assert rows.loss[i] == pytest.approx(-math.log(q[targets[i]]), rel=1e-9)
            order = sorted(range(vocabulary), key=lambda v: -q[v])
            best = max(range(vocabulary), key=lambda v: p[v])
            assert rows.top1[i] == (order[0] == best)
            assert rows.top5[i] == (best in order[:5])


def test_large_logits_and_equal_ones_stay_finite() -> None:
    big = np.array([[3e4, 3e4 - 1, -3e4]], dtype=np.float32)
    rows = metrics.score_rows(big, big, np.array([2]))
    assert rows.kl[0] == 0 and rows.loss[0] == pytest.approx(6e4, rel=1e-3)
    assert math.isfinite(metrics.perplexity(rows.loss))


def test_ties_go_to_the_lower_id() -> None:
    """A bundle that says the same of all tokens does not agree with everyone."""
    reference = np.zeros((6, 6), dtype=np.float32)
    reference[np.arange(6), np.arange(6)] = 1
    rows = metrics.score_rows(np.zeros_like(reference), reference, np.zeros(6, dtype=np.int64))
    assert rows.rank.tolist() == [0, 1, 2, 3, 4, 5]
    assert rows.top1.sum() == 1 and rows.top5.sum() == 5


def test_a_wide_vocabulary_takes_little_memory() -> None:
    logits = np.random.default_rng(0).normal(size=(48, 150_000)).astype(np.float32)
    other = logits[::-1]
    tracemalloc.start()
    metrics.score_rows(logits, other, np.zeros(48, dtype=np.int64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80 << 20


def test_histogram_counts_all() -> None:
    found = metrics.histogram(np.array([0.0, 1e-12, 2e-8, 5.0, 100.0]))
    assert sum(found.counts) == 5 and len(found.counts) == len(found.edges) - 1
    assert found.counts[0] == 3 and found.counts[-1] == 2


@pytest.mark.parametrize(
    ("freedom", "expected"),
    # Published tables, 0.975 two-sided.
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (10, 2.22814), (67, 1.99601)],
)
def test_t_quantiles_are_those_of_tables(freedom: int, expected: float) -> None:
    assert intervals.t_quantile(0.975, freedom) == pytest.approx(expected, rel=2e-3)


def _correlated(random: np.random.Generator, n: int, rho: float) -> np.ndarray:
    """A stationary series of mean 0, each number like the one before it."""
    noise = random.normal(0, math.sqrt(1 - rho * rho), n)
    series = np.empty(n)
    value = random.normal()
    for i in range(n):
        value = rho * value + noise[i]
        series[i] = value
    return series


@pytest.mark.parametrize(("blocks", "rho"), [(68, 0.0), (68, 0.6), (250, 0.6), (6, 0.5)])
def test_intervals_hold_the_true_mean_in_19_of_20_runs(blocks: int, rho: float) -> None:
    """exp of a normal variable: skewed as KL is; its mean is sqrt(e)."""
    random = np.random.default_rng([blocks, int(10 * rho)])
    runs, held, naive = 400, 0, 0
    for _ in range(runs):
        values = np.exp(0.5 * _correlated(random, 32 * blocks, rho))
        found = intervals.mean_interval(intervals.block_means(values, 32))
        held += found.low <= math.exp(0.125) <= found.high
        half = 1.96 * values.std(ddof=1) / math.sqrt(values.size)
        naive += abs(values.mean() - math.exp(0.125)) <= half
    assert 0.90 <= held / runs <= 0.98
    if rho > 0.5:
        # What would come of taking tokens for independent.
        assert naive / runs < 0.80


@pytest.mark.parametrize(("p", "blocks"), [(0.5, 40), (0.97, 68), (0.999, 68)])
def test_intervals_of_rates_hold_the_true_rate(p: float, blocks: int) -> None:
    random = np.random.default_rng(int(1000 * p))
    cut = float(np.quantile(random.normal(size=2_000_000), p))
    held = 0
    for _ in range(300):
        values = _correlated(random, 32 * blocks, 0.4) < cut
        found = intervals.rate_interval(intervals.block_means(values, 32), 32)
        assert 0 <= found.low <= found.mean <= found.high <= 1
        held += found.low <= p <= found.high
    assert held / 300 >= 0.90


def test_full_agreement_promises_no_certainty() -> None:
    found = intervals.rate_interval(np.ones(64), 32)
    assert found.mean == found.high == 1 and 0.99 < found.low < 0.9995
    none = intervals.rate_interval(np.zeros(64), 32)
    assert none.mean == none.low == 0 and 0.0005 < none.high < 0.01


def test_a_known_mean_is_not_passed_below() -> None:
    assert intervals.mean_interval(np.array([0.0, 1.0]), low=0.0) == Interval(
        0.5, 0.0, pytest.approx(0.5 + 12.706 / 2, rel=1e-3)
    )
