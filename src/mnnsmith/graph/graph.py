"""The graph that we author: operators over values, checked as they are added.

Every method adds one operator (or a short fixed sequence) and returns its output.  A shape or
layout that does not fit raises `ConversionError` at once, naming the operator and the values; the
engine itself would compute garbage or crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import ConversionError
from mnnsmith.graph.values import Dim, DType, Layout, Value
from mnnsmith.graph.weights import MatrixSlot, Slot, Table, VectorSlot


@dataclass(frozen=True)
class Node:
    """One operator.

    kind: our name of the operator; `mnnsmith.mnn.graph_json` says what it becomes.
    attributes: plain values.  slots: weights by their part ("weight", "bias", "gain", ...).
    """

    kind: str
    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)


class Graph:
    """An ordered list of operators in single assignment."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.outputs: list[Value] = []
        self._names: set[str] = set()
        self._int_constants: dict[tuple[tuple[int, ...], bool], Value] = {}

    # ------------------------------------------------------------------ inputs, constants, outputs

    def input(self, name: str, shape: Sequence[Dim], dtype: DType = DType.FLOAT) -> Value:
        """A tensor that the engine feeds, in NCHW."""
        return self._add("input", name, (), [(tuple(shape), Layout.NCHW, dtype)])

    def integers(self, values: Sequence[int], scalar: bool = False) -> Value:
        """An int32 constant of shape [len(values)], or a scalar; equal ones are shared."""
        key = (tuple(values), scalar)
        if key not in self._int_constants:
            shape: tuple[Dim, ...] = () if scalar else (len(values),)
            self._int_constants[key] = self._add(
                "integers",
                f"const/{len(self._int_constants)}",
                (),
                [(shape, Layout.NCHW, DType.INT32)],
                {"values": key[0], "scalar": scalar},
            )
        return self._int_constants[key]

    def table(self, name: str, values: npt.NDArray[np.float32]) -> Value:
        """A float32 constant, stored with the weights."""
        shape = tuple(values.shape)
        return self._add("table", name, (), [(shape, Layout.NCHW, DType.FLOAT)], slots={
            "values": Table(np.ascontiguousarray(values, dtype=np.float32))
        })  # fmt: skip

    def mark_output(self, value: Value) -> None:
        """Make a value an output of the graph; the engine finds it by its name."""
        self.outputs.append(value)

    # ------------------------------------------------------------------ layout and shape

    def convert(self, x: Value, layout: Layout, name: str) -> Value:
        """Change the memory layout; a shape is given in the order of its layout."""
        if x.layout is layout:
            self._fail(name, f"{x} already has this layout")
        if len(x.shape) != 4:
            self._fail(name, f"{x}: only tensors of rank 4 change their layout")
        shape = x.shape
        if x.layout is Layout.NHWC:
            shape = (shape[0], shape[3], shape[1], shape[2])
        elif layout is Layout.NHWC:
            shape = (shape[0], shape[2], shape[3], shape[1])
        return self._add("convert", name, (x,), [(shape, layout, x.dtype)])

    def reshape(self, x: Value, shape: Sequence[Dim], name: str) -> Value:
        """Give a new shape; at most one dimension is symbolic. The layout tag stays."""
        if x.layout is Layout.NC4HW4:
            self._fail(name, f"{x}: convert the layout before reshaping")
        if sum(isinstance(d, str) for d in shape) > 1:
            self._fail(name, f"more than one unknown dimension in {tuple(shape)}")
        if _known_size(x.shape) != _known_size(shape) or _symbols(x.shape) != _symbols(shape):
            self._fail(name, f"cannot reshape {x} to {tuple(shape)}")
        return self._add("reshape", name, (x,), [(tuple(shape), x.layout, x.dtype)])

    def to_channels(self, x: Value, width: int, name: str) -> Value:
        """Any [seq, width] tensor to the packed form [seq, width, 1, 1] that linear layers take.

        Tensors tagged NHWC (outputs of rope and attention) keep their channel last.
        """
        seq = _symbol(x, name)
        shape: tuple[Dim, ...] = (seq, width, 1, 1)
        if x.layout is Layout.NHWC:
            shape = (seq, 1, 1, width)
        flat = self.reshape(x, shape, f"{name}/flat")
        return self.convert(flat, Layout.NC4HW4, name)

    def from_channels(self, x: Value, shape: Sequence[Dim], name: str) -> Value:
        """The packed form back to a plain tensor of the given shape."""
        self._expect_channels(x, name)
        return self.reshape(self.convert(x, Layout.NCHW, f"{name}/nchw"), shape, name)

    def slice(self, x: Value, begin: int | Value, end: int, axis: int, name: str) -> Value:
        """x[begin:end] along one axis; `begin` may be a run-time value of shape [1]."""
        size: Dim = "selected"
        if isinstance(begin, int):
            full = x.shape[axis]
            if not 0 <= begin < end or (isinstance(full, int) and end > full):
                self._fail(name, f"slice [{begin}:{end}] is outside of axis {axis} of {x}")
            size = end - begin
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        first = begin if isinstance(begin, Value) else self.integers([begin])
        inputs = (x, first, self.integers([end]), self.integers([axis]), self.integers([1]))
        return self._add("slice", name, inputs, [(shape, x.layout, x.dtype)])

    def concat(self, xs: Sequence[Value], axis: int, name: str) -> Value:
        """Join along one axis."""
        first = xs[0]
        axis %= len(first.shape)
        total = 0
        for x in xs:
            same = x.shape[:axis] + x.shape[axis + 1 :] == (
                first.shape[:axis] + first.shape[axis + 1 :]
            )
            if not same or x.layout is not first.layout:
                self._fail(name, f"cannot join {first} and {x} on axis {axis}")
            size = x.shape[axis]
            if isinstance(size, str):
                self._fail(name, f"axis {axis} of {x} is unknown")
            total += size
        shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
        return self._add("concat", name, xs, [(shape, first.layout, first.dtype)], {"axis": axis})

    def gather(self, table: Value, indices: Value, name: str) -> Value:
        """Rows of `table` by index: [rows, width], [n] int32 -> [n, width]."""
        if indices.dtype is not DType.INT32 or len(indices.shape) != 1:
            self._fail(name, f"indices must be [n] int32, not {indices}")
        shape = (*indices.shape, *table.shape[1:])
        inputs = (table, indices, self.integers([0], scalar=True))
        return self._add("gather", name, inputs, [(shape, table.layout, table.dtype)])

    # ------------------------------------------------------------------ arithmetic

    def binary(self, function: str, a: Value, b: Value, name: str) -> Value:
        """Elementwise a ? b, where `b` has the shape of `a`, or is a scalar or [1]."""
        if a.dtype is not b.dtype:
            self._fail(name, f"{function} of {a} and {b}: element types differ")
        if b.shape not in ((), (1,)):
            if a.shape != b.shape:
                self._fail(name, f"{function} of {a} and {b}: shapes differ")
            if a.layout is not b.layout:
                self._fail(name, f"{function} of {a} and {b}: layouts differ")
        return self._add(
            "binary", name, (a, b), [(a.shape, a.layout, a.dtype)], {"function": function}
        )

    def unary(self, function: str, x: Value, name: str) -> Value:
        """An elementwise function."""
        return self._add(
            "unary", name, (x,), [(x.shape, x.layout, x.dtype)], {"function": function}
        )

    # ------------------------------------------------------------------ the layers of a transformer

    def linear(
        self, x: Value, weight: MatrixSlot, name: str, bias: VectorSlot | None = None
    ) -> Value:
        """x W^T + b on the packed form: [seq, cols, 1, 1] -> [seq, rows, 1, 1]."""
        self._expect_channels(x, name, weight.cols)
        if bias is not None and bias.size != weight.rows:
            self._fail(name, f"bias {bias.tensor} has {bias.size} elements, not {weight.rows}")
        slots: dict[str, Slot] = {"weight": weight}
        if bias is not None:
            slots["bias"] = bias
        shape: tuple[Dim, ...] = (x.shape[0], weight.rows, 1, 1)
        return self._add("linear", name, (x,), [(shape, Layout.NC4HW4, DType.FLOAT)], slots=slots)

    def rms_norm(self, x: Value, gain: VectorSlot, epsilon: float, name: str) -> Value:
        """x / sqrt(mean(x^2) + epsilon) * gain over the channels (Zhang and Sennrich 2019)."""
        self._expect_channels(x, name, gain.size)
        return self._add(
            "rms_norm", name, (x,), [(x.shape, x.layout, x.dtype)],
            {"epsilon": epsilon}, {"gain": gain},
        )  # fmt: skip

    def add_rms_norm(
        self, x: Value, residual: Value, gain: VectorSlot, epsilon: float, name: str
    ) -> tuple[Value, Value]:
        """(x + residual, rms_norm(x + residual)) in one operator."""
        self._expect_channels(x, name, gain.size)
        self._expect_channels(residual, name, gain.size)
        out = (x.shape, x.layout, x.dtype)
        total = self._add(
            "rms_norm", name, (x, residual), [out, out], {"epsilon": epsilon}, {"gain": gain},
            suffixes=("/sum", ""),
        )  # fmt: skip
        return total, self.values[total.index + 1]

    def rope(
        self,
        q: Value,
        k: Value,
        cos: Value,
        sin: Value,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        name: str,
        qk_norm: tuple[VectorSlot, VectorSlot] | None = None,
        epsilon: float = 0.0,
    ) -> tuple[Value, Value]:
        """Rotate the first `rotary_dim` elements of each head, the two halves against each other.

        Su et al. 2021, in the half-split form.  With `qk_norm` each head is RMS-normalized first.
        q [seq, heads*head_dim, 1, 1] -> [1, seq, heads, head_dim] NHWC, k likewise.
        """
        self._expect_channels(q, name, heads * head_dim)
        self._expect_channels(k, name, kv_heads * head_dim)
        for t in (cos, sin):
            if t.shape[1:] != (rotary_dim,):
                self._fail(name, f"{t}: expected [seq, {rotary_dim}]")
        slots: dict[str, Slot] = {}
        if qk_norm is not None:
            for part, slot in zip(("q_gain", "k_gain"), qk_norm, strict=True):
                if slot.size != head_dim:
                    self._fail(name, f"{slot.tensor} has {slot.size} elements, not {head_dim}")
                slots[part] = slot
        seq = q.shape[0]
        outs = [((1, seq, n, head_dim), Layout.NHWC, DType.FLOAT) for n in (heads, kv_heads)]
        attributes = {
            "rotary_dim": rotary_dim, "heads": heads, "kv_heads": kv_heads,
            "head_dim": head_dim, "epsilon": epsilon,
        }  # fmt: skip
        rotated = self._add(
            "rope", name, (q, k, cos, sin), outs, attributes, slots, suffixes=("/q", "/k")
        )
        return rotated, self.values[rotated.index + 1]

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        mask: Value,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        layer: int,
        name: str,
    ) -> Value:
        """Causal attention over the engine's own KV cache; q, k, v have one head width.

        softmax(q k^T * scale + mask) v.  -> [seq, heads*head_dim, 1, 1] packed.
        """
        for x, n in ((q, heads), (k, kv_heads)):
            if x.shape[2:] != (n, head_dim):
                self._fail(name, f"{x}: expected [1, seq, {n}, {head_dim}]")
        if heads % kv_heads:
            self._fail(name, f"{heads} query heads cannot share {kv_heads} key heads")
        self._expect_channels(v, name, kv_heads * head_dim)
        shape: tuple[Dim, ...] = (q.shape[1], heads * head_dim, 1, 1)
        return self._add(
            "attention", name, (q, k, v, mask), [(shape, Layout.NC4HW4, DType.FLOAT)],
            {"layer": layer, "scale": scale, "kv_heads": kv_heads, "head_dim": head_dim},
        )  # fmt: skip

    # ------------------------------------------------------------------ inside

    def _add(
        self,
        kind: str,
        name: str,
        inputs: Sequence[Value],
        outputs: Sequence[tuple[tuple[Dim, ...], Layout, DType]],
        attributes: dict[str, Any] | None = None,
        slots: dict[str, Slot] | None = None,
        suffixes: Sequence[str] = ("",),
    ) -> Value:
        if name in self._names:
            self._fail(name, "an operator of this name exists")
        self._names.add(name)
        for x in inputs:
            if x.index >= len(self.values) or self.values[x.index].name != x.name:
                self._fail(name, f"{x} is not of this graph")
        made = []
        for suffix, (shape, layout, dtype) in zip(suffixes, outputs, strict=True):
            made.append(Value(len(self.values), name + suffix, shape, layout, dtype))
            self.values.append(made[-1])
        self.nodes.append(
            Node(kind, name, tuple(inputs), tuple(made), attributes or {}, slots or {})
        )
        return made[0]

    def _expect_channels(self, x: Value, name: str, width: int | None = None) -> None:
        if x.layout is not Layout.NC4HW4 or len(x.shape) != 4:
            self._fail(name, f"{x}: expected packed channels [seq, width, 1, 1]")
        if width is not None and x.shape[1] != width:
            self._fail(name, f"{x}: expected width {width}")

    def _fail(self, name: str, what: str) -> NoReturn:
        raise ConversionError(
            f"Graph operator {name}: {what}.",
            "The model file of this architecture and the checkpoint's config.json disagree.",
        )


def _known_size(shape: Sequence[Dim]) -> int:
    return int(np.prod([d for d in shape if isinstance(d, int)], dtype=np.int64))


def _symbols(shape: Sequence[Dim]) -> list[str]:
    return sorted(d for d in shape if isinstance(d, str))


def _symbol(x: Value, name: str) -> str:
    symbols = _symbols(x.shape)
    if len(symbols) != 1:
        raise ConversionError(f"Graph operator {name}: {x} must have one unknown dimension.")
    return symbols[0]
