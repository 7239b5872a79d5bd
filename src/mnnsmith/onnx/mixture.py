"""A mixture of experts as ONNX, each expert computing the tokens that chose it and no others."""

from __future__ import annotations

from mnnsmith.graph.core import GraphCore, Node
from mnnsmith.onnx.draft import BOOL, INT64, Draft
from mnnsmith.onnx.emit import OPERATORS, Emitter


def mixture(e: Emitter, node: Node) -> None:
    """sum_j weights[i, j] * experts[ids[i, j]](x[i]).

    Choices are numbered through, token after token.  The rows that the experts give, one expert
    after the other, go to the numbers of their choices; each is written once.
    """
    draft = e.draft
    x, weights, ids = (e.name(value) for value in node.inputs)
    width, k = node.inputs[0].shape[-1], node.attributes["top_k"]
    assert isinstance(width, int)
    tokens = draft.reshape(draft.cast(x, e.types.compute), [-1, width])
    flat_ids = draft.reshape(ids, [-1])
    every = draft.integers([k], ())
    results, places = [], []
    for number, expert in enumerate(node.graphs):
        draft.scope = f"{node.name}/{number}"
        chosen = draft.op("Equal", [flat_ids, draft.integers([number], ())], elem=BOOL)
        place = draft.reshape(draft.op("NonZero", [chosen], elem=INT64), [-1])
        rows = draft.op("Gather", [tokens, draft.op("Div", [place, every])], axis=0)
        results.append(_expert(e, expert, rows))
        places.append(place)
    draft.scope = node.name
    joined = draft.op("Concat", results, axis=0)
    at = draft.unsqueeze(draft.op("Concat", places, axis=0), 1)
    ordered = draft.op("ScatterND", [joined, at, joined])
    by_token = draft.op("Reshape", [ordered, _shape_with(draft, ids, width)])
    share = draft.unsqueeze(draft.cast(weights, e.types.compute), -1)
    weighed = draft.op("Mul", [by_token, share])
    draft.reduce("ReduceSum", weighed, e.leading, e.result(node), keep=False)


def _shape_with(draft: Draft, x: str, width: int) -> str:
    """The shape of `x`, and `width` behind it."""
    shape = draft.op("Shape", [x], elem=INT64)
    return draft.op("Concat", [shape, draft.integers([width])], axis=0)


def _expert(e: Emitter, graph: GraphCore, rows: str) -> str:
    """The layers of one expert over `rows` [n, width]."""
    inner = Emitter(e.draft, e.types, 1, e.shared)

    def given(_: Emitter, node: Node) -> None:
        inner.names[node.outputs[0].index] = rows

    inner.run(graph, {**OPERATORS, "input": given})
    (output,) = graph.outputs
    return inner.name(output)
