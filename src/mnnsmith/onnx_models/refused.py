"""What the engine is known to compute wrongly, or to die of, and no rule cures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mnnsmith.errors import UnsupportedError
from mnnsmith.onnx_models.graph_view import GraphView, attributes

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_INT32 = np.iinfo(np.int32)
# Inputs of these that mean "to the end" are clipped by the converter.
_CLIPPING = frozenset({"Slice"})


@dataclass(frozen=True)
class Defect:
    """operators: op types it concerns; empty for all.  applies: whether a node meets it."""

    operators: frozenset[str]
    reason: str
    applies: Callable[[NodeProto, GraphView], bool]


def _reduces(node: NodeProto, view: GraphView) -> bool:
    return str(attributes(node).get("reduction", "none")) != "none"


def _is_dilated_average(node: NodeProto, view: GraphView) -> bool:
    return any(d != 1 for d in attributes(node).get("dilations", ()))


def _reads_wide_integer(node: NodeProto, view: GraphView) -> bool:
    if node.op_type in _CLIPPING:
        return False
    return any(_is_wide(view.constant(name)) for name in node.input if name)


def _is_wide(value: Any) -> bool:
    if value is None or value.dtype.kind not in "iu" or value.size == 0:
        return False
    return bool(value.max() > _INT32.max or value.min() < _INT32.min)


def _has_output_shape(node: NodeProto, view: GraphView) -> bool:
    return len(node.input) > 2 and bool(node.input[2])


def _aligns_corners_of_parts(node: NodeProto, view: GraphView) -> bool:
    """Whether `align_corners` meets scales that give no whole sizes, or may do so."""
    if attributes(node).get("coordinate_transformation_mode") != "align_corners":
        return False
    if len(node.input) < 3 or not node.input[2]:
        return False
    scales, shape = view.constant(node.input[2]), view.shape(node.input[0])
    if scales is None:
        return True
    if scales.size == 0 or (scales % 1 == 0).all():
        return False
    sizes = [size if isinstance(size, int) else None for size in shape or ()]
    if None in sizes or len(sizes) != scales.size:
        return True
    return bool((np.array(sizes, np.float64) * scales % 1 != 0).any())


# What ONNX Runtime computes otherwise than ONNX says is no reference.
DEFECTS = (
    Defect(
        frozenset({"MaxUnpool"}),
        "with an output shape, ONNX Runtime and the engine differ from ONNX",
        _has_output_shape,
    ),
    Defect(
        frozenset({"Resize"}),
        "align_corners to no whole size, where ONNX Runtime and the engine differ from ONNX",
        _aligns_corners_of_parts,
    ),
    Defect(
        frozenset({"ScatterND", "ScatterElements", "Scatter"}),
        "a scatter with a reduction overwrites instead of reducing",
        _reduces,
    ),
    Defect(
        frozenset({"AveragePool", "MaxPool", "LpPool"}),
        "a pool ignores dilations",
        _is_dilated_average,
    ),
    Defect(
        frozenset(),
        "an integer constant beyond 32 bits is cut to 32 bits",
        _reads_wide_integer,
    ),
)  # fmt: skip


def refuse_known_defects(model: ModelProto, path: Path) -> None:
    """Raise UnsupportedError that names the first nodes that meet a defect."""
    found = _find(model, model.graph, None)
    if found:
        shown = "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
        raise UnsupportedError(
            f"{path}: the engine is known to compute this wrongly: {shown}.",
            "Change the model so that it does without, or cut it before these nodes.",
        )


def _find(model: ModelProto, graph: Any, outer: GraphView | None) -> list[str]:
    view = GraphView(model, graph, outer)
    found: list[str] = []
    for node in graph.node:
        name = node.name or node.output[0]
        found.extend(
            f"{node.op_type} {name!r}: {defect.reason}"
            for defect in DEFECTS
            if (not defect.operators or node.op_type in defect.operators)
            and defect.applies(node, view)
        )
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found.extend(_find(model, attribute.g, view))
    return found
