"""Means with 95 % confidence intervals, from numbers that are correlated with their neighbours.

Neighbouring tokens are alike (a hard sentence is hard throughout), so the usual standard error of
n tokens would be too small.  Means over blocks of neighbours, longer than the correlation reaches,
are nearly independent; their spread gives the standard error of the whole (the method of batch
means, Conway 1963).  Assumed: all blocks are of one size, and their means are drawn independently.
Texts of several kinds make that spread larger than it need be: intervals err on the wide side.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mnnsmith.verify.results import Interval

F64: TypeAlias = npt.NDArray[np.float64]

# A two-sided interval of 95 %.
_LEVEL = 0.975
MIN_BLOCKS = 2


def block_means(values: npt.NDArray[np.floating | np.bool_], size: int) -> F64:
    """Means of `size` neighbours each, float64; `values` [n * size] are whole blocks."""
    means: F64 = values.astype(np.float64).reshape(-1, size).mean(1)
    return means


def standard_error(means: F64) -> float:
    """Of the mean of at least two block means."""
    return float(means.std(ddof=1) / math.sqrt(len(means)))


def mean_interval(means: F64, *, low: float = -math.inf) -> Interval:
    """Mean of block means with its interval by Student's t.  low: no mean can be below it."""
    mean = float(means.mean())
    half = t_quantile(_LEVEL, len(means) - 1) * standard_error(means)
    return Interval(mean, max(low, mean - half), mean + half)


def rate_interval(means: F64, size: int) -> Interval:
    """A share of tokens, such as top-1, with an interval that stays within 0 .. 1.

    Wilson's interval (1927) at the effective number of tokens p (1 - p) / SE^2, at most their true
    number (Korn & Graubard 1998): where all tokens agree it still does not promise that all others
    would.
    """
    p, tokens = float(means.mean()), len(means) * size
    error = standard_error(means)
    effective = min(tokens, p * (1 - p) / error**2) if error else tokens
    z = t_quantile(_LEVEL, len(means) - 1)
    # A mean of 0 or 1 has no spread; rounding could make the product negative.
    effective = max(effective, 1.0)
    scale = 1 + z**2 / effective
    centre = (p + z**2 / (2 * effective)) / scale
    half = z / scale * math.sqrt(max(p * (1 - p), 0) / effective + z**2 / (4 * effective**2))
    return Interval(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))


def t_quantile(level: float, freedom: int) -> float:
    """Student's t: exact for one and two degrees of freedom, else within 0.5 %.

    Abramowitz & Stegun, Handbook of Mathematical Functions, 26.7.5; 26.7.3-4 for the exact ones.
    """
    if freedom == 1:
        return math.tan(math.pi * (level - 0.5))
    if freedom == 2:
        a = 2 * level - 1
        return a * math.sqrt(2 / (1 - a * a))
    z, n = NormalDist().inv_cdf(level), freedom
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / float(n) ** (i + 1) for i, term in enumerate(terms))
