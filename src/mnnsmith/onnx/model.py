"""A draft as an ONNX model, whose weights stand in a file beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mnnsmith.errors import ConversionError
from mnnsmith.onnx.draft import Draft, Port, pruned
from mnnsmith.onnx.weights import Place
from mnnsmith.version import __version__

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto, ValueInfoProto

# Protobuf takes no larger message, and all that is large is beside it.
_LIMIT_BYTES = 1 << 31


def assemble(
    draft: Draft,
    places: Mapping[str, Place],
    data_name: str,
    outputs: Mapping[str, Port],
    metadata: Mapping[str, str],
    name: str = "decoder",
) -> ModelProto:
    """The operators that `outputs` depend on, as a model.

    data_name: the name of the file of weights, which lies in the model's folder.  name: of the
    graph, for people.
    """
    from onnx import helper

    nodes = pruned(draft, outputs)
    used = {name for node in nodes for name in node.input}
    constants: Sequence[TensorProto] = [t for n, t in draft.constants.items() if n in used]
    weights = [_external(draft, name, places[name], data_name) for name in draft.weights
               if name in used]  # fmt: skip
    graph = helper.make_graph(
        nodes, name,
        [_value_info(name, port) for name, port in draft.inputs.items() if name in used],
        [_value_info(name, port) for name, port in outputs.items()],
        [*constants, *weights],
    )  # fmt: skip
    opset = helper.make_opsetid("", draft.opset)
    # The oldest form that has this opset, for the runtimes that people have.
    model = helper.make_model(
        graph, opset_imports=[opset], ir_version=helper.find_min_ir_version_for([opset]),
        producer_name="mnnsmith", producer_version=__version__,
    )  # fmt: skip
    helper.set_model_props(model, dict(metadata))
    return model


def used_weights(draft: Draft, outputs: Mapping[str, Port]) -> set[str]:
    """Names of the weights that the outputs depend on."""
    return {name for node in pruned(draft, outputs) for name in node.input} & set(draft.weights)


def write_model(model: ModelProto, path: Path) -> None:
    """Write the file of the graph."""
    if model.ByteSize() >= _LIMIT_BYTES:
        raise ConversionError(f"{path}: the graph alone is larger than 2 GB.")
    path.write_bytes(model.SerializeToString(deterministic=True))


def _value_info(name: str, port: Port) -> ValueInfoProto:
    from onnx import helper

    return helper.make_tensor_value_info(name, port.elem, list(port.shape))


def _external(draft: Draft, name: str, place: Place, data_name: str) -> TensorProto:
    from onnx import TensorProto

    weight = draft.weights[name]
    tensor = TensorProto(
        name=name, data_type=weight.elem, dims=weight.shape, data_location=TensorProto.EXTERNAL
    )
    entries = (("location", data_name), ("offset", place.offset), ("length", place.nbytes))
    for key, value in entries:
        tensor.external_data.add(key=key, value=str(value))
    return tensor
