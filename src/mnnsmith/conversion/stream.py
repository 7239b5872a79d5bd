"""Weights from the checkpoint into `llm.mnn.weight`, a block of rows at a time, on all cores.

Memory is bounded by the blocks in flight.  Every block goes to a place that the plan fixed, so the
file is the same whatever the order in which threads finish.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.conversion.plan import MatrixTask, VectorTask, WeightPlan
from mnnsmith.conversion.slots import matrix_rows, read_vector
from mnnsmith.errors import ConversionError, MissingResourceError
from mnnsmith.mnn.weight_records import (
    BlockEncoding,
    Encoding,
    FloatEncoding,
    block_header,
    pack_codes,
    pack_scales,
)
from mnnsmith.quant.round_to_nearest import (
    NotRepresentableError,
    ScaleError,
    round_to_nearest,
    to_float16,
    to_float32,
)
from mnnsmith.sources.checkpoint import Checkpoint, QuantizedRows, row_ranges

# float32 bytes of one block of rows: large enough for numpy, small enough for the caches.
_BLOCK_BYTES = 4 << 20

Progress = Callable[[int, int], None]


def write_weights(
    plan: WeightPlan, checkpoint: Checkpoint, path: Path, *, threads: int, progress: Progress
) -> None:
    """Write every weight of the plan to `path`, which must not exist.

    progress: called with (bytes written, bytes in all).  Raises `MissingResourceError` when the
    disk is full, `ConversionError` for a weight that its scheme cannot hold.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        reserve(fd, plan.weight_bytes, path)
        for vector in plan.vectors:
            _write_vector(fd, vector, checkpoint)
        _write_matrices(fd, plan, checkpoint, threads, progress)
    finally:
        os.close(fd)


def reserve(fd: int, nbytes: int, path: Path) -> None:
    """Claim the disk space of a file before it is written; raises `MissingResourceError`."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        raise disk_error(path, error) from error


def disk_error(path: Path, error: OSError) -> MissingResourceError:
    """The error for a write that the system refused."""
    return MissingResourceError(
        f"{path}: cannot be written: {error.strerror}.",
        "Free some space or choose another output; nothing was left behind.",
    )


def _write_matrices(
    fd: int, plan: WeightPlan, checkpoint: Checkpoint, threads: int, progress: Progress
) -> None:
    total = sum(_matrix_bytes(task) for task in plan.matrices)
    done = 0
    with ThreadPoolExecutor(max_workers=threads) as pool:
        pending: set[Future[int]] = set()
        try:
            for work in _blocks(fd, plan, checkpoint):
                # A short queue: what is queued holds no data, but keeps errors prompt.
                if len(pending) >= 2 * threads:
                    finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                    done += sum(future.result() for future in finished)
                    progress(done, total)
                pending.add(pool.submit(work))
            for future in pending:
                done += future.result()
                progress(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _blocks(fd: int, plan: WeightPlan, checkpoint: Checkpoint) -> Iterator[Callable[[], int]]:
    """One piece of work for each block of rows; each returns the bytes that it wrote."""
    for task in plan.matrices:
        record = task.record
        if isinstance(record.encoding, BlockEncoding):
            header = block_header(record.rows, record.cols, record.encoding.bits)
            pwrite(fd, header, record.offset)
        if task.bias is not None:
            bias = read_vector(task.bias, checkpoint).astype("<f4", copy=False)
            pwrite(fd, bias.tobytes(), record.bias_offset)
        for start, stop in row_ranges(task.slot.rows, task.slot.cols, _BLOCK_BYTES):
            yield _block_work(fd, task, start, stop)


def _block_work(fd: int, task: MatrixTask, start: int, stop: int) -> Callable[[], int]:
    def work() -> int:
        record = task.record
        try:
            codes, scales = _encode(task, start, stop)
        except NotRepresentableError as error:
            last = task.slot.first_row + stop - 1
            raise ConversionError(
                f"{task.tensor.name}, rows {task.slot.first_row + start} to {last}: {error}.",
                f"Take {task.scheme_name}-scale32 (as the recipe, or for this tensor in a recipe "
                "file)."
                if isinstance(error, ScaleError)
                else "Choose another scheme for this tensor in a recipe file, or check the "
                "checkpoint.",
            ) from error
        codes_offset = record.codes_offset + start * record.codes_row_bytes()
        pwrite(fd, codes, codes_offset)
        # Linux starts to write these pages to the disk now, while there is work to do; else most of
        # the file would wait for the sync at the end.
        os.posix_fadvise(fd, codes_offset, codes.nbytes, os.POSIX_FADV_DONTNEED)
        written = codes.nbytes
        if scales is not None:
            pwrite(fd, scales, record.scales_offset + start * record.scales_row_bytes())
            written += scales.nbytes
        return written

    return work


def _encode(
    task: MatrixTask, start: int, stop: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """The stored codes (or floats) and scales of rows start..stop of a slot."""
    encoding = task.record.encoding
    if task.carried and isinstance(encoding, BlockEncoding):
        kept = _kept_rows(task, start, stop)
        return pack_codes(kept.codes, encoding.bits), pack_scales(
            kept.scale, kept.zero, encoding.scale_bits
        )
    weights = matrix_rows(task.slot, task.tensor, start, stop)
    if isinstance(encoding, FloatEncoding):
        return (to_float16(weights) if encoding.bits == 16 else to_float32(weights)), None
    if not weights.flags.writeable:
        weights = weights.copy()
    q = round_to_nearest(
        weights, bits=encoding.bits, block=encoding.block, symmetric=encoding.symmetric,
        scale_bits=encoding.scale_bits,
    )  # fmt: skip
    return pack_codes(q.codes, encoding.bits), pack_scales(q.scale, q.zero, encoding.scale_bits)


def _kept_rows(task: MatrixTask, start: int, stop: int) -> QuantizedRows:
    """The source's blocks of rows start..stop of a slot, in the slot's order."""
    slot = task.slot
    if slot.heads is None:
        return task.tensor.quantized_rows(slot.first_row + start, slot.first_row + stop)
    wanted = slot.source_rows()[start:stop]
    first = int(wanted.min())
    kept = task.tensor.quantized_rows(first, int(wanted.max()) + 1)
    at = wanted - first
    zero = None if kept.zero is None else kept.zero[at]
    return QuantizedRows(kept.bits, kept.block, kept.codes[at], kept.scale[at], zero)


def _matrix_bytes(task: MatrixTask) -> int:
    return task.record.codes_bytes + task.record.scales_bytes


def _write_vector(fd: int, task: VectorTask, checkpoint: Checkpoint) -> None:
    values = read_vector(task.slot, checkpoint).astype("<f4", copy=False)
    if task.encoding is not None:
        values = as_stored(values, task.encoding)
    pwrite(fd, np.ascontiguousarray(values).tobytes() + bytes(task.padding), task.record.offset)


def as_stored(rows: npt.NDArray[np.float32], encoding: Encoding) -> npt.NDArray[np.float32]:
    """What remains of rows [n, cols] that are stored as `encoding`."""
    if isinstance(encoding, FloatEncoding):
        return rows if encoding.bits == 32 else to_float16(rows).astype(np.float32)
    q = round_to_nearest(
        rows.copy(), bits=encoding.bits, block=encoding.block, symmetric=encoding.symmetric,
        scale_bits=encoding.scale_bits,
    )  # fmt: skip
    return QuantizedRows(encoding.bits, encoding.block, q.codes, q.scale, q.zero).dequantize()


def pwrite(fd: int, data: bytes | npt.NDArray[Any], offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data) if isinstance(data, bytes) else np.ascontiguousarray(data).data
    view = view.cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
