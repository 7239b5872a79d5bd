"""safetensors files, read strictly: a header, then tensors a range of rows at a time.

Reading with `pread` rather than a memory map keeps resident memory at the block that is worked on.
Format: u64 length of the header, a JSON object (name -> dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.files import OpenFile, is_lfs_pointer, lfs_error, parse_json, pread_exact
from mnnsmith.sources.checkpoint import F32, BlockFormat, QuantizedRows
from mnnsmith.sources.floats import FLOAT_BYTES, decode_float

# The reference implementation stops at 100 MB; 90,000 tensors take 12.
_HEADER_LIMIT_BYTES = 32 << 20
_MAX_RANK = 8

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_READABLE = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class SafeTensor:
    """One tensor; implements `checkpoint.Tensor`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: OpenFile
    offset: int

    @property
    def block_format(self) -> BlockFormat | None:
        return None

    def rows(self, start: int, stop: int) -> F32:
        """float32 [stop - start, *shape[1:]]; a scalar counts as one row."""
        count = self.shape[0] if self.shape else 1
        where = f"{self.file.path} ({self.name})"
        if not 0 <= start <= stop <= count:
            raise SourceError(f"{where}: rows {start}:{stop} of {count} do not exist.")
        row_bytes = self.nbytes // count if count else 0
        offset = self.offset + start * row_bytes
        raw = pread_exact(self.file.fd, (stop - start) * row_bytes, offset, where)
        return decode(raw, self.dtype, self.name).reshape(stop - start, *self.shape[1:])

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        raise UnsupportedError(f"{self.name}: {self.dtype} tensors hold no blocks.")


def open_safetensors(path: Path) -> dict[str, SafeTensor]:
    """All tensors of one file, by name; raises `SourceError` if the file is not sound."""
    file = OpenFile(path)
    size = os.fstat(file.fd).st_size
    header, data_start = _read_header(file, size)
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _tensor(file, name, entry, data_start, size)
    _check_no_overlap(path, list(tensors.values()))
    return tensors


def decode(raw: bytearray, dtype: str, name: str) -> F32:
    """Stored bytes as float32 [n]."""
    if dtype in FLOAT_BYTES:
        return decode_float(dtype, np.frombuffer(raw, dtype=np.uint8))
    if dtype == "F8_E4M3":
        return _E4M3[np.frombuffer(raw, dtype=np.uint8)]
    if dtype == "F8_E5M2":
        # The upper byte of an fp16 number.
        half = np.frombuffer(raw, dtype=np.uint8).astype(np.uint16) << 8
        return half.astype(np.uint16).view(np.float16).astype(np.float32)
    known = ", ".join(_READABLE)
    raise UnsupportedError(f"{name}: weights of type {dtype} are not supported; {known} are.")


def _e4m3_values() -> npt.NDArray[np.float32]:
    """Micikevicius et al. 2022, the variant without infinities: 1 sign, 4 exponent, 3 mantissa."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * np.exp2(exponent - 7.0)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    values[codes & 127 == 127] = np.nan
    return np.where(codes >> 7, -values, values).astype(np.float32)


_E4M3 = _e4m3_values()


def _read_header(file: OpenFile, size: int) -> tuple[dict[str, Any], int]:
    where = str(file.path)
    head = bytes(pread_exact(file.fd, min(size, 64), 0, where))
    if is_lfs_pointer(head):
        raise lfs_error(file.path)
    if size < 8:
        raise SourceError(f"{where}: {size} bytes are too few for a safetensors file.")
    (length,) = struct.unpack("<Q", head[:8])
    if length > min(size - 8, _HEADER_LIMIT_BYTES):
        raise SourceError(
            f"{where}: the header says that it has {length} bytes, the file has {size}.",
            "It is truncated or no safetensors file (or its header exceeds the "
            f"{_HEADER_LIMIT_BYTES} bytes we accept); download it again.",
        )
    raw = bytes(pread_exact(file.fd, length, 8, where))
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{where}: the header is not UTF-8 text.") from error
    header = parse_json(text, f"{where} (header)")
    if not isinstance(header, dict):
        raise SourceError(f"{where}: the header is not a JSON object.")
    return header, 8 + length


def _tensor(file: OpenFile, name: str, entry: Any, data_start: int, size: int) -> SafeTensor:
    where = f"{file.path} ({name})"
    if not isinstance(entry, dict):
        raise SourceError(f"{where}: its header entry is not an object.")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise SourceError(f"{where}: unknown dtype {dtype!r:.40}.")
    if not _is_sizes(shape) or len(shape) > _MAX_RANK:
        raise SourceError(f"{where}: bad shape {shape!r:.60}.")
    if not _is_sizes(span) or len(span) != 2:
        raise SourceError(f"{where}: bad data_offsets {span!r:.60}.")
    nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if span[1] - span[0] != nbytes:
        raise SourceError(
            f"{where}: {dtype} {shape} takes {nbytes} bytes, its data_offsets span "
            f"{span[1] - span[0]}."
        )
    if data_start + span[1] > size:
        raise SourceError(
            f"{where}: the tensor ends at byte {data_start + span[1]}, the file at {size}.",
            "The file is truncated; download it again.",
        )
    return SafeTensor(name, tuple(shape), dtype, nbytes, file, data_start + span[0])


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in value)


def _check_no_overlap(path: Path, tensors: list[SafeTensor]) -> None:
    end, last = 0, ""
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset < end:
            raise SourceError(f"{path}: the tensors {last} and {tensor.name} overlap.")
        end, last = tensor.offset + tensor.nbytes, tensor.name
