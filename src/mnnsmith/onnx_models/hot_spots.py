"""Where a model's time goes that it need not: advice from what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from mnnsmith.engine.module_profile import ModuleProfile, OperatorProfile

# Kinds that compute nothing: slices, transposes, concatenations, changes of layout.
_MOVING = ("Raster", "ConvertTensor")
_NAMED = 3
# From here on a thing is worth a line.
_MOVING_SHARE = 0.15
_UNARY_SHARE = 0.25
_OPERATOR_SHARE = 0.1
_SMALL_S = 10e-6
_SMALL_SHARE = 0.3
_SLOW_RATIO = 0.2
_THREADS_GAIN = 1.15


def advice(profile: ModuleProfile) -> tuple[str, ...]:
    """Sentences, the more general first; none where nothing stands out."""
    lines = [*_threads(profile), *_gelu(profile)]
    if not profile.operators:
        lines.append(
            "The model has branches, loops or int8 inputs: the engine times such a model as a "
            "whole only, so there are no times by operator."
        )
        return tuple(lines)
    return (
        *lines, *_moving(profile), *_unary(profile), *_small(profile), *_slow(profile),
    )  # fmt: skip


def _threads(profile: ModuleProfile) -> list[str]:
    if profile.one_thread is None:
        return []
    many, one = profile.plain.median_s, profile.one_thread.median_s
    if one > _THREADS_GAIN * many:
        return []
    return [
        f"{profile.threads} threads take {_ms(many)}, one takes {_ms(one)}: unless something else "
        "kept the processors busy, use one thread, and run several requests side by side."
    ]


def _gelu(profile: ModuleProfile) -> list[str]:
    names = profile.approximate_gelu
    if not names:
        return []
    return [
        f"GELU is computed by tanh: {_list(names)}. If the original has the exact form, results "
        "differ by up to some thousandths; `mnnsmith convert` keeps what the original has."
    ]


def _moving(profile: ModuleProfile) -> list[str]:
    steps = [one for one in profile.operators if one.kind in _MOVING]
    share = _share(profile, steps)
    if share < _MOVING_SHARE:
        return []
    return [
        f"{share:.0%} of the time moves data and computes nothing: transposes, slices, "
        f"concatenations, changes of layout. The longest are {_longest(steps)}. Fewer transposes "
        "around convolutions in the original, or constant shapes, avoid them."
    ]


def _unary(profile: ModuleProfile) -> list[str]:
    steps = [one for one in profile.operators if one.kind == "UnaryOp"]
    share = _share(profile, steps)
    if share < _UNARY_SHARE:
        return []
    return [
        f"{share:.0%} of the time computes functions value by value (GELU, sigmoid and such): "
        f"{_longest(steps)}. A cheaper activation in the original helps more than quantization."
    ]


def _small(profile: ModuleProfile) -> list[str]:
    steps = [one for one in profile.operators if one.timing.median_s < _SMALL_S]
    share = _share(profile, steps)
    if share < _SMALL_SHARE:
        return []
    return [
        f"{len(steps)} of {len(profile.operators)} operators take less than "
        f"{_SMALL_S * 1e6:.0f} µs, {share:.0%} of the time together: the work is small against the "
        "cost of a call. Run several inputs as one batch."
    ]


def _slow(profile: ModuleProfile) -> list[str]:
    """Products far slower than others of the same model."""
    counted = [one for one in profile.operators if one.gflop_per_s is not None]
    heavy = [one for one in counted if _share(profile, [one]) >= _OPERATOR_SHARE]
    best = max((one.gflop_per_s or 0.0 for one in counted), default=0.0)
    slow = [one for one in heavy if (one.gflop_per_s or 0.0) < _SLOW_RATIO * best]
    return [
        f"{one.name} ({one.kind}, output {_shape(one)}) takes {_share(profile, [one]):.0%} at "
        f"{one.gflop_per_s:.1f} GFLOP/s, where another reaches {best:.1f}: most often few rows or "
        "channels, which leave the processor waiting for memory. A larger batch may help."
        for one in slow[:_NAMED]
    ]


def _share(profile: ModuleProfile, steps: Sequence[OperatorProfile]) -> float:
    return profile.share(sum(one.timing.median_s for one in steps))


def _longest(steps: Sequence[OperatorProfile]) -> str:
    ordered = sorted(steps, key=lambda one: one.timing.median_s, reverse=True)
    return _list([one.name for one in ordered])


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (" and others" if len(names) > _NAMED else "")


def _shape(one: OperatorProfile) -> str:
    return "x".join(str(size) for size in one.shape) or "one value"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
