"""The sparse feed-forward of the Qwen families: softmax routing, dense blocks in between."""

from __future__ import annotations

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Value
from mnnsmith.graph.weights import ConstantSlot
from mnnsmith.models import layers as nn
from mnnsmith.models import moe
from mnnsmith.models.config import ConfigReader
from mnnsmith.models.decoder import Part, layer_name, layer_prefix


def sparse_feed_forward(
    config: ConfigReader,
    *,
    default_experts: int,
    default_chosen: int,
    shared_expert: bool = False,
) -> Part:
    """Blocks with experts, and the dense ones that `mlp_only_layers` and the step leave.

    shared_expert: one more expert that every token uses, times sigmoid(shared_expert_gate(x)).
    """
    hidden = config.integer("hidden_size")
    inner = config.integer("intermediate_size")
    expert_inner = config.integer("moe_intermediate_size")
    step = config.integer("decoder_sparse_step", 1)
    dense = config.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise config.error("mlp_only_layers must be a list of layer numbers")
    # transformers 5 saves the field of qwen3_moe under its newer name.
    routing = moe.Routing(
        config.either_integer("num_experts", "num_local_experts", default_experts),
        config.integer("num_experts_per_tok", default_chosen), "softmax",
        normalized=config.flag("norm_topk_prob", False),
    )  # fmt: skip
    shared = config.integer("shared_expert_intermediate_size") if shared_expert else 0

    def feed_forward(g: Graph, x: Value, i: int) -> Value:
        prefix, name = f"{layer_prefix(i)}.mlp", f"{layer_name(i)}/mlp"
        if i in dense or (i + 1) % step:
            gate, up, down = nn.separate_mlp(prefix, hidden, inner)
            return nn.gated_mlp(g, x, gate, up, down, "silu", i, name)
        plain = g.from_channels(x, [x.shape[0], hidden], f"{name}/plain")
        weights, ids = moe.route(g, plain, f"{prefix}.gate.weight", routing, f"{name}/router")
        mixed = moe.experts(
            g, plain, weights, ids, routing.experts,
            lambda number: nn.separate_mlp(f"{prefix}.experts.{number}", hidden, expert_inner),
            i, name,
        )  # fmt: skip
        if shared:
            extra = _shared(g, x, plain, shared, prefix, i, name)
            mixed = g.binary("add", mixed, extra, f"{name}/sum")
        return g.to_channels(mixed, hidden, f"{name}/routed")

    return feed_forward


def _shared(
    g: Graph, x: Value, plain: Value, inner: int, prefix: str, layer: int, name: str
) -> Value:
    """The shared expert times its gate, [n, hidden] plain."""
    n, hidden = plain.shape
    assert isinstance(hidden, int)
    gate, up, down = nn.separate_mlp(f"{prefix}.shared_expert", hidden, inner)
    out = nn.gated_mlp(g, x, gate, up, down, "silu", layer, f"{name}/shared")
    slot = ConstantSlot(f"{prefix}.shared_expert_gate.weight", (1, hidden))
    weight = g.constant(f"{name}/shared_gate/weight", slot)
    score = g.matmul_transposed(plain, weight, f"{name}/shared_gate/logit")
    open_ = g.unary("sigmoid", score, f"{name}/shared_gate")
    flat = g.from_channels(out, [n, hidden], f"{name}/shared/plain")
    return g.binary("multiply", flat, open_, f"{name}/shared/gated")
