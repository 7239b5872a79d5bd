"""A pool without `strides` or `pads` crashes the converter; ONNX's defaults are written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView, attributes, with_attributes
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    found = attributes(node)
    axes = len(found["kernel_shape"])
    missing: dict[str, list[int]] = {}
    if "strides" not in found:
        missing["strides"] = [1] * axes
    if "pads" not in found and found.get("auto_pad", "NOTSET") == "NOTSET":
        missing["pads"] = [0] * (2 * axes)
    return [with_attributes(node, missing)] if missing else None


RULE = Rule(
    name="pool_defaults",
    operators=frozenset({"MaxPool", "AveragePool", "LpPool"}),
    reason="a pool without strides or pads crashes the converter",
    engines=("3.6.1",),
    cures=("test_maxpool_2d_default", "test_averagepool_2d_default"),
    rewrite=_rewrite,
)
