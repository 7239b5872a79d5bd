"""What a model's run takes, operator by operator."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mnnsmith.engine.module import Feeds, Module
from mnnsmith.errors import UsageError

# Kinds for which the engine counts products, each of them a multiplication and an addition; for
# other kinds it counts elements (`onComputeFlops` in source/shape of MNN 3.6.1).
PRODUCT_KINDS = frozenset({
    "Convolution", "ConvolutionDepthwise", "ConvInt8", "DepthwiseConvInt8",
    "Deconvolution", "DeconvolutionDepthwise", "MatMul", "BatchMatMul",
})  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of repeated runs."""

    times_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """The first and the third quartile."""
        if len(self.times_s) == 1:
            return self.times_s[0], self.times_s[0]
        low, _, high = statistics.quantiles(self.times_s, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True)
class OperatorProfile:
    """One step of a run: an operator of the graph, or a part that the engine makes of it.

    kind: the engine's name of its type.  flop: floating-point operations, None where the engine
    does not count them.  shape: of its first output.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    flop: float | None
    timing: Timing

    @property
    def gflop_per_s(self) -> float | None:
        return self.flop / self.timing.median_s / 1e9 if self.flop is not None else None


@dataclass(frozen=True)
class KindProfile:
    """All steps of one kind.  seconds: the sum of their medians."""

    kind: str
    count: int
    seconds: float
    flop: float | None

    @property
    def gflop_per_s(self) -> float | None:
        return self.flop / self.seconds / 1e9 if self.flop is not None else None


@dataclass(frozen=True)
class ModuleProfile:
    """What `profile` measured.

    plain: whole runs in one go.  one_thread: the same on one thread, None where one was asked for.
    operators: the steps in the order of the run, empty for a model with branches, loops or int8
    inputs, which the engine times as a whole only.
    memory_bytes: weights and work buffers by the engine's account, None likewise.
    peak_rss_bytes: the most memory that the child process held in the whole runs.
    approximate_gelu: operators that compute GELU by tanh.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    threads: int
    precision: str
    memory: str
    plain: Timing
    one_thread: Timing | None
    operators: tuple[OperatorProfile, ...]
    memory_bytes: int | None
    peak_rss_bytes: int
    approximate_gelu: tuple[str, ...]

    @property
    def operators_s(self) -> float:
        """The sum of all steps' medians."""
        return sum(one.timing.median_s for one in self.operators)

    def share(self, seconds: float) -> float:
        """Of the time of all steps."""
        return seconds / self.operators_s

    def kinds(self) -> tuple[KindProfile, ...]:
        """The longest first."""
        groups: dict[str, list[OperatorProfile]] = {}
        for one in self.operators:
            groups.setdefault(one.kind, []).append(one)
        result = [
            KindProfile(
                kind,
                len(group),
                sum(one.timing.median_s for one in group),
                sum(one.flop or 0 for one in group) if kind in PRODUCT_KINDS else None,
            )
            for kind, group in groups.items()
        ]
        return tuple(sorted(result, key=lambda one: one.seconds, reverse=True))

    def longest(self, count: int) -> tuple[OperatorProfile, ...]:
        ordered = sorted(self.operators, key=lambda one: one.timing.median_s, reverse=True)
        return tuple(ordered[:count])


def profile(
    path: Path,
    feeds: Feeds,
    *,
    repeats: int = 20,
    warm_ups: int = 3,
    threads: int | None = None,
    precision: str = "normal",
    memory: str = "normal",
) -> ModuleProfile:
    """Time the model in `path` (see `Module`) on `feeds`.

    First `repeats` whole runs, then as many in which each operator is timed; each after
    `warm_ups` that do not count; then whole runs on one thread, to compare.

    Raises UsageError for wrong options or inputs, EngineError when the engine fails.
    """
    if repeats < 1 or warm_ups < 0:
        raise UsageError(
            f"repeats must be at least 1 and warm_ups not negative, found {repeats} and {warm_ups}."
        )
    with Module(path, threads=threads, precision=precision, memory=memory) as module:
        arrays = module.checked(feeds)
        header, results = module.call(
            "profile", arrays, repeats=repeats, warm_ups=warm_ups,
            by_operator=_has_operator_times(module),
        )  # fmt: skip
        used = module.options["threads"]
    one_thread = None
    if used > 1:
        with Module(path, threads=1, precision=precision, memory=memory) as module:
            _, alone = module.call(
                "profile", arrays, repeats=repeats, warm_ups=warm_ups, by_operator=False
            )
        one_thread = _timing(alone["plain_s"].tolist())
    columns = results["operator_s"].T.tolist() if "operator_s" in results else []
    memory_mb = header["memory_mb"]
    return ModuleProfile(
        path=module.path,
        shapes={name: array.shape for name, array in arrays.items()},
        threads=used,
        precision=precision,
        memory=memory,
        plain=_timing(results["plain_s"].tolist()),
        one_thread=one_thread,
        operators=tuple(
            OperatorProfile(
                one["name"],
                one["kind"],
                tuple(one["shape"]),
                2e6 * one["mega_operations"] if one["kind"] in PRODUCT_KINDS else None,
                _timing(times),
            )
            for one, times in zip(header["operators"], columns, strict=True)
        ),
        memory_bytes=None if memory_mb is None else round(memory_mb * (1 << 20)),
        peak_rss_bytes=header["peak_rss_bytes"],
        approximate_gelu=tuple(one.name for one in module.operators if one.approximates),
    )


def _has_operator_times(module: Module) -> bool:
    """Whether the engine's interface for single operators can run it."""
    branches = any(one.runs_graphs for one in module.operators)
    return not branches and all(one.dtype != "int8" for one in module.inputs)


def _timing(times_s: Sequence[float]) -> Timing:
    return Timing(tuple(times_s))
