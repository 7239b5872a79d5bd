"""Weights from the checkpoint into the file beside an ONNX model, a block of rows at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.conversion.slots import matrix_rows, read_vector
from mnnsmith.conversion.stream import pwrite, reserve
from mnnsmith.errors import ConversionError
from mnnsmith.graph.weights import MatrixSlot, Table
from mnnsmith.onnx.draft import FLOAT16, Weight
from mnnsmith.quant.round_to_nearest import NotRepresentableError, to_float16, to_float32
from mnnsmith.sources.checkpoint import Checkpoint, row_ranges

# Runtimes map large tensors into memory, which takes offsets of whole pages (64 KiB on Windows).
_LARGE_BYTES, _LARGE_ALIGNMENT, _ALIGNMENT = 1 << 20, 1 << 16, 64


@dataclass(frozen=True)
class Place:
    """Where a weight stands in the file, in bytes."""

    offset: int
    nbytes: int


def lay_out(weights: Mapping[str, Weight]) -> tuple[dict[str, Place], int]:
    """A place for every weight, and the size of the file."""
    places, end = {}, 0
    for name, weight in weights.items():
        step = _LARGE_ALIGNMENT if weight.nbytes >= _LARGE_BYTES else _ALIGNMENT
        offset = -(-end // step) * step
        places[name] = Place(offset, weight.nbytes)
        end = offset + weight.nbytes
    return places, end


def write_weights(
    weights: Mapping[str, Weight],
    places: Mapping[str, Place],
    checkpoint: Checkpoint,
    path: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Write every weight to `path`, which must not exist; memory is bounded by a block of rows.

    progress: called with (bytes written, bytes in all).  Raises `ConversionError` for a weight that
    its type cannot hold, `MissingResourceError` when the disk is full.
    """
    total = sum(place.nbytes for place in places.values())
    end = max((place.offset + place.nbytes for place in places.values()), default=0)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        reserve(fd, end, path)
        done = 0
        for name, weight in weights.items():
            for nbytes in _write(fd, weight, places[name].offset, checkpoint):
                done += nbytes
                progress(done, total)
    finally:
        os.close(fd)


def _write(fd: int, weight: Weight, offset: int, checkpoint: Checkpoint) -> Iterator[int]:
    """Write one weight; yields the bytes of each block."""
    slot = weight.slot
    if not isinstance(slot, MatrixSlot):
        values = _stored(weight, read_vector(slot, checkpoint))
        pwrite(fd, values, offset)
        yield values.nbytes
        return
    tensor = checkpoint.tensors[slot.tensor]
    for start, stop in row_ranges(slot.rows, slot.cols):
        block = _stored(weight, matrix_rows(slot, tensor, start, stop))
        if weight.turned:
            _write_columns(fd, block.T, offset, start, slot.rows)
        else:
            pwrite(fd, block, offset + start * slot.cols * block.itemsize)
        # Linux starts to write these pages to the disk now, while there is work to do.
        os.posix_fadvise(fd, offset, weight.nbytes, os.POSIX_FADV_DONTNEED)
        yield block.nbytes


def _write_columns(fd: int, columns: npt.NDArray[Any], offset: int, start: int, width: int) -> None:
    """Columns start.. of a matrix whose rows have `width` elements."""
    columns = np.ascontiguousarray(columns)
    if columns.shape[1] == width:
        pwrite(fd, columns, offset)
        return
    for i, part in enumerate(columns):
        pwrite(fd, part, offset + (i * width + start) * columns.itemsize)


def _stored(weight: Weight, values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    try:
        if weight.elem == FLOAT16:
            return to_float16(values).astype("<f2", copy=False)
        return to_float32(values).astype("<f4", copy=False)
    except NotRepresentableError as error:
        name = "A table" if isinstance(weight.slot, Table) else weight.slot.tensor
        raise ConversionError(
            f"{name}: {error}.", "Take --dtype fp32, or check the checkpoint."
        ) from error
