"""Mixtures of experts: routing in its variants, and the experts themselves.

Scores are computed in floats on a float32 copy of the router's weight, whatever the recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Value
from mnnsmith.graph.weights import ConstantSlot, Role
from mnnsmith.models import layers as nn

# The value of the graph that `add_choices` writes.  As long as "logits", the name of the engine's
# output: in a copy of the finished graph the two can change places.
CHOICES = "router"
# Far below any score, so that what is masked out is never chosen.
_BELOW = 1e4
# What the authors add to a sum of weights before they divide by it.
_SUM_EPSILON = 1e-20


@dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighed.

    scores: "softmax" or "sigmoid" of the router's logits.
    correction: name of a bias that is added for the choice only (DeepSeek-V3), or None.
    groups, groups_kept: experts are chosen from the best groups only; 1 group means from all.
    group_score: "max", or "top2" for the sum of a group's two best.
    normalized: weights of the chosen ones are divided by their sum.
    factor: multiplies the weights.
    """

    experts: int
    chosen: int
    scores: str
    correction: str | None = None
    groups: int = 1
    groups_kept: int = 1
    group_score: str = "max"
    normalized: bool = False
    factor: float = 1.0


def route(g: Graph, x: Value, weight: str, r: Routing, name: str) -> tuple[Value, Value]:
    """Weights and numbers of the chosen experts, [n, chosen] each, for x [n, width]."""
    width = x.shape[1]
    assert isinstance(width, int)
    router = g.constant(f"{name}/weight", ConstantSlot(weight, (r.experts, width)))
    logits = g.matmul_transposed(x, router, f"{name}/logits")
    if r.scores == "softmax":
        scores = g.softmax(logits, f"{name}/scores")
    else:
        scores = g.unary("sigmoid", logits, f"{name}/scores")
    choice = scores
    if r.correction is not None:
        bias = g.constant(f"{name}/bias", ConstantSlot(r.correction, (r.experts,)))
        flat = g.reshape(bias, [1, r.experts], f"{name}/bias/row")
        choice = g.binary("add", scores, flat, f"{name}/choice")
    if r.groups_kept < r.groups:
        choice = _keep_best_groups(g, choice, r, name)
    weights, ids = g.top_k(choice, r.chosen, f"{name}/top")
    if choice is not scores:
        weights = g.gather_last(scores, ids, f"{name}/weights")
    if r.normalized:
        total = g.reduce("sum", weights, -1, f"{name}/sum")
        floor = g.table(f"{name}/epsilon", np.array([_SUM_EPSILON], dtype=np.float32))
        total = g.binary("add", total, floor, f"{name}/sum/safe")
        weights = g.binary("divide", weights, total, f"{name}/normalized")
    if r.factor != 1.0:
        factor = g.table(f"{name}/factor", np.array([r.factor], dtype=np.float32))
        weights = g.binary("multiply", weights, factor, f"{name}/scaled")
    return weights, ids


def _keep_best_groups(g: Graph, choice: Value, r: Routing, name: str) -> Value:
    """Lower the scores of all but the best groups, so that the choice falls within these."""
    n = choice.shape[0]
    size = r.experts // r.groups
    grouped = g.reshape(choice, [n, r.groups, size], f"{name}/groups")
    if r.group_score == "max":
        best = g.reduce("maximum", grouped, -1, f"{name}/groups/best")
    else:
        two, _ = g.top_k(grouped, 2, f"{name}/groups/two")
        best = g.reduce("sum", two, -1, f"{name}/groups/best")
    _, kept = g.top_k(
        g.reshape(best, [n, r.groups], f"{name}/groups/score"), r.groups_kept,
        f"{name}/groups/kept",
    )  # fmt: skip
    # [n, kept, 1] against [1, 1, groups]: which groups are among the kept ones.
    numbers = g.integers(range(r.groups), (1, 1, r.groups))
    column = g.reshape(kept, [n, r.groups_kept, 1], f"{name}/groups/column")
    hit = g.binary("equal", column, numbers, f"{name}/groups/hit")
    hits = g.to_float(hit, f"{name}/groups/hits")
    mask = g.reshape(
        g.reduce("maximum", hits, 1, f"{name}/groups/any"), [n, r.groups, 1], f"{name}/groups/mask"
    )
    one = g.table(f"{name}/one", np.array([1.0], dtype=np.float32))
    below = g.table(f"{name}/below", np.array([_BELOW], dtype=np.float32))
    penalty = g.binary(
        "multiply", g.binary("subtract", mask, one, f"{name}/groups/out"), below,
        f"{name}/groups/penalty",
    )  # fmt: skip
    masked = g.binary("add", grouped, penalty, f"{name}/groups/masked")
    return g.reshape(masked, [n, r.experts], f"{name}/choice/masked")


def experts(
    g: Graph,
    x: Value,
    weights: Value,
    ids: Value,
    count: int,
    projections: Callable[[int], tuple[nn.Projection, ...]],
    layer: int,
    name: str,
) -> Value:
    """The weighted sum of the chosen experts' gated SiLU layers, [n, width] plain.

    projections: gate, up and down of one expert.
    """
    width = x.shape[1]
    assert isinstance(width, int)
    graphs = []
    for number in range(count):
        sub = Graph(f"/expert/{layer}_{number}")
        prefix = f"{name}/expert{number}"
        hidden = sub.input(f"{prefix}/in", ["n", width])
        packed = sub.to_channels(hidden, width, f"{prefix}/packed")
        gate, up, down = projections(number)
        out = nn.gated_mlp(
            sub, packed, gate, up, down, "silu", layer, prefix, role=Role.EXPERT
        )  # fmt: skip
        sub.mark_output(sub.from_channels(out, ["n", width], f"{prefix}/out"))
        graphs.append(sub)
    return g.mixture(x, weights, ids, graphs, layer, f"{name}/mixture")


def add_choices(g: Graph, vocabulary: int) -> None:
    """Add what every router chose, layer after layer, as `CHOICES` [1, n, vocabulary].

    Numbers of experts as floats, zeros after them: the engine takes the width of its output for the
    vocabulary.  It is no output of the graph, so the engine computes none of it (`mnnsmith profile`
    has it computed).  A graph without routers, or with more choices than tokens, gets none.
    """
    chosen = [node.inputs[2] for node in g.nodes if node.kind == "mixture"]
    if not chosen or sum(int(ids.shape[1]) for ids in chosen) > vocabulary:
        return
    parts = [g.to_float(ids, f"{CHOICES}/{i}") for i, ids in enumerate(chosen)]
    both = parts[0] if len(parts) == 1 else g.concat(parts, -1, f"{CHOICES}/all")
    wide = g.pad_last(both, vocabulary, f"{CHOICES}/wide")
    g.reshape(wide, [1, *wide.shape], CHOICES)
