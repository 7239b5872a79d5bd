"""Round to nearest against an oracle in exact arithmetic, one weight at a time."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from mnnsmith.quant.round_to_nearest import (
    NotRepresentableError,
    Quantized,
    ScaleError,
    round_to_nearest,
    to_float16,
    to_float32,
)

STORED = {16: np.float16, 32: np.float32}


def oracle_scale(block: np.ndarray, bits: int, symmetric: bool, kind: type) -> tuple[float, float]:
    """Scale and the value at level 0 of one block, rounded as they are stored."""
    low, high = np.float32(block.min()), np.float32(block.max())
    levels = 2**bits
    if symmetric:
        return float(kind(max(abs(low), abs(high)) / np.float32(levels // 2 - 1))), 0.0
    scale = kind(np.float32(high - low) / np.float32(levels - 1))
    zero = kind(np.float32(low + np.float32(levels // 2) * np.float32(scale)))
    return float(scale), float(zero)


def check(weights: np.ndarray, bits: int, block: int, symmetric: bool, scale_bits: int) -> None:
    q = round_to_nearest(
        weights.copy(), bits=bits, block=block, symmetric=symmetric, scale_bits=scale_bits
    )
    rows, cols = weights.shape
    assert q.codes.dtype == np.uint8 and q.codes.shape == weights.shape
    assert q.scale.shape == (rows, cols // block) and (q.zero is None) == symmetric
    half, lowest, highest = 2 ** (bits - 1), int(symmetric), 2**bits - 1
    ties = 0
    for r in range(rows):
        for b in range(cols // block):
            part = weights[r, b * block : (b + 1) * block]
            scale, zero = oracle_scale(part, bits, symmetric, STORED[scale_bits])
            assert q.scale[r, b] == scale
            assert symmetric or q.zero[r, b] == zero
            for c, value in enumerate(part):
                code = int(q.codes[r, b * block + c])
                if scale == 0:
                    assert code == half
                    continue
                exact = (Fraction(float(value)) - Fraction(zero)) / Fraction(scale) + half
                best = min(max(int((exact + Fraction(1, 2)).__floor__()), lowest), highest)
                # Between two levels either is right up to the rounding of float32.
                tie = abs(exact - exact.__floor__() - Fraction(1, 2)) < Fraction(1, 5000)
                ties += tie
                assert code == best or (tie and abs(code - best) == 1), (r, b, c, float(exact))
    assert ties <= max(8, weights.size // 100)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("block", "scale_bits"), [(32, 16), (64, 32), (96, 16)])
def test_against_exact_arithmetic(bits: int, symmetric: bool, block: int, scale_bits: int) -> None:
    random = np.random.default_rng(bits + block)
    weights = random.standard_normal((6, 192)).astype(np.float32)
    weights[1] *= 1e-3
    weights[2] = np.abs(weights[2]) + 3
    weights[3, 7] = 500
    weights[4] = -2.5
    weights[5] = 0
    check(weights, bits, block, symmetric, scale_bits)


@pytest.mark.parametrize("scale", [5e-8, 1e-8, 1e-10, 1e-38, 1e-41, 0.0])
@pytest.mark.parametrize("scale_bits", [16, 32])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_smallest_weights(scale: float, scale_bits: int, symmetric: bool) -> None:
    """Where a scale vanishes the values are at most the block's own range off."""
    weights = (np.linspace(-1, 1, 64, dtype=np.float32) * np.float32(scale)).reshape(2, 32)
    q = round_to_nearest(
        weights.copy(), bits=4, block=32, symmetric=symmetric, scale_bits=scale_bits
    )
    values = decoded(q, 4, 32)
    assert np.isfinite(values).all()
    assert np.abs(values - weights).max() <= np.ptp(weights) + 2**-24 * (scale_bits == 16)


def decoded(q: Quantized, bits: int, block: int) -> np.ndarray:
    level = q.codes.astype(np.float64) - 2 ** (bits - 1)
    zero = 0.0 if q.zero is None else np.repeat(q.zero, block, axis=1)
    return level * np.repeat(q.scale, block, axis=1) + zero


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_error_is_at_most_half_a_step(bits: int, symmetric: bool) -> None:
    weights = np.random.default_rng(1).uniform(-1, 1, (64, 256)).astype(np.float32)
    q = round_to_nearest(weights.copy(), bits=bits, block=64, symmetric=symmetric, scale_bits=32)
    step = np.repeat(q.scale, 64, axis=1)
    assert (np.abs(decoded(q, bits, 64) - weights) <= step * 0.50001).all()
    if symmetric:
        # Zero is a level, and the lowest code is not used.
        assert q.codes.min() >= 1
        zeros = round_to_nearest(
            np.where(weights > 0, weights, 0).astype(np.float32),
            bits=bits, block=64, symmetric=True, scale_bits=16,
        )  # fmt: skip
        assert (decoded(zeros, bits, 64)[weights <= 0] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 40, 191])
@pytest.mark.parametrize("symmetric", [False, True])
def test_weights_that_are_no_numbers(bad: float, place: int, symmetric: bool) -> None:
    weights = np.ones((1, 192), np.float32)
    weights[0, place] = bad
    with pytest.raises(NotRepresentableError, match="not finite"):
        round_to_nearest(weights, bits=4, block=32, symmetric=symmetric, scale_bits=16)


def test_scales_beyond_fp16() -> None:
    weights = np.random.default_rng(2).standard_normal((1, 32)).astype(np.float32) * 1_000_000
    for symmetric in (False, True):
        with pytest.raises(NotRepresentableError, match="overflows fp16; store scales in fp32"):
            round_to_nearest(weights.copy(), bits=4, block=32, symmetric=symmetric, scale_bits=16)
        check(weights, 4, 32, symmetric, 32)
    # The scale fits, the value at level 0 does not.
    high = np.linspace(70_000, 70_100, 32, dtype=np.float32).reshape(1, 32)
    with pytest.raises(NotRepresentableError, match="overflows fp16"):
        round_to_nearest(high, bits=8, block=32, symmetric=False, scale_bits=16)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_below_fp16(bits: int, symmetric: bool) -> None:
    """Weights that fp16 holds well and whose scale it rounds away."""
    weights = np.random.default_rng(3).standard_normal((4, 128)).astype(np.float32) * 1e-7
    options = {"bits": bits, "block": 32, "symmetric": symmetric}
    with pytest.raises(ScaleError, match=r"rounded to fp16.*store scales in fp32"):
        round_to_nearest(weights.copy(), scale_bits=16, **options)  # type: ignore[arg-type]
    q = round_to_nearest(weights.copy(), scale_bits=32, **options)  # type: ignore[arg-type]
    step = np.repeat(q.scale, 32, axis=1)
    assert (np.abs(decoded(q, bits, 32) - weights) <= step * 0.50001).all()


def test_zero_points_too_coarse_for_fp16() -> None:
    weights = 10 + 0.01 * np.random.default_rng(4).uniform(-1, 1, (4, 128)).astype(np.float32)
    with pytest.raises(ScaleError, match=r"from 9.99\d* to 10.0"):
        round_to_nearest(weights.copy(), bits=8, block=64, symmetric=False, scale_bits=16)
    q = round_to_nearest(weights.copy(), bits=8, block=64, symmetric=False, scale_bits=32)
    assert np.abs(decoded(q, 8, 64) - weights).max() < 1e-4
    # Symmetric, the step is 0.08: there is nothing to lose.
    round_to_nearest(weights.copy(), bits=8, block=64, symmetric=True, scale_bits=16)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_few_blocks_of_tiny_or_constant_weights_are_fine(bits: int, symmetric: bool) -> None:
    """Their error is far below that of the blocks beside them, or as in fp16."""
    weights = np.random.default_rng(5).standard_normal((16, 128)).astype(np.float32) * 0.02
    weights[0] *= 1e-5
    weights[1] = 0
    weights[2] = 0.017
    weights[3] = 0.3 + 1e-5 * weights[4]
    q = round_to_nearest(weights.copy(), bits=bits, block=32, symmetric=symmetric, scale_bits=16)
    error = np.abs(decoded(q, bits, 32) - weights)
    assert error[0].max() <= 2 * np.abs(weights[0]).max() < 2e-6
    assert error[1].max() == 0
    if not symmetric:
        assert error[2].max() <= 0.017 * 2**-11 and error[3].max() <= 0.3 * 2**-10
    # Alone, too: a constant block is kept as well as fp16 keeps it.
    round_to_nearest(weights[1:4].copy(), bits=bits, block=32, symmetric=symmetric, scale_bits=16)


def test_floats() -> None:
    weights = np.array([[65504, -65504, 6e-8, 0, 1.0009765625]], np.float32)
    np.testing.assert_array_equal(to_float16(weights), weights.astype(np.float16))
    assert to_float32(weights) is weights
    # The largest that still rounds to 65504, and the least that does not.
    assert to_float16(np.array([[65519.996]], np.float32))[0, 0] == 65504
    with pytest.raises(NotRepresentableError, match=r"a weight of 65520 is beyond the range"):
        to_float16(np.array([[65520]], np.float32))
    for bad in (np.nan, np.inf):
        for convert in (to_float16, to_float32):
            with pytest.raises(NotRepresentableError, match="not finite"):
                convert(np.array([[1, bad]], np.float32))
