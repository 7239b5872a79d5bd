"""Mixtral: mistral attention, and two of eight experts in every block."""

from __future__ import annotations

from functools import partial

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Value
from mnnsmith.models import layers as nn
from mnnsmith.models import moe
from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits, uniform_windows
from mnnsmith.models.decoder import Part, layer_name, layer_prefix
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.llama import Variant, build_variant
from mnnsmith.models.rope import RopeRules


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graph of `MixtralForCausalLM`."""
    variant = Variant(
        qkv_bias=False, o_bias=False, kv_heads=8, epsilon=1e-5,
        windows=partial(uniform_windows, absent=None), feed_forward=_feed_forward(config),
        rope=RopeRules(theta=1_000_000.0),
    )  # fmt: skip
    return build_variant(config, limits, variant)


def _feed_forward(config: ConfigReader) -> Part:
    hidden = config.integer("hidden_size")
    inner = config.integer("intermediate_size")
    routing = moe.Routing(
        config.either_integer("num_local_experts", "num_experts", 8),
        config.integer("num_experts_per_tok", 2), "softmax", normalized=True,
    )  # fmt: skip
    # Noise of the router while training.
    config.raw("router_jitter_noise")

    def projections(prefix: str) -> tuple[nn.Projection, ...]:
        # w1 is the gate, w3 goes up, w2 down.
        return (
            nn.Projection(f"{prefix}.w1", inner),
            nn.Projection(f"{prefix}.w3", inner),
            nn.Projection(f"{prefix}.w2", hidden),
        )

    def feed_forward(g: Graph, x: Value, i: int) -> Value:
        prefix, name = f"{layer_prefix(i)}.block_sparse_moe", f"{layer_name(i)}/mlp"
        plain = g.from_channels(x, [x.shape[0], hidden], f"{name}/plain")
        weights, ids = moe.route(g, plain, f"{prefix}.gate.weight", routing, f"{name}/router")
        mixed = moe.experts(
            g, plain, weights, ids, routing.experts,
            lambda number: projections(f"{prefix}.experts.{number}"), i, name,
        )  # fmt: skip
        return g.to_channels(mixed, hidden, f"{name}/routed")

    return feed_forward
