"""What a pattern over tokens points to, on patterns made here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mnnsmith.graph.core import Node
from mnnsmith.graph.values import Layout, Value
from mnnsmith.verify.checks.causes import Evidence, likely_cause
from mnnsmith.verify.measure.differences import compare

IDS = (np.arange(20) % 7, (np.arange(20) + 3) % 7)
VALUE = Value(0, "layer0/attention/mix", ("seq", 32, 1, 1), Layout.NC4HW4)


def evidence(
    *bad: list[int], kind: str = "attention", layer: int = 1, **fields: object
) -> Evidence:
    """A value that differs on these tokens of each prompt."""
    parts = []
    for tokens in bad:
        right = np.random.default_rng(1).standard_normal((20, 32)).astype(np.float32)
        wrong = right.copy()
        wrong[tokens] += np.float32(0.1) * np.roll(right[tokens], 1, axis=-1)
        parts.append(compare(wrong, right))
    node = Node("attention", VALUE.name, (), (VALUE,), {"head_dim": 8})
    made = Evidence(VALUE, node, kind, layer, 1e-4, IDS[: len(bad)], tuple(parts))
    return replace(made, **fields)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (evidence(list(range(20))), "The first token differs"),
        (evidence(list(range(1, 20))), "It begins at position 1: rope"),
        (evidence(list(range(10, 20)), cuts=(10, 19)), "KV cache"),
        (evidence(list(range(9, 20)), cuts=(10, 19)), "rope"),
        (evidence(list(range(12, 20)), window=12), "the mask of the window"),
        (evidence(list(range(5, 20)), window=12), "rope"),
        (evidence(list(range(20)), kind="mlp"), "the weights of gate, up or down"),
        (evidence([3, 5], kind="mlp", routed=True), "the router"),
        (evidence([3], kind="residual"), "residual connections"),
        (evidence([3], kind="residual", layer=0), "its factor"),
        (evidence([3], clipped=True), "The recipe clips a value before it"),
        (evidence([3, 10, 17], layer=0), "begins at token 3:"),
        (evidence([3, 10, 17, 18], layer=0), "begins at position 3"),
        (evidence([*range(2, 20)], [*range(6, 20)], layer=0), "begins at token 2:"),
        (evidence([*range(1, 20)], [*range(1, 20)], layer=0), "begins at position 1"),
    ],
)
def test_a_pattern_is_read(given: Evidence, says: str) -> None:
    told = likely_cause(given)
    assert says in told
    assert ("embedding for this id" in told) == ("begins at token" in says)


def test_heads_that_changed_places_are_named() -> None:
    right = np.random.default_rng(1).standard_normal((20, 32)).astype(np.float32)
    wrong = np.concatenate([right[:, :8], right[:, 16:24], right[:, 8:16], right[:, 24:]], axis=1)
    made = evidence([0], kind="mix", actual=wrong, reference=right, head_dim=8)
    assert "head 1 has what head 2 should, head 2 has what head 1 should" in likely_cause(made)
    wrong = right.copy()
    wrong[:, 8:16] *= -1
    made = evidence([0], kind="mix", actual=wrong, reference=right, head_dim=8)
    assert "Of 4 heads these differ: head 1" in likely_cause(made)
