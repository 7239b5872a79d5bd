"""`OneHot` reads the bits of a float depth as a number, and writes far outside, as for index -1.

The depth becomes int32, and an index counts from the end where it is negative; ONNX leaves those
out of range without a one, which a comparison with the original shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import (
    GraphView,
    attributes,
    make,
    with_attributes,
    with_inputs,
)
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto

_INT32 = 6


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    indices, depth, values = node.input
    known = view.constant(indices)
    if view.element_type(depth) == _INT32 and view.element_type(indices) == _INT32:
        return None
    output = node.output[0]
    names = [view.fresh(f"{output}_{part}") for part in ("depth", "int32", "moved", "places")]
    nodes = [
        make("Cast", [depth], [names[0]], node, to=_INT32),
        make("Cast", [indices], [names[1]], node, to=_INT32),
    ]
    view.note_type(names[0], depth)
    place = names[1]
    if known is None or (known < 0).any():
        nodes.append(make("Add", [names[1], names[0]], [names[2]], node))
        nodes.append(make("Mod", [names[2], names[0]], [names[3]], node))
        place = names[3]
    # The engine takes another axis than ONNX where none is given.
    axis = attributes(node).get("axis", -1)
    last = with_inputs(node, [place, names[0], values])
    return [*nodes, with_attributes(last, {"axis": axis})]


RULE = Rule(
    name="one_hot_integers",
    operators=frozenset({"OneHot"}),
    reason="OneHot reads a float depth as an integer, and knows no negative indices",
    engines=("3.6.1",),
    cures=("test_onehot_with_axis", "test_onehot_negative_indices"),
    rewrite=_rewrite,
)
