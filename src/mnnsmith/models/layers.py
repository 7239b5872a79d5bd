"""What the decoder families share: inputs, attention, gated feed-forward, head.

Tensor names are those of the checkpoint.  Every function adds operators to the graph and returns
values; hidden states are packed channels [seq, width, 1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import DType, Value
from mnnsmith.graph.weights import MatrixSlot, Role, VectorSlot
from mnnsmith.models.config import ConfigReader

# The engine's way to say "to the end".
_TO_THE_END = 1 << 30


@dataclass(frozen=True)
class DecoderInputs:
    """What the engine feeds.

    hidden: embeddings, packed; masks: one for full attention, and one for the sliding window where
    the model has both; positions: [seq] int32; logits_index: [1], where the wanted logits begin.
    """

    hidden: Value
    full_mask: Value
    sliding_mask: Value
    positions: Value
    logits_index: Value


@dataclass(frozen=True)
class AttentionShape:
    """Heads and widths of self-attention, and the factor of q k^T."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True)
class Projection:
    """A linear layer of the checkpoint: `tensor`.weight, rows first_row.. of it, and its bias."""

    tensor: str
    rows: int
    first_row: int = 0
    bias: bool = False


def attention_shape(
    config: ConfigReader,
    hidden_size: int,
    default_head_dim: int | None = None,
    default_kv_heads: int | None = None,
) -> AttentionShape:
    """The usual fields, with the family's defaults; scale is 1/sqrt(head_dim)."""
    heads = config.integer("num_attention_heads")
    # The family's default is for a config without the key; null asks for as many as heads.
    if default_kv_heads is None or config.contains("num_key_value_heads"):
        default_kv_heads = heads
    kv_heads = config.integer("num_key_value_heads", default_kv_heads)
    if default_head_dim is None and not config.has("head_dim") and hidden_size % heads:
        raise config.error(f"hidden_size {hidden_size} is no multiple of {heads} heads")
    head_dim = config.integer("head_dim", default_head_dim or hidden_size // heads)
    if heads % kv_heads:
        raise config.error(f"{heads} heads cannot share {kv_heads} key-value heads")
    return AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5)


def decoder_inputs(g: Graph, hidden_size: int, *, sliding: bool) -> DecoderInputs:
    """Declare the four inputs under the names that the engine expects.

    With `sliding` the engine gives two masks, [2, 1, 1, q, k]: full, then sliding.
    """
    embeddings = g.input("input_ids", ["seq", 1, hidden_size])
    if sliding:
        both = g.input("attention_mask", [2, 1, 1, "query", "key"])
        full = g.slice(both, 0, 1, 0, "mask/full")
        local = g.slice(both, 1, 2, 0, "mask/sliding")
    else:
        full = local = g.input("attention_mask", [1, 1, "query", "key"])
    positions = g.input("position_ids", [1, "seq"], DType.INT32)
    logits_index = g.input("logits_index", [1], DType.INT32)
    return DecoderInputs(
        hidden=g.to_channels(embeddings, hidden_size, "embed"),
        full_mask=full,
        sliding_mask=local,
        positions=g.reshape(positions, ["seq"], "positions"),
        logits_index=logits_index,
    )


def linear(g: Graph, x: Value, p: Projection, role: Role, layer: int | None, name: str) -> Value:
    """Add the linear layer that `p` names; its input width is that of `x`."""
    cols = x.shape[1]
    assert isinstance(cols, int)
    weight = MatrixSlot(f"{p.tensor}.weight", p.rows, cols, role, layer, p.first_row)
    bias = VectorSlot(f"{p.tensor}.bias", p.rows, p.first_row) if p.bias else None
    return g.linear(x, weight, name, bias)


@dataclass(frozen=True)
class AttentionWeights:
    """The projections of one attention block; `qk_norm` names the gains of q and k."""

    q: Projection
    k: Projection
    v: Projection
    o: Projection
    qk_norm: tuple[VectorSlot, VectorSlot] | None = None
    qk_norm_epsilon: float = 0.0


def separate_projections(
    prefix: str, shape: AttentionShape, hidden_size: int, *, qkv_bias: bool, o_bias: bool
) -> AttentionWeights:
    """q_proj, k_proj, v_proj and o_proj as tensors of their own."""
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return AttentionWeights(
        q=Projection(f"{prefix}.q_proj", q_rows, bias=qkv_bias),
        k=Projection(f"{prefix}.k_proj", kv_rows, bias=qkv_bias),
        v=Projection(f"{prefix}.v_proj", kv_rows, bias=qkv_bias),
        o=Projection(f"{prefix}.o_proj", hidden_size, bias=o_bias),
    )


def self_attention(
    g: Graph,
    x: Value,
    weights: AttentionWeights,
    shape: AttentionShape,
    tables: tuple[Value, Value],
    mask: Value,
    layer: int,
    name: str,
) -> Value:
    """Grouped-query attention with rope (Ainslie et al. 2023; Su et al. 2021)."""
    q, k, v = (
        linear(g, x, p, Role.ATTENTION, layer, f"{name}/{part}")
        for part, p in (("q", weights.q), ("k", weights.k), ("v", weights.v))
    )
    cos, sin = tables
    rotary_dim = cos.shape[1]
    assert isinstance(rotary_dim, int)
    q, k = g.rope(
        q, k, cos, sin,
        heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        rotary_dim=rotary_dim, name=f"{name}/rope",
        qk_norm=weights.qk_norm, epsilon=weights.qk_norm_epsilon,
    )  # fmt: skip
    mixed = g.attention(
        q, k, v, mask,
        heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        scale=shape.scale, layer=layer, name=f"{name}/mix",
    )  # fmt: skip
    return linear(g, mixed, weights.o, Role.ATTENTION, layer, f"{name}/o")


def separate_mlp(prefix: str, hidden: int, inner: int) -> tuple[Projection, ...]:
    """gate_proj, up_proj and down_proj as tensors of their own."""
    return (
        Projection(f"{prefix}.gate_proj", inner),
        Projection(f"{prefix}.up_proj", inner),
        Projection(f"{prefix}.down_proj", hidden),
    )


def gated_mlp(
    g: Graph,
    x: Value,
    gate: Projection,
    up: Projection,
    down: Projection,
    activation: str,
    layer: int,
    name: str,
    role: Role = Role.MLP,
) -> Value:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020); activation is "silu" or "gelu_tanh"."""
    gated = linear(g, x, gate, role, layer, f"{name}/gate")
    raised = linear(g, x, up, role, layer, f"{name}/up")
    if activation == "silu":
        product = g.binary("multiply_silu", raised, gated, f"{name}/act")
    else:
        product = g.binary(
            "multiply", g.unary(activation, gated, f"{name}/gelu"), raised, f"{name}/act"
        )
    return linear(g, product, down, role, layer, f"{name}/down")


def head(
    g: Graph,
    hidden: Value,
    logits_index: Value,
    norm: VectorSlot,
    epsilon: float,
    weight: MatrixSlot,
) -> None:
    """Final norm and logits [1, n, vocabulary] of the positions from `logits_index` on.

    Value names are those that the engine looks for.
    """
    wanted = g.slice(hidden, logits_index, _TO_THE_END, 0, "last")
    normed = g.rms_norm(wanted, norm, epsilon, "hidden_states")
    scores = g.linear(normed, weight, "lm_head")
    g.mark_output(g.from_channels(scores, [1, "selected", weight.rows], "logits"))
