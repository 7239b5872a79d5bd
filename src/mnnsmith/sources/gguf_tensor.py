"""A tensor of a GGUF file as a checkpoint's: rows as float32, in Hugging Face's order.

Two changes that llama.cpp's converter makes are undone while reading, so that nothing else needs to
know of them: rows of query and key projections reordered for interleaved rotary embedding, and
norms stored with one added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.files import pread_exact
from mnnsmith.sources import gguf_blocks
from mnnsmith.sources.checkpoint import F32, U8, BlockFormat, QuantizedRows
from mnnsmith.sources.floats import decode_float
from mnnsmith.sources.gguf_file import TensorInfo

_BLOCK_FORMATS = {
    "Q4_0": BlockFormat(bits=4, block=32, symmetric=True),
    "Q4_1": BlockFormat(bits=4, block=32, symmetric=False),
    "Q8_0": BlockFormat(bits=8, block=32, symmetric=True),
}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor, by its Hugging Face name.

    heads: of a query or key projection whose rows are interleaved in the file, else 0.
    shift: added to every value (Gemma's norms: -1.0, since the file has them with one added).
    """

    info: TensorInfo
    name: str
    heads: int = 0
    shift: float = 0.0

    def __post_init__(self) -> None:
        if len(self.info.shape) == 1 and self.info.block > 1:
            raise UnsupportedError(
                f"{self.info.path}: {self.info.name} has one dimension and is stored as "
                f"{self.info.type_name}; rows of it cannot be read."
            )
        if self.heads and self.shape[0] % (2 * self.heads):
            raise SourceError(
                f"{self.info.path}: {self.info.name} has {self.shape[0]} rows, which "
                f"{self.heads} heads of an even size cannot share."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> str:
        return self.info.type_name

    @property
    def nbytes(self) -> int:
        return self.info.nbytes

    @property
    def block_format(self) -> BlockFormat | None:
        """Of Q4_0, Q4_1 and Q8_0; a shifted tensor has none, as a scale cannot take the shift."""
        return None if self.shift else _BLOCK_FORMATS.get(self.info.type_name)

    def rows(self, start: int, stop: int) -> F32:
        """float32 [stop - start, *shape[1:]]; SourceError for a cut file or a scale of NaN."""
        raw = self._raw_rows(start, stop)
        # A NaN in a stored weight may raise a flag on the way; it is not ours to report here.
        with np.errstate(all="ignore"):
            if self.info.block == 1:
                out = decode_float(self.info.type_name, raw.reshape(-1))
                out = out.reshape(stop - start, *self.shape[1:])
            else:
                out = np.empty((stop - start, *self.shape[1:]), dtype=np.float32)
                blocks = raw.reshape(-1, self.info.block_bytes)
                try:
                    gguf_blocks.decode(
                        self.info.type_name, blocks, out.reshape(-1, self.info.block)
                    )
                except gguf_blocks.NonFiniteScaleError as error:
                    raise self._bad_scale(start, stop) from error
            if self.shift:
                out += np.float32(self.shift)
        return out

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        """The stored blocks of these rows; UnsupportedError where `block_format` is None."""
        form = self.block_format
        if form is None:
            raise UnsupportedError(
                f"{self.name} is stored as {self.dtype}"
                f"{' with a shift' if self.shift else ''}: its blocks cannot be carried over."
            )
        blocks = self._raw_rows(start, stop).reshape(-1, self.info.block_bytes)
        try:
            codes, scale, zero = gguf_blocks.codes_of(self.info.type_name, blocks)
        except gguf_blocks.NonFiniteScaleError as error:
            raise self._bad_scale(start, stop) from error
        rows = stop - start
        return QuantizedRows(
            bits=form.bits,
            block=form.block,
            codes=codes.reshape(rows, -1),
            scale=scale.reshape(rows, -1),
            zero=None if zero is None else zero.reshape(rows, -1),
        )

    def _bad_scale(self, start: int, stop: int) -> SourceError:
        return SourceError(
            f"{self.info.path}: {self.info.name} has a block scale that is infinite or not a "
            f"number, in rows {start} to {stop}.",
            "The file is damaged, or the model was already broken when it was quantized.",
        )

    def _raw_rows(self, start: int, stop: int) -> U8:
        """uint8 [stop - start, bytes of a row], the rows in Hugging Face's order."""
        count = self.shape[0]
        if not 0 <= start <= stop <= count:
            raise SourceError(f"{self.name}: rows {start} to {stop} of {count} were asked for.")
        row_bytes = self.info.nbytes // count
        if not self.heads:
            return self._read(start * row_bytes, (stop - start) * row_bytes).reshape(-1, row_bytes)
        if start == stop:
            return np.empty((0, row_bytes), dtype=np.uint8)
        source = interleaved_rows(start, stop, count // self.heads)
        first, last = int(source.min()), int(source.max())
        raw = self._read(first * row_bytes, (last + 1 - first) * row_bytes)
        return raw.reshape(-1, row_bytes)[source - first]

    def _read(self, offset: int, nbytes: int) -> U8:
        """uint8 [nbytes] at `offset` within the tensor."""
        where = f"{self.info.path} ({self.info.name})"
        raw = pread_exact(self.info.file.fd, nbytes, self.info.offset + offset, where)
        return np.frombuffer(raw, dtype=np.uint8)


def interleaved_rows(start: int, stop: int, head_dim: int) -> npt.NDArray[np.int64]:
    """Which row of the file holds each row `start` to `stop` of Hugging Face's order.

    Rotary embedding turns pairs of rows: Hugging Face pairs row i of a head with row
    i + head_dim / 2, the llama architecture of llama.cpp row 2 i with row 2 i + 1.
    """
    row = np.arange(start, stop, dtype=np.int64)
    head, within = np.divmod(row, head_dim)
    half, index = np.divmod(within, head_dim // 2)
    source: npt.NDArray[np.int64] = head * head_dim + 2 * index + half
    return source
