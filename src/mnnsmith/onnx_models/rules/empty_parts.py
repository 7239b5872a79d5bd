"""`Split` with an empty part shifts the other parts; the empty ones are cut out on their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    found = attributes(node)
    given = view.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    sizes = found.get("split") if given is None else given.tolist()
    if sizes is None or 0 not in sizes or not any(sizes):
        return None
    axis, output = found.get("axis", 0), node.output[0]
    full = [name for name, size in zip(node.output, sizes, strict=True) if size]
    empty = [name for name, size in zip(node.output, sizes, strict=True) if not size]
    nodes: list[NodeProto] = []
    if len(full) == 1:
        nodes.append(make("Identity", [node.input[0]], full, node))
    elif given is None:
        nodes.append(make("Split", [node.input[0]], full, node, axis=axis,
                          split=[size for size in sizes if size]))  # fmt: skip
    else:
        parts = view.add_constant(np.array([s for s in sizes if s], np.int64), f"{output}_parts")
        nodes.append(make("Split", [node.input[0], parts], full, node, axis=axis))
    zero = view.add_constant(np.zeros(1, np.int64), f"{output}_zero")
    axes = view.add_constant(np.array([axis], np.int64), f"{output}_axes")
    nodes += [make("Slice", [node.input[0], zero, zero, axes], [name], node) for name in empty]
    return nodes


RULE = Rule(
    name="empty_parts",
    operators=frozenset({"Split"}),
    reason="Split with an empty part shifts the others",
    engines=("3.6.1",),
    cures=("test_rotary_embedding",),
    rewrite=_rewrite,
)
