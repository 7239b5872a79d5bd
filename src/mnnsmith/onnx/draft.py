"""An ONNX graph as it grows: operators, constants, and weights that are not read yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mnnsmith.graph.values import Dim
from mnnsmith.graph.weights import Slot

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto

# Element types by their numbers in ONNX (TensorProto.DataType).
FLOAT, INT64, BOOL, FLOAT16 = 1, 7, 9, 10
_NUMPY = {FLOAT: np.float32, INT64: np.int64, FLOAT16: np.float16}


@dataclass(frozen=True)
class Weight:
    """An initializer that is read from the checkpoint when it is written.

    shape: as stored.  elem: FLOAT or FLOAT16.  turned: a matrix slot stored as [cols, rows], the
    form in which it is multiplied.
    """

    slot: Slot
    shape: tuple[int, ...]
    elem: int
    turned: bool = False

    @property
    def nbytes(self) -> int:
        size = int(np.prod(self.shape, dtype=np.int64))
        return size * (2 if self.elem == FLOAT16 else 4)


@dataclass(frozen=True)
class Port:
    """An input or output of the graph: element type and dimensions."""

    elem: int
    shape: tuple[Dim, ...]


class Draft:
    """Operators in single assignment; `scope` prefixes the names of values in between."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.nodes: list[NodeProto] = []
        self.weights: dict[str, Weight] = {}
        self.constants: dict[str, TensorProto] = {}
        self.types: dict[str, int] = {}
        self.inputs: dict[str, Port] = {}
        self.outputs: dict[str, Port] = {}
        self.scope = ""
        self._shared: dict[tuple[int, tuple[int, ...], bytes], str] = {}

    def op(
        self,
        kind: str,
        inputs: Sequence[str],
        name: str | None = None,
        *,
        elem: int | None = None,
        **attributes: Any,
    ) -> str:
        """Add an operator and return its output, of the first input's element type by default."""
        from onnx import helper

        output = name or f"{self.scope}.{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(kind, list(inputs), [output], name=f"{output}/{kind}", **attributes)
        )
        self.types[output] = self.types[inputs[0]] if elem is None else elem
        return output

    def top_k(self, x: str, k: int, names: Sequence[str]) -> None:
        """The k largest of the last dimension: values, and their indices as int64."""
        from onnx import helper

        self.nodes.append(
            helper.make_node("TopK", [x, self.integers([k])], list(names), name=f"{names[0]}/TopK")
        )
        self.types.update({names[0]: self.types[x], names[1]: INT64})

    def add_input(self, name: str, elem: int, shape: Sequence[Dim]) -> str:
        self.inputs[name] = Port(elem, tuple(shape))
        self.types[name] = elem
        return name

    def add_output(self, name: str, shape: Sequence[Dim]) -> None:
        self.outputs[name] = Port(self.types[name], tuple(shape))

    def weight(self, name: str, weight: Weight) -> str:
        self.weights[name] = weight
        self.types[name] = weight.elem
        return name

    def integers(self, values: Sequence[int], shape: Sequence[int] | None = None) -> str:
        """An int64 constant, [len(values)] if no shape is given; equal ones are shared."""
        return self.constant(np.array(values, np.int64), INT64, shape)

    def number(self, value: float, elem: int) -> str:
        """A scalar."""
        return self.constant(np.array(value), elem, ())

    def constant(
        self, values: np.ndarray[Any, Any], elem: int, shape: Sequence[int] | None = None
    ) -> str:
        """A small constant, kept in the graph; equal ones are shared."""
        from onnx import helper

        data = np.asarray(values, dtype=_NUMPY[elem])
        dims = tuple(data.shape if shape is None else shape)
        key = (elem, dims, data.tobytes())
        if key not in self._shared:
            name = f"const.{len(self._shared)}"
            self.constants[name] = helper.make_tensor(name, elem, dims, data.tobytes(), raw=True)
            self.types[name] = elem
            self._shared[key] = name
        return self._shared[key]

    # ------------------------------------------------------------------ short sequences

    def cast(self, x: str, elem: int, name: str | None = None) -> str:
        """`x` in another element type; itself if it has that type and needs no other name."""
        if self.types[x] == elem:
            return x if name is None else self.op("Identity", [x], name)
        return self.op("Cast", [x], name, elem=elem, to=elem)

    def reshape(self, x: str, shape: Sequence[int], name: str | None = None) -> str:
        """0 keeps the dimension at this place, -1 takes what is left."""
        return self.op("Reshape", [x, self.integers(shape)], name)

    def slice(self, x: str, begin: int, end: int, axis: int, name: str | None = None) -> str:
        parts = (self.integers([part]) for part in (begin, end, axis))
        return self.op("Slice", [x, *parts], name)

    def unsqueeze(self, x: str, *axes: int) -> str:
        return self.op("Unsqueeze", [x, self.integers(axes)])

    def reduce(
        self, kind: str, x: str, axis: int, name: str | None = None, *, keep: bool = True
    ) -> str:
        """ReduceSum, ReduceMean or ReduceMax over one dimension.

        Sums take the axes as an input since opset 13, the others since 18.
        """
        if kind == "ReduceSum" or self.opset >= 18:
            return self.op(kind, [x, self.integers([axis])], name, keepdims=int(keep))
        return self.op(kind, [x], name, axes=[axis], keepdims=int(keep))


def pruned(draft: Draft, outputs: Collection[str]) -> list[NodeProto]:
    """The operators that the outputs depend on, in order."""
    needed = set(outputs)
    kept = []
    for node in reversed(draft.nodes):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    return kept[::-1]
