"""Rows of a stored matrix against the original's: how far off, and may rounding explain it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mnnsmith.conversion.plan import MatrixTask
from mnnsmith.conversion.slots import matrix_rows
from mnnsmith.mnn.weight_records import BlockEncoding
from mnnsmith.sources.checkpoint import QuantizedRows, row_ranges
from mnnsmith.verify.stored.records import StoredMatrix

F32 = npt.NDArray[np.float32]
_BLOCK_BYTES = 4 << 20
# Relative rounding of fp16 and fp32, and the half distance of their smallest numbers.
_ROUNDING = {16: (2.0**-11, 2.0**-25), 32: (2.0**-24, 2.0**-150)}
# What float32 arithmetic on the way there and back may add, relative to the values in it.
_ARITHMETIC = 2.0**-22


@dataclass(frozen=True)
class WideScale:
    """A block whose levels stand too far apart: `times` as far as its weights need."""

    row: int
    block: int
    times: float


@dataclass(frozen=True)
class RowDifference:
    """Sums of squares of the difference and of the original, the largest difference in steps of
    its block (None for floats), the slot's rows that are off by more than rounding, and the block
    with the widest of scales that are too wide."""

    squares: float
    original_squares: float
    steps: float | None
    off: npt.NDArray[np.int64]
    wide: WideScale | None = None

    @classmethod
    def of(cls, parts: Sequence[RowDifference]) -> RowDifference:
        """All parts of one matrix."""
        steps = [part.steps for part in parts if part.steps is not None]
        wide = [part.wide for part in parts if part.wide is not None]
        return cls(
            sum(part.squares for part in parts),
            sum(part.original_squares for part in parts),
            max(steps, default=None),
            np.concatenate([part.off for part in parts]),
            max(wide, key=lambda block: block.times, default=None),
        )

    @property
    def relative_error(self) -> float:
        """Norm of the difference over the norm of the original."""
        if not self.squares:
            return 0.0
        return float(np.sqrt(self.squares / max(self.original_squares, np.finfo(float).tiny)))


def rows_at_a_time(matrix: StoredMatrix) -> Iterator[tuple[int, int]]:
    """The blocks of rows in which a matrix is compared."""
    return row_ranges(matrix.rows, matrix.cols, _BLOCK_BYTES)


def compare_rows(task: MatrixTask, matrix: StoredMatrix, start: int, stop: int) -> RowDifference:
    """Rows start..stop of a slot.

    A row that is quantized here is off where a weight is further from the original's than rounding
    to the stored levels explains, or where the levels themselves stand further apart than the
    original's row asks for.  One that is carried over must be the source's own.
    """
    expected = matrix_rows(task.slot, task.tensor, start, stop)
    encoding = matrix.encoding
    blocks = matrix.blocks_of(start, stop) if isinstance(encoding, BlockEncoding) else None
    found = matrix.rows_of(start, stop) if blocks is None else blocks.dequantize()
    wide = None
    with np.errstate(all="ignore"):
        found -= expected
        difference = np.abs(found, out=found).reshape(stop - start, -1)
        if blocks is None:
            steps = None
            good = difference <= _float_bound(expected, encoding.bits)
        else:
            largest = difference.reshape(stop - start, -1, blocks.block).max(-1)
            bound = _bound(task, matrix, blocks)
            good = largest <= bound
            if not task.carried:
                too_wide = _too_wide(expected, matrix, blocks)
                good &= ~(too_wide > 0)
                wide = _widest(too_wide, start)
            used = blocks.scale > 0
            in_steps = np.divide(largest, blocks.scale, out=np.zeros_like(largest), where=used)
            steps = float(in_steps.max(initial=0.0, where=np.isfinite(in_steps)))
        # The negation also takes what is no number.
        off = start + np.flatnonzero(~good.all(-1))
        return RowDifference(_squares(difference), _squares(expected), steps, off, wide)


def _too_wide(expected: F32, matrix: StoredMatrix, blocks: QuantizedRows) -> F32:
    """How many times too wide the scale of each block is, [rows, blocks]; 0 where it is right.

    The widest right one spans the block's own weights, and is rounded to its stored precision; what
    the bundle says must not be the measure of itself.
    """
    encoding = matrix.encoding
    assert isinstance(encoding, BlockEncoding)
    relative, least = _ROUNDING[encoding.scale_bits]
    starts = np.arange(0, expected.size, blocks.block)
    flat = expected.reshape(-1)
    low, high = np.minimum.reduceat(flat, starts), np.maximum.reduceat(flat, starts)
    if blocks.zero is None:
        needed = np.maximum(high, -low) / np.float32((1 << (blocks.bits - 1)) - 1)
    else:
        needed = (high - low) / np.float32((1 << blocks.bits) - 1)
    needed = needed.reshape(blocks.scale.shape)
    widest = needed * np.float32(1 + relative + _ARITHMETIC) + np.float32(least)
    scale = np.abs(blocks.scale)
    times: F32 = np.where(scale > widest, scale / needed, np.float32(0))
    return times


def _widest(times: F32, start: int) -> WideScale | None:
    """The worst block of what `_too_wide` gives for the rows from `start` on."""
    row, block = divmod(int(times.argmax()), times.shape[1])
    worst = float(times[row, block])
    return WideScale(start + row, block, worst) if worst > 0 else None


def _squares(values: F32) -> float:
    """The sum of squares, of finite values where there are others."""
    total = float(np.vdot(values, values))
    if np.isfinite(total):
        return total
    wide = values[np.isfinite(values)].astype(np.float64)
    return float(np.vdot(wide, wide))


def _float_bound(expected: F32, bits: int) -> F32:
    """Rounding to fp16; fp32 holds every weight as it is."""
    if bits == 32:
        return np.zeros_like(expected)
    relative, least = _ROUNDING[16]
    bound: F32 = np.abs(expected) * np.float32(relative) + np.float32(least)
    return bound


def _bound(task: MatrixTask, matrix: StoredMatrix, blocks: QuantizedRows) -> F32:
    """The largest difference that a sound block may have, [rows, blocks]."""
    encoding = matrix.encoding
    assert isinstance(encoding, BlockEncoding)
    return _carried_bound(blocks) if task.carried else _block_bound(blocks, encoding.scale_bits)


def _block_bound(blocks: QuantizedRows, scale_bits: int) -> F32:
    """The same after rounding to nearest, of blocks whose scale is no wider than they need.

    Half a step, for weights within the reach of the levels.  The scale is rounded to its stored
    precision (u relative, s absolute), so that the span of the levels is up to `levels` times that
    shorter than the block's, and the zero point likewise moves all levels: weights at the ends may
    be as far out as both together.
    """
    relative, least = _ROUNDING[scale_bits]
    levels = (1 << blocks.bits) - 1
    if blocks.zero is None:
        reach, offset = levels // 2, np.zeros_like(blocks.scale)
    else:
        reach, offset = levels, np.abs(blocks.zero)
    scale = np.abs(blocks.scale)
    beyond = reach * (scale * relative + least) + offset * relative + least
    bound: F32 = np.maximum(0.5 * scale, beyond) + _ARITHMETIC * (offset + levels * scale)
    return bound


def _carried_bound(blocks: QuantizedRows) -> F32:
    """Blocks carried over are the source's own; only the order of two additions may differ."""
    if blocks.zero is None:
        return np.zeros_like(blocks.scale)
    size = np.abs(blocks.zero) + (1 << blocks.bits) * np.abs(blocks.scale)
    bound: F32 = size * np.float32(_ARITHMETIC)
    return bound


def find_rows(task: MatrixTask, matrix: StoredMatrix, wanted: Sequence[int]) -> list[int | None]:
    """For stored rows that are off: the original's row that each of them is, if one is."""
    stored = np.concatenate([matrix.rows_of(row, row + 1) for row in wanted])
    best = np.full(len(wanted), np.inf)
    origin = np.zeros(len(wanted), dtype=np.int64)
    with np.errstate(all="ignore"):
        lengths = np.einsum("rc,rc->r", stored, stored)
        for start, stop in rows_at_a_time(matrix):
            rows = matrix_rows(task.slot, task.tensor, start, stop)
            # Squared distances of every stored row to every row here.
            distance = np.einsum("rc,rc->r", rows, rows)[:, None] + lengths - 2 * (rows @ stored.T)
            nearest = distance.argmin(0)
            smaller = distance[nearest, np.arange(len(wanted))] < best
            best = np.where(smaller, distance[nearest, np.arange(len(wanted))], best)
            origin = np.where(smaller, start + nearest, origin)
        return [
            int(at) if not _off_as(task, matrix, row, int(at)) else None
            for row, at in zip(wanted, origin, strict=True)
        ]


def _off_as(task: MatrixTask, matrix: StoredMatrix, row: int, origin: int) -> bool:
    """Whether stored row `row` is off when it is taken for the original's row `origin`."""
    expected = matrix_rows(task.slot, task.tensor, origin, origin + 1)
    found = matrix.rows_of(row, row + 1)
    if isinstance(matrix.encoding, BlockEncoding):
        blocks = matrix.blocks_of(row, row + 1)
        allowed = np.repeat(_bound(task, matrix, blocks), blocks.block, axis=1)
    else:
        allowed = _float_bound(expected, matrix.encoding.bits)
    return not bool((np.abs(found - expected) <= allowed).all())
