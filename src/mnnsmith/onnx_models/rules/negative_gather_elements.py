"""`GatherElements` reads before the start at a negative index; the axis' size is added to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make, with_inputs
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    shape = view.shape(node.input[0])
    if shape is None:
        return None
    size = shape[attributes(node).get("axis", 0) % len(shape)]
    given = view.constant(node.input[1])
    if not isinstance(size, int) or (given is not None and not (given < 0).any()):
        return None
    output, indices = node.output[0], node.input[1]
    if given is not None:
        positive = view.add_constant(given % size, f"{output}_indices")
        return [with_inputs(node, [node.input[0], positive])]
    names = [view.fresh(f"{output}_{part}") for part in ("int32", "shifted", "indices")]
    count = view.add_constant(np.int32(size), f"{output}_size")
    return [
        make("Cast", [indices], [names[0]], node, to=6),
        make("Add", [names[0], count], [names[1]], node),
        make("Mod", [names[1], count], [names[2]], node),
        with_inputs(node, [node.input[0], names[2]]),
    ]


RULE = Rule(
    name="negative_gather_elements",
    operators=frozenset({"GatherElements"}),
    reason="negative indices are read as they are",
    engines=("3.6.1",),
    cures=("test_gather_elements_negative_indices",),
    rewrite=_rewrite,
)
