"""`Gelu` is approximated whatever its attribute says; the exact form is composed.

gelu(x) = x / 2 * (1 + erf(x / sqrt 2))."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    if attributes(node).get("approximate", "none") != "none":
        return None
    x, output = node.input[0], node.output[0]
    root, one, half = (
        view.add_constant(np.float32(value), f"{output}_constant")
        for value in (math.sqrt(0.5), 1, 0.5)
    )
    scaled, erf, raised, product = (
        view.fresh(f"{output}_{part}") for part in ("scaled", "erf", "raised", "product")
    )
    return [
        make("Mul", [x, root], [scaled], node),
        make("Erf", [scaled], [erf], node),
        make("Add", [erf, one], [raised], node),
        make("Mul", [x, raised], [product], node),
        make("Mul", [product, half], [output], node),
    ]


RULE = Rule(
    name="exact_gelu",
    operators=frozenset({"Gelu"}),
    reason="the exact Gelu is approximated",
    engines=("3.6.1",),
    cures=("test_gelu_default_2",),
    rewrite=_rewrite,
)
