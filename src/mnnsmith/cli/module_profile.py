"""What `mnnsmith profile` shows of a converted ONNX model: times by operator and by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnnsmith.cli.console import format_bytes, say, say_json
from mnnsmith.cli.verify_module import one_shape_each

if TYPE_CHECKING:
    from mnnsmith.engine.module_profile import ModuleProfile, Timing
    from mnnsmith.onnx_models.profile import ProfiledModule

_LONGEST = 10
_NAME_WIDTH = 40


def show_module_profile(
    directory: Path,
    input_shape: Sequence[str],
    data: Path | None,
    *,
    json_output: bool,
    **options: Any,
) -> None:
    """Time the model, then write the tables or one JSON object."""
    shapes = one_shape_each(input_shape)
    from mnnsmith import api

    found = api.profile_module(directory, input_shapes=shapes, data=data, **options)
    if json_output:
        say_json(as_json(found))
    else:
        _show(found)


def as_json(found: ProfiledModule) -> dict[str, Any]:
    """The object that `profile --json` writes; docs/cli.md lists its fields."""
    profile = found.profile
    return {
        "file": str(profile.path),
        "shapes": {name: list(shape) for name, shape in profile.shapes.items()},
        "threads": profile.threads,
        "precision": profile.precision,
        "memory": profile.memory,
        "run": _timing(profile.plain),
        "run_on_one_thread": None if profile.one_thread is None else _timing(profile.one_thread),
        "operators_s": profile.operators_s,
        "memory_bytes": profile.memory_bytes,
        "peak_rss_bytes": profile.peak_rss_bytes,
        "approximate_gelu": list(profile.approximate_gelu),
        "kinds": [
            {
                "kind": one.kind,
                "count": one.count,
                "seconds": one.seconds,
                "share": profile.share(one.seconds),
                "gflop_per_s": one.gflop_per_s,
            }
            for one in profile.kinds()
        ],
        "operators": [
            {
                "name": one.name,
                "kind": one.kind,
                "shape": list(one.shape),
                "share": profile.share(one.timing.median_s),
                "gflop_per_s": one.gflop_per_s,
                **_timing(one.timing),
            }
            for one in profile.operators
        ],
        "advice": list(found.advice),
    }


def _timing(timing: Timing) -> Mapping[str, float]:
    low, high = timing.quartiles_s
    return {
        "median_s": timing.median_s,
        "first_quartile_s": low,
        "third_quartile_s": high,
        "repeats": len(timing.times_s),
    }


def _show(found: ProfiledModule) -> None:
    profile = found.profile
    shapes = ", ".join(f"{name} {_shape(shape)}" for name, shape in profile.shapes.items())
    say(f"{profile.path} on {shapes}")
    say(f"  {_range(profile.plain)} a run on {_threads(profile.threads)} "
        f"({len(profile.plain.times_s)} runs, middle half in brackets)")  # fmt: skip
    if profile.one_thread is not None:
        say(f"  {_range(profile.one_thread)} a run on 1 thread")
    memory = format_bytes(profile.peak_rss_bytes)
    if profile.memory_bytes is not None:
        memory = f"{format_bytes(profile.memory_bytes)} of weights and buffers; process {memory}"
    say(f"  memory: {memory}")
    if profile.operators:
        _show_tables(profile)
    for line in found.advice:
        say(f"* {line}")


def _show_tables(profile: ModuleProfile) -> None:
    say(f"  {1e3 * profile.operators_s:.3f} ms in all operators, each timed by itself")
    say()
    say(f"  {'kind':<24}{'count':>6}{'ms':>10}{'share':>8}{'GFLOP/s':>10}")
    for kind in profile.kinds():
        say(f"  {kind.kind:<24}{kind.count:>6}{1e3 * kind.seconds:>10.3f}"
            f"{profile.share(kind.seconds):>8.1%}{_rate(kind.gflop_per_s):>10}")  # fmt: skip
    say()
    say(f"  {'longest operators':<{_NAME_WIDTH}}  {'kind':<20}{'ms':>9}{'share':>8}{'GFLOP/s':>10}"
        "  output")  # fmt: skip
    for one in profile.longest(_LONGEST):
        # The end of a name tells more than its beginning.
        name = one.name if len(one.name) <= _NAME_WIDTH else "…" + one.name[1 - _NAME_WIDTH :]
        say(f"  {name:<{_NAME_WIDTH}}  {one.kind:<20}{1e3 * one.timing.median_s:>9.3f}"
            f"{profile.share(one.timing.median_s):>8.1%}{_rate(one.gflop_per_s):>10}"
            f"  {_shape(one.shape)}")  # fmt: skip
    say()


def _range(timing: Timing) -> str:
    low, high = timing.quartiles_s
    return f"{1e3 * timing.median_s:.3f} ms [{1e3 * low:.3f}-{1e3 * high:.3f}]"


def _rate(gflop_per_s: float | None) -> str:
    return "" if gflop_per_s is None else f"{gflop_per_s:.1f}"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape) or "one value"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
