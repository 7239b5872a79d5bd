"""How far what the engine gives is from what the original gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
# Outputs that are all smaller count as of this magnitude: the tail of a sigmoid, say, holds nothing
# but the rounding of what came before.
_LEAST_SCALE = 1e-2


def difference(found: Array, expected: Array) -> float:
    """The largest difference, as a share of the largest magnitude in `expected`.

    Infinite where shapes differ, where integers or truth values differ at all, or where the one
    has an infinity or no number and the other has not.
    """
    if found.shape != expected.shape:
        return float("inf")
    if expected.dtype.kind not in "f":
        return 0.0 if np.array_equal(found.astype(np.float64), _wide(expected)) else float("inf")
    wide, reference = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(reference)
    # float32 has infinity where the reference, in float64, has a large number.
    alike = (wide == reference) | (np.isnan(wide) & np.isnan(reference))
    same = np.where(finite, np.isfinite(wide), alike)
    if not same.all():
        return float("inf")
    if not finite.any():
        return 0.0
    scale = max(_LEAST_SCALE, float(np.abs(reference[finite]).max()))
    largest = float(np.abs(wide[finite] - reference[finite]).max())
    return largest / scale


def _wide(array: Array) -> npt.NDArray[np.float64]:
    return array.astype(np.float64)
