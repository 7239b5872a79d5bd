"""Every block of every family says which of its values the original computes too."""

from __future__ import annotations

from pathlib import Path

import pytest

from mnnsmith.api import prepare
from peaky import CASES, MIXTURES, make_checkpoint

pytestmark = [pytest.mark.reference]


@pytest.mark.parametrize("name", [*CASES, *MIXTURES])
def test_three_values_of_each_block_are_marked(name: str, tmp_path: Path) -> None:
    model = make_checkpoint({**CASES, **MIXTURES}[name], tmp_path)
    modules = {name for name, _ in model.named_modules()}
    ready = prepare(tmp_path, recipe="fp16").model
    marks = ready.graph.landmarks
    assert len(marks) == 3 * ready.layers
    for layer in range(ready.layers):
        kinds = {mark.kind for mark in marks if mark.layer == layer}
        assert kinds == {"residual", "attention", "mlp"}
    assert {mark.module for mark in marks} <= modules
    assert len({mark.value.name for mark in marks}) == len(marks)
