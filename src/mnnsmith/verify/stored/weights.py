"""The weights of a bundle as its own files describe them: where each record stands, and its values.

Everything is told by the bundle: its graph, read back by the engine's converter, and the entry of
`llm_config.json` that embeddings are read by.  The plan of the conversion is not asked, so a record
that was written wrongly is seen as the engine sees it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mnnsmith.bundle import Bundle
from mnnsmith.engine.converter import mnn_to_graph_json, operators
from mnnsmith.errors import BundleError, SourceError
from mnnsmith.files import OpenFile, pread_exact, read_json_object
from mnnsmith.graph.core import Node
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.weights import MatrixSlot, VectorSlot
from mnnsmith.mnn.config_files import (
    MODEL_FILE,
    VISION_MODEL_FILE,
    VISION_WEIGHT_FILE,
    WEIGHT_FILE,
)
from mnnsmith.mnn.weight_records import BlockEncoding, Encoding, FloatEncoding, block_header
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.verify.results import Finding
from mnnsmith.verify.stored.fields import Fields
from mnnsmith.verify.stored.records import StoredMatrix, StoredVector

EMBEDDING = "embedding"
# The engine's enumeration of stored forms: blocks of integers, fp16, fp32.
_BLOCKS, _FP16, _FP32 = 1, 3, 8
# Graph kinds that read weights, as the engine calls them.
_KINDS = {
    "linear": "Convolution", "rms_norm": "LayerNorm", "layer_norm": "LayerNorm", "rope": "RoPE",
    "table": "Const",
}  # fmt: skip
# By operator and the slot's part ("gain", "bias", "values", ...).
Vectors: TypeAlias = Mapping[tuple[str, str], StoredVector]


@dataclass(frozen=True)
class StoredWeights:
    """All weights of a file that fit the model's graph, and a finding for each that does not.

    matrices: by operator, and the embedding as `EMBEDDING`.
    """

    matrices: Mapping[str, StoredMatrix]
    vectors: Vectors
    problems: tuple[Finding, ...]


def read_stored_vision(bundle: Bundle, graph: Graph) -> StoredWeights:
    """The same of a bundle's vision, whose graph in our terms is `graph`."""
    reading = _Reading(bundle.path / VISION_MODEL_FILE, bundle.path / VISION_WEIGHT_FILE)
    reading.add(graph)
    return reading.result(graph)


def read_stored_weights(bundle: Bundle, model: LanguageModel) -> StoredWeights:
    """Read how `bundle` stores the language weights of `model`; only small parts are read.

    Raises `BundleError` where the bundle cannot be read at all.
    """
    reading = _Reading(bundle.path / MODEL_FILE, bundle.path / WEIGHT_FILE)
    try:
        config = read_json_object(bundle.path / "llm_config.json")
    except SourceError as error:
        raise BundleError(error.message, "Convert the model again.") from error
    reading.add(model.graph)

    def embedding() -> None:
        reading.matrices[EMBEDDING] = _embedding(reading.reader, config, model.embedding)

    reading.attempt("llm_config.json: tie_embeddings", embedding)
    return reading.result(model.graph)


class _Reading:
    """What is found in one graph and its weight file."""

    def __init__(self, model: Path, weights: Path) -> None:
        graph = mnn_to_graph_json(model)
        try:
            self.reader = _Reader(OpenFile(weights))
        except SourceError as error:
            raise BundleError(error.message, "Convert the model again.") from error
        self.operators, self.problems = _operators_by_name(graph, model.name)
        self.matrices: dict[str, StoredMatrix] = {}
        self.vectors: dict[tuple[str, str], StoredVector] = {}

    def attempt(self, where: str, work: Callable[[], None]) -> None:
        """Do a part of the work; that it fails is a finding."""
        try:
            work()
        except (BundleError, SourceError) as error:
            self.problems.append(Finding("error", where, error.message, error.hint))

    def add(self, graph: Graph) -> None:
        """Every operator of `graph` that has weights."""
        for node in graph.all_nodes():
            if node.slots:
                operator = self.operators.get(node.name)
                read = partial(
                    _read_node, self.reader, node, operator, self.matrices, self.vectors
                )  # fmt: skip
                self.attempt(node.name, read)

    def result(self, graph: Graph) -> StoredWeights:
        """All of it, with a finding for each linear layer that `graph` does not have."""
        expected = {node.name for node in graph.all_nodes() if node.slots}
        for name, found in self.operators.items():
            if found.get("type") == "Convolution" and name not in expected:
                text = f"{name}: the model has no such linear layer."
                self.problems.append(Finding("error", name, text))
        return StoredWeights(self.matrices, self.vectors, tuple(self.problems))


def _operators_by_name(
    graph: Mapping[str, Any], file: str
) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """Operators of the main graph and of the experts' graphs."""
    problems: list[Finding] = []
    found: dict[str, dict[str, Any]] = {}
    for operator in operators(graph):
        name = operator.get("name") if isinstance(operator, dict) else None
        if not isinstance(name, str):
            problems.append(Finding("error", file, f"an operator has no name: {name!r:.60}"))
        elif name in found:
            problems.append(Finding("error", name, f"{name}: two operators have this name."))
        else:
            found[name] = operator
    return found, problems


@dataclass(frozen=True)
class _Reader:
    """The weight file, and what may lie in it."""

    file: OpenFile

    @property
    def size(self) -> int:
        return os.fstat(self.file.fd).st_size

    def span(self, where: str, offset: int, nbytes: int) -> int:
        """`offset`, if that many bytes are there."""
        if offset + nbytes > self.size:
            raise BundleError(
                f"{where}: its weights at {offset}..{offset + nbytes} end beyond the weight file "
                f"({self.size} bytes)."
            )
        return offset

    def vector(self, where: str, offset: int, nbytes: int, size: int) -> StoredVector:
        """`size` float32 values, if the record has as many."""
        if nbytes != 4 * size:
            raise BundleError(
                f"{where}: {nbytes} bytes are stored, expected {size} float32 values."
            )
        return StoredVector(where, size, (self.file, self.span(where, offset, nbytes)))


def _read_node(
    reader: _Reader,
    node: Node,
    operator: dict[str, Any] | None,
    matrices: dict[str, StoredMatrix],
    vectors: dict[tuple[str, str], StoredVector],
) -> None:
    """Read the weights of one operator of our graph as the bundle's operator has them."""
    name = node.name
    if operator is None:
        raise BundleError(f"{name}: the bundle's graph has no such operator.")
    if operator.get("type") != _KINDS.get(node.kind):
        raise BundleError(
            f"{name}: is a {operator.get('type')!r:.40}, expected {_KINDS.get(node.kind)}."
        )
    main = Fields(operator, name).member("main")
    if node.kind == "linear":
        weight, bias = node.slots["weight"], node.slots.get("bias")
        assert isinstance(weight, MatrixSlot)
        matrices[name], stored_bias = _matrix(reader, name, main, weight)
        if (stored_bias is None) != (bias is None):
            has = "none" if stored_bias is None else "one"
            raise BundleError(f"{name}: {has} is stored where the bias is {bias}.")
        if stored_bias is not None:
            vectors[name, "bias"] = stored_bias
    elif node.kind == "rms_norm":
        gain = node.slots["gain"]
        assert isinstance(gain, VectorSlot)
        vectors[name, "gain"] = _gain(reader, name, main, gain)
    elif node.kind == "layer_norm":
        vectors.update(_layer_norm(reader, name, main, node))
    elif node.kind == "table":
        offset, nbytes = main.integers("external", 2)[:2]
        dims = main.integers("dims", 1)
        shape = list(node.outputs[0].shape)
        if dims != shape:
            raise BundleError(f"{name}: has shape {dims}, expected {shape}.")
        vectors[name, "values"] = reader.vector(name, offset, nbytes, int(np.prod(dims)))
    else:
        for part, slot in node.slots.items():
            assert isinstance(slot, VectorSlot)
            key = {"q_gain": "q_norm", "k_gain": "k_norm"}[part]
            values = main.member(key).numbers("gamma", slot.size)
            vectors[name, part] = StoredVector(f"{name}: {key}", slot.size, None, values)


def _gain(reader: _Reader, name: str, main: Fields, slot: VectorSlot) -> StoredVector:
    """A norm's gain; the offset beside it must be zero, or it would not be an RMS norm."""
    offset, gain_bytes, offset_bytes = main.integers("external", 3)[:3]
    gain = reader.vector(name, offset, gain_bytes, slot.size)
    beta = reader.vector(f"{name}: offset", offset + gain_bytes, offset_bytes, slot.size)
    # As bytes: of numbers, one that is none would be warned of.
    if beta.values().view(np.uint32).any():
        raise BundleError(f"{name}: the offset stored beside its gain is not zero.")
    return gain


def _layer_norm(
    reader: _Reader, name: str, main: Fields, node: Node
) -> dict[tuple[str, str], StoredVector]:
    """Gain and bias, which stand side by side."""
    offset, gain_bytes, bias_bytes = main.integers("external", 3)[:3]
    places = {"gain": (offset, gain_bytes), "bias": (offset + gain_bytes, bias_bytes)}
    found = {}
    for part, (start, nbytes) in places.items():
        slot = node.slots[part]
        assert isinstance(slot, VectorSlot)
        found[name, part] = reader.vector(f"{name}: {part}", start, nbytes, slot.size)
    return found


def _matrix(
    reader: _Reader, name: str, main: Fields, slot: MatrixSlot
) -> tuple[StoredMatrix, StoredVector | None]:
    common, quantization = main.member("common"), main.member("quanParameter")
    shape = common.integer("outputCount"), common.integer("inputCount")
    if shape != (slot.rows, slot.cols):
        raise BundleError(
            f"{name}: is a matrix of {list(shape)}, expected {[slot.rows, slot.cols]} "
            f"for {slot.tensor}."
        )
    offset, weight_bytes, scale_bytes, bias_bytes = main.integers("external", 4)[:4]
    reader.span(name, offset, weight_bytes + scale_bytes + bias_bytes)
    kind = quantization.integer("type")
    scales_offset = offset + weight_bytes
    encoding: Encoding
    if kind in (_FP16, _FP32):
        encoding, codes_offset = FloatEncoding(16 if kind == _FP16 else 32), offset
        _expect(name, "bytes of values", weight_bytes, shape[0] * shape[1] * encoding.bits // 8)
        _expect(name, "bytes of scales", scale_bytes, 0)
    elif kind == _BLOCKS:
        encoding = _block_encoding(name, quantization, shape, scale_bytes)
        codes_offset = _after_header(reader, name, shape, encoding.bits, offset, weight_bytes)
    else:
        raise BundleError(f"{name}: its weights are stored as type {kind}, which we do not know.")
    bias = None
    if bias_bytes:
        bias = reader.vector(
            f"{name}: bias", scales_offset + scale_bytes, bias_bytes, slot.rows
        )  # fmt: skip
    matrix = StoredMatrix(name, *shape, encoding, codes_offset, scales_offset, reader.file)
    return matrix, bias


def _block_encoding(
    name: str, quantization: Fields, shape: tuple[int, int], scale_bytes: int
) -> BlockEncoding:
    """Bits and block; the number of blocks follows from the bytes of scales, as in the engine."""
    symmetric = quantization.integer("aMin", 0) == 0
    scale_bits = 32 if quantization.text("scaleStorage", "FP16") == "FP32" else 16
    bits = quantization.integer("aMaxOrBits")
    encoding = block_encoding(name, shape, bits, scale_bytes, symmetric, scale_bits)
    if not symmetric:
        blocks = shape[0] * (shape[1] // encoding.block)
        _expect(name, "blocks (readType)", quantization.integer("readType", 0), blocks)
    return encoding


def block_encoding(
    name: str,
    shape: tuple[int, int],
    bits: int,
    scale_bytes: int,
    symmetric: bool,
    scale_bits: int,
) -> BlockEncoding:
    """The encoding of a matrix whose scales take `scale_bytes`; raises `BundleError` for none."""
    rows, cols = shape
    per_block = rows * (1 if symmetric else 2) * scale_bits // 8
    blocks, rest = divmod(scale_bytes, per_block)
    if rest or not blocks or cols % blocks:
        raise BundleError(
            f"{name}: {scale_bytes} bytes of {'' if symmetric else 'pairs of '}scales of "
            f"{scale_bits} bits do not divide the rows of a {[rows, cols]} matrix into blocks."
        )
    if bits not in (4, 8) or cols * bits % 8:
        raise BundleError(f"{name}: codes of {bits} bits in rows of {cols} are not known.")
    return BlockEncoding(bits, cols // blocks, symmetric, scale_bits)


def _after_header(
    reader: _Reader, name: str, shape: tuple[int, int], bits: int, offset: int, weight_bytes: int
) -> int:
    """Where the codes begin: the header must say what the graph says."""
    header = block_header(*shape, bits)
    _expect(name, "bytes of codes", weight_bytes - len(header), shape[0] * shape[1] * bits // 8)
    if bytes(pread_exact(reader.file.fd, len(header), offset, name)) != header:
        raise BundleError(
            f"{name}: the header of its weights does not describe {list(shape)} codes of {bits} "
            "bits with ascending levels."
        )
    return offset + len(header)


def _embedding(reader: _Reader, config: Mapping[str, Any], slot: MatrixSlot) -> StoredMatrix:
    """What `tie_embeddings` says, read as the engine reads it.

    The engine takes the number of rows from the distance between codes and scales, and whether
    blocks have a zero point from the bytes of scales for that many rows.
    """
    where = "llm_config.json: tie_embeddings"
    _expect(
        "llm_config.json", "hidden_size", Fields(config, "llm_config.json").integer("hidden_size"),
        slot.cols,
    )  # fmt: skip
    tie = Fields(config, "llm_config.json").member("tie_embeddings")
    codes = tie.integer("weight_offset")
    bits = tie.integer("quant_bit")
    if bits == 16:
        reader.span(where, codes, 2 * slot.rows * slot.cols)
        return StoredMatrix(
            EMBEDDING, slot.rows, slot.cols, FloatEncoding(16), codes, 0, reader.file
        )
    if bits not in (4, 8):
        raise BundleError(f"{where}: codes of {bits} bits are not known.")
    scales, scale_bytes = tie.integer("alpha_offset"), tie.integer("alpha_size")
    _expect(where, "rows between codes and scales", (scales - codes) * 8 // bits // slot.cols,
            slot.rows)  # fmt: skip
    reader.span(where, scales, scale_bytes)
    block = tie.integer("quant_block") or slot.cols
    scale_bits = 32 if tie.text("alpha_dtype", "fp16") == "fp32" else 16
    if slot.cols % block:
        raise BundleError(f"{where}: blocks of {block} do not divide a width of {slot.cols}.")
    one_each = slot.rows * (slot.cols // block) * scale_bits // 8
    if scale_bytes not in (one_each, 2 * one_each):
        raise BundleError(
            f"{where}: alpha_size is {scale_bytes}; {slot.rows} rows in blocks of {block} with "
            f"scales of {scale_bits} bits take {one_each}, or {2 * one_each} with zero points."
        )
    encoding = BlockEncoding(bits, block, scale_bytes == one_each, scale_bits)
    return StoredMatrix(EMBEDDING, slot.rows, slot.cols, encoding, codes, scales, reader.file)


def _expect(where: str, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise BundleError(f"{where}: {what}: found {found}, expected {expected}.")
