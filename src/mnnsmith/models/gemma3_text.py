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
from mnnsmith.models.context import FULL, SLIDING, ContextLimits, layer_kinds, typed_windows
from mnnsmith.models.decoder import mark_block, mark_parts
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.rope import complete, rope_frequencies, rope_object, rope_tables

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
    pattern = config.integer("sliding_window_pattern", _PATTERN)
    default = [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]
    kinds = layer_kinds(config, layers, default)
    settings, ignored = _rope_settings(config, positions)
    ropes = {
        kind: rope_frequencies(config, settings[kind], block.shape.head_dim, positions)
        for kind in sorted(set(kinds))
    }
    longest = min((r.longest for r in ropes.values() if r.longest is not None), default=None)
    context, notes = limits.resolve(positions, longest)
    windows = typed_windows(config, layers, context, default, absent=4096)

    g = Graph()
    inputs = nn.decoder_inputs(g, block.hidden, sliding=any(windows))
    factor = g.table("embed/factor", np.array([block.hidden**0.5], dtype=np.float32))
    x: Value = g.binary("multiply", inputs.hidden, factor, "embed/scaled")
    tables = {
        kind: rope_tables(g, inputs.positions, rope, context, f"rope/{kind}")
        for kind, rope in ropes.items()
    }
    delta = None
    for i, kind in enumerate(kinds):
        mask = inputs.sliding_mask if windows[i] else inputs.full_mask
        x, delta = _layer(g, block, i, x, delta, tables[kind], mask)
    assert delta is not None
    x = g.binary("add", x, delta, "residual")
    mark_block(g, x, layers - 1)
    embedding = MatrixSlot("model.embed_tokens.weight", vocabulary, block.hidden, Role.EMBEDDING)
    tied = config.flag("tie_word_embeddings", True)
    head = replace(embedding, tensor=embedding.tensor if tied else "lm_head.weight", role=Role.HEAD)
    nn.head(
        g, x, inputs.logits_index, _gain("model.norm", block.hidden), block.epsilon, head
    )  # fmt: skip
    return LanguageModel(
        g, embedding, head, block.hidden, layers, block.shape, context,
        sliding_window=next((w for w in windows if w), None), fits_fp16=False,
        notes=(*notes, *ignored),
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


def _rope_settings(
    config: ConfigReader, positions: int
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Rope by layer type, and notes; step by step as `Gemma3TextConfig` merges the fields.

    rope_scaling updates what is there for full attention; `rope_theta` and `rope_local_base_freq`
    of older configs fill in the bases.
    """
    parameters, scaling = (rope_object(config, k) for k in ("rope_parameters", "rope_scaling"))
    plain = {"rope_type": "default"}
    given = {FULL: plain, SLIDING: plain} if parameters is None else dict(parameters)
    if scaling is not None:
        if not isinstance(given.get(FULL), Mapping):
            raise config.error("rope_scaling needs a full_attention in rope_parameters to update")
        given[FULL] = {**given[FULL], **scaling}
    found: dict[str, dict[str, Any]] = {}
    bases = ((FULL, "rope_theta", _GLOBAL_THETA), (SLIDING, "rope_local_base_freq", _LOCAL_THETA))
    for kind, key, default in bases:
        theta = config.raw(key) if config.contains(key) else default
        fields = given.pop(kind, None)
        if fields is not None and not isinstance(fields, Mapping):
            raise config.error(f"rope_parameters must hold an object for {kind}")
        found[kind] = dict(plain if fields is None else fields)
        complete(config, found[kind], theta)
        found[kind].setdefault("original_max_position_embeddings", positions)
    # transformers looks for this one outside of the object to which it belongs.
    if "truncate" in given or any("truncate" in fields for fields in found.values()):
        raise config.unsupported("truncate in the rope settings of this model type")
    if not given:
        return found, ()
    names = ", ".join(sorted(map(str, given)))
    return found, (
        f"rope_parameters: {names:.200} without effect: transformers reads only full_attention and "
        "sliding_attention of it for this model type",
    )


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
        mark_block(g, x, i - 1)
    weights = nn.separate_projections(
        f"{prefix}.self_attn", shape, hidden, qkv_bias=block.bias, o_bias=block.bias
    )
    norms = [_gain(f"{prefix}.self_attn.{part}_norm", shape.head_dim) for part in "qk"]
    weights = replace(weights, qk_norm=(norms[0], norms[1]), qk_norm_epsilon=eps)
    attended = nn.self_attention(g, normed, weights, shape, tables, mask, i, f"{name}/attention")
    mixed = g.rms_norm(attended, gain("post_attention"), eps, f"{name}/attention_out_norm")
    x, normed = g.add_rms_norm(x, mixed, gain("pre_feedforward"), eps, f"{name}/mlp_norm")
    gate, up, down = (
        nn.Projection(f"{prefix}.mlp.{part}_proj", rows)
        for part, rows in (("gate", block.inner), ("up", block.inner), ("down", hidden))
    )
    out = nn.gated_mlp(g, normed, gate, up, down, "gelu_tanh", i, f"{name}/mlp")
    mark_parts(g, attended, out, i)
    return x, g.rms_norm(out, gain("post_feedforward"), eps, f"{name}/mlp_out_norm")
