"""Round-to-nearest quantization in blocks along the input width, as a pure function on arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


class NotRepresentableError(ValueError):
    """A weight, or the scale of a block, that the target type cannot hold."""


class ScaleError(NotRepresentableError):
    """A block whose scale or zero point fp16 cannot hold; fp32 can."""


# fp16: the smallest number above zero, and the distance of neighbours relative to their size.
_FP16_LEAST = np.float32(2.0**-24)
_FP16_EPSILON = np.float32(2.0**-10)


@dataclass(frozen=True)
class Quantized:
    """Codes and scales: value = scale * (code - 2^(bits-1)) + zero (zero is None if symmetric).

    codes: uint8 [rows, cols]; scale, zero: float32 [rows, cols / block], already rounded to the
    precision they are stored at.
    """

    codes: U8
    scale: F32
    zero: F32 | None


def round_to_nearest(
    weights: F32, *, bits: int, block: int, symmetric: bool, scale_bits: int
) -> Quantized:
    """Quantize float32 [rows, cols]; `block` divides cols.

    Asymmetric blocks span [min, max] with 2^bits levels; symmetric ones [-a, a] with 2^bits - 1, so
    that zero is a level.  Scale and zero are rounded to the stored precision first, and codes
    chosen for the rounded values.  Overwrites `weights`.

    Raises `NotRepresentableError` if a weight is not finite, `ScaleError` if a scale overflows its
    type, or is so small (a zero point so coarse) that rounding it costs more than a step.
    """
    rows, cols = weights.shape
    flat = weights.reshape(-1)
    x = flat.reshape(-1, block)
    half = 1 << (bits - 1)
    stored = np.float16 if scale_bits == 16 else np.float32
    zero: F32 | None = None
    with np.errstate(over="ignore", invalid="ignore"):
        # Twice as fast as min(axis=1) over rows as short as a block.
        starts = np.arange(0, x.size, block)
        low, high = np.minimum.reduceat(flat, starts), np.maximum.reduceat(flat, starts)
        if symmetric:
            step = np.maximum(high, -low) / np.float32(half - 1)
        else:
            step = (high - low) / np.float32(2 * half - 1)
        scale = step.astype(stored).astype(np.float32)
        if not symmetric:
            zero = (low + np.float32(half) * scale).astype(stored).astype(np.float32)
    _check(low, high, scale, zero)
    _check_reach(low, high, step, scale, zero, half)
    # Below the normal numbers the inverse overflows; such a block is its zero point throughout.
    usable = scale >= np.finfo(np.float32).tiny
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=usable)
    if zero is not None:
        x -= zero[:, None]
    x *= inverse[:, None]
    # Rounding is the truncation of the cast below: all values are above zero by then.
    x += np.float32(half + 0.5)
    lowest = 1.0 if symmetric else 0.0
    np.clip(x, np.float32(lowest), np.float32(2 * half - 0.5), out=x)
    shape = (rows, cols // block)
    return Quantized(
        x.astype(np.uint8).reshape(rows, cols),
        scale.reshape(shape),
        None if zero is None else zero.reshape(shape),
    )


def to_float16(weights: F32) -> npt.NDArray[np.float16]:
    """fp16, refusing what it cannot hold."""
    with np.errstate(over="ignore"):
        half = weights.astype(np.float16)
    if not np.isfinite(half).all():
        _check_finite(weights)
        raise NotRepresentableError(
            f"a weight of {np.abs(weights).max():.6g} is beyond the range of fp16 (65504)"
        )
    return half


def to_float32(weights: F32) -> F32:
    """The weights themselves, refused if not finite."""
    _check_finite(weights)
    return weights


def _check(low: F32, high: F32, scale: F32, zero: F32 | None) -> None:
    if np.isfinite(scale).all() and (zero is None or np.isfinite(zero).all()):
        return
    _check_finite(low)
    _check_finite(high)
    raise ScaleError("the scale of a block overflows fp16; store scales in fp32")


def _check_reach(low: F32, high: F32, step: F32, scale: F32, zero: F32 | None, half: int) -> None:
    """Refuse blocks whose rounded scale and zero point leave weights far out of the levels' reach.

    By themselves blocks of half a step's error may be a whole step off.  Beyond that it matters if
    the error is more than most blocks of these rows have anyway, and fp16 itself would hold the
    weights better: a constant block, or one of weights that are zero in fp16, is as good as there.
    """
    if zero is None:
        reach = np.float32(half - 1) * scale
        size = spread = np.maximum(high, -low)
        beyond = size - reach
    else:
        size, spread = np.maximum(high, -low), high - low
        beyond = np.maximum(
            zero - np.float32(half) * scale - low, high - zero - np.float32(half - 1) * scale
        )
    lost = (beyond > step) & (size > _FP16_LEAST) & (spread > _FP16_EPSILON * size)
    if not lost.any():
        return
    worst = int(np.argmax(np.where(lost, beyond, 0)))
    if beyond[worst] > np.median(step):
        raise ScaleError(
            f"a block of weights from {low[worst]:.6g} to {high[worst]:.6g} has steps of "
            f"{step[worst]:.3g}; rounded to fp16, its scale and offset put weights "
            f"{beyond[worst]:.3g} off; store scales in fp32"
        )


def _check_finite(values: F32) -> None:
    if not np.isfinite(values).all():
        raise NotRepresentableError("it holds values that are not finite (NaN or infinity)")
