"""A worker's task: a model made fit for the converter, or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnnsmith.errors import UnsupportedError
from mnnsmith.onnx_models.graph_view import names_in, opset_of
from mnnsmith.onnx_models.load import graphs_of, load_onnx
from mnnsmith.onnx_models.operators import known_operators, plain_operators
from mnnsmith.onnx_models.refused import refuse_known_defects
from mnnsmith.onnx_models.rules.registry import apply_rules
from mnnsmith.onnx_models.signature import signature_of
from mnnsmith.onnx_models.simplify import simplify

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

PREPARED = "prepared.onnx"
# Older operators have forms that neither the rules nor the converter know.
_OLDEST_OPSET, _UPGRADE_TO = 7, 13
# The name of an operand that is left out.
_OMITTED = ""
# A function's body may hold functions again.
_INLINE_ROUNDS = 6


def run_task(arguments: dict[str, Any]) -> dict[str, Any]:
    """arguments: model, and then `only_describe` or simplify, without_rules.

    Gives inputs and outputs; and unless only described, what was done, and writes PREPARED.
    """
    path = Path(arguments["model"])
    model = load_onnx(path)
    inputs, outputs = signature_of(model, path)
    described: dict[str, Any] = {"inputs": inputs, "outputs": outputs, **_facts(model)}
    if arguments.get("only_describe"):
        return described
    notes: list[str] = []
    model = _upgraded(model, notes)
    model = _inlined(model, notes)
    if arguments["simplify"]:
        model = simplify(model, notes)
    renamed = _own_outputs(model)
    model = _with_types(model, notes)
    rewritten = apply_rules(model, without=arguments["without_rules"])
    if arguments["refuse"]:
        _refuse_unknown(model, path)
        refuse_known_defects(_with_types(model, []), path)
    Path(PREPARED).write_bytes(model.SerializeToString(deterministic=True))
    return {
        "inputs": inputs,
        "outputs": [{**o, "tensor": renamed.get(o["name"], o["name"])} for o in outputs],
        "used_inputs": _used_inputs(model),
        "rewritten": dict(rewritten),
        "notes": notes,
        **_facts(model),
    }


def _facts(model: ModelProto) -> dict[str, Any]:
    counts = Counter(n.op_type for g in graphs_of(model.graph) for n in g.node)
    return {
        "operators": dict(sorted(counts.items())),
        "size_bytes": model.ByteSize(),
        "opset": opset_of(model),
    }


def _upgraded(model: ModelProto, notes: list[str]) -> ModelProto:
    from onnx import version_converter

    opset = opset_of(model)
    if opset == 0 or opset >= _OLDEST_OPSET:
        return model
    try:
        upgraded = version_converter.convert_version(model, _UPGRADE_TO)
    except (RuntimeError, ValueError, version_converter.ConvertError) as error:
        notes.append(f"operator set {opset} stayed, since it could not be upgraded: {error}")
        return model
    notes.append(f"operator set {opset} upgraded to {_UPGRADE_TO}")
    return upgraded


def _inlined(model: ModelProto, notes: list[str]) -> ModelProto:
    """The model with functions in place of operators that the converter lacks."""
    from onnx import inliner

    if model.functions:
        model = inliner.inline_local_functions(model)
        notes.append("functions of the model put in place")
    plain = plain_operators()
    for graph in graphs_of(model.graph):
        _declare_constants(graph)
    for _ in range(_INLINE_ROUNDS):
        unknown = {
            (n.domain, n.op_type)
            for g in graphs_of(model.graph)
            for n in g.node
            if n.op_type not in plain
        }
        if not unknown:
            break
        before = model.SerializeToString(deterministic=True)
        try:
            model = inliner.inline_selected_functions(
                model, sorted(unknown), inline_schema_functions=True
            )
        except (RuntimeError, ValueError) as error:
            notes.append(f"operators could not be decomposed: {str(error)[:200]}")
            break
        if model.SerializeToString(deterministic=True) == before:
            break
    for graph in graphs_of(model.graph):
        kept = [v for v in graph.value_info if v.name != _OMITTED]
        del graph.value_info[:]
        graph.value_info.extend(kept)
    return model


def _declare_constants(graph: GraphProto) -> None:
    """The inliner asks for the types of all that a function reads, of an omitted operand, too."""
    from onnx import TensorProto, helper

    graph.value_info.append(helper.make_tensor_value_info(_OMITTED, TensorProto.FLOAT, None))

    known = {v.name for v in (*graph.input, *graph.value_info)}
    graph.value_info.extend(
        helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        for t in graph.initializer
        if t.name not in known
    )


def _own_outputs(model: ModelProto) -> dict[str, str]:
    """Give each output that is an input or a constant a node of its own; gives new names."""
    from onnx import helper

    graph = model.graph
    made = {name for node in graph.node for name in node.output}
    names = names_in(graph)
    renamed = {}
    for output in graph.output:
        if output.name in made:
            continue
        new = output.name + "_output"
        while new in names:
            new += "_"
        graph.node.append(helper.make_node("Identity", [output.name], [new], name=new))
        renamed[output.name] = new
        output.name = new
    return renamed


def _with_types(model: ModelProto, notes: list[str]) -> ModelProto:
    from onnx import shape_inference

    try:
        return shape_inference.infer_shapes(model, data_prop=True)
    except (RuntimeError, ValueError, shape_inference.InferenceError) as error:
        notes.append(f"shapes could not be inferred: {str(error)[:200]}")
        return model


def _used_inputs(model: ModelProto) -> list[str]:
    used = {name for g in graphs_of(model.graph) for n in g.node for name in n.input}
    constant = {t.name for t in model.graph.initializer}
    return [i.name for i in model.graph.input if i.name in used and i.name not in constant]


def _refuse_unknown(model: ModelProto, path: Path) -> None:
    """Name every operator that is left and that the converter lacks."""
    known = known_operators()
    found: dict[str, list[str]] = {}
    for graph in graphs_of(model.graph):
        shapes = _shape_texts(graph)
        for node in graph.node:
            if node.op_type not in known or node.domain not in ("", "ai.onnx"):
                op = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
                found.setdefault(op, []).append(_node_text(node, shapes))
    if found:
        named = "; ".join(f"{op} ({_few(nodes)})" for op, nodes in sorted(found.items()))
        raise UnsupportedError(
            f"{path}: the engine has no operator for: {named}.",
            "Export the model with other operators in their place (another operator set, or the "
            "exporter's own decompositions), or cut the model before them.",
        )


def _shape_texts(graph: GraphProto) -> dict[str, str]:
    texts = {t.name: "x".join(map(str, t.dims)) or "scalar" for t in graph.initializer}
    for value in (*graph.value_info, *graph.input, *graph.output):
        dims = value.type.tensor_type.shape.dim
        texts[value.name] = "x".join(str(d.dim_value or d.dim_param or "?") for d in dims)
    return texts


def _node_text(node: NodeProto, shapes: dict[str, str]) -> str:
    inputs = ", ".join(shapes.get(name) or "?" for name in node.input if name)
    return f"node {node.name or node.output[0]!r} of {inputs or 'no inputs'}"[:160]


def _few(items: Collection[str], limit: int = 3) -> str:
    shown = "; ".join(list(items)[:limit])
    return shown if len(items) <= limit else f"{shown}; and {len(items) - limit} more"
