"""What of this machine matters to the engine: version, processors, where caches go."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Features that choose the engine's kernels, by the names /proc/cpuinfo gives them.
X86_FEATURES = ("sse4_1", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni")
ARM_FEATURES = ("asimd", "asimdhp", "asimddp", "i8mm", "sve2", "sme2")
# More than any machine has that runs such models.
MAX_THREADS = 1024


def installed_version(package: str) -> str | None:
    """The version of an installed package, None where it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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


def cache_home() -> Path:
    """Where everything that can be made again is kept, by the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    home = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    return Path(home, "mnnsmith")
