"""Compound reductions ignore axes that come as an input; they are composed of plain ones.

L1 = sum |x|; L2 = sqrt(sum x^2); LogSum = log(sum x); LogSumExp = m + log(sum exp(x - m)), where
m = max x keeps the powers finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    x, output = node.input[0], node.output[0]
    nodes: list[NodeProto] = []

    def step(op: str, inputs: Sequence[str], last: bool = False) -> str:
        result = output if last else view.fresh(f"{output}_{op}")
        view.note_type(result, x, view.shape(x) if op in ("Abs", "Mul") else None)
        nodes.append(make(op, inputs, [result], node))
        return result

    def reduce(op: str, value: str, last: bool = False, keep: bool = False) -> str:
        result = output if last else view.fresh(f"{output}_{op}")
        reduced = make(op, [value, *node.input[1:]], [result], node, **attributes(node))
        if keep:
            reduced = make(op, [value, *node.input[1:]], [result], node,
                           **{**attributes(node), "keepdims": 1})  # fmt: skip
        nodes.append(reduced)
        return result

    match node.op_type:
        case "ReduceL1":
            reduce("ReduceSum", step("Abs", [x]), last=True)
        case "ReduceSumSquare":
            reduce("ReduceSum", step("Mul", [x, x]), last=True)
        case "ReduceL2":
            step("Sqrt", [reduce("ReduceSum", step("Mul", [x, x]))], last=True)
        case "ReduceLogSum":
            step("Log", [reduce("ReduceSum", x)], last=True)
        case _:
            largest = reduce("ReduceMax", x, keep=True)
            powers = step("Exp", [step("Sub", [x, largest])])
            logarithm = step("Log", [reduce("ReduceSum", powers)])
            step("Add", [logarithm, reduce("ReduceMax", x)], last=True)
    return nodes


RULE = Rule(
    name="composed_reductions",
    operators=frozenset(
        {"ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"}
    ),
    reason="axes that come as an input are ignored",
    engines=("3.6.1",),
    cures=(
        "test_reduce_l1_keep_dims_example",
        "test_reduce_l2_do_not_keepdims_example",
        "test_reduce_log_sum_asc_axes",
    ),
    rewrite=_rewrite,
)
