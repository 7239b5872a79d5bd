"""Llama, and the decoders that differ from it by a few flags (mistral, qwen2, qwen3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Value
from mnnsmith.graph.weights import VectorSlot
from mnnsmith.models import layers as nn
from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits, no_windows
from mnnsmith.models.decoder import Part, add_stack, layer_name, layer_prefix, read_stack
from mnnsmith.models.language_model import IgnoredTensors, LanguageModel
from mnnsmith.models.rope import (
    COMMON_RULES,
    RopeRules,
    rope_frequencies,
    rope_settings,
    rope_tables,
)

# Older checkpoints store what is computed from the config.
IGNORED = (
    IgnoredTensors("*.rotary_emb.inv_freq", "rope frequencies are computed from the config"),
)


@dataclass(frozen=True)
class Variant:
    """Where a family departs from llama.

    qk_norm: each head of q and k is RMS-normalized before rope.
    head_dim, kv_heads, epsilon: what transformers takes where the config leaves them out; None
    means hidden_size / heads, and as many as there are heads.
    windows: the sliding window of each layer.
    attention, mlp: the names of a block's projections, by default each a tensor of its own.
    rope: how the rope settings are read.
    feed_forward: in place of the gated SiLU layer.
    """

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    kv_heads: int | None = None
    epsilon: float = 1e-6
    windows: Callable[[ConfigReader, int, int], list[int | None]] = no_windows
    attention: Callable[[str, nn.AttentionShape, int], nn.AttentionWeights] | None = None
    mlp: Callable[[str, int, int], tuple[nn.Projection, ...]] = nn.separate_mlp
    rope: RopeRules = COMMON_RULES
    feed_forward: Part | None = None


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graph of `LlamaForCausalLM`."""
    bias = config.flag("attention_bias", False)
    return build_variant(
        config, limits, Variant(bias, bias, mlp_bias=config.flag("mlp_bias", False))
    )


def build_variant(config: ConfigReader, limits: ContextLimits, variant: Variant) -> LanguageModel:
    """Grouped-query attention with rope, and a gated SiLU layer or what the variant has instead."""
    stack = read_stack(config, variant.epsilon, tied_by_default=False)
    config.only("hidden_act", ("silu",), "silu", "Another activation is another model.")
    shape = nn.attention_shape(config, stack.hidden, variant.head_dim, variant.kv_heads)
    settings = rope_settings(config, variant.rope)
    positions = config.integer("max_position_embeddings")
    rope = rope_frequencies(config, settings, shape.head_dim, positions)
    context, notes = limits.resolve(positions, rope.longest)
    windows = variant.windows(config, stack.layers, context)
    feed_forward = variant.feed_forward or _gated_mlp(config, variant, stack.hidden)

    g = Graph()
    inputs = nn.decoder_inputs(g, stack.hidden, sliding=any(windows))
    tables = rope_tables(g, inputs.positions, rope, context, "rope")

    def attention(g: Graph, x: Value, i: int) -> Value:
        prefix = f"{layer_prefix(i)}.self_attn"
        weights = _attention_weights(prefix, shape, stack.hidden, variant, stack.epsilon)
        mask = inputs.sliding_mask if windows[i] else inputs.full_mask
        name = f"{layer_name(i)}/attention"
        return nn.self_attention(g, x, weights, shape, tables, mask, i, name)

    add_stack(g, inputs, stack, attention, feed_forward)
    return LanguageModel(
        g, stack.embedding, stack.head, stack.hidden, stack.layers, shape, context,
        sliding_window=next((w for w in windows if w), None), ignored=IGNORED, notes=notes,
    )  # fmt: skip


def _gated_mlp(config: ConfigReader, variant: Variant, hidden: int) -> Part:
    inner = config.integer("intermediate_size")

    def feed_forward(g: Graph, x: Value, i: int) -> Value:
        gate, up, down = (
            replace(p, bias=variant.mlp_bias)
            for p in variant.mlp(f"{layer_prefix(i)}.mlp", hidden, inner)
        )
        return nn.gated_mlp(g, x, gate, up, down, "silu", i, f"{layer_name(i)}/mlp")

    return feed_forward


def _attention_weights(
    prefix: str, shape: nn.AttentionShape, hidden: int, variant: Variant, epsilon: float
) -> nn.AttentionWeights:
    if variant.attention is not None:
        return variant.attention(prefix, shape, hidden)
    weights = nn.separate_projections(
        prefix, shape, hidden, qkv_bias=variant.qkv_bias, o_bias=variant.o_bias
    )
    if not variant.qk_norm:
        return weights
    gains = (
        VectorSlot(f"{prefix}.q_norm.weight", shape.head_dim),
        VectorSlot(f"{prefix}.k_norm.weight", shape.head_dim),
    )
    return replace(weights, qk_norm=gains, qk_norm_epsilon=epsilon)
