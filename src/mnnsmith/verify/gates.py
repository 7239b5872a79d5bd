"""Thresholds of a user, and a verification of before: what a change may not make worse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from mnnsmith.errors import UsageError
from mnnsmith.verify.intervals import standard_error, t_quantile
from mnnsmith.verify.results import Gate, Interval, StatisticalFigures, Subject, Verification

# Of the one-sided test for a regression: one alarm in twenty is false.
_LEVEL = 0.95
# What a regression must exceed beside the noise; less is of no consequence.
_KL_SHARE, _KL_LEAST = 0.02, 1e-5
_LOSS_LEAST = 1e-3
_TOP1_LEAST = 5e-3
# Two runs of one reference on one text differ by rounding only.
_SAME_PERPLEXITY = 1e-3


@dataclass(frozen=True)
class Thresholds:
    """None where nothing is asked for.

    max_kl: of the mean, nats.  min_top1: a share, 0 .. 1.  max_ppl_increase: relative, 0.02 is two
    percent.  Raises `UsageError` for numbers that cannot be meant.
    """

    max_kl: float | None = None
    min_top1: float | None = None
    max_ppl_increase: float | None = None

    def __post_init__(self) -> None:
        for option, value, most, unit in (
            ("--max-kl", self.max_kl, math.inf, "nats"),
            ("--min-top1", self.min_top1, 1.0, "a share: 0.95 is 95 %"),
            ("--max-ppl-increase", self.max_ppl_increase, math.inf, "relative: 0.02 is 2 %"),
        ):
            if value is not None and not (0 <= value <= most and math.isfinite(value)):
                raise UsageError(f"{option} must be a number from 0 up ({unit}), found {value:g}.")

    @property
    def needs_statistics(self) -> bool:
        limits = (self.max_kl, self.min_top1, self.max_ppl_increase)
        return any(limit is not None for limit in limits)


def judge(
    found: Verification, thresholds: Thresholds, baseline: Verification | None = None
) -> tuple[Gate, ...]:
    """Hold a verification, whose own gates are not looked at, against limits and an older one.

    A threshold is compared with the mean; where the limit lies within the interval, the gate says
    so.  The baseline fails where something is worse by more than noise and by more than a trifle:

    - KL: more than 2 % of the old mean and 1e-5; loss: more than 0.001 nats a token (0.1 % of
      perplexity); top-1: more than half a percentage point.  And the one-sided 95 % interval of the
      difference lies above zero.  On the same text, KL and loss are compared block by block.
    - A check that passed fails now.

    Raises `UsageError` where a gate lacks its figures, or the baseline is of another model.
    """
    gates = list(_thresholds(found, thresholds))
    if baseline is not None:
        require_same_model(found.subject, baseline.subject)
        _require_same_reference(found, baseline)
        gates += _baseline(found, baseline)
    return tuple(gates)


def _thresholds(found: Verification, limits: Thresholds) -> Iterator[Gate]:
    if not limits.needs_statistics:
        return
    figures = _statistics(found, "a threshold")
    kl = top1 = increase = None
    if figures is not None:
        kl, top1, increase = figures.kl, figures.top1, figures.perplexity_increase
    yield from _threshold("max-kl", "KL at most", limits.max_kl, kl, "{:.3g}")
    yield from _threshold("min-top1", "top-1 at least", limits.min_top1, top1, "{:.2%}", least=True)
    limit = limits.max_ppl_increase
    yield from _threshold("max-ppl-increase", "perplexity at most", limit, increase, "{:+.2%}")


def _threshold(
    name: str,
    what: str,
    limit: float | None,
    found: Interval | None,
    form: str,
    *,
    least: bool = False,
) -> Iterator[Gate]:
    """One gate where there is a limit.  least: the mean must not be below it, else not above."""
    if limit is None:
        return
    wanted = f"{what} {form.format(limit)}"
    if found is None:
        yield Gate(name, wanted, "not measured: the statistical check failed", False)
        return
    passed = found.mean >= limit if least else found.mean <= limit
    yield Gate(name, wanted, _shown(found, limit, form), passed)


def _statistics(found: Verification, wanted_by: str) -> StatisticalFigures | None:
    """The figures; None where the check failed to give any."""
    figures = found.figures.statistical
    failed = any(c.name == "statistical" and c.status == "failed" for c in found.checks)
    if figures is None and not failed:
        raise UsageError(
            f"{wanted_by} needs the statistical check, which did not run.",
            "Leave the statistical check in, or the gate out.",
        )
    return figures


def _shown(interval: Interval, limit: float, form: str) -> str:
    mean, low, high = (form.format(x) for x in (interval.mean, interval.low, interval.high))
    unsure = "; the limit is within the noise" if interval.low <= limit <= interval.high else ""
    return f"{mean} (95 %: {low} to {high}{unsure})"


def require_same_model(found: Subject, old: Subject) -> None:
    """See that a baseline is of this very model, whatever its recipe; raises `UsageError`."""
    for what, now, before in (
        ("model type", found.model_type, old.model_type),
        ("source", _last_part(found.source), _last_part(old.source)),
    ):
        if now != before:
            raise UsageError(
                f"the baseline is of another model: {what} {before!r}, here {now!r}.",
                "Give the JSON of an earlier verification of the same model.",
            )


def _require_same_reference(found: Verification, old: Verification) -> None:
    new_figures, old_figures = found.figures.statistical, old.figures.statistical
    if new_figures is None or old_figures is None or not _paired(new_figures, old_figures):
        return
    ratio = new_figures.reference_perplexity / old_figures.reference_perplexity
    if abs(ratio - 1) > _SAME_PERPLEXITY:
        raise UsageError(
            f"the baseline was judged by another original: on the same text its perplexity was "
            f"{old_figures.reference_perplexity:.4f}, here {new_figures.reference_perplexity:.4f}.",
            "Is it the same revision of the model?",
        )


def _last_part(source: str) -> str:
    """Of a path or hub id: where a checkout lies differs between machines."""
    return source.rstrip("/").rpartition("/")[2]


def _baseline(found: Verification, old: Verification) -> Iterator[Gate]:
    passed = {check.name for check in old.checks if check.status == "passed"}
    worse = [c.name for c in found.checks if c.status == "failed" and c.name in passed]
    text = f"{', '.join(worse)} failed" if worse else "none failed"
    yield Gate("baseline", "checks that passed pass", text, not worse)
    old_figures = old.figures.statistical
    if old_figures is None:
        return
    figures = _statistics(found, "the baseline, which has statistics,")
    if figures is None:
        return
    kl_limit = max(_KL_SHARE * old_figures.kl.mean, _KL_LEAST)
    if _paired(figures, old_figures):
        how = "same text, block by block"
        kl = _paired_change(figures.block_kl, old_figures.block_kl)
        loss = _paired_change(figures.block_loss_increase, old_figures.block_loss_increase)
    else:
        how = "other text: intervals only"
        kl = _change(figures.kl, old_figures.kl)
        loss = _change(figures.loss_increase, old_figures.loss_increase)
    top1 = _change(old_figures.top1, figures.top1)
    yield _regression("KL", kl, kl_limit, how)
    yield _regression("loss", loss, _LOSS_LEAST, how)
    yield _regression("top-1", top1, _TOP1_LEAST, "intervals only")


def _regression(what: str, change: tuple[float, float], limit: float, how: str) -> Gate:
    """change: by how much it is worse, and the lower end of that."""
    worse, low = change
    failed = worse > limit and low > 0
    noise = "beyond noise" if low > 0 else "within noise"
    text = f"{worse:+.3g}, at least {low:+.3g} ({how}): {noise}"
    return Gate("baseline", f"{what} worse by at most {limit:.3g}", text, not failed)


def _paired(new: StatisticalFigures, old: StatisticalFigures) -> bool:
    """Whether block i of one is block i of the other."""
    return (
        new.text_sha256 == old.text_sha256
        and new.block_tokens == old.block_tokens
        and len(new.block_kl) == len(old.block_kl) > 1
        and len(new.block_loss_increase) == len(old.block_loss_increase) > 1
    )


def _paired_change(new: tuple[float, ...], old: tuple[float, ...]) -> tuple[float, float]:
    """Mean of the differences of blocks, and the lower end of its one-sided interval."""
    difference = np.asarray(new, dtype=np.float64) - np.asarray(old, dtype=np.float64)
    mean = float(difference.mean())
    quantile = t_quantile(_LEVEL, difference.size - 1)
    return mean, mean - quantile * standard_error(difference)


def _change(high: Interval, low: Interval) -> tuple[float, float]:
    """Difference of two independent means, and the lower end of its one-sided interval."""
    mean = high.mean - low.mean
    width = NormalDist().inv_cdf(0.975)
    # The half that faces the other interval: one that ends at 0 or 1 is not symmetric.
    error = math.hypot(high.mean - high.low, low.high - low.mean) / width
    return mean, mean - NormalDist().inv_cdf(_LEVEL) * error
