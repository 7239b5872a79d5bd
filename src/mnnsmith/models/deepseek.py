"""What DeepSeek-V2 and V3 share: latent attention, dense layers, shared and routed experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Value
from mnnsmith.models import layers as nn
from mnnsmith.models import moe
from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.decoder import Part, add_stack, layer_name, layer_prefix, read_stack
from mnnsmith.models.language_model import IgnoredTensors, LanguageModel
from mnnsmith.models.mla import latent_attention, mla_shape
from mnnsmith.models.rope import rope_frequencies, rope_settings, rope_tables

IGNORED = (
    IgnoredTensors("*.rotary_emb.inv_freq", "rope frequencies are computed from the config"),
)


def build_deepseek(
    config: ConfigReader,
    limits: ContextLimits,
    routing: Callable[[str], moe.Routing],
    *,
    interleaved: bool,
) -> LanguageModel:
    """The graph; `routing` is given the prefix of a block's feed-forward tensors."""
    stack = read_stack(config, 1e-6, tied_by_default=False)
    config.only("hidden_act", ("silu",), "silu", "Another activation is another model.")
    settings = rope_settings(config)
    positions = config.integer("max_position_embeddings")
    shape = mla_shape(config, mscale=_mscale(settings), interleaved=interleaved)
    rope = rope_frequencies(config, settings, shape.rope, positions)
    context, notes = limits.resolve(positions, rope.longest)
    feed_forward = _feed_forward(config, stack.hidden, routing)

    g = Graph()
    inputs = nn.decoder_inputs(g, stack.hidden, sliding=False)
    tables = rope_tables(g, inputs.positions, rope, context, "rope")

    def attention(g: Graph, x: Value, i: int) -> Value:
        return latent_attention(
            g, x, shape, limits.mla, f"{layer_prefix(i)}.self_attn", tables, inputs.full_mask, i,
            f"{layer_name(i)}/attention",
        )  # fmt: skip

    add_stack(g, inputs, stack, attention, feed_forward)
    return LanguageModel(
        g, stack.embedding, stack.head, stack.hidden, stack.layers, shape.cached(limits.mla),
        context, ignored=IGNORED, notes=notes,
    )  # fmt: skip


def read_groups(
    config: ConfigReader,
    experts: int,
    chosen: int,
    *,
    default: tuple[int, int] | None = None,
    least_size: int = 1,
) -> tuple[int, int]:
    """Groups of experts, and how many of them are kept.

    The `chosen` ones must fit in the kept groups, and a group must hold `least_size` experts, or
    what the authors' code computes has no meaning.
    """
    groups = config.integer("n_group", default[0] if default else None)
    kept = config.integer("topk_group", default[1] if default else None)
    if experts % groups or kept > groups or kept * (experts // groups) < chosen:
        raise config.error(
            f"{chosen} experts out of {experts} in {groups} groups, of which {kept} are kept"
        )
    if experts // groups < least_size:
        raise config.error(f"{experts} experts in {groups} groups: a group must hold {least_size}")
    return groups, kept


def _mscale(settings: Mapping[str, Any]) -> float:
    """What YaRN multiplies the softmax scale by: (0.1 * mscale_all_dim * ln(factor) + 1)^2."""
    reader = ConfigReader(settings, "config.json (rope)")
    if settings["rope_type"] == "default" or not settings.get("mscale_all_dim"):
        return 1.0
    weight, factor = reader.number("mscale_all_dim", most=1e6), reader.number("factor", most=1e6)
    return 1.0 if factor <= 1 else (0.1 * weight * math.log(factor) + 1.0) ** 2


def _feed_forward(config: ConfigReader, hidden: int, routing: Callable[[str], moe.Routing]) -> Part:
    dense_layers = config.integer("first_k_dense_replace", 0, least=0)
    config.only("moe_layer_freq", (1,), 1, "transformers puts experts in every later block.")
    inner = config.integer("intermediate_size")
    expert_inner = config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts", 0, least=0)
    config.only("mlp_bias", (False,), False, "No released model has such biases.")

    def feed_forward(g: Graph, x: Value, i: int) -> Value:
        prefix, name = f"{layer_prefix(i)}.mlp", f"{layer_name(i)}/mlp"
        if i < dense_layers:
            gate, up, down = nn.separate_mlp(prefix, hidden, inner)
            return nn.gated_mlp(g, x, gate, up, down, "silu", i, name)
        plain = g.from_channels(x, [x.shape[0], hidden], f"{name}/plain")
        r = routing(prefix)
        weights, ids = moe.route(g, plain, f"{prefix}.gate.weight", r, f"{name}/router")
        mixed = moe.experts(
            g, plain, weights, ids, r.experts,
            lambda number: nn.separate_mlp(f"{prefix}.experts.{number}", hidden, expert_inner),
            i, name,
        )  # fmt: skip
        out = g.to_channels(mixed, hidden, f"{name}/routed")
        if shared:
            gate, up, down = nn.separate_mlp(
                f"{prefix}.shared_experts", hidden, shared * expert_inner
            )
            extra = nn.gated_mlp(g, x, gate, up, down, "silu", i, f"{name}/shared")
            out = g.binary("add", out, extra, f"{name}/sum")
        return out

    return feed_forward
