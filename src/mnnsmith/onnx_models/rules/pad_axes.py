"""The engine's padding knows no `axes`; pads of all axes are made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, make, with_inputs
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    if len(node.input) < 4 or not node.input[3]:
        return None
    axes, shape = view.constant(node.input[3]), view.shape(node.input[0])
    if axes is None or shape is None:
        return None
    rank, count = len(shape), axes.size
    # Places among the given pads followed by one zero.
    places = np.full(2 * rank, 2 * count, dtype=np.int64)
    for place, axis in enumerate(axes.reshape(-1)):
        places[axis % rank] = place
        places[axis % rank + rank] = count + place
    given = view.constant(node.input[1])
    if given is not None:
        pads = view.add_constant(
            np.append(given.reshape(-1), 0)[places].astype(np.int64), f"{node.output[0]}_pads"
        )
        return [with_inputs(node, [node.input[0], pads, *node.input[2:3]])]
    zero = view.add_constant(np.zeros(1, np.int64), f"{node.output[0]}_zero")
    index = view.add_constant(places, f"{node.output[0]}_places")
    extended, pads = (view.fresh(f"{node.output[0]}_{part}") for part in ("extended", "pads"))
    return [
        make("Concat", [node.input[1], zero], [extended], node, axis=0),
        make("Gather", [extended, index], [pads], node),
        with_inputs(node, [node.input[0], pads, *node.input[2:3]]),
    ]


RULE = Rule(
    name="pad_axes",
    operators=frozenset({"Pad"}),
    reason="axes of Pad are ignored",
    engines=("3.6.1",),
    cures=("test_constant_pad_axes", "test_constant_pad_negative_axes"),
    rewrite=_rewrite,
)
