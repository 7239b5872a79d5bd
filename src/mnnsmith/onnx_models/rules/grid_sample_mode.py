"""The converter knows the modes of `GridSample` by the names of operator set 16 alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView, attributes, with_attributes
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto

_NAMES = {"linear": "bilinear", "cubic": "bicubic"}


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    mode = attributes(node).get("mode", "linear")
    return [with_attributes(node, {"mode": _NAMES[mode]})] if mode in _NAMES else None


RULE = Rule(
    name="grid_sample_mode",
    operators=frozenset({"GridSample"}),
    reason="modes linear and cubic are known as bilinear and bicubic alone",
    engines=("3.6.1",),
    cures=(),
    rewrite=_rewrite,
)
