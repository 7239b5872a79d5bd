"""Thresholds of a user, and a verification of before: what a change may not make worse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np

from mnnsmith.errors import UsageError
from mnnsmith.verify.measure.intervals import standard_error, t_quantile
from mnnsmith.verify.results import Gate, Interval, StatisticalFigures, Subject, Verification

# Of the one-sided test for a regression: one alarm in twenty is false.
_LEVEL = 0.95
# What a regression must exceed beside the noise; less is of no consequence.
_KL_SHARE, _KL_LEAST = 0.02, 1e-5
_LOSS_LEAST = 1e-3
_TOP1_LEAST = 5e-3
# Two runs of one reference on one text differ by rounding only.
_SAME_PERPLEXITY = 1e-3
_NOT_MEASURED = "not measured: the statistical check gave no figures"
# By how much something is worse, and the lower end of that at 95 %.
_Change: TypeAlias = tuple[float, float]


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
    so.  The baseline, which `require_same_model` holds for one of this model, fails where something
    is worse by more than noise and by more than a trifle:

    - KL: more than 2 % of the old mean and 1e-5; loss: more than 0.001 nats a token (0.1 % of
      perplexity); top-1: more than half a percentage point.  And the one-sided 95 % interval of the
      difference lies above zero.  On the same text, all three are compared block by block.
    - A check that passed then fails now, or did not run.
    - It was judged by another original or reference, so that figures cannot be compared.

    What is lacking is a gate that fails: nothing is raised, as the work is done.
    """
    gates = list(_thresholds(found, thresholds))
    if baseline is not None:
        gates += _baseline(found, baseline)
    return tuple(gates)


def _thresholds(found: Verification, limits: Thresholds) -> Iterator[Gate]:
    figures = found.figures.statistical
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
        yield Gate(name, wanted, _NOT_MEASURED, False)
        return
    passed = found.mean >= limit if least else found.mean <= limit
    yield Gate(name, wanted, _shown(found, limit, form), passed)


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


def _last_part(source: str) -> str:
    """Of a path or hub id: where a checkout lies differs between machines."""
    return source.rstrip("/").rpartition("/")[2]


def _baseline(found: Verification, old: Verification) -> Iterator[Gate]:
    yield _same_checks(found, old)
    before, now = old.figures.statistical, found.figures.statistical
    if before is None:
        return
    if now is not None and (other := _other_original(now, before)):
        yield other
        return
    kl_limit = max(_KL_SHARE * before.kl.mean, _KL_LEAST)
    changes = dict.fromkeys(("KL", "loss", "top-1")) if now is None else _changes(now, before)
    how = "block by block" if now and _paired(now, before) else "other text: intervals only"
    for (what, change), limit in zip(
        changes.items(), (kl_limit, _LOSS_LEAST, _TOP1_LEAST), strict=True
    ):
        yield _regression(what, change, limit, how)


def _same_checks(found: Verification, old: Verification) -> Gate:
    """What stopped being checked is as unknown as if it had failed."""
    status = {check.name: check.status for check in found.checks}
    words = {"failed": "failed", "skipped": "is skipped", None: "did not run"}
    worse = [
        f"{check.name} {words[now]}"
        for check in old.checks
        if check.status == "passed" and (now := status.get(check.name)) != "passed"
    ]
    text = ", ".join(worse) if worse else "they do"
    return Gate("baseline checks", "checks that passed then pass", text, not worse)


def _other_original(now: StatisticalFigures, before: StatisticalFigures) -> Gate | None:
    """A gate that fails where the two were not judged by the same: differences mean nothing."""
    ratio = now.reference_perplexity / before.reference_perplexity
    if not _paired(now, before) or abs(ratio - 1) <= _SAME_PERPLEXITY:
        return None
    return Gate(
        "baseline original",
        f"the original's perplexity is {before.reference_perplexity:.4f}, as it was on this text",
        f"{now.reference_perplexity:.4f}: it is another revision, or {now.reference} computes "
        f"otherwise than {before.reference}; nothing else is compared",
        False,
    )


def _changes(now: StatisticalFigures, before: StatisticalFigures) -> dict[str, _Change | None]:
    """By how much each is worse."""
    if _paired(now, before):
        return {
            "KL": _paired_change(now.block_kl, before.block_kl),
            "loss": _paired_change(now.block_loss_increase, before.block_loss_increase),
            "top-1": _paired_change(before.block_top1, now.block_top1),
        }
    return {
        "KL": _change(now.kl, before.kl),
        "loss": _change(now.loss_increase, before.loss_increase),
        "top-1": _change(before.top1, now.top1),
    }


def _regression(what: str, change: _Change | None, limit: float, how: str) -> Gate:
    name, wanted = f"baseline {what}", f"{what} worse by at most {limit:.3g}, or by noise"
    if change is None:
        return Gate(name, wanted, _NOT_MEASURED, False)
    worse, low = change
    if worse <= 0:
        text = f"better by {-worse:.3g} ({how})" if worse else f"the same ({how})"
    elif low <= 0:
        text = f"worse by {worse:.3g}, which may be noise ({how})"
    else:
        text = f"worse by {worse:.3g}, surely by {low:.3g} ({how})"
    return Gate(name, wanted, text, not (worse > limit and low > 0))


def _paired(new: StatisticalFigures, old: StatisticalFigures) -> bool:
    """Whether block i of one is block i of the other."""
    return (
        new.text_sha256 == old.text_sha256
        and new.block_tokens == old.block_tokens
        and len(new.block_kl) == len(old.block_kl) > 1
        and len(new.block_loss_increase) == len(old.block_loss_increase) > 1
        and len(new.block_top1) == len(old.block_top1) > 1
    )


def _paired_change(new: tuple[float, ...], old: tuple[float, ...]) -> _Change:
    """Mean of the differences of blocks, and the lower end of its one-sided interval."""
    difference = np.asarray(new, dtype=np.float64) - np.asarray(old, dtype=np.float64)
    mean = float(difference.mean())
    quantile = t_quantile(_LEVEL, difference.size - 1)
    return mean, mean - quantile * standard_error(difference)


def _change(high: Interval, low: Interval) -> _Change:
    """Difference of two independent means, and the lower end of its one-sided interval."""
    mean = high.mean - low.mean
    width = NormalDist().inv_cdf(0.975)
    # The half that faces the other interval: one that ends at 0 or 1 is not symmetric.
    error = math.hypot(high.mean - high.low, low.high - low.mean) / width
    return mean, mean - NormalDist().inv_cdf(_LEVEL) * error
