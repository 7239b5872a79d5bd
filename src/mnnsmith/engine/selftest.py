"""What `mnnsmith doctor` asks the engine: versions, processor features, and whether it computes."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from mnnsmith.engine.client import Runner, RunnerRefusedError
from mnnsmith.errors import EngineError

START_TIMEOUT_S = 60.0
LARGEST_ERROR = 1e-5
# Features that choose the engine's kernels, by the names /proc/cpuinfo gives them.
X86_FEATURES = ("sse4_1", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni")
ARM_FEATURES = ("asimd", "asimdhp", "asimddp", "i8mm", "sve2", "sme2")


@dataclass(frozen=True)
class EngineReport:
    """What the engine said of itself.

    cpu_features: those present, of the ones the engine has kernels for; empty where the system
    does not tell.  problem: None when a small graph gave the right values, else what went wrong.
    """

    mnn: str
    python: str
    numpy: str
    machine: str
    processors: int
    cpu_features: tuple[str, ...]
    problem: str | None


def engine_versions() -> dict[str, str]:
    """Versions of the packages the engine room needs; "not installed" where one is missing."""
    packages = {name: _installed(name) for name in ("MNN", "numpy")}
    return {"python": platform.python_version(), **packages}


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cpu_features() -> tuple[str, ...]:
    """The processor features that choose the engine's kernels (Linux; elsewhere empty)."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    present = set(value.split())
                    return tuple(f for f in (*X86_FEATURES, *ARM_FEATURES) if f in present)
    except OSError:
        pass
    return ()


def usable_processors() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def self_test() -> EngineReport:
    """Start the engine in a child process and let it compute; never raises for a broken engine."""
    versions = engine_versions()
    problem = None
    runner = Runner()
    try:
        runner.call("hello", silence_s=START_TIMEOUT_S)
        result, _ = runner.call("self_test", silence_s=START_TIMEOUT_S)
        if not result["largest_error"] <= LARGEST_ERROR:
            problem = f"a matrix product is off by {result['largest_error']:g}"
    except (EngineError, RunnerRefusedError) as error:
        problem = str(error)
    finally:
        runner.close()
    return EngineReport(
        mnn=versions["MNN"],
        python=versions["python"],
        numpy=versions["numpy"],
        machine=f"{platform.system()} {platform.machine()}",
        processors=usable_processors(),
        cpu_features=cpu_features(),
        problem=problem,
    )
