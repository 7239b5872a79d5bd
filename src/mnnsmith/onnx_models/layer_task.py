"""A worker's task: tensors inside the original, against those of the same names in the engine.

Where the engine's converter joins operators, a name may stay with a tensor that now holds a later
value: the one called after an addition holds what GELU makes of it.  So a tensor is compared with
its namesake first, then with what the original computes from that, up to six operators on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import UsageError
from mnnsmith.onnx_models.arrays import read_arrays
from mnnsmith.onnx_models.compare import difference
from mnnsmith.onnx_models.load import load_onnx
from mnnsmith.onnx_models.reference import RunFailedError, open_reference

if TYPE_CHECKING:
    from onnx import GraphProto

HOPS = 6
WATCHED = "watched.onnx"
# Their outputs are no tensors.
_LISTS = frozenset({
    "SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SequenceMap",
    "SplitToSequence", "Optional", "OptionalGetElement",
})  # fmt: skip
Array = npt.NDArray[Any]


def run_task(arguments: dict[str, Any]) -> dict[str, Any]:
    """arguments: model, feed and found (npz files: inputs, tensors of the engine), tolerance.

    Gives the program that ran the original, the number of tensors that its operators compute, and
    a row for each tensor of `found` that the original has.
    """
    from onnx import ValueInfoProto

    path = Path(arguments["model"])
    model = load_onnx(path)
    graph = model.graph
    found = read_arrays(Path(arguments["found"]))
    operators = {name: node.op_type for node in graph.node if node.op_type not in _LISTS
                 for name in node.output if name}  # fmt: skip
    computed = [name for name, kind in operators.items() if kind != "Constant"]
    common = [name for name in found if name in operators and operators[name] != "Constant"]
    successors = _successors(graph)
    watched = dict.fromkeys(
        name for start in common for name in (start, *_later(start, successors))
        if name in operators
    )  # fmt: skip
    del graph.output[:]
    graph.output.extend(ValueInfoProto(name=name) for name in watched)
    Path(WATCHED).write_bytes(model.SerializeToString())
    program, run = open_reference(Path(WATCHED), list(watched))
    try:
        results = run(read_arrays(Path(arguments["feed"])))
    except RunFailedError as error:
        raise UsageError(f"{path}: its inner tensors cannot be had: {error}") from error
    values = dict(zip(watched, results, strict=True))
    rows = []
    for name in common:
        later = [one for one in _later(name, successors) if one in values]
        row = _compared(found[name], name, later, values, arguments["tolerance"])
        rows.append({"name": name, "operator": operators[name], **row})
    return {"program": program, "tensors": len(computed), "rows": rows}


def _successors(graph: GraphProto) -> dict[str, list[str]]:
    """What is computed directly from each tensor."""
    result: dict[str, list[str]] = {}
    for node in graph.node:
        for name in node.input:
            result.setdefault(name, []).extend(output for output in node.output if output)
    return result


def _later(name: str, successors: dict[str, list[str]]) -> Iterator[str]:
    """What is computed from a tensor, nearest first."""
    seen, nearest = {name}, [name]
    for _ in range(HOPS):
        nearest = list(dict.fromkeys(
            later for one in nearest for later in successors.get(one, ()) if later not in seen
        ))  # fmt: skip
        seen.update(nearest)
        yield from nearest


def _compared(
    found: Array, name: str, later: list[str], values: dict[str, Array], tolerance: float
) -> dict[str, Any]:
    """Status, what it was compared with, difference, shape."""
    row = {"shape": list(found.shape), "compared_with": name}
    off = _difference(found, values[name])
    if off is not None and off <= tolerance:
        return {**row, "status": "equal", "difference": off}
    for one in later:
        # A single value is equal to too many others.
        shifted = _difference(found, values[one]) if found.size > 1 else None
        if shifted is not None and shifted <= tolerance:
            return {**row, "status": "shifted", "compared_with": one, "difference": shifted}
    if off is None:
        return {**row, "status": "unmatched", "difference": None}
    return {**row, "status": "differs", "difference": off if np.isfinite(off) else None}


def _difference(found: Array, expected: Array) -> float | None:
    """As `difference`, whatever the shapes; None where not even the sizes are equal."""
    # To the engine a matrix is at times a picture of size 1.
    if found.size != expected.size:
        return None
    return difference(found.reshape(expected.shape), expected)
