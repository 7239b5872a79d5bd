"""How far one distribution of next tokens is from another: pure functions on rows of logits.

All is computed in float64, a few rows at a time, so that a wide vocabulary costs megabytes.  With
p = softmax(reference's logits) and q = softmax(bundle's logits) of one row, in nats:

    KL(p || q) = sum_v p_v (log p_v - log q_v)         Kullback & Leibler 1951
    loss of target t = -log q_t                        cross-entropy of the token that came
    perplexity = exp(mean loss)                        Jelinek et al. 1977

Of equal logits, the one of the lower token id counts as better, as argmax has it: a bundle that
gives one number for all tokens agrees with nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mnnsmith.verify.results import Histogram

Logits = npt.NDArray[np.floating]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# float64 values of one piece of rows.
_PIECE_VALUES = 1 << 20
# exp of more is no float64.
_MAX_EXPONENT = 700.0
# Two a decade, from what float32 leaves uncertain to what no usable bundle has.
KL_EDGES = tuple(10.0 ** (power / 2) for power in range(-16, 3))


@dataclass(frozen=True)
class RowScores:
    """One number for each row: kl, loss, reference_loss float64 [n] in nats; best, reference_best
    int64 [n], the best tokens' ids; rank int64 [n]: how many tokens the bundle holds for better
    than the reference's best."""

    kl: F64
    loss: F64
    reference_loss: F64
    best: I64
    reference_best: I64
    rank: I64

    @property
    def top1(self) -> Flags:
        """Whether both have the same best token."""
        return np.equal(self.rank, 0)

    @property
    def top5(self) -> Flags:
        """Whether the reference's best token is among the bundle's five best."""
        return np.less(self.rank, 5)


def log_softmax(logits: Logits) -> F64:
    """log of softmax along the last axis, float64; the largest logit is taken out first, so that
    no exponential overflows."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def divergence(logits: Logits, reference: Logits) -> F64:
    """KL(reference || bundle) of each row, float64 [n]; both are finite logits [n, vocabulary].

    Never negative, as rounding could make it where the two are all but equal.
    """
    result = np.empty(len(logits))
    for part in pieces(*reference.shape):
        log_p = log_softmax(reference[part])
        log_q = log_softmax(logits[part])
        result[part] = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    return np.maximum(result, 0.0)


def score_rows(logits: Logits, reference: Logits, targets: I64) -> RowScores:
    """Score rows [n, vocabulary] of finite logits; targets [n]: the tokens that came next."""
    n = len(targets)
    kl, loss, reference_loss = (np.empty(n) for _ in range(3))
    best, reference_best, rank = (np.empty(n, dtype=np.int64) for _ in range(3))
    for part in pieces(*reference.shape):
        log_p, log_q = log_softmax(reference[part]), log_softmax(logits[part])
        row = np.arange(len(log_p))
        kl[part] = (np.exp(log_p) * (log_p - log_q)).sum(-1)
        loss[part] = -log_q[row, targets[part]]
        reference_loss[part] = -log_p[row, targets[part]]
        # Of the logits themselves: a logarithm may round two of them to one number.
        best[part] = logits[part].argmax(-1)
        wanted = reference[part].argmax(-1)
        reference_best[part] = wanted
        rank[part] = _rank(logits[part], wanted)
    return RowScores(np.maximum(kl, 0.0), loss, reference_loss, best, reference_best, rank)


def pieces(rows: int, width: int) -> list[slice]:
    """Ranges of rows, each of a size that float64 work on it stays small."""
    step = max(1, _PIECE_VALUES // max(1, width))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def perplexity(losses: F64) -> float:
    """exp of the mean loss, at most 1e304, where a broken model would overflow."""
    return exponential(float(losses.mean()))


def exponential(x: float) -> float:
    """exp, bounded where float64 would overflow."""
    return math.exp(min(x, _MAX_EXPONENT))


def histogram(values: F64, edges: Sequence[float] = KL_EDGES) -> Histogram:
    """Counts of values between ascending edges; the first and last bin take all beyond."""
    inside = np.clip(values, edges[0], edges[-1])
    counts, _ = np.histogram(inside, bins=np.asarray(edges))
    return Histogram(tuple(edges), tuple(int(count) for count in counts))


def _rank(logits: Logits, token: I64) -> I64:
    """How many tokens of each row are better than the given one."""
    own = np.take_along_axis(logits, token[:, None], -1)
    lower = np.arange(logits.shape[-1]) < token[:, None]
    better: I64 = ((logits > own) | ((logits == own) & lower)).sum(-1)
    return better
