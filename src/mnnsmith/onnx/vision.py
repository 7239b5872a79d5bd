"""What a model sees with as ONNX: tiles in, embeddings for its text out.

Here every value has the shape that it has in our graph, but for packed channels, which are
[rows, width] without the two ones.  Unlike text, tiles need no batch: they are a dimension already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mnnsmith.errors import ConversionError, UsageError
from mnnsmith.graph.core import Node
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Dim, Layout, Value
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.onnx.decoder import DEFAULT_OPSET, DTYPES, check_options
from mnnsmith.onnx.draft import FLOAT, FLOAT16, INT64, Draft
from mnnsmith.onnx.emit import Emitter, Types, gather, linear, unary

# Sums and products of whole numbers, too, from which a canvas finds its tiles.
_BINARY = {
    "add": "Add", "subtract": "Sub", "multiply": "Mul", "divide": "Div", "minimum": "Min",
}  # fmt: skip


def draft_vision(model: LanguageModel, *, dtype: str = "fp32", opset: int = DEFAULT_OPSET) -> Draft:
    """The vision of a model; no weight is read.

    pixel_values float32 [tiles, 3, S, S] in, image_embeds float32 [tiles, tokens, width] out.
    dtype: a name of `DTYPES`.  Raises `UsageError` for an option out of its range, and for a model
    of text alone.
    """
    check_options(dtype, opset)
    if model.vision is None:
        raise UsageError("This model sees no pictures: there is no vision to export.")
    if DTYPES[dtype].compute == FLOAT16 and not model.fits_fp16:
        raise UsageError(
            "The activations of this model leave the range of fp16.",
            "Take fp16-weights, which computes in float32, or fp32.",
        )
    draft = Draft(opset)
    _Vision(draft, DTYPES[dtype], model.vision.graph).write()
    return draft


class _Vision(Emitter):
    """The graph of what a model sees with."""

    def __init__(self, draft: Draft, types: Types, graph: Graph) -> None:
        super().__init__(draft, types)
        self.graph = graph

    def write(self) -> None:
        self.run(self.graph, OPERATORS)
        for value in self.graph.outputs:
            self.draft.add_output(value.name, _without_ones(value.shape))


def _own_shape(value: Value) -> tuple[Dim, ...]:
    return value.shape[:2] if value.layout is Layout.NC4HW4 else value.shape


def _without_ones(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Dimensions of 1 are the engine's."""
    return tuple(dim for dim in shape if dim != 1)


def _sizes(shape: Sequence[Dim]) -> list[int]:
    return [dim if isinstance(dim, int) else -1 for dim in shape]


def _input(e: Emitter, node: Node) -> None:
    value = node.outputs[0]
    e.draft.add_input(value.name, FLOAT, value.shape)
    e.names[value.index] = e.draft.cast(value.name, e.types.compute)


def _integers(e: Emitter, node: Node) -> None:
    value = node.outputs[0]
    e.integers[value.index] = node.attributes["values"]
    shape = [dim for dim in value.shape if isinstance(dim, int)]
    e.names[value.index] = e.draft.integers(node.attributes["values"], shape)


def _table(e: Emitter, node: Node) -> None:
    value = node.outputs[0]
    e.names[value.index] = e.vector(value.name, node.slots["values"], e.types.compute)


def _reshape(e: Emitter, node: Node) -> None:
    assert isinstance(e, _Vision)
    out, x = node.outputs[0], e.name(node.inputs[0])
    if out in e.graph.outputs:
        e.draft.reshape(e.draft.cast(x, FLOAT), _sizes(_without_ones(out.shape)), e.result(node))
        return
    copied = node.attributes.get("copied", ())
    sizes = [0 if axis in copied else size for axis, size in enumerate(_sizes(out.shape))]
    e.draft.reshape(x, sizes, e.result(node))


def _convert(e: Emitter, node: Node) -> None:
    for value in (node.inputs[0], node.outputs[0]):
        if sum(d != 1 for d in value.shape[1:]) > 1:
            raise ConversionError(f"{node.name}: {value} is more than channels.")
    e.draft.reshape(e.name(node.inputs[0]), _sizes(_own_shape(node.outputs[0])), e.result(node))


def _transpose(e: Emitter, node: Node) -> None:
    order = list(node.attributes["order"])
    e.draft.op("Transpose", [e.name(node.inputs[0])], e.result(node), perm=order)


def _slice(e: Emitter, node: Node) -> None:
    x, *bounds = (e.name(value) for value in node.inputs)
    e.draft.op("Slice", [x, *bounds], e.result(node))


def _shape(e: Emitter, node: Node) -> None:
    e.draft.op("Shape", [e.name(node.inputs[0])], e.result(node), elem=INT64)


def _concat(e: Emitter, node: Node) -> None:
    parts = [e.name(value) for value in node.inputs]
    e.draft.op("Concat", parts, e.result(node), axis=node.attributes["axis"])


def _binary(e: Emitter, node: Node) -> None:
    kind = _BINARY.get(node.attributes["function"])
    if kind is None:
        function = node.attributes["function"]
        raise ConversionError(f"{node.name}: {function} cannot be written as ONNX.")
    e.draft.op(kind, [e.name(value) for value in node.inputs], e.result(node))


def _unary(e: Emitter, node: Node) -> None:
    if node.attributes["function"] != "square":
        unary(e, node)
        return
    x = e.name(node.inputs[0])
    e.draft.op("Mul", [x, x], e.result(node))


def _layer_norm(e: Emitter, node: Node) -> None:
    """(x - mean) / sqrt(variance + epsilon) * gain + bias over the last dimension, in float32."""
    draft = e.draft
    x = e.name(node.inputs[0])
    if len(node.inputs) == 2:
        x = draft.op("Add", [x, e.name(node.inputs[1])], e.result(node, 0))
    name = e.result(node, len(node.outputs) - 1)
    wide = draft.cast(x, FLOAT)
    centred = draft.op("Sub", [wide, draft.reduce("ReduceMean", wide, -1)])
    variance = draft.reduce("ReduceMean", draft.op("Mul", [centred, centred]), -1)
    epsilon = draft.number(node.attributes["epsilon"], FLOAT)
    unit = draft.op("Div", [centred, draft.op("Sqrt", [draft.op("Add", [variance, epsilon])])])
    gain, bias = (e.vector(f"{name}/{part}", node.slots[part], FLOAT) for part in ("gain", "bias"))
    e.narrowed("Add", [draft.op("Mul", [unit, gain]), bias], name)


def _full_attention(e: Emitter, node: Node) -> None:
    """softmax(q k^T * scale + mask) v of q, k, v [1, tokens, heads, width]; softmax in float32."""
    draft = e.draft
    q, k, v, mask = (e.name(value) for value in node.inputs)
    _, tokens, _, width = node.inputs[0].shape
    assert isinstance(tokens, int) and isinstance(width, int)
    q, v = (draft.op("Transpose", [x], perm=[0, 2, 1, 3]) for x in (q, v))
    k = draft.op("Transpose", [k], perm=[0, 2, 3, 1])
    q = draft.op("Mul", [q, draft.number(node.attributes["scale"], e.types.compute)])
    scores = draft.cast(draft.op("MatMul", [q, k]), FLOAT)
    masked = draft.op("Add", [scores, draft.cast(mask, FLOAT)])
    shares = draft.cast(draft.op("Softmax", [masked], axis=-1), e.types.compute)
    mixed = draft.op("Transpose", [draft.op("MatMul", [shares, v])], perm=[0, 2, 1, 3])
    draft.reshape(mixed, [1, tokens, -1], e.result(node))


OPERATORS: dict[str, Callable[[Emitter, Node], None]] = {
    "input": _input,
    "integers": _integers,
    "table": _table,
    "reshape": _reshape,
    "convert": _convert,
    "transpose": _transpose,
    "slice": _slice,
    "shape": _shape,
    "concat": _concat,
    "gather": gather,
    "binary": _binary,
    "unary": _unary,
    "linear": linear,
    "layer_norm": _layer_norm,
    "full_attention": _full_attention,
}
