"""A language model as ONNX: inputs and masks, rope, attention with a cache, experts.

Inputs and outputs have the names that decoders exported by Optimum have: input_ids, attention_mask,
position_ids, past_key_values.N.key and .value; logits, present.N.key and .value.
"""

from __future__ import annotations

import numpy as np

from mnnsmith.errors import ConversionError, UsageError
from mnnsmith.graph.core import Node
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.onnx.draft import BOOL, FLOAT, FLOAT16, INT64, Draft, Weight
from mnnsmith.onnx.emit import OPERATORS, Emitter, Types, normalize
from mnnsmith.onnx.mixture import mixture

# Types by the names that options have: of activations, and of stored matrices.
DTYPES = {
    "fp32": Types(FLOAT, FLOAT),
    "fp16": Types(FLOAT16, FLOAT16),
    "fp16-weights": Types(FLOAT, FLOAT16),
}
# What all operators that we use exist in, and the newest that the tests run.
OPSETS = range(13, 24)
DEFAULT_OPSET = 18
_BATCH, _SEQ, _PAST, _TOTAL = "batch", "sequence", "past_sequence", "total_sequence"
_MASK, _IDS, _EMBEDDED = "attention_mask", "input_ids", "inputs_embeds"


def draft_decoder(
    model: LanguageModel,
    *,
    dtype: str = "fp32",
    opset: int = DEFAULT_OPSET,
    kv_cache: bool = True,
    embedded: bool = False,
) -> Draft:
    """The whole model, or its text part where it sees; no weight is read.

    dtype: a name of `DTYPES`.  embedded: takes `inputs_embeds` in place of `input_ids`, what
    `draft_embeddings` gives with pictures in it.  Raises `UsageError` for an option out of its
    range.
    """
    check_options(dtype, opset)
    if DTYPES[dtype].compute == FLOAT16 and not model.fits_fp16:
        raise UsageError(
            "The activations of this model leave the range of fp16.",
            "Take fp16-weights, which computes in float32, or fp32.",
        )
    draft = Draft(opset)
    decoder = _Decoder(draft, DTYPES[dtype], model, kv_cache, embedded)
    decoder.write()
    return draft


def draft_embeddings(
    model: LanguageModel, *, dtype: str = "fp32", opset: int = DEFAULT_OPSET
) -> Draft:
    """The rows of the embedding for `input_ids`, as `inputs_embeds`; options as above."""
    check_options(dtype, opset)
    draft, types = Draft(opset), DTYPES[dtype]
    draft.add_input(_IDS, INT64, (_BATCH, _SEQ))
    slot = model.embedding
    weight = draft.weight("embedding", Weight(slot, (slot.rows, slot.cols), types.stored))
    rows = draft.op("Gather", [weight, _IDS], elem=types.stored, axis=0)
    draft.cast(rows, types.compute, _EMBEDDED)
    draft.add_output(_EMBEDDED, (_BATCH, _SEQ, slot.cols))
    return draft


def check_options(dtype: str, opset: int) -> None:
    """Whether these are options that we have, before any file is opened."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r:.40} is not one of {', '.join(DTYPES)}.")
    if opset not in OPSETS:
        raise UsageError(
            f"opset {opset} is out of range: it goes from {OPSETS[0]} to {OPSETS[-1]}."
        )


class _Decoder(Emitter):
    """The main graph; it knows what the engine would feed, and the cache."""

    def __init__(
        self, draft: Draft, types: Types, model: LanguageModel, kv_cache: bool, embedded: bool
    ) -> None:
        super().__init__(draft, types)
        self.model = model
        self.kv_cache = kv_cache
        self.embedded = embedded
        self.masks: tuple[str, str] | None = None

    def write(self) -> None:
        draft = self.draft
        if self.embedded:
            draft.add_input(_EMBEDDED, self.types.compute, (_BATCH, _SEQ, self.model.hidden_size))
        else:
            draft.add_input(_IDS, INT64, (_BATCH, _SEQ))
        draft.add_input(_MASK, INT64, (_BATCH, _TOTAL if self.kv_cache else _SEQ))
        draft.add_input("position_ids", INT64, (_BATCH, _SEQ))
        if self.kv_cache:
            for layer in range(self.model.layers):
                for part in ("key", "value"):
                    shape = self._cache_shape(_PAST)
                    draft.add_input(f"past_key_values.{layer}.{part}", self.types.compute, shape)
        self.run(self.model.graph, _OPERATORS)
        (logits,) = self.model.graph.outputs
        draft.add_output(self.name(logits), (_BATCH, _SEQ, self.model.head.rows))
        if self.kv_cache:
            for layer in range(self.model.layers):
                for part in ("key", "value"):
                    draft.add_output(f"present.{layer}.{part}", self._cache_shape(_TOTAL))

    def _cache_shape(self, length: str) -> tuple[int | str, ...]:
        shape = self.model.attention
        return _BATCH, shape.kv_heads, length, shape.head_dim

    def cached(self, x: str, layer: int, part: str) -> str:
        """`x` [batch, kv_heads, seq, head_dim] behind what the cache holds."""
        if not self.kv_cache:
            return x
        past = f"past_key_values.{layer}.{part}"
        return self.draft.op("Concat", [past, x], f"present.{layer}.{part}", axis=2)


def _input(e: Emitter, node: Node) -> None:
    assert isinstance(e, _Decoder)
    value = node.outputs[0]
    if value.name == _IDS:
        e.names[value.index] = _embedded(e)
    elif value.name == "position_ids":
        e.names[value.index] = value.name
    elif value.name == _MASK:
        e.masks = _masks(e)
        e.names[value.index] = e.masks[0]
    elif value.name != "logits_index":
        raise ConversionError(f"{value}: is no input that we know.")


def _embedded(e: _Decoder) -> str:
    """Rows of the embedding, [batch, seq, 1, hidden]."""
    slot, draft = e.model.embedding, e.draft
    if e.embedded:
        return draft.reshape(_EMBEDDED, [0, 0, 1, slot.cols])
    weight = draft.weight("embedding", Weight(slot, (slot.rows, slot.cols), e.types.stored))
    e.shared[f"embedding {slot.tensor}"] = weight
    rows = draft.op("Gather", [weight, _IDS], elem=e.types.stored, axis=0)
    wide = draft.cast(rows, e.types.compute)
    return draft.reshape(wide, [0, 0, 1, slot.cols], _EMBEDDED)


def _masks(e: _Decoder) -> tuple[str, str]:
    """What is added to scores, [batch, 1, seq, total]: for full attention, and for the window.

    Token i of the text may look at those before it that are no padding; in a window of w, at the
    last w of them, itself included.  What is hidden gets the lowest number, not minus infinity: a
    row of padding, which may look at nothing, then has no softmax of 0 / 0.
    """
    draft = e.draft
    total = _length(draft, _MASK)
    first = draft.op("Sub", [total, _length(draft, _EMBEDDED if e.embedded else _IDS)])
    one = draft.integers([1], ())
    queries = draft.unsqueeze(draft.op("Range", [first, total, one]), 1)
    keys = draft.unsqueeze(draft.op("Range", [draft.integers([0], ()), total, one]), 0)
    real = draft.op("Cast", [_MASK], elem=BOOL, to=BOOL)
    seen = draft.op("Not", [draft.op("Greater", [keys, queries], elem=BOOL)])
    seen = draft.op("And", [seen, draft.unsqueeze(real, 1, 2)])

    def added(allowed: str, name: str) -> str:
        lowest = draft.number(float(np.finfo(np.float32).min), FLOAT)
        zero = draft.number(0.0, FLOAT)
        return draft.op("Where", [allowed, zero, lowest], name, elem=FLOAT)

    full = added(seen, "mask/full")
    if e.model.sliding_window is None:
        return full, full
    width = draft.integers([e.model.sliding_window], ())
    near = draft.op("Greater", [keys, draft.op("Sub", [queries, width])], elem=BOOL)
    return full, added(draft.op("And", [seen, near]), "mask/sliding")


def _length(draft: Draft, name: str) -> str:
    """The second dimension of an input, a scalar."""
    shape = draft.op("Shape", [name], elem=INT64)
    return draft.op("Gather", [shape, draft.integers([1], ())], axis=0)


def _slice(e: Emitter, node: Node) -> None:
    assert isinstance(e, _Decoder)
    x, begin, end, axis, _ = node.inputs
    out = node.outputs[0]
    if x.name == _MASK:
        assert e.masks is not None
        e.names[out.index] = e.masks[e.integers[begin.index][0]]
    elif begin.index not in e.integers:
        # The engine computes the logits of some positions, this graph those of all.
        e.draft.op("Identity", [e.name(x)], e.result(node))
    else:
        first, last, along = (e.integers[part.index][0] for part in (begin, end, axis))
        e.draft.slice(e.name(x), first, last, e.axis(x, along), e.result(node))


def _rope(e: Emitter, node: Node) -> None:
    """Rotated heads, [batch, seq, heads, head_dim]: x cos + (-second half, first half) sin.

    In float32 whatever the model's type, with the norm of heads that may go before.
    """
    a, draft = node.attributes, e.draft
    width, head_dim = a["rotary_dim"], a["head_dim"]
    tables = [_table_of_heads(e, e.name(value)) for value in node.inputs[2:]]
    for i, (part, heads) in enumerate((("q_gain", a["heads"]), ("k_gain", a["kv_heads"]))):
        x = draft.reshape(e.name(node.inputs[i]), [0, 0, heads, head_dim])
        x = draft.cast(x, FLOAT)
        if part in node.slots:
            gain = e.vector(f"{node.name}/{part}", node.slots[part], FLOAT)
            x = draft.op("Mul", [normalize(draft, x, a["epsilon"]), gain])
        turned = x if width == head_dim else draft.slice(x, 0, width, 3)
        second = draft.slice(turned, width // 2, width, 3)
        first = draft.slice(turned, 0, width // 2, 3)
        crossed = draft.op("Concat", [draft.op("Neg", [second]), first], axis=3)
        terms = [draft.op("Mul", pair) for pair in zip((turned, crossed), tables, strict=True)]
        name = e.result(node, i)
        if width == head_dim:
            e.narrowed("Add", terms, name)
        else:
            rest = draft.slice(x, width, head_dim, 3)
            e.narrowed("Concat", [draft.op("Add", terms), rest], name, axis=3)


def _table_of_heads(e: Emitter, table: str) -> str:
    """cos or sin [batch, seq, width] as [batch, seq, 1, width], once for all layers."""
    key = f"of heads {table}"
    if key not in e.shared:
        e.shared[key] = e.draft.unsqueeze(table, 2)
    return e.shared[key]


def _attention(e: Emitter, node: Node) -> None:
    """softmax(q k^T * scale + mask) v; the softmax in float32.

    Query heads that share a key head are rows of one matrix, so that no key is repeated.
    """
    assert isinstance(e, _Decoder)
    a, draft = node.attributes, e.draft
    layer, kv_heads, head_dim = a["layer"], a["kv_heads"], a["head_dim"]
    q, k, v, mask = (e.name(value) for value in node.inputs)
    heads = node.inputs[0].shape[2]
    assert isinstance(heads, int)
    v = draft.reshape(v, [0, 0, kv_heads, head_dim])
    q, k, v = (draft.op("Transpose", [x], perm=[0, 2, 1, 3]) for x in (q, k, v))
    q = draft.op("Mul", [q, draft.number(a["scale"], e.types.compute)])
    k, v = e.cached(k, layer, "key"), e.cached(v, layer, "value")
    shared = heads != kv_heads
    if shared:
        q = draft.reshape(q, [0, kv_heads, -1, head_dim])
    scores = draft.op("MatMul", [q, draft.op("Transpose", [k], perm=[0, 1, 3, 2])])
    if shared:
        scores = draft.reshape(scores, [0, heads, -1, 0])
    masked = draft.op("Add", [draft.cast(scores, FLOAT), mask])
    shares = draft.cast(draft.op("Softmax", [masked], axis=-1), e.types.compute)
    if shared:
        shares = draft.reshape(shares, [0, kv_heads, -1, 0])
    mixed = draft.op("MatMul", [shares, v])
    if shared:
        mixed = draft.reshape(mixed, [0, heads, -1, head_dim])
    mixed = draft.op("Transpose", [mixed], perm=[0, 2, 1, 3])
    draft.reshape(mixed, [0, 0, heads * head_dim], e.result(node))


def _reshape(e: Emitter, node: Node) -> None:
    """The last one gives the logits, which are float32 in every form."""
    out = node.outputs[0]
    x = e.name(node.inputs[0])
    if out.name == "logits":
        x = e.draft.cast(x, FLOAT)
    e.draft.reshape(x, e.shape(out), e.result(node))


_OPERATORS = {
    **OPERATORS,
    "input": _input,
    "slice": _slice,
    "rope": _rope,
    "attention": _attention,
    "mixture": mixture,
    "reshape": _reshape,
}
