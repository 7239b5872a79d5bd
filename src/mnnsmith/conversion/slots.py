"""What a weight slot takes out of its tensor, as float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import ConversionError, SourceError
from mnnsmith.graph.weights import ConstantSlot, MatrixSlot, Slot, StoredRows, Table, VectorSlot
from mnnsmith.sources.checkpoint import Checkpoint, Tensor, read_whole


def read_vector(slot: Slot, checkpoint: Checkpoint) -> npt.NDArray[np.float32]:
    """The values of a vector slot or table; of `StoredRows` as they are before being stored."""
    if isinstance(slot, Table):
        return slot.values
    if isinstance(slot, MatrixSlot):
        raise ConversionError(f"{slot.tensor} is no vector.")
    tensor = checkpoint.tensors[slot.tensor]
    if isinstance(slot, ConstantSlot):
        values = read_whole(tensor)
    elif isinstance(slot, StoredRows):
        values = np.concatenate([tensor.rows(row, row + 1) for row in slot.rows])
    else:
        values = tensor.rows(slot.first_row, slot.first_row + slot.size)
    if not np.isfinite(values).all():
        raise SourceError(f"{checkpoint.origin}: {slot.tensor} holds values that are not finite.")
    return values + np.float32(slot.add) if isinstance(slot, VectorSlot) and slot.add else values


def matrix_rows(slot: MatrixSlot, tensor: Tensor, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Rows start..stop of a slot, in the slot's order: [stop - start, cols]."""
    if slot.transposed:
        # The part is small (one head); its rows are our columns.
        rows = slot.source_rows()
        part = tensor.rows(int(rows[0]), int(rows[-1]) + 1)
        return np.ascontiguousarray(part[:, start:stop].T)
    if slot.heads is None:
        # Kernels of a convolution are rows of one matrix.
        taken = tensor.rows(slot.first_row + start, slot.first_row + stop)
        return taken.reshape(stop - start, slot.cols)
    wanted = slot.source_rows()[start:stop]
    first = int(wanted.min())
    values: npt.NDArray[np.float32] = tensor.rows(first, int(wanted.max()) + 1)[wanted - first]
    return values
