"""How far one value of the graph is from the reference's: one figure that no large number hides.

Some models have activations a thousand times as large as the others, in a few channels of a few
tokens (Sun et al. 2024, "massive activations").  A norm over all would see these alone.  So each
token is judged by its own norm, and channels that are larger than most by a factor are judged apart
from the others:

    error = max over the two kinds of channels of
            sqrt(mean over tokens of |actual - reference|^2 / |reference|^2)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mnnsmith.verify.results import ValueDifference

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# A channel with so many times the median channel's RMS is judged apart.
_OUTLIER = 20.0
# A token's norm counts for at least this part of the median token's: of one that all but cancels,
# only rounding is left.
_LEAST = 1e-2
# In place of an infinite error, which JSON cannot hold.
_WORST = 1e30


@dataclass(frozen=True)
class ValueDistance:
    """One value on some tokens.

    token_errors: float64 [n], relative to the token's own norm, the worse of the two kinds of
    channels.  channel_errors: float64 [width], norm over tokens relative to the channel's own.
    """

    error: float
    cosine: float
    max_abs: float
    reference_rms: float
    token_errors: F64
    channel_errors: F64

    @property
    def snr_db(self) -> float:
        """The error in decibels; equal values have 300, beyond what float64 could tell."""
        return -20 * math.log10(max(self.error, 1e-15))

    def figures(
        self, name: str, layer: int | None, kind: str, allowed: float | None
    ) -> ValueDifference:
        """As results hold it."""
        return ValueDifference(
            name, layer, kind, self.cosine, self.error, self.snr_db, self.max_abs,
            self.reference_rms, allowed,
        )  # fmt: skip


def compare(actual: F32, reference: F32) -> ValueDistance:
    """Compare float32 [n, width]; the reference is finite."""
    r = reference.astype(np.float64)
    d = actual.astype(np.float64) - r
    if not np.isfinite(d).all():
        return _broken(d, r)
    kinds = _kinds(r)
    errors = np.stack([_token_errors(d[:, part], r[:, part]) for part in kinds])
    product = (r * (r + d)).sum(-1)
    norms = np.linalg.norm(r, axis=-1) * np.linalg.norm(r + d, axis=-1)
    # Two vectors of zeros point alike.
    cosines = np.where(norms > 0, product / np.where(norms > 0, norms, 1), (d == 0).all(-1))
    return ValueDistance(
        error=float(np.sqrt((errors**2).mean(-1)).max()),
        cosine=float(min(cosines.min(), 1.0)),
        max_abs=float(np.abs(d).max()),
        reference_rms=float(np.sqrt((r**2).mean())),
        token_errors=errors.max(0),
        channel_errors=_relative(np.linalg.norm(d, axis=0), np.linalg.norm(r, axis=0)),
    )


def _broken(d: F64, r: F64) -> ValueDistance:
    """Where the bundle gave what is no number."""
    bad = ~np.isfinite(d)
    return ValueDistance(
        error=_WORST,
        cosine=-1.0,
        max_abs=_WORST,
        reference_rms=float(np.sqrt((r**2).mean())),
        token_errors=np.where(bad.any(1), _WORST, 0.0),
        channel_errors=np.where(bad.any(0), _WORST, 0.0),
    )


def _kinds(r: F64) -> list[Flags]:
    """Which channels are ordinary, and which are large; a kind without channels is left out."""
    rms = np.sqrt((r**2).mean(0))
    large = rms > _OUTLIER * np.median(rms)
    return [part for part in (~large, large) if part.any()]


def _token_errors(d: F64, r: F64) -> F64:
    return _relative(np.linalg.norm(d, axis=-1), np.linalg.norm(r, axis=-1))


def _relative(differences: F64, norms: F64) -> F64:
    floor = np.maximum(norms, _LEAST * np.median(norms))
    zero = floor == 0
    relative: F64 = np.where(
        zero, np.where(differences > 0, _WORST, 0.0), differences / np.where(zero, 1, floor)
    )
    return relative


def merged(parts: Sequence[ValueDistance]) -> ValueDistance:
    """One value on several texts: every token counts alike, channels by the worst text."""
    counts = [part.token_errors.size for part in parts]
    return ValueDistance(
        error=_root_mean_square([part.error for part in parts], counts),
        cosine=min(part.cosine for part in parts),
        max_abs=max(part.max_abs for part in parts),
        reference_rms=_root_mean_square([part.reference_rms for part in parts], counts),
        token_errors=np.concatenate([part.token_errors for part in parts]),
        channel_errors=np.max([part.channel_errors for part in parts], axis=0),
    )


def _root_mean_square(values: Sequence[float], counts: Sequence[int]) -> float:
    return float(np.sqrt(np.average(np.square(values), weights=counts)))
