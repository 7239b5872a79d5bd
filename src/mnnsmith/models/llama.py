"""Llama, and the decoders that differ from it by a few flags (mistral, qwen2, qwen3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Value
from mnnsmith.graph.weights import MatrixSlot, Role, VectorSlot
from mnnsmith.models import layers as nn
from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits, no_windows
from mnnsmith.models.language_model import IgnoredTensors, LanguageModel
from mnnsmith.models.rope import rope_frequencies, rope_settings, rope_tables

# Older checkpoints store what is computed from the config.
IGNORED = (
    IgnoredTensors("*.rotary_emb.inv_freq", "rope frequencies are computed from the config"),
)


def _separate_mlp(prefix: str, hidden: int, inner: int) -> tuple[nn.Projection, ...]:
    return (
        nn.Projection(f"{prefix}.gate_proj", inner),
        nn.Projection(f"{prefix}.up_proj", inner),
        nn.Projection(f"{prefix}.down_proj", hidden),
    )


@dataclass(frozen=True)
class Variant:
    """Where a family departs from llama.

    qk_norm: each head of q and k is RMS-normalized before rope.
    head_dim, kv_heads, epsilon: what transformers takes where the config leaves them out; None
    means hidden_size / heads, and as many as there are heads.
    windows: the sliding window of each layer.
    attention, mlp: the names of a block's projections, by default each a tensor of its own.
    rope: corrects the rope settings.
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
    mlp: Callable[[str, int, int], tuple[nn.Projection, ...]] = _separate_mlp
    rope: Callable[[Mapping[str, Any]], dict[str, Any]] = dict


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graph of `LlamaForCausalLM`."""
    bias = config.flag("attention_bias", False)
    return build_variant(
        config, limits, Variant(bias, bias, mlp_bias=config.flag("mlp_bias", False))
    )


def build_variant(config: ConfigReader, limits: ContextLimits, variant: Variant) -> LanguageModel:
    """Norm, attention, norm, gated SiLU; residual around both."""
    hidden = config.integer("hidden_size")
    layers = config.integer("num_hidden_layers")
    inner = config.integer("intermediate_size")
    vocabulary = config.integer("vocab_size")
    epsilon = config.number("rms_norm_eps", variant.epsilon, most=1.0)
    config.only("hidden_act", ("silu",), "silu", "Another activation is another model.")
    shape = nn.attention_shape(config, hidden, variant.head_dim, variant.kv_heads)
    settings = variant.rope(rope_settings(config))
    positions = config.integer("max_position_embeddings")
    rope = rope_frequencies(config, settings, shape.head_dim, positions)
    context, notes = limits.resolve(positions, rope.longest)
    windows = variant.windows(config, layers, context)

    g = Graph()
    inputs = nn.decoder_inputs(g, hidden, sliding=any(windows))
    tables = rope_tables(g, inputs.positions, rope, context, "rope")
    x, delta = inputs.hidden, None
    for i in range(layers):
        prefix, name = f"model.layers.{i}", f"layer{i}"
        gain = VectorSlot(f"{prefix}.input_layernorm.weight", hidden)
        x, normed = _residual_norm(g, x, delta, gain, epsilon, f"{name}/attention_norm")
        weights = _attention_weights(f"{prefix}.self_attn", shape, hidden, variant, epsilon)
        mask = inputs.sliding_mask if windows[i] else inputs.full_mask
        mixed = nn.self_attention(g, normed, weights, shape, tables, mask, i, f"{name}/attention")
        gain = VectorSlot(f"{prefix}.post_attention_layernorm.weight", hidden)
        x, normed = g.add_rms_norm(x, mixed, gain, epsilon, f"{name}/mlp_norm")
        gate, up, down = (
            replace(p, bias=variant.mlp_bias) for p in variant.mlp(f"{prefix}.mlp", hidden, inner)
        )
        delta = nn.gated_mlp(g, normed, gate, up, down, "silu", i, f"{name}/mlp")
    assert delta is not None
    x = g.binary("add", x, delta, "residual")
    embedding = MatrixSlot("model.embed_tokens.weight", vocabulary, hidden, Role.EMBEDDING)
    tied = config.flag("tie_word_embeddings", False)
    head = MatrixSlot(embedding.tensor if tied else "lm_head.weight", vocabulary, hidden, Role.HEAD)
    norm = VectorSlot("model.norm.weight", hidden)
    nn.head(g, x, inputs.logits_index, norm, epsilon, head)
    return LanguageModel(
        g, embedding, head, hidden, layers, shape, context,
        sliding_window=next((w for w in windows if w), None), ignored=IGNORED, notes=notes,
    )  # fmt: skip


def _residual_norm(
    g: Graph, x: Value, delta: Value | None, gain: VectorSlot, epsilon: float, name: str
) -> tuple[Value, Value]:
    """(x + delta, its norm); before the first block there is nothing to add."""
    if delta is None:
        return x, g.rms_norm(x, gain, epsilon, name)
    return g.add_rms_norm(x, delta, gain, epsilon, name)


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
