"""Rope settings as transformers reads them, and tables that are exact at any position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mnnsmith.errors import UnsupportedError
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import DType
from mnnsmith.graph.weights import Table
from mnnsmith.models.config import ConfigReader
from mnnsmith.models.rope import RopeFrequencies, rope_frequencies, rope_settings, rope_tables


def settings(**fields: Any) -> dict[str, Any]:
    return rope_settings(ConfigReader(fields, "config"))


def test_both_spellings() -> None:
    old = settings(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    new = settings(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0})
    assert old == new == {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}


def test_rope_scaling_wins_as_a_whole() -> None:
    """As in transformers; a mixture of the two would be a third model."""
    found = settings(
        rope_theta=1e4,
        rope_scaling={"rope_type": "yarn", "factor": 4.0},
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    assert found == {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("kind", ["dynamic", "ntk-by-parts", "mrope"])
def test_other_types_are_refused_by_name(kind: str) -> None:
    config = ConfigReader({}, "config")
    given = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedError, match=kind):
        rope_frequencies(config, given, 64, 2048)


@pytest.mark.parametrize("context", [64, 4096, 131072])
def test_tables_reach_beyond_the_context_and_are_exact(context: int) -> None:
    inverse = np.array([1.0, 0.037, 1e-4], dtype=np.float32)
    g = Graph()
    positions = g.input("p", ["seq"], DType.INT32)
    rope_tables(g, positions, RopeFrequencies(inverse, 1.25), context, "rope")
    tables = {
        node.name.rsplit("/", 1)[1]: node.slots["values"].values
        for node in g.nodes
        if node.kind == "table" and isinstance(node.slots["values"], Table)
    }
    assert len(tables["cos_low"]) * len(tables["cos_high"]) >= 262144
    for p in (0, 1, 63, 4095, 4096, 70001, 262143):
        high, low = divmod(p, len(tables["cos_low"]))
        parts = {name: table[high if "high" in name else low].astype(np.float64)
                 for name, table in tables.items()}  # fmt: skip
        cos = parts["cos_high"] * parts["cos_low"] - parts["sin_high"] * parts["sin_low"]
        sin = parts["sin_high"] * parts["cos_low"] + parts["cos_high"] * parts["sin_low"]
        # The low angle is rounded to float32, as transformers rounds it.
        angle = p * inverse.astype(np.float64)
        np.testing.assert_allclose(cos, 1.25 * np.cos(angle), atol=4e-4)
        np.testing.assert_allclose(sin, 1.25 * np.sin(angle), atol=4e-4)
