"""Decoders of GGUF's block formats, in numpy: bytes to float32, or to integer codes and scales.

A block holds 32 elements (Q4_0 to Q8_0) or 256 (the K formats) with their scales; its layout is
that of ggml (ggml-common.h).  A K block of 256 has sub-blocks of 16 or 32 with integer scales of
their own, relative to the scale of the block, which is an fp16 number.  The order of the float32
operations is that of ggml, so that the results are equal to its own bit for bit.

The arrays are worked on in slices that stay in the cache: about 2 GB of output a second on one
core, five to twenty times what expressions over whole arrays give.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_SLICE_ELEMENTS = 1 << 16
_BITS = np.arange(8, dtype=np.uint8)[:, None]
_PAIRS = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
_EIGHT = np.uint8(8)


class NonFiniteScaleError(Exception):
    """A block has a scale that is not a number, or infinite; the caller knows which tensor."""


def decode(type_name: str, blocks: U8, out: F32) -> None:
    """Decode uint8 [blocks, bytes] into float32 [blocks, elements of a block].

    NonFiniteScaleError where a scale is not finite.
    """
    decoder = _DECODERS[type_name]
    step = max(1, _SLICE_ELEMENTS // out.shape[1])
    for start in range(0, len(blocks), step):
        decoder(blocks[start : start + step], out[start : start + step])


def codes_of(type_name: str, blocks: U8) -> tuple[U8, F32, F32 | None]:
    """Levels, scales and offsets of Q4_0, Q4_1 or Q8_0 blocks, as the file has them.

    uint8 [blocks, 32] with the level 0 at 2^(bits-1), float32 [blocks] scales, float32 [blocks]
    values at level 0 (None: symmetric).  For Q4_1, of which `d * q + m` is the value, the latter is
    `m + 8 d` rounded once to float32: exact unless |m| and |d| differ by a factor over 2^10 or so.
    """
    if type_name == "Q8_0":
        return blocks[:, 2:] ^ np.uint8(128), _half(blocks, 0)[:, 0], None
    if type_name == "Q4_0":
        return _nibbles(blocks[:, 2:]), _half(blocks, 0)[:, 0], None
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    return _nibbles(blocks[:, 4:]), scale[:, 0], (minimum + np.float32(8) * scale)[:, 0]


def _half(blocks: U8, at: int) -> F32:
    """The fp16 number at byte `at` of each block: float32 [blocks, 1]."""
    value = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)
    if not np.isfinite(value).all():
        raise NonFiniteScaleError
    return value


def _nibbles(packed: U8) -> U8:
    """uint8 [blocks, 2 n] of [blocks, n]: the low halves, then the high ones."""
    rows, width = packed.shape
    out = np.empty((rows, 2, width), dtype=np.uint8)
    np.bitwise_and(packed, 15, out=out[:, 0])
    np.right_shift(packed, 4, out=out[:, 1])
    return out.reshape(rows, 2 * width)


def _nibbles_by_group(packed: U8, group: int) -> U8:
    """As `_nibbles`, for each group of `group` bytes on its own."""
    rows = len(packed)
    grouped = packed.reshape(rows, -1, group)
    out = np.empty((rows, grouped.shape[1], 2, group), dtype=np.uint8)
    np.bitwise_and(grouped, 15, out=out[:, :, 0])
    np.right_shift(grouped, 4, out=out[:, :, 1])
    return out.reshape(rows, -1)


def _crumbs(packed: U8) -> U8:
    """uint8 [blocks, 4 n] of [blocks, n]: two-bit numbers, in groups of 32 bytes."""
    rows = len(packed)
    out = np.right_shift(packed.reshape(rows, -1, 1, 32), _PAIRS)
    out &= np.uint8(3)
    return out.reshape(rows, -1)


def _single_bits(packed: U8) -> U8:
    """uint8 [blocks, 256] of [blocks, 32]: bit 0 of all bytes, then bit 1, and so on."""
    out = np.right_shift(packed[:, None, :], _BITS)
    out &= np.uint8(1)
    return out.reshape(len(packed), -1)


def _q4_0(blocks: U8, out: F32) -> None:
    levels = _nibbles(blocks[:, 2:])
    np.subtract(levels, _EIGHT, out=levels)
    np.multiply(levels.view(np.int8), _half(blocks, 0), out=out)


def _q4_1(blocks: U8, out: F32) -> None:
    np.multiply(_nibbles(blocks[:, 4:]), _half(blocks, 0), out=out)
    np.add(out, _half(blocks, 2), out=out)


def _fifth_bits(blocks: U8, at: int) -> U8:
    """uint8 [blocks, 32], 0 or 16, from the 32-bit number at byte `at`."""
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    bits <<= np.uint8(4)
    return bits


def _q5_0(blocks: U8, out: F32) -> None:
    levels = _nibbles(blocks[:, 6:])
    levels |= _fifth_bits(blocks, 2)
    np.subtract(levels, np.uint8(16), out=levels)
    np.multiply(levels.view(np.int8), _half(blocks, 0), out=out)


def _q5_1(blocks: U8, out: F32) -> None:
    levels = _nibbles(blocks[:, 8:])
    levels |= _fifth_bits(blocks, 4)
    np.multiply(levels, _half(blocks, 0), out=out)
    np.add(out, _half(blocks, 2), out=out)


def _q8_0(blocks: U8, out: F32) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _scaled(levels: npt.NDArray[np.int8] | U8, scale: F32, minimum: F32 | None, out: F32) -> None:
    """out = scale * levels - minimum, with `scale` and `minimum` per sub-block."""
    rows, groups = scale.shape
    view = out.reshape(rows, groups, -1)
    np.multiply(levels.reshape(view.shape), scale[:, :, None], out=view)
    if minimum is not None:
        np.subtract(view, minimum[:, :, None], out=view)


def _q2_k(blocks: U8, out: F32) -> None:
    scale = _half(blocks, 80) * (blocks[:, :16] & np.uint8(15))
    minimum = _half(blocks, 82) * (blocks[:, :16] >> np.uint8(4))
    _scaled(_crumbs(blocks[:, 16:80]), scale, minimum, out)


def _q3_k(blocks: U8, out: F32) -> None:
    levels = _crumbs(blocks[:, 32:96])
    # The mask's bit is the third bit of the level, and levels run from -4.
    third = _single_bits(blocks[:, :32])
    third <<= np.uint8(2)
    levels |= third
    np.subtract(levels, np.uint8(4), out=levels)
    # Sixteen scales of six bits: low four in bytes 96-103, high two in 104-107.
    high = np.right_shift(blocks[:, None, 104:108], _PAIRS) & np.uint8(3)
    scales = _nibbles(blocks[:, 96:104]) | (high.reshape(-1, 16) << np.uint8(4))
    np.subtract(scales, np.uint8(32), out=scales)
    _scaled(levels.view(np.int8), _half(blocks, 108) * scales.view(np.int8), None, out)


def _six_bit_scales(blocks: U8) -> tuple[F32, F32]:
    """Scales and minima, float32 [blocks, 8] each, of Q4_K and Q5_K.

    Bytes 4-15 hold eight scales and eight minima of six bits: the first four of each whole, the
    last four as a nibble each with their upper two bits above the first four.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    low, top = np.uint8(63), np.uint8(48)
    scales = [first & low, (third & np.uint8(15)) | ((first >> np.uint8(2)) & top)]
    minima = [second & low, (third >> np.uint8(4)) | ((second >> np.uint8(2)) & top)]
    return (
        _half(blocks, 0) * np.concatenate(scales, axis=1),
        _half(blocks, 2) * np.concatenate(minima, axis=1),
    )


def _q4_k(blocks: U8, out: F32) -> None:
    scale, minimum = _six_bit_scales(blocks)
    _scaled(_nibbles_by_group(blocks[:, 16:], 32), scale, minimum, out)


def _q5_k(blocks: U8, out: F32) -> None:
    scale, minimum = _six_bit_scales(blocks)
    levels = _nibbles_by_group(blocks[:, 48:], 32)
    fifth = _single_bits(blocks[:, 16:48])
    fifth <<= np.uint8(4)
    levels |= fifth
    _scaled(levels, scale, minimum, out)


def _q6_k(blocks: U8, out: F32) -> None:
    levels = _nibbles_by_group(blocks[:, :128], 64)
    high = _crumbs(blocks[:, 128:192])
    high <<= np.uint8(4)
    levels |= high
    np.subtract(levels, np.uint8(32), out=levels)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    _scaled(levels.view(np.int8), scale, None, out)


_DECODERS: dict[str, Callable[[U8, F32], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
