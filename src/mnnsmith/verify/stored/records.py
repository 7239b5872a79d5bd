"""A matrix or vector of a bundle's weight file: where it stands, and its values.

Nothing is read before it is asked for, a range of rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import SourceError
from mnnsmith.files import OpenFile, pread_exact
from mnnsmith.mnn.weight_records import BlockEncoding, Encoding, FloatEncoding
from mnnsmith.sources.checkpoint import QuantizedRows
from mnnsmith.sources.floats import decode_float

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [rows, cols] in the weight file; offsets and sizes in bytes."""

    operator: str
    rows: int
    cols: int
    encoding: Encoding
    codes_offset: int
    scales_offset: int
    file: OpenFile

    @property
    def nbytes(self) -> int:
        """Codes and scales, or float values."""
        return self.rows * (self._codes_row_bytes + self._scales_row_bytes)

    @property
    def _codes_row_bytes(self) -> int:
        return self.cols * self.encoding.bits // 8

    @property
    def _scales_row_bytes(self) -> int:
        if isinstance(self.encoding, FloatEncoding):
            return 0
        numbers = self.cols // self.encoding.block * (1 if self.encoding.symmetric else 2)
        return numbers * self.encoding.scale_bits // 8

    def same_place(self, other: StoredMatrix) -> bool:
        """Whether both read the same bytes in the same way."""
        mine = (self.rows, self.cols, self.encoding, self.codes_offset)
        theirs = (other.rows, other.cols, other.encoding, other.codes_offset)
        blocks = isinstance(self.encoding, BlockEncoding)
        return mine == theirs and not (blocks and self.scales_offset != other.scales_offset)

    def rows_of(self, start: int, stop: int) -> F32:
        """float32 [stop - start, cols], dequantized."""
        if isinstance(self.encoding, BlockEncoding):
            return self.blocks_of(start, stop).dequantize()
        raw = self._read(self.codes_offset, self._codes_row_bytes, start, stop)
        values = decode_float("F16" if self.encoding.bits == 16 else "F32", raw)
        return values.reshape(stop - start, self.cols)

    def blocks_of(self, start: int, stop: int) -> QuantizedRows:
        """The codes and scales of rows start..stop; only of a matrix stored in blocks."""
        encoding = self.encoding
        assert isinstance(encoding, BlockEncoding)
        raw = self._read(self.codes_offset, self._codes_row_bytes, start, stop)
        if encoding.bits == 4:
            pairs = np.empty((raw.size, 2), dtype=np.uint8)
            np.right_shift(raw, 4, out=pairs[:, 0])
            np.bitwise_and(raw, 15, out=pairs[:, 1])
            raw = pairs
        codes = raw.reshape(stop - start, self.cols)
        alpha = decode_float(
            "F16" if encoding.scale_bits == 16 else "F32",
            self._read(self.scales_offset, self._scales_row_bytes, start, stop),
        ).reshape(stop - start, self.cols // encoding.block, -1)
        zero = None if encoding.symmetric else np.ascontiguousarray(alpha[..., 0])
        scale = np.ascontiguousarray(alpha[..., -1])
        return QuantizedRows(encoding.bits, encoding.block, codes, scale, zero)

    def _read(self, offset: int, row_bytes: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
        if not 0 <= start <= stop <= self.rows:
            raise SourceError(f"{self.operator}: rows {start}:{stop} of {self.rows} do not exist.")
        raw = pread_exact(
            self.file.fd, (stop - start) * row_bytes, offset + start * row_bytes,
            f"{self.file.path} ({self.operator})",
        )  # fmt: skip
        return np.frombuffer(raw, dtype=np.uint8)


@dataclass(frozen=True)
class StoredVector:
    """A gain, bias, constant or table; in the weight file at `place`, or in the graph itself.

    rounded: kept in the graph, whose numbers the converter gives with six decimals.
    """

    operator: str
    size: int
    place: tuple[OpenFile, int] | None
    inline: F32 | None = None

    @property
    def rounded(self) -> bool:
        return self.inline is not None

    def values(self) -> F32:
        """float32 [size]."""
        if self.place is None:
            assert self.inline is not None
            return self.inline
        file, offset = self.place
        raw = pread_exact(file.fd, 4 * self.size, offset, f"{file.path} ({self.operator})")
        return np.frombuffer(raw, dtype="<f4")
