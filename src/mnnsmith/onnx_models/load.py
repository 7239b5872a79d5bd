"""Opening an ONNX file that may be damaged or hostile.

Runs in the worker's child: the native parser and checker see the bytes before anything is proved.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.files import OpenFile, is_lfs_pointer, pread_exact

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, TensorProto

# Protobuf takes no larger message.
MODEL_LIMIT_BYTES = 1 << 31
# Data beside the model that is read into it; with more, the message would pass protobuf's limit.
INLINE_LIMIT_BYTES = 1_500_000_000
NODE_LIMIT = 200_000


def load_onnx(path: Path) -> ModelProto:
    """The model with all its tensors' data within.

    Raises SourceError for what is no whole, consistent ONNX model, UnsupportedError for one that
    is larger than we read.
    """
    model = _parse(path)
    graph = model.graph
    if not model.opset_import:
        raise SourceError(f"{path}: no ONNX model: it names no operator set.")
    if len(graph.node) > NODE_LIMIT:
        raise UnsupportedError(f"{path}: {len(graph.node)} nodes, we accept {NODE_LIMIT}.")
    _read_external(model, path)
    _check(model, path)
    return model


def _parse(path: Path) -> ModelProto:
    from google.protobuf.message import DecodeError
    from onnx import ModelProto

    try:
        size_bytes = path.stat().st_size
        if size_bytes >= MODEL_LIMIT_BYTES:
            raise SourceError(f"{path}: {size_bytes} bytes; an ONNX file has less than 2 GB.")
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}.") from error
    if is_lfs_pointer(data[:200]):
        raise SourceError(
            f"{path}: this is a Git LFS pointer, not the file itself.",
            "Fetch the real file, for example with `git lfs pull`.",
        )
    try:
        model = ModelProto.FromString(data)
    except DecodeError as error:
        raise SourceError(
            f"{path}: no ONNX model, or a damaged one: {str(error)[:200]}.", "Download it again."
        ) from error
    if not model.HasField("graph"):
        raise SourceError(f"{path}: no ONNX model: it holds no graph.")
    return model


def _check(model: ModelProto, path: Path) -> None:
    from onnx import checker

    # The checker asks for shapes of inputs and outputs, which runtimes do without.
    kinds = [v.type.tensor_type for v in (*model.graph.input, *model.graph.output)
             if v.type.HasField("tensor_type")]  # fmt: skip
    shapeless = [kind for kind in kinds if not kind.HasField("shape")]
    for kind in shapeless:
        kind.shape.SetInParent()
    try:
        checker.check_model(model)
    except (checker.ValidationError, ValueError) as error:
        raise SourceError(f"{path}: no valid ONNX model: {_first_line(error)}") from error
    for kind in shapeless:
        kind.ClearField("shape")
    for graph in graphs_of(model.graph):
        _check_tensors(graph, path)


def _check_tensors(graph: GraphProto, path: Path) -> None:
    """Lengths against shapes: what would make a reader run over the end of a buffer."""
    from onnx import TensorProto, numpy_helper

    for tensor in tensors_of(graph):
        if tensor.data_type == TensorProto.STRING or not tensor.raw_data:
            continue
        if any(dim < 0 for dim in tensor.dims):
            raise SourceError(f"{path}: tensor {tensor.name!r} has shape {list(tensor.dims)}.")
        try:
            numpy_helper.to_array(tensor)
        except (ValueError, TypeError, KeyError) as error:
            raise SourceError(
                f"{path}: tensor {tensor.name!r} of shape {list(tensor.dims)} does not fit its "
                f"{len(tensor.raw_data)} bytes: {_first_line(error)}"
            ) from error


def _read_external(model: ModelProto, path: Path) -> None:
    """Take in data that lie in files of the model's own folder, and in no other place."""
    from onnx import TensorProto

    total = 0
    for graph in graphs_of(model.graph):
        for tensor in tensors_of(graph):
            if tensor.data_location != TensorProto.EXTERNAL:
                continue
            file, offset, length = _place(tensor, path)
            total += length
            if total > INLINE_LIMIT_BYTES:
                raise UnsupportedError(
                    f"{path}: more than {INLINE_LIMIT_BYTES} bytes of weights lie beside the "
                    "model; the engine's converter takes 2 GB in all.",
                    "For a language model, convert its Hugging Face folder or GGUF file; else "
                    "export the model in float16, or in parts.",
                )
            where = f"{path}: tensor {tensor.name!r} in {file.name}"
            opened = OpenFile(file)
            tensor.raw_data = bytes(pread_exact(opened.fd, length, offset, where))
            del tensor.external_data[:]
            tensor.data_location = TensorProto.DEFAULT


def _place(tensor: TensorProto, path: Path) -> tuple[Path, int, int]:
    """File, offset and length in bytes of a tensor's data, each checked."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    where = f"{path}: the data of tensor {tensor.name[:80]!r}"
    folder = path.resolve().parent
    # Symbolic links are followed, so that none leads out.
    file = Path(os.path.realpath(folder / location)) if _plain(location) else None
    if file is None or not file.is_relative_to(folder):
        raise SourceError(
            f"{where} are said to be in {location[:200]!r}, outside the model's folder.",
            "Only files beside the model are read. Put the data there, if you trust the model.",
        )
    try:
        size = file.stat().st_size if file.is_file() else None
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", _nbytes(tensor, where)))
    except (OSError, ValueError) as error:
        raise SourceError(f"{where} cannot be found: {error}.") from error
    if size is None:
        raise SourceError(f"{where} should be in {location[:200]!r}, which is no file there.")
    if length != _nbytes(tensor, where) or offset < 0 or offset + length > size:
        raise SourceError(
            f"{where} are said to be {length} bytes at {offset}; expected "
            f"{_nbytes(tensor, where)} bytes within the {size} of {location[:200]!r}.",
            "The download is incomplete, or the files do not belong together.",
        )
    return file, offset, length


def _plain(location: str) -> bool:
    parts = Path(location).parts
    return bool(parts) and "\0" not in location and ".." not in parts and parts[0] != "/"


def _nbytes(tensor: TensorProto, where: str) -> int:
    from onnx import TensorProto, helper

    if any(dim < 0 for dim in tensor.dims):
        raise SourceError(f"{where}: shape {list(tensor.dims)}.")
    count: int = math.prod(tensor.dims)
    if tensor.data_type in (TensorProto.INT4, TensorProto.UINT4):
        return (count + 1) // 2
    try:
        itemsize: int = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        return int(count * itemsize)
    except KeyError as error:
        raise SourceError(f"{where}: unknown data type {tensor.data_type}.") from error


def graphs_of(graph: GraphProto) -> Iterator[GraphProto]:
    """The graph and all graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs_of(attribute.g)
            for inner in attribute.graphs:
                yield from graphs_of(inner)


def tensors_of(graph: GraphProto) -> Iterator[TensorProto]:
    """Tensors of the graph itself: initializers and attributes of nodes."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
