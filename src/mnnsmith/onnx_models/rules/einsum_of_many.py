"""`Einsum` of three operands or more is computed wrongly; they are taken two at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    equation = attributes(node)["equation"].replace(" ", "")
    terms = equation.split("->")[0].split(",")
    if len(terms) < 3 or "." in equation:
        return None
    if "->" in equation:
        result = equation.split("->")[1]
    else:
        letters = "".join(terms)
        result = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    nodes, left, name = [], terms[0], node.input[0]
    for index, term in enumerate(terms[1:], 1):
        last = index == len(terms) - 1
        needed = set(result).union(*terms[index + 1 :])
        kept = result if last else "".join(sorted((set(left) | set(term)) & needed))
        output = node.output[0] if last else view.fresh(f"{node.output[0]}_part{index}")
        nodes.append(
            make("Einsum", [name, node.input[index]], [output], node,
                 equation=f"{left},{term}->{kept}")
        )  # fmt: skip
        left, name = kept, output
    return nodes


RULE = Rule(
    name="einsum_of_many",
    operators=frozenset({"Einsum"}),
    reason="Einsum of more than two operands is wrong",
    engines=("3.6.1",),
    cures=(),
    rewrite=_rewrite,
)
