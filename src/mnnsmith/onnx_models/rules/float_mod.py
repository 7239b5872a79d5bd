"""`Mod` with fmod = 1 is wrong for negative operands: the sign must be that of the dividend.

fmod(a, b) = sign(a) * mod(|a|, |b|), where both operands of the inner one are positive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    if not attributes(node).get("fmod", 0):
        return None
    a, b = node.input
    output = node.output[0]
    names = [view.fresh(f"{output}_{part}") for part in ("abs_a", "abs_b", "sign", "mod")]
    abs_a, abs_b, sign, mod = names
    return [
        make("Abs", [a], [abs_a], node),
        make("Abs", [b], [abs_b], node),
        make("Sign", [a], [sign], node),
        make("Mod", [abs_a, abs_b], [mod], node),
        make("Mul", [sign, mod], [output], node),
    ]


RULE = Rule(
    name="float_mod",
    operators=frozenset({"Mod"}),
    reason="Mod with fmod = 1 is wrong for negative operands",
    engines=("3.6.1",),
    cures=("test_mod_mixed_sign_float32", "test_mod_int64_fmod"),
    rewrite=_rewrite,
)
