"""What a rule asks about the graph around a node, and how it makes new parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

Shape = tuple[int | str | None, ...]


class GraphView:
    """Constants, types and fresh names, as seen from inside one graph of a model."""

    def __init__(self, model: ModelProto, graph: GraphProto, outer: GraphView | None) -> None:
        self.graph = graph
        self.opset = opset_of(model)
        self._outer = outer
        self._constants = dict(_constants(graph))
        self._types = dict(_types(graph))
        self._names: set[str] = outer._names if outer else names_in(model.graph)

    def constant(self, name: str) -> npt.NDArray[Any] | None:
        """The value of a tensor that is constant, else None."""
        if name in self._constants:
            from onnx import numpy_helper

            array: npt.NDArray[Any] = numpy_helper.to_array(self._constants[name])
            return array
        return self._outer.constant(name) if self._outer else None

    def element_type(self, name: str) -> int | None:
        """The tensor's type as ONNX counts them; None where it is not known."""
        if name in self._types:
            return self._types[name][0]
        if name in self._constants:
            return int(self._constants[name].data_type)
        return self._outer.element_type(name) if self._outer else None

    def shape(self, name: str) -> Shape | None:
        """Sizes, names of dynamic axes, None for an unknown one; None where the rank is unknown."""
        if name in self._types:
            return self._types[name][1]
        if name in self._constants:
            return tuple(self._constants[name].dims)
        return self._outer.shape(name) if self._outer else None

    def is_float(self, name: str) -> bool:
        """Whether it is computed in floating point; an unknown type counts as such."""
        from onnx import TensorProto as T

        return self.element_type(name) in (None, T.FLOAT, T.FLOAT16, T.DOUBLE, T.BFLOAT16)

    def fresh(self, base: str) -> str:
        """A name that the model does not hold yet."""
        name, number = base, 0
        while name in self._names:
            number += 1
            name = f"{base}_{number}"
        self._names.add(name)
        return name

    def add_constant(self, value: npt.NDArray[Any] | np.generic, base: str) -> str:
        """A new initializer; gives its name."""
        from onnx import numpy_helper

        name = self.fresh(base)
        tensor = numpy_helper.from_array(np.asarray(value), name)
        self.graph.initializer.append(tensor)
        self._constants[name] = tensor
        return name

    def note_type(self, name: str, like: str, shape: Shape | None = None) -> None:
        """Say what a new tensor is: of the type of `like`."""
        element_type = self.element_type(like)
        if element_type is not None:
            self._types[name] = (element_type, shape)


def opset_of(model: ModelProto) -> int:
    """The version of ONNX's own operators."""
    return max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)


def attributes(node: NodeProto) -> dict[str, Any]:
    """Values of a node's attributes; texts as `str`."""
    from onnx import helper

    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {k: v.decode("utf-8", "replace") if isinstance(v, bytes) else v
            for k, v in found.items()}  # fmt: skip


def make(
    op: str, inputs: Sequence[str], outputs: Sequence[str], like: NodeProto, **attrs: Any
) -> NodeProto:
    """A node in the place of `like`, named after its first output."""
    from onnx import helper

    name = f"{like.name}/{op}/{outputs[0]}" if like.name else outputs[0]
    return helper.make_node(op, inputs, outputs, name=name, **attrs)


def with_attributes(node: NodeProto, changes: Mapping[str, Any]) -> NodeProto:
    """A copy with attributes set; None takes one away."""
    from onnx import NodeProto, helper

    copy = NodeProto()
    copy.CopyFrom(node)
    kept = [a for a in node.attribute if a.name not in changes]
    del copy.attribute[:]
    copy.attribute.extend(kept)
    copy.attribute.extend(helper.make_attribute(k, v) for k, v in changes.items() if v is not None)
    return copy


def with_inputs(node: NodeProto, inputs: Iterable[str], op: str | None = None) -> NodeProto:
    """A copy that reads other tensors, or is of another operator."""
    from onnx import NodeProto

    copy = NodeProto()
    copy.CopyFrom(node)
    del copy.input[:]
    copy.input.extend(inputs)
    copy.op_type = op or node.op_type
    return copy


def _constants(graph: GraphProto) -> Iterable[tuple[str, Any]]:
    from onnx import numpy_helper

    # An initializer that is an input, too, is only a default.
    inputs = {i.name for i in graph.input}
    yield from ((t.name, t) for t in graph.initializer if t.name not in inputs)
    for node in graph.node:
        if node.op_type != "Constant":
            continue
        found = attributes(node)
        if "value" in found:
            yield node.output[0], found["value"]
        for key, dtype in (("value_float", np.float32), ("value_floats", np.float32),
                           ("value_int", np.int64), ("value_ints", np.int64)):  # fmt: skip
            if key in found:
                yield node.output[0], numpy_helper.from_array(np.array(found[key], dtype))


def _types(graph: GraphProto) -> Iterable[tuple[str, tuple[int, Shape | None]]]:
    for value in (*graph.value_info, *graph.input, *graph.output):
        kind = value.type.tensor_type
        if not value.type.HasField("tensor_type"):
            continue
        shape = tuple(map(_dim, kind.shape.dim)) if kind.HasField("shape") else None
        yield value.name, (kind.elem_type, shape)


def _dim(dim: Any) -> int | str | None:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return str(dim.dim_param) or None


def names_in(graph: GraphProto) -> set[str]:
    """All names of tensors, inner graphs included."""
    from mnnsmith.onnx_models.load import graphs_of

    names: set[str] = set()
    for inner in graphs_of(graph):
        names.update(t.name for t in inner.initializer)
        names.update(v.name for v in (*inner.input, *inner.output))
        for node in inner.node:
            names.update(node.input, node.output)
    return names
