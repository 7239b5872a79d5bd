"""Sampling: the options, the pure functions, and that they equal transformers' warpers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mnnsmith.engine import SamplingOptions
from mnnsmith.engine.runner import Sampler, apply_penalties, candidates
from mnnsmith.errors import UsageError


def spread(logits: list[float], **changes: Any) -> dict[int, float]:
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    ids, weights = candidates(np.array(logits, dtype=np.float64), **options)
    return dict(zip(ids.tolist(), weights.tolist(), strict=True))


def log(*probabilities: float) -> list[float]:
    return np.log(probabilities).tolist()


def test_nothing_set_keeps_the_softmax() -> None:
    assert spread(log(0.5, 0.2, 0.3)) == pytest.approx({0: 0.5, 1: 0.2, 2: 0.3})


def test_temperature_divides_the_logits() -> None:
    squared = {0: 0.25 / 0.38, 1: 0.04 / 0.38, 2: 0.09 / 0.38}
    assert spread(log(0.5, 0.2, 0.3), temperature=0.5) == pytest.approx(squared)


def test_top_k_keeps_the_best_and_ties() -> None:
    assert spread(log(0.5, 0.2, 0.3), top_k=2) == pytest.approx({0: 0.625, 2: 0.375})
    assert set(spread([1.0, 0.0, 0.0, -1.0], top_k=2)) == {0, 1, 2}
    assert set(spread([1.0, 0.0], top_k=99)) == {0, 1}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, {0}), (0.49, {0}), (0.51, {0, 2}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    assert set(spread(log(0.5, 0.2, 0.3), top_p=top_p)) == kept


def test_top_p_over_a_flat_tail_counts_what_was_not_sorted() -> None:
    # 0.5 and a thousand of 0.0005 each: 0.9 needs 800 of the thousand.
    assert len(spread(log(0.5, *[0.0005] * 1000), top_p=0.9)) == pytest.approx(801, abs=1)


def test_min_p_is_relative_to_the_best() -> None:
    assert set(spread(log(0.5, 0.2, 0.3), min_p=0.5)) == {0, 2}
    assert set(spread(log(0.5, 0.2, 0.3), min_p=1.0)) == {0}


def test_penalties() -> None:
    logits = np.array([2.0, -2.0, 1.0, 1.0])
    seen = np.array([True, True, False, True])
    counts = np.array([0, 0, 0, 3])
    options = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.1}
    result = apply_penalties(logits, seen, counts, options)
    assert result.tolist() == pytest.approx([1.0, -4.0, 1.0, 0.5 - 0.5 - 0.3])
    assert logits.tolist() == [2.0, -2.0, 1.0, 1.0]


def sampler(**options: Any) -> Sampler:
    return Sampler(SamplingOptions(**options).request(), 4, [])


def test_drawn_tokens_follow_the_probabilities() -> None:
    logits = np.array(log(0.1, 0.2, 0.3, 0.4), dtype=np.float32)
    source = sampler(temperature=1.0, seed=7)
    drawn = np.bincount([source.draw(logits) for _ in range(4000)], minlength=4) / 4000
    # Four standard deviations.
    assert drawn == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=4 * 0.5 / np.sqrt(4000))


def test_the_same_seed_gives_the_same_tokens_and_another_does_not() -> None:
    logits = np.zeros(4, dtype=np.float32)

    def run(seed: int) -> list[int]:
        source = sampler(temperature=1.0, seed=seed)
        return [source.draw(logits) for _ in range(50)]

    assert run(1) == run(1) != run(2)


def test_temperature_zero_takes_the_best_after_penalties() -> None:
    logits = np.array([1.0, 0.9, 0.8, 0.0], dtype=np.float32)
    assert [sampler().draw(logits) for _ in range(3)] == [0, 0, 0]
    source = sampler(presence_penalty=0.3)
    assert [source.draw(logits) for _ in range(3)] == [0, 1, 2]


def test_no_seed_draws_one() -> None:
    assert SamplingOptions().request()["seed"] != SamplingOptions().request()["seed"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", True),
        ("temperature", "warm"), ("top_k", -1), ("top_k", 1.5), ("top_p", 0.0), ("top_p", 1.1),
        ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")), ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1), ("seed", -1), ("seed", 1 << 63),
    ],
)  # fmt: skip
def test_wrong_options_are_named(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingOptions(**{name: value})


@pytest.mark.reference
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7}, {"top_k": 5}, {"top_k": 40, "temperature": 1.3}, {"top_p": 0.5},
        {"top_p": 0.95}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.8, "temperature": 0.9},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.1, "temperature": 1.5},
    ],
)  # fmt: skip
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_candidates_equal_transformers(options: dict[str, Any], scale: float) -> None:
    import torch
    from transformers.generation import logits_process as reference

    logits = scale * np.random.default_rng(3).standard_normal(2000)
    scores = torch.tensor(logits)[None]
    if "temperature" in options:
        scores = reference.TemperatureLogitsWarper(options["temperature"])(None, scores)
    if "top_k" in options:
        scores = reference.TopKLogitsWarper(options["top_k"])(None, scores)
    if "top_p" in options:
        scores = reference.TopPLogitsWarper(options["top_p"])(None, scores)
    if "min_p" in options:
        scores = reference.MinPLogitsWarper(options["min_p"])(None, scores)
    expected = torch.softmax(scores, -1)[0].numpy()
    found = np.zeros_like(expected)
    for token, weight in spread(logits.tolist(), **options).items():
        found[token] = weight
    assert (found > 0).tolist() == (expected > 0).tolist()
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.reference
def test_repetition_penalty_equals_transformers() -> None:
    import torch
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = np.random.default_rng(3).standard_normal(50)
    seen = np.zeros(50, dtype=bool)
    seen[[3, 4, 4, 20]] = True
    options = {"repetition_penalty": 1.3, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    found = apply_penalties(logits, seen, np.zeros(50, dtype=np.int64), options)
    ids = torch.tensor([[3, 4, 4, 20]])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, torch.tensor(logits)[None])[0]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12)
