"""All rewrite rules, and their application to a model."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models import rules
from mnnsmith.onnx_models.graph_view import GraphView
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

_NO_RULES = frozenset({"registry", "rule"})


def all_rules() -> tuple[Rule, ...]:
    """The rules in this folder, one a file, by name."""
    names = sorted(m.name for m in pkgutil.iter_modules(rules.__path__))
    found = [importlib.import_module(f"{rules.__name__}.{n}").RULE for n in names
             if n not in _NO_RULES]  # fmt: skip
    return tuple(found)


def apply_rules(model: ModelProto, *, without: Collection[str] = ()) -> Counter[str]:
    """Rewrite `model` in place; gives how often each rule did something.

    without: names of rules to leave out.
    """
    chosen = [rule for rule in all_rules() if rule.name not in without]
    counts: Counter[str] = Counter()
    _rewrite_graph(model, model.graph, None, chosen, counts)
    return counts


def _rewrite_graph(
    model: ModelProto,
    graph: GraphProto,
    outer: GraphView | None,
    chosen: Sequence[Rule],
    counts: Counter[str],
) -> None:
    view = GraphView(model, graph, outer)
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes.extend(_rewritten(node, view, chosen, frozenset(), counts))
    del graph.node[:]
    graph.node.extend(nodes)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rewrite_graph(model, attribute.g, view, chosen, counts)


def _rewritten(
    node: NodeProto,
    view: GraphView,
    chosen: Sequence[Rule],
    done: frozenset[str],
    counts: Counter[str],
) -> Sequence[NodeProto]:
    """What stands in place of `node`; what a rule made is looked at by the other rules."""
    if node.domain not in ("", "ai.onnx"):
        return [node]
    for rule in chosen:
        if node.op_type not in rule.operators or rule.name in done:
            continue
        made = rule.rewrite(node, view)
        if made is not None:
            counts[rule.name] += 1
            below = done | {rule.name}
            return [n for new in made for n in _rewritten(new, view, chosen, below, counts)]
    return [node]
