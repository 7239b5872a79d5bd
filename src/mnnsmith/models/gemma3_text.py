"""Gemma 3, text only: norms on both sides of each block, two ropes, five sliding layers to a full.

Norm gains are stored minus one; embeddings are scaled by sqrt(hidden_size).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Value
from mnnsmith.graph.weights import MatrixSlot, Role, VectorSlot
from mnnsmith.models import layers as nn
from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import FULL, SLIDING, ContextLimits, typed_windows
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.rope import rope_frequencies, rope_settings, rope_tables

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PATTERN = 6


@dataclass(frozen=True)
class _Block:
    """What all blocks share."""

    hidden: int
    inner: int
    epsilon: float
    bias: bool
    shape: nn.AttentionShape


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graph of `Gemma3ForCausalLM`."""
    block = _block(config)
    layers = config.integer("num_hidden_layers")
    vocabulary = config.integer("vocab_size")
    positions = config.integer("max_position_embeddings", 131_072)
    context, notes = limits.resolve(positions, None)
    pattern = config.integer("sliding_window_pattern", _PATTERN)
    default = [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]
    kinds = config.raw("layer_types") or default
    windows = typed_windows(config, layers, context, default)

    g = Graph()
    inputs = nn.decoder_inputs(g, block.hidden, sliding=any(windows))
    factor = g.table("embed/factor", np.array([block.hidden**0.5], dtype=np.float32))
    x: Value = g.binary("multiply", inputs.hidden, factor, "embed/scaled")
    tables = {}
    for kind, settings in _rope_settings(config).items():
        if kind in kinds:
            rope = rope_frequencies(config, settings, block.shape.head_dim, positions)
            tables[kind] = rope_tables(g, inputs.positions, rope, context, f"rope/{kind}")
    delta = None
    for i, kind in enumerate(kinds):
        mask = inputs.sliding_mask if windows[i] else inputs.full_mask
        x, delta = _layer(g, block, i, x, delta, tables[kind], mask)
    assert delta is not None
    x = g.binary("add", x, delta, "residual")
    embedding = MatrixSlot("model.embed_tokens.weight", vocabulary, block.hidden, Role.EMBEDDING)
    tied = config.flag("tie_word_embeddings", True)
    head = replace(embedding, tensor=embedding.tensor if tied else "lm_head.weight", role=Role.HEAD)
    nn.head(
        g, x, inputs.logits_index, _gain("model.norm", block.hidden), block.epsilon, head
    )  # fmt: skip
    return LanguageModel(
        g, embedding, head, block.hidden, layers, block.shape, context,
        sliding_window=next((w for w in windows if w), None), fits_fp16=False, notes=notes,
    )  # fmt: skip


def _block(config: ConfigReader) -> _Block:
    config.absent("attn_logit_softcapping", "The engine's attention has no soft cap.")
    config.absent("final_logit_softcapping", "No released model of this type has one.")
    config.only("use_bidirectional_attention", (False,), False, "The engine attends causally.")
    config.only("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh", "")
    config.raw("hidden_act")
    hidden = config.integer("hidden_size")
    shape = nn.attention_shape(config, hidden, default_head_dim=256, default_kv_heads=4)
    scale = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    return _Block(
        hidden,
        config.integer("intermediate_size"),
        config.number("rms_norm_eps", 1e-6, most=1.0),
        config.flag("attention_bias", False),
        replace(shape, scale=scale),
    )


def _rope_settings(config: ConfigReader) -> dict[str, dict[str, Any]]:
    """Rope by layer type; older configs name the two bases apart."""
    local = config.raw("rope_local_base_freq")
    parameters = config.raw("rope_parameters")
    if isinstance(parameters, Mapping) and (FULL in parameters or SLIDING in parameters):
        given = {kind: parameters.get(kind) or {} for kind in (FULL, SLIDING)}
        if not all(isinstance(fields, Mapping) for fields in given.values()):
            raise config.error("rope_parameters must hold an object for each layer type")
        return {
            FULL: {"rope_type": "default", "rope_theta": _GLOBAL_THETA, **given[FULL]},
            SLIDING: {"rope_type": "default", "rope_theta": _LOCAL_THETA, **given[SLIDING]},
        }
    settings = rope_settings(config)
    if config.raw("rope_theta") is None and not isinstance(parameters, Mapping):
        settings["rope_theta"] = _GLOBAL_THETA
    return {
        FULL: settings,
        SLIDING: {"rope_type": "default", "rope_theta": _LOCAL_THETA if local is None else local},
    }


def _gain(tensor: str, size: int) -> VectorSlot:
    return VectorSlot(f"{tensor}.weight", size, add=1.0)


def _layer(
    g: Graph,
    block: _Block,
    i: int,
    x: Value,
    delta: Value | None,
    tables: tuple[Value, Value],
    mask: Value,
) -> tuple[Value, Value]:
    """x += norm(attention(norm(x))); returns x and norm(mlp(norm(x))), not yet added."""
    prefix, name = f"model.layers.{i}", f"layer{i}"
    hidden, shape, eps = block.hidden, block.shape, block.epsilon

    def gain(part: str) -> VectorSlot:
        return _gain(f"{prefix}.{part}_layernorm", hidden)

    if delta is None:
        normed = g.rms_norm(x, gain("input"), eps, f"{name}/attention_norm")
    else:
        x, normed = g.add_rms_norm(x, delta, gain("input"), eps, f"{name}/attention_norm")
    weights = nn.separate_projections(
        f"{prefix}.self_attn", shape, hidden, qkv_bias=block.bias, o_bias=block.bias
    )
    norms = [_gain(f"{prefix}.self_attn.{part}_norm", shape.head_dim) for part in "qk"]
    weights = replace(weights, qk_norm=(norms[0], norms[1]), qk_norm_epsilon=eps)
    mixed = nn.self_attention(g, normed, weights, shape, tables, mask, i, f"{name}/attention")
    mixed = g.rms_norm(mixed, gain("post_attention"), eps, f"{name}/attention_out_norm")
    x, normed = g.add_rms_norm(x, mixed, gain("pre_feedforward"), eps, f"{name}/mlp_norm")
    gate, up, down = (
        nn.Projection(f"{prefix}.mlp.{part}_proj", rows)
        for part, rows in (("gate", block.inner), ("up", block.inner), ("down", hidden))
    )
    out = nn.gated_mlp(g, normed, gate, up, down, "gelu_tanh", i, f"{name}/mlp")
    return x, g.rms_norm(out, gain("post_feedforward"), eps, f"{name}/mlp_out_norm")
