"""The original checkpoint with the weights that a bundle stores in place of its own."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mnnsmith.bundle import Bundle
from mnnsmith.conversion.prepare import Prepared
from mnnsmith.conversion.slots import read_vector
from mnnsmith.errors import BundleError, SourceError, UnsupportedError
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.weights import ConstantSlot, MatrixSlot, VectorSlot
from mnnsmith.mnn.config_files import MODEL_FILE, WEIGHT_FILE
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.sources.checkpoint import F32, BlockFormat, Checkpoint, QuantizedRows, Tensor
from mnnsmith.verify.stored.records import StoredMatrix, StoredVector
from mnnsmith.verify.stored.weights import (
    EMBEDDING,
    StoredWeights,
    read_stored_vision,
    read_stored_weights,
)

HEAD_TENSOR = "lm_head.weight"
# What `stored_checkpoint` calls its format.
BUNDLE_FORMAT = "bundle"
_SHOWN = 6
# The converter prints numbers of the graph with six decimals.
_PRINTED = 0.5e-6


@dataclass(frozen=True)
class _MatrixPart:
    """Rows of a tensor (`source`, in the slot's order) out of a stored matrix."""

    source: npt.NDArray[np.int64]
    transposed: bool
    matrix: StoredMatrix

    def fill(self, out: F32, start: int, stop: int) -> int:
        """Write those of the tensor's rows start..stop that are of this part; how many."""
        own = np.flatnonzero((self.source >= start) & (self.source < stop))
        if not own.size:
            return 0
        if self.transposed:
            # A small matrix, one head's: its columns are the tensor's rows.
            values = self.matrix.rows_of(0, self.matrix.rows).T[own]
        else:
            first = int(own.min())
            values = self.matrix.rows_of(first, int(own.max()) + 1)[own - first]
        # A kernel of a convolution is one row of the matrix.
        out[self.source[own] - start] = values.reshape(-1, *out.shape[1:])
        return own.size


@dataclass(frozen=True)
class _ValuesPart:
    """Rows of a tensor from `first` on, as float32 [rows, ...]."""

    first: int
    values: F32

    def fill(self, out: F32, start: int, stop: int) -> int:
        """As `_MatrixPart.fill`."""
        begin, end = max(start, self.first), min(stop, self.first + len(self.values))
        if begin >= end:
            return 0
        out[begin - start : end - start] = self.values[begin - self.first : end - self.first]
        return end - begin


_Part: TypeAlias = _MatrixPart | _ValuesPart


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the original's name and shape with a bundle's values; a `checkpoint.Tensor`."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[_Part, ...]

    @property
    def dtype(self) -> str:
        return "F32"

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)

    @property
    def block_format(self) -> BlockFormat | None:
        return None

    def rows(self, start: int, stop: int) -> F32:
        """float32 [stop - start, *shape[1:]], dequantized."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise SourceError(f"{self.name}: rows {start}:{stop} of {self.shape[0]} do not exist.")
        out = np.empty((stop - start, *self.shape[1:]), dtype=np.float32)
        filled = sum(part.fill(out, start, stop) for part in self.parts)
        if filled != stop - start:
            raise BundleError(f"{self.name}: the bundle stores {filled} of {stop - start} rows.")
        return out

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        raise UnsupportedError(f"{self.name}: dequantized weights hold no blocks.")


def stored_checkpoint(bundle: Bundle, original: Prepared) -> Checkpoint:
    """`original.checkpoint` with the weights that `bundle` stores, dequantized as they are read.

    original: prepared for the same attention form as the bundle.  A tied head that the bundle
    stores apart from its embedding becomes a tensor of its own, and the config says so.

    Raises `BundleError` that names every operator whose weights do not fit the model.
    """
    stored = _sound(bundle, read_stored_weights(bundle, original.model))
    parts, untied = _all_parts(stored, original)
    vision = original.model.vision
    if vision is not None:
        seen = _sound(bundle, read_stored_vision(bundle, vision.graph))
        _add_parts(parts, vision.graph, seen, original)
    checkpoint = original.checkpoint
    tensors: dict[str, Tensor] = dict(checkpoint.tensors)
    for name, own in parts.items():
        shape = tensors[original.model.embedding.tensor if untied and name == HEAD_TENSOR else name]
        tensors[name] = StoredTensor(name, shape.shape, tuple(own))
    config = dict(checkpoint.config)
    if untied:
        config["tie_word_embeddings"] = False
    return replace(
        checkpoint,
        origin=str(bundle.path),
        format=BUNDLE_FORMAT,
        config=config,
        tensors=tensors,
        files=tuple(bundle.path / name for name in (MODEL_FILE, WEIGHT_FILE, "llm_config.json")),
    )


def _sound(bundle: Bundle, stored: StoredWeights) -> StoredWeights:
    """The same, if all of it fits the model."""
    if stored.problems:
        shown = " ".join(finding.message for finding in stored.problems[:_SHOWN])
        raise BundleError(
            f"{bundle.path}: {len(stored.problems)} weights are not as the model needs them: "
            f"{shown}",
            "Convert the model again.",
        )
    return stored


def printed_value(stored: StoredVector, original: F32) -> F32:
    """The values of a vector; of one that the converter printed, the original's where they are
    what such a print is of."""
    values = stored.values()
    if not stored.rounded:
        return values
    with np.errstate(invalid="ignore"):
        same = np.abs(values - original) <= _PRINTED + np.spacing(np.abs(original))
    return np.where(same, original, values)


def _all_parts(stored: StoredWeights, original: Prepared) -> tuple[dict[str, list[_Part]], bool]:
    """What the bundle stores of each tensor, and whether a tied head must be told apart."""
    model = original.model
    untied = model.tied and not _shared(stored, model)
    parts: dict[str, list[_Part]] = defaultdict(list)
    renamed = {model.head.tensor: HEAD_TENSOR} if untied else {}
    _add_parts(parts, model.graph, stored, original, renamed)
    if untied or not model.tied:
        slot = model.embedding
        parts[slot.tensor].append(_matrix_part(slot, stored.matrices[EMBEDDING]))
    return parts, untied


def _add_parts(
    parts: dict[str, list[_Part]],
    graph: Graph,
    stored: StoredWeights,
    original: Prepared,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add what a graph's operators read; renamed: other names for tensors of matrices."""
    for node in graph.all_nodes():
        for part, slot in node.slots.items():
            if isinstance(slot, MatrixSlot):
                tensor = renamed.get(slot.tensor, slot.tensor)
                parts[tensor].append(_matrix_part(slot, stored.matrices[node.name]))
            elif isinstance(slot, VectorSlot | ConstantSlot):
                vector = stored.vectors[node.name, part]
                parts[slot.tensor].append(_values_part(slot, vector, original))


def _shared(stored: StoredWeights, model: LanguageModel) -> bool:
    """Whether head and embedding are read from one place in one way."""
    heads = [n.name for n in model.graph.nodes if n.slots.get("weight") == model.head]
    return stored.matrices[heads[0]].same_place(stored.matrices[EMBEDDING])


def _matrix_part(slot: MatrixSlot, matrix: StoredMatrix) -> _MatrixPart:
    return _MatrixPart(slot.source_rows(), slot.transposed, matrix)


def _values_part(
    slot: VectorSlot | ConstantSlot, vector: StoredVector, original: Prepared
) -> _ValuesPart:
    if isinstance(slot, ConstantSlot):
        return _ValuesPart(0, vector.values().reshape(slot.shape))
    values = vector.values()
    if vector.rounded:
        values = printed_value(vector, read_vector(slot, original.checkpoint))
    # Damaged values may be no numbers.
    with np.errstate(invalid="ignore"):
        return _ValuesPart(slot.first_row, values - np.float32(slot.add))


def head_tensor(model: LanguageModel, checkpoint: Checkpoint) -> Tensor:
    """The head's weight in a checkpoint of `model`, the original's or a bundle's."""
    tied = checkpoint.config.get("tie_word_embeddings") is not False and model.tied
    return checkpoint.tensors[model.head.tensor if tied else HEAD_TENSOR]
