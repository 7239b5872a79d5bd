"""How a prompt is fed where inner values are compared: in all the ways in which an app feeds it.

First a half, or more than a piece of the engine's where there is as much; then most of the rest
after it, then the last tokens one by one: so a fault of the cache, or of positions and masks behind
it, shows in the values of the later tokens.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mnnsmith.engine.engine import PIECE_TOKENS
from mnnsmith.verify.checks.probe import F32, Probe

_STEPS = 6


def cuts(count: int) -> tuple[int, ...]:
    """The positions before which a prompt of `count` tokens is cut."""
    steps = range(max(1, count - _STEPS), count)
    half = count // 2
    beyond = PIECE_TOKENS + _STEPS
    first = max(half, beyond) if count > beyond + _STEPS else half
    return tuple(sorted({first, *steps} - {0}))


def feed(probe: Probe, ids: npt.NDArray[np.int64]) -> dict[str, F32]:
    """Each value of the probe for `ids`, [n, width], from an empty cache."""
    probe.engine.reset()
    places = (0, *cuts(ids.size), ids.size)
    parts = [probe.run(ids[start:end].tolist()) for start, end in pairwise(places)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
