"""Weight records of `llm.mnn.weight`: where each byte of a weight stands, and how it is packed.

A matrix stored in blocks is `header | codes | scales | bias`:

- header: byte 2; rows and cols (u16 each, u32 if one is over 65535); the number of levels as one
  byte (0 means 256); the levels themselves, ascending int8;
- codes: level + 2^(bits-1) of every weight, row by row; at 4 bits two to a byte, the first in the
  high half;
- scales: per row and block the pair (value at level 0, scale), or the scale alone if symmetric;
  fp16 or fp32;
- bias: float32.

A float matrix is `values | bias` without a header.  All is little endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import ConversionError

# Above this width the header holds sizes in four bytes.
_U16_MAX = 65535


@dataclass(frozen=True)
class FloatEncoding:
    """fp16 or fp32 values."""

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (16, 32):
            raise ConversionError(f"Float weights have 16 or 32 bits, not {self.bits}.")


@dataclass(frozen=True)
class BlockEncoding:
    """Integer codes with a scale (and a value at level 0) for each block of a row."""

    bits: int
    block: int
    symmetric: bool
    scale_bits: int = 16

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.block < 1 or self.scale_bits not in (16, 32):
            raise ConversionError(f"The engine does not store weights as {self}.")


Encoding: TypeAlias = FloatEncoding | BlockEncoding


@dataclass(frozen=True)
class VectorRecord:
    """A run of float32 values."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class MatrixRecord:
    """Where the parts of a matrix stand in the weight file; sizes and offsets in bytes."""

    rows: int
    cols: int
    encoding: Encoding
    offset: int
    header_bytes: int
    codes_bytes: int
    scales_bytes: int
    bias_bytes: int

    @property
    def codes_offset(self) -> int:
        return self.offset + self.header_bytes

    @property
    def scales_offset(self) -> int:
        return self.codes_offset + self.codes_bytes

    @property
    def bias_offset(self) -> int:
        return self.scales_offset + self.scales_bytes

    @property
    def end(self) -> int:
        return self.bias_offset + self.bias_bytes

    def codes_row_bytes(self) -> int:
        """Bytes of one row of codes (or of float values)."""
        return self.codes_bytes // self.rows

    def scales_row_bytes(self) -> int:
        """Bytes of one row of scales."""
        return self.scales_bytes // self.rows

    def external(self) -> list[int]:
        """The `external` field of a Convolution: offset, weight, scale and bias bytes, 0."""
        return [
            self.offset,
            self.header_bytes + self.codes_bytes,
            self.scales_bytes,
            self.bias_bytes,
            0,
        ]


def block_header(rows: int, cols: int, bits: int) -> bytes:
    """The header of a matrix stored in blocks."""
    size_type = "<u4" if _wide(rows, cols) else "<u2"
    levels = 1 << bits
    return (
        b"\x02"
        + np.array([rows, cols], dtype=size_type).tobytes()
        + bytes([levels & 255])
        + np.arange(-levels // 2, levels // 2, dtype=np.int8).tobytes()
    )


def matrix_record(
    offset: int, rows: int, cols: int, encoding: Encoding, has_bias: bool
) -> MatrixRecord:
    """Lay out a matrix that begins at `offset`."""
    bias_bytes = 4 * rows if has_bias else 0
    if isinstance(encoding, FloatEncoding):
        nbytes = rows * cols * encoding.bits // 8
        return MatrixRecord(rows, cols, encoding, offset, 0, nbytes, 0, bias_bytes)
    if cols % encoding.block:
        raise ConversionError(
            f"Block {encoding.block} does not divide the width {cols} of a [{rows}, {cols}] matrix."
        )
    if cols * encoding.bits % 8:
        raise ConversionError(f"A row of {cols} {encoding.bits}-bit codes is no whole byte.")
    per_block = 1 if encoding.symmetric else 2
    scales = rows * (cols // encoding.block) * per_block * encoding.scale_bits // 8
    header = len(block_header(rows, cols, encoding.bits))
    codes = rows * cols * encoding.bits // 8
    return MatrixRecord(rows, cols, encoding, offset, header, codes, scales, bias_bytes)


def quantization_parameter(record: MatrixRecord) -> dict[str, Any]:
    """The `quanParameter` of a Convolution that reads this record."""
    encoding = record.encoding
    if isinstance(encoding, FloatEncoding):
        return {"type": 3 if encoding.bits == 16 else 8}
    blocks = record.rows * (record.cols // encoding.block)
    return {
        "type": 1,
        "useInt32": False,
        "quantScale": 1.0,
        "scaleIn": 0.0,
        "scaleOut": 0.0,
        "aMaxOrBits": encoding.bits,
        "aMin": 0 if encoding.symmetric else 1,
        "readType": 0 if encoding.symmetric else blocks,
        "has_scaleInt": False,
        "shapeInt32": _wide(record.rows, record.cols),
        "weightSize": 0,
        "scaleStorage": "FP16" if encoding.scale_bits == 16 else "FP32",
    }


def embedding_entry(record: MatrixRecord) -> dict[str, Any]:
    """The `tie_embeddings` of llm_config.json: embeddings are read out of this record."""
    encoding = record.encoding
    if isinstance(encoding, FloatEncoding):
        if encoding.bits != 16:
            raise ConversionError("The engine reads float embeddings at 16 bits only.")
        quant = {"alpha_offset": 0, "alpha_size": 0, "quant_bit": 16, "quant_block": 0}
    else:
        quant = {
            "alpha_offset": record.scales_offset,
            "alpha_size": record.scales_bytes,
            "quant_bit": encoding.bits,
            "quant_block": encoding.block,
        }
    dtype = "fp32" if isinstance(encoding, BlockEncoding) and encoding.scale_bits == 32 else "fp16"
    return {"weight_offset": record.codes_offset, **quant, "alpha_dtype": dtype}


def pack_codes(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Codes [rows, cols] to the bytes of the file [rows, cols*bits/8]."""
    if bits == 8:
        return codes
    # As pairs of bytes (first, second), little endian: first << 4 | second, without strided access.
    pairs = np.ascontiguousarray(codes).view("<u2")
    packed: npt.NDArray[np.uint8] = ((pairs << 4) | (pairs >> 8)).astype(np.uint8)
    return packed


def pack_scales(
    scale: npt.NDArray[np.float32], zero: npt.NDArray[np.float32] | None, scale_bits: int
) -> npt.NDArray[Any]:
    """Scales [rows, blocks] (and values at level 0) to the values of the file."""
    dtype = np.dtype("<f2") if scale_bits == 16 else np.dtype("<f4")
    if zero is None:
        return scale.astype(dtype)
    pairs = np.empty((*scale.shape, 2), dtype=dtype)
    pairs[..., 0] = zero
    pairs[..., 1] = scale
    return pairs


def _wide(rows: int, cols: int) -> bool:
    return rows > _U16_MAX or cols > _U16_MAX
