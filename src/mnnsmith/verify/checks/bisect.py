"""Inside one block: every value that the reference has, in the order of computation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mnnsmith.bundle import Bundle
from mnnsmith.engine import Engine
from mnnsmith.graph.core import Node
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import DType, Value
from mnnsmith.verify.checks.causes import Evidence
from mnnsmith.verify.checks.feeding import cuts, feed
from mnnsmith.verify.checks.probe import Probe, readable
from mnnsmith.verify.measure.differences import compare
from mnnsmith.verify.references.reference import Reference
from mnnsmith.verify.results import ValueDifference

# Results name operators by kind; "attention" is taken by the output of the whole part.
_KINDS = {"attention": "mix"}


def bisect_block(
    bundle: Bundle,
    graph: Graph,
    found: Evidence,
    reference: Reference,
    open_engine: Callable[..., Engine],
) -> tuple[tuple[ValueDifference, ...], Evidence]:
    """Compare the values of the block in which `found` lies, on the prompt that differs most.

    Gives all of them, and the evidence of the first that differs: `found` itself where the
    reference has none before it.
    """
    values = [v for v in block_values(graph, found.layer) if v.name in reference.available()]
    names = [value.name for value in values]
    worst = max(range(len(found.parts)), key=lambda i: found.parts[i].error)
    ids = found.ids[worst]
    with Probe(bundle, graph, names, open_engine) as probe:
        actual = feed(probe, ids)
    expected = {name: v[0] for name, v in reference.run(ids[None], names).values.items()}
    makers = {v.name: node for node in graph.nodes for v in node.outputs}
    figures: list[ValueDifference] = []
    agreeing: set[str] = set()
    first: Evidence | None = None
    for value in values:
        node = makers[value.name]
        difference = compare(actual[value.name], expected[value.name])
        kind = _kind(node, value)
        figures.append(difference.figures(value.name, found.layer, kind, found.allowed))
        if difference.error <= found.allowed:
            agreeing.add(value.name)
        elif first is None:
            first = replace(
                found, value=value, node=node, kind=kind, ids=(ids,), parts=(difference,),
                cuts=cuts(ids.size), head_dim=_head_dim(graph, node, value),
                agreeing=frozenset(agreeing), reference=expected[value.name],
                actual=actual[value.name] if np.isfinite(actual[value.name]).all() else None,
            )  # fmt: skip
    return tuple(figures), first or found


def block_values(graph: Graph, layer: int) -> list[Value]:
    """Floats from behind the block before to the end of this one, in the order of computation."""
    values = [value for value in readable(graph) if value.dtype is DType.FLOAT]
    names = [value.name for value in values]
    ends = {m.layer: m.value.name for m in graph.landmarks if m.kind == "residual"}
    start = names.index(ends[layer - 1]) + 1 if layer > 0 else 0
    return values[start : names.index(ends[layer]) + 1]


def _kind(node: Node, value: Value) -> str:
    if node.kind == "rms_norm" and value != node.outputs[-1]:
        return "residual"
    return _KINDS.get(node.kind, node.kind)


def _head_dim(graph: Graph, node: Node, value: Value) -> int | None:
    """The width of a head, where a value consists of heads."""
    if "head_dim" in node.attributes:
        width = node.attributes["head_dim"]
    else:
        readers = [n for n in graph.nodes if value in n.inputs and "head_dim" in n.attributes]
        width = readers[0].attributes["head_dim"] if readers else None
    return int(width) if width is not None else None
