"""The graph that we author: its storage, and the operators that move data without changing it.

Every method adds one operator (or a short fixed sequence) and returns its output.  A shape or
layout that does not fit raises `ConversionError` at once, naming the operator and the values; the
engine itself would compute garbage or crash.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import ConversionError
from mnnsmith.graph.values import Dim, DType, Layout, Value, multiple, split_dimension
from mnnsmith.graph.weights import ConstantSlot, Slot, StoredRows, Table


@dataclass(frozen=True)
class Node:
    """One operator.

    kind: our name of the operator; `mnnsmith.mnn.graph_json` says what it becomes.
    attributes: plain values.  slots: weights by their part ("weight", "bias", "gain", ...).
    graphs: sub-graphs that the operator chooses from, such as experts.
    """

    kind: str
    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    graphs: tuple[GraphCore, ...] = ()


@dataclass(frozen=True)
class Landmark:
    """A value that a module of the original model computes too.

    module: its name in the original ("model.layers.3.mlp"); the value is the module's output.
    kind: "residual" (what a block passes on), "attention" or "mlp" (what these two give).
    """

    value: Value
    module: str
    layer: int
    kind: str


class GraphCore:
    """An ordered list of operators in single assignment; `Graph` adds the arithmetic."""

    def __init__(self, name: str = "") -> None:
        """name: of a sub-graph, as the engine looks it up."""
        self.name = name
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.outputs: list[Value] = []
        self.landmarks: list[Landmark] = []
        self._names: set[str] = set()
        self._int_constants: dict[tuple[tuple[int, ...], tuple[int, ...]], Value] = {}

    # ------------------------------------------------------------------ inputs, constants, outputs

    def input(self, name: str, shape: Sequence[Dim], dtype: DType = DType.FLOAT) -> Value:
        """A tensor that the engine feeds, in NCHW."""
        return self.add("input", name, (), [(tuple(shape), Layout.NCHW, dtype)])

    def integers(self, values: Sequence[int], shape: tuple[int, ...] | None = None) -> Value:
        """An int32 constant, [len(values)] if no shape is given; equal ones are shared."""
        key = (tuple(values), (len(values),) if shape is None else shape)
        if key not in self._int_constants:
            self._int_constants[key] = self.add(
                "integers",
                f"{self.name}const/{len(self._int_constants)}",
                (),
                [(key[1], Layout.NCHW, DType.INT32)],
                {"values": key[0]},
            )
        return self._int_constants[key]

    def table(self, name: str, values: npt.NDArray[np.float32]) -> Value:
        """A float32 constant, stored with the weights."""
        shape = tuple(values.shape)
        return self.add("table", name, (), [(shape, Layout.NCHW, DType.FLOAT)], slots={
            "values": Table(np.ascontiguousarray(values, dtype=np.float32))
        })  # fmt: skip

    def constant(self, name: str, slot: ConstantSlot | StoredRows) -> Value:
        """A tensor of the checkpoint, or rows of one, as a float32 constant."""
        return self.add(
            "table", name, (), [(slot.shape, Layout.NCHW, DType.FLOAT)], slots={"values": slot}
        )

    def all_nodes(self) -> Iterator[Node]:
        """Operators of this graph and of its sub-graphs, in the order in which they were added."""
        for node in self.nodes:
            yield node
            for graph in node.graphs:
                yield from graph.all_nodes()

    def mark_output(self, value: Value) -> None:
        """Make a value an output of the graph; the engine finds it by its name."""
        self.outputs.append(value)

    def clip(self, value: Value, limit: float) -> None:
        """Let all that read `value` read it within -limit .. limit instead.

        The value keeps its name and place, also as a landmark; the new one is named NAME/clip.
        """
        clipped = replace(value, index=len(self.values), name=f"{value.name}/clip")
        if clipped.name in self._names:
            self.fail(clipped.name, "an operator of this name exists")
        self._names.add(clipped.name)
        self.values.append(clipped)
        node = Node("clip", clipped.name, (value,), (clipped,), {"limit": limit})
        nodes = []
        for other in self.nodes:
            inputs = tuple(clipped if x == value else x for x in other.inputs)
            nodes.append(replace(other, inputs=inputs))
            if value in other.outputs:
                nodes.append(node)
        self.nodes = nodes

    def mark(self, value: Value, module: str, layer: int, kind: str) -> None:
        """Say that `value` is what a module of the original gives, for comparisons."""
        self.landmarks.append(Landmark(value, module, layer, kind))

    # ------------------------------------------------------------------ layout and shape

    def convert(self, x: Value, layout: Layout, name: str) -> Value:
        """Change the memory layout; a shape is given in the order of its layout."""
        if x.layout is layout:
            self.fail(name, f"{x} already has this layout")
        if len(x.shape) != 4:
            self.fail(name, f"{x}: only tensors of rank 4 change their layout")
        shape = x.shape
        if x.layout is Layout.NHWC:
            shape = (shape[0], shape[3], shape[1], shape[2])
        elif layout is Layout.NHWC:
            shape = (shape[0], shape[2], shape[3], shape[1])
        return self.add("convert", name, (x,), [(shape, layout, x.dtype)])

    def reshape(self, x: Value, shape: Sequence[Dim], name: str) -> Value:
        """Give a new shape; the layout tag stays.

        At run time one unknown dimension follows from the size of all; others must stand where they
        stand in `x`.
        """
        if x.layout is Layout.NC4HW4:
            self.fail(name, f"{x}: convert the layout before reshaping")
        unknown = [axis for axis, dim in enumerate(shape) if isinstance(dim, str)]
        kept = [i for i in unknown if i < len(x.shape) and x.shape[i] == shape[i]]
        if len(unknown) - len(kept) > 1:
            self.fail(name, f"more than one unknown dimension in {tuple(shape)}")
        if _known_size(x.shape) != _known_size(shape) or _symbols(x.shape) != _symbols(shape):
            self.fail(name, f"cannot reshape {x} to {tuple(shape)}")
        # A single one needs no copy, wherever it stands.
        copied = tuple(kept) if len(unknown) > 1 else ()
        return self.add(
            "reshape", name, (x,), [(tuple(shape), x.layout, x.dtype)], {"copied": copied}
        )

    def to_channels(self, x: Value, width: int, name: str) -> Value:
        """Any [..., width] tensor to the packed form [rows, width, 1, 1] that linear layers take.

        Tensors tagged NHWC (outputs of rope and attention) keep their channel last.
        """
        symbol, known = _symbol(x, name), _known_size(x.shape)
        if known % width:
            self.fail(name, f"{x} holds no whole rows of {width}")
        rows = multiple(known // width, symbol)
        shape: tuple[Dim, ...] = (rows, width, 1, 1)
        if x.layout is Layout.NHWC:
            shape = (rows, 1, 1, width)
        flat = self.reshape(x, shape, f"{name}/flat")
        return self.convert(flat, Layout.NC4HW4, name)

    def from_channels(self, x: Value, shape: Sequence[Dim], name: str) -> Value:
        """The packed form back to a plain tensor of the given shape."""
        self.expect_channels(x, name)
        return self.reshape(self.convert(x, Layout.NCHW, f"{name}/nchw"), shape, name)

    def transpose(self, x: Value, order: Sequence[int], name: str) -> Value:
        """Dimension i of the result is dimension order[i] of a plain tensor."""
        if x.layout is not Layout.NCHW or sorted(order) != list(range(len(x.shape))):
            self.fail(name, f"cannot reorder the dimensions of {x} as {list(order)}")
        shape = tuple(x.shape[axis] for axis in order)
        return self.add(
            "transpose", name, (x,), [(shape, x.layout, x.dtype)], {"order": tuple(order)}
        )

    def slice(
        self,
        x: Value,
        begin: int | Value,
        end: int | Value,
        axis: int,
        name: str,
        size: str = "selected",
    ) -> Value:
        """x[begin:end] along one axis.

        begin, end: may be run-time int32 values of shape [1]; the axis then has the unknown `size`.
        """
        length: Dim = size
        if isinstance(begin, int) and isinstance(end, int):
            full = x.shape[axis]
            if not 0 <= begin < end or (isinstance(full, int) and end > full):
                self.fail(name, f"slice [{begin}:{end}] is outside of axis {axis} of {x}")
            length = end - begin
        bounds = [b if isinstance(b, Value) else self.integers([b]) for b in (begin, end)]
        for bound in bounds:
            if bound.dtype is not DType.INT32:
                self.fail(name, f"{bound}: bounds are int32")
        shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
        inputs = (x, *bounds, self.integers([axis]), self.integers([1]))
        return self.add("slice", name, inputs, [(shape, x.layout, x.dtype)])

    def size(self, x: Value, axis: int, name: str) -> Value:
        """How long one axis of a plain tensor is at run time, int32 [1]."""
        if x.layout is not Layout.NCHW or not 0 <= axis < len(x.shape):
            self.fail(name, f"cannot tell the size of axis {axis} of {x}")
        sizes = self.add(
            "shape", f"{name}/all", (x,), [((len(x.shape),), Layout.NCHW, DType.INT32)]
        )
        return self.gather(sizes, self.integers([axis]), name)

    def concat(self, xs: Sequence[Value], axis: int, name: str, size: str | None = None) -> Value:
        """Join along one axis; the result has the layout tag of the first.

        size: the name of the sum where one of the parts is of unknown size.
        """
        first = xs[0]
        axis %= len(first.shape)
        total: Dim = 0
        for x in xs:
            same = x.shape[:axis] + x.shape[axis + 1 :] == (
                first.shape[:axis] + first.shape[axis + 1 :]
            )
            mixed = x.layout is not first.layout and Layout.NC4HW4 in (x.layout, first.layout)
            if not same or mixed:
                self.fail(name, f"cannot join {first} and {x} on axis {axis}")
            part = x.shape[axis]
            if isinstance(part, int) and isinstance(total, int):
                total += part
            elif size is None:
                self.fail(name, f"axis {axis} of {x} is unknown")
            else:
                total = size
        shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
        return self.add("concat", name, xs, [(shape, first.layout, first.dtype)], {"axis": axis})

    def pad_last(self, x: Value, width: int, name: str) -> Value:
        """Zeros after the last dimension, up to `width`."""
        last = x.shape[-1]
        if not isinstance(last, int) or last > width or x.layout is Layout.NC4HW4:
            self.fail(name, f"cannot pad {x} to {width}")
        pads = [0] * (2 * len(x.shape) - 1) + [width - last]
        amounts = self.integers(pads, (len(x.shape), 2))
        shape = (*x.shape[:-1], width)
        return self.add("pad", name, (x, amounts), [(shape, x.layout, x.dtype)])

    def gather(self, table: Value, indices: Value, name: str) -> Value:
        """Rows of `table` by index: [rows, width], [n] int32 -> [n, width]."""
        if indices.dtype is not DType.INT32 or len(indices.shape) != 1:
            self.fail(name, f"indices must be [n] int32, not {indices}")
        shape = (*indices.shape, *table.shape[1:])
        inputs = (table, indices, self.integers([0], ()))
        return self.add("gather", name, inputs, [(shape, table.layout, table.dtype)])

    # ------------------------------------------------------------------ inside

    def add(
        self,
        kind: str,
        name: str,
        inputs: Sequence[Value],
        outputs: Sequence[tuple[tuple[Dim, ...], Layout, DType]],
        attributes: dict[str, Any] | None = None,
        slots: dict[str, Slot] | None = None,
        suffixes: Sequence[str] = ("",),
        graphs: Sequence[GraphCore] = (),
    ) -> Value:
        if name in self._names:
            self.fail(name, "an operator of this name exists")
        self._names.add(name)
        for x in inputs:
            if x.index >= len(self.values) or self.values[x.index].name != x.name:
                self.fail(name, f"{x} is not of this graph")
        made = []
        for suffix, (shape, layout, dtype) in zip(suffixes, outputs, strict=True):
            made.append(Value(len(self.values), name + suffix, shape, layout, dtype))
            self.values.append(made[-1])
        self.nodes.append(
            Node(
                kind, name, tuple(inputs), tuple(made), attributes or {}, slots or {}, tuple(graphs)
            )
        )
        return made[0]

    def expect_channels(self, x: Value, name: str, width: int | None = None) -> None:
        if x.layout is not Layout.NC4HW4 or len(x.shape) != 4:
            self.fail(name, f"{x}: expected packed channels [seq, width, 1, 1]")
        if width is not None and x.shape[1] != width:
            self.fail(name, f"{x}: expected width {width}")

    def fail(self, name: str, what: str) -> NoReturn:
        raise ConversionError(
            f"Graph operator {name}: {what}.",
            "The model file of this architecture and the checkpoint's config.json disagree.",
        )


def _known_size(shape: Sequence[Dim]) -> int:
    return math.prod(split_dimension(d)[0] for d in shape)


def _symbols(shape: Sequence[Dim]) -> list[str]:
    return sorted(symbol for d in shape for symbol in split_dimension(d)[1].split("*") if symbol)


def _symbol(x: Value, name: str) -> str:
    symbols = _symbols(x.shape)
    if len(symbols) != 1:
        raise ConversionError(f"Graph operator {name}: {x} must have one unknown dimension.")
    return symbols[0]
