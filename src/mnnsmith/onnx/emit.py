"""A graph's operators as those of ONNX, with a batch before the tokens.

Every value that has a dimension of tokens becomes [batch, seq, *the dimensions after it]; packed
channels [seq, width, 1, 1] become [batch, seq, width].  Names are those of our graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mnnsmith.errors import ConversionError
from mnnsmith.graph.core import GraphCore, Node
from mnnsmith.graph.values import Layout, Value
from mnnsmith.graph.weights import ConstantSlot, MatrixSlot, Slot, Table, VectorSlot
from mnnsmith.onnx.draft import BOOL, FLOAT, INT64, Draft, Weight

# Names of the dimension of tokens: of the text, of its positions whose logits are wanted, and of
# the tokens that an expert gets.
TOKENS = ("seq", "selected", "n")
# Tables of at most so many elements are kept in the graph.
_INLINE_ELEMENTS = 64


@dataclass(frozen=True)
class Types:
    """compute: of activations.  stored: of matrices."""

    compute: int
    stored: int


class Emitter:
    """One graph on its way: which ONNX value each of its values is.

    leading: 2 where tokens are [batch, seq], 1 in the sub-graph of an expert, where they are [n].
    """

    def __init__(
        self, draft: Draft, types: Types, leading: int = 2, shared: dict[str, str] | None = None
    ) -> None:
        self.draft = draft
        self.types = types
        self.leading = leading
        self.names: dict[int, str] = {}
        # What integer constants hold, by the value's index.
        self.integers: dict[int, tuple[int, ...]] = {}
        # Initializers by what they hold, and values that several operators derive.
        self.shared: dict[str, str] = {} if shared is None else shared

    def run(self, graph: GraphCore, emitters: dict[str, Callable[[Emitter, Node], None]]) -> None:
        """Add every operator of `graph`."""
        for node in graph.nodes:
            emit = emitters.get(node.kind)
            if emit is None:
                raise ConversionError(f"{node.name}: {node.kind} cannot be written as ONNX.")
            self.draft.scope = node.name
            emit(self, node)

    def name(self, value: Value) -> str:
        return self.names[value.index]

    def result(self, node: Node, output: int = 0) -> str:
        """Register an output under its own name, and return that."""
        value = node.outputs[output]
        self.names[value.index] = value.name
        return value.name

    # ------------------------------------------------------------------ shapes

    def shape(self, value: Value) -> list[int]:
        """As reshaping takes it, from a value with the same tokens."""
        kept = [] if token_axis(value) is None else [0] * self.leading
        return [*kept, *inner_shape(value)]

    def axis(self, value: Value, axis: int) -> int:
        at = token_axis(value)
        axis %= len(value.shape)
        if at is None:
            return axis
        if axis < at or axis - at > len(inner_shape(value)):
            raise ConversionError(f"{value}: axis {axis} has no counterpart in ONNX.")
        return axis - at + self.leading - 1

    # ------------------------------------------------------------------ element types

    def joined(self, values: Sequence[Value]) -> list[str]:
        """Inputs in one element type: float32 if all that depends on tokens is, else the model's.

        What routers compute is float32 throughout.
        """
        names = [self.name(value) for value in values]
        types = {self.draft.types[n] for n in names}
        if len(types) == 1:
            return names
        live = [n for n, v in zip(names, values, strict=True) if token_axis(v) is not None]
        wide = bool(live) and all(self.draft.types[n] == FLOAT for n in live)
        return [self.draft.cast(n, FLOAT if wide else self.types.compute) for n in names]

    def narrowed(self, kind: str, inputs: Sequence[str], name: str, **attributes: Any) -> None:
        """An operator in float32 whose result goes on in the model's type."""
        if self.types.compute == FLOAT:
            self.draft.op(kind, inputs, name, **attributes)
        else:
            wide = self.draft.op(kind, inputs, **attributes)
            self.draft.cast(wide, self.types.compute, name)

    # ------------------------------------------------------------------ weights

    def vector(self, name: str, slot: Slot, elem: int) -> str:
        """A bias, a gain, a table or a constant of the checkpoint."""
        if isinstance(slot, Table):
            if slot.values.size <= _INLINE_ELEMENTS:
                return self.draft.constant(slot.values, elem)
            return self.draft.weight(name, Weight(slot, slot.values.shape, elem))
        if isinstance(slot, ConstantSlot):
            return self.draft.weight(name, Weight(slot, slot.shape, elem))
        assert isinstance(slot, VectorSlot)
        return self.draft.weight(name, Weight(slot, (slot.size,), elem))

    def multiplied(self, x: str, name: str, slot: MatrixSlot, output: str | None) -> str:
        """x W^T; the weight is stored as [cols, rows], or is the embedding where that is tied."""
        draft = self.draft
        x = draft.cast(x, self.types.compute)
        tied = self.shared.get(f"embedding {slot.tensor}")
        if tied is not None and slot.heads is None and slot.first_row == 0:
            weight = draft.op("Transpose", [draft.cast(tied, self.types.compute)], perm=[1, 0])
        else:
            shape = (slot.cols, slot.rows)
            stored = draft.weight(name, Weight(slot, shape, self.types.stored, turned=True))
            weight = draft.cast(stored, self.types.compute)
        return draft.op("MatMul", [x, weight], output)


def token_axis(value: Value) -> int | None:
    """Which dimension counts tokens; None for a constant."""
    found = [i for i, d in enumerate(value.shape) if d in TOKENS]
    return found[0] if found else None


def inner_shape(value: Value) -> tuple[int, ...]:
    """The dimensions behind that of tokens, or all of a constant's."""
    shape = value.shape[:2] if value.layout is Layout.NC4HW4 else value.shape
    at = token_axis(value)
    inner = shape if at is None else shape[at + 1 :]
    before = () if at is None else shape[:at]
    fixed = tuple(d for d in inner if isinstance(d, int))
    if fixed != inner or any(d != 1 for d in before):
        raise ConversionError(f"{value}: has no form with a batch.")
    return fixed


def _check_repeated(node: Node, constant: Value) -> None:
    """A constant beside a value with tokens must be the same for all of them."""
    at = token_axis(node.outputs[0])
    if at is None or constant.shape in ((), (1,)):
        return
    if constant.layout is Layout.NC4HW4 or any(d != 1 for d in constant.shape[: at + 1]):
        raise ConversionError(f"{node.name}: {constant} differs from token to token.")


# ---------------------------------------------------------------------- operators that compute


def integers(e: Emitter, node: Node) -> None:
    value = node.outputs[0]
    e.integers[value.index] = node.attributes["values"]
    e.names[value.index] = e.draft.integers(node.attributes["values"], inner_shape(value))


def table(e: Emitter, node: Node) -> None:
    value = node.outputs[0]
    e.names[value.index] = e.vector(value.name, node.slots["values"], FLOAT)


def reshape(e: Emitter, node: Node) -> None:
    """Also a change of the layout: values are not packed here."""
    out = node.outputs[0]
    e.draft.reshape(e.name(node.inputs[0]), e.shape(out), e.result(node))


def convert(e: Emitter, node: Node) -> None:
    for value in (node.inputs[0], node.outputs[0]):
        if sum(d != 1 for d in value.shape[1:]) > 1:
            raise ConversionError(f"{node.name}: {value} is more than channels.")
    reshape(e, node)


def concat(e: Emitter, node: Node) -> None:
    axis = e.axis(node.outputs[0], node.attributes["axis"])
    e.draft.op("Concat", e.joined(node.inputs), e.result(node), axis=axis)


def gather(e: Emitter, node: Node) -> None:
    rows, indices = (e.name(value) for value in node.inputs[:2])
    e.draft.op("Gather", [rows, indices], e.result(node), axis=0)


def binary(e: Emitter, node: Node) -> None:
    draft, function = e.draft, node.attributes["function"]
    for value in node.inputs:
        if token_axis(value) is None:
            _check_repeated(node, value)
    x, y = e.joined(node.inputs)
    if function == "equal":
        draft.cast(draft.op("Equal", [x, y], elem=BOOL), INT64, e.result(node))
    elif function == "multiply_silu":
        gated = draft.op("Mul", [y, draft.op("Sigmoid", [y])])
        draft.op("Mul", [gated, x], e.result(node))
    else:
        draft.op(_BINARY[function], [x, y], e.result(node))


_BINARY = {"add": "Add", "subtract": "Sub", "multiply": "Mul", "divide": "Div"}


def unary(e: Emitter, node: Node) -> None:
    x, function = e.name(node.inputs[0]), node.attributes["function"]
    if function == "sigmoid":
        e.draft.op("Sigmoid", [x], e.result(node))
    elif function == "gelu_tanh":
        _gelu_tanh(e.draft, x, e.result(node))
    else:
        raise ConversionError(f"{node.name}: {function} cannot be written as ONNX.")


def _gelu_tanh(draft: Draft, x: str, name: str) -> None:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), an operator of its own since opset 20."""
    if draft.opset >= 20:
        draft.op("Gelu", [x], name, approximate="tanh")
        return
    elem = draft.types[x]

    def times(y: str, factor: float) -> str:
        return draft.op("Mul", [y, draft.number(factor, elem)])

    cube = draft.op("Mul", [draft.op("Mul", [x, x]), x])
    inner = times(draft.op("Add", [x, times(cube, 0.044715)]), (2 / np.pi) ** 0.5)
    raised = draft.op("Add", [draft.op("Tanh", [inner]), draft.number(1.0, elem)])
    draft.op("Mul", [times(x, 0.5), raised], name)


def clip(e: Emitter, node: Node) -> None:
    x, limit = e.name(node.inputs[0]), node.attributes["limit"]
    ends = [e.draft.number(end, e.draft.types[x]) for end in (-limit, limit)]
    e.draft.op("Clip", [x, *ends], e.result(node))


def softmax(e: Emitter, node: Node) -> None:
    e.draft.op("Softmax", [e.name(node.inputs[0])], e.result(node), axis=-1)


def reduce(e: Emitter, node: Node) -> None:
    x = node.inputs[0]
    kind = {"sum": "ReduceSum", "maximum": "ReduceMax"}[node.attributes["function"]]
    e.draft.reduce(kind, e.name(x), e.axis(x, node.attributes["axis"]), e.result(node))


def to_float(e: Emitter, node: Node) -> None:
    e.draft.cast(e.name(node.inputs[0]), FLOAT, e.result(node))


def top_k(e: Emitter, node: Node) -> None:
    k = node.outputs[0].shape[-1]
    assert isinstance(k, int)
    e.draft.top_k(e.name(node.inputs[0]), k, [e.result(node, 0), e.result(node, 1)])


def gather_last(e: Emitter, node: Node) -> None:
    x, indices = (e.name(value) for value in node.inputs[:2])
    e.draft.op("GatherElements", [x, indices], e.result(node), axis=-1)


def matmul_transposed(e: Emitter, node: Node) -> None:
    """In float32 whatever the model's type: near ties between experts are decided here."""
    x, weight = (e.draft.cast(e.name(value), FLOAT) for value in node.inputs)
    turned = e.draft.op("Transpose", [weight], perm=[1, 0])
    e.draft.op("MatMul", [x, turned], e.result(node))


def pad(e: Emitter, node: Node) -> None:
    out = node.outputs[0]
    before, width = inner_shape(node.inputs[0]), inner_shape(out)
    ranks = e.leading + len(width)
    amounts = e.draft.integers([0] * (2 * ranks - 1) + [width[-1] - before[-1]])
    x = e.name(node.inputs[0])
    e.draft.op("Pad", [x, amounts, e.draft.number(0.0, e.draft.types[x])], e.result(node))


def linear(e: Emitter, node: Node) -> None:
    slot, bias = node.slots["weight"], node.slots.get("bias")
    assert isinstance(slot, MatrixSlot)
    x = e.name(node.inputs[0])
    name = e.result(node)
    if bias is None:
        e.multiplied(x, f"{name}/weight", slot, name)
        return
    product = e.multiplied(x, f"{name}/weight", slot, None)
    offset = e.vector(f"{name}/bias", bias, e.types.compute)
    e.draft.op("Add", [product, offset], name)


def rms_norm(e: Emitter, node: Node) -> None:
    x = e.name(node.inputs[0])
    if len(node.inputs) == 2:
        x = e.draft.op("Add", e.joined(node.inputs), e.result(node, 0))
    name = e.result(node, len(node.outputs) - 1)
    gain = e.vector(f"{name}/gain", node.slots["gain"], FLOAT)
    unit = normalize(e.draft, x, node.attributes["epsilon"])
    e.narrowed("Mul", [unit, gain], name)


def normalize(draft: Draft, x: str, epsilon: float) -> str:
    """x / sqrt(mean(x^2) + epsilon) over the last dimension, in float32."""
    wide = draft.cast(x, FLOAT)
    square = draft.op("Pow", [wide, draft.number(2.0, FLOAT)])
    mean = draft.reduce("ReduceMean", square, -1)
    root = draft.op("Sqrt", [draft.op("Add", [mean, draft.number(epsilon, FLOAT)])])
    return draft.op("Div", [wide, root])


OPERATORS: dict[str, Callable[[Emitter, Node], None]] = {
    "integers": integers,
    "table": table,
    "reshape": reshape,
    "convert": convert,
    "concat": concat,
    "gather": gather,
    "binary": binary,
    "unary": unary,
    "clip": clip,
    "pad": pad,
    "softmax": softmax,
    "reduce": reduce,
    "to_float": to_float,
    "top_k": top_k,
    "gather_last": gather_last,
    "matmul_transposed": matmul_transposed,
    "linear": linear,
    "rms_norm": rms_norm,
}
