"""What of this machine matters to the engine: version, processors, where caches go."""

from __future__ import annotations

import os
from collections.abc import Iterator
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


def free_memory_bytes(root: Path = Path("/")) -> int:
    """What this process can still take without swapping, or being ended for it.

    The least of what the system has available and what each control group above leaves (Linux
    kernel documentation, admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst); file pages that are
    not in use count as free in both.  root: where /proc and /sys are.
    """
    try:
        fields = _numbers(root / "proc/meminfo")
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([fields["MemAvailable"] * 1024, *_left_by_groups(root)]))


def _left_by_groups(root: Path) -> Iterator[int]:
    """What the memory limits of our control groups leave, from the innermost up."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        place = Path(path.lstrip("/"))
        for part in (place, *place.parents):
            left = _left_by_group(top / part, *names)
            if left is not None:
                yield left


def _left_by_group(folder: Path, limit: str, used: str, unused: str) -> int | None:
    """None for a group without a limit, or one that is not seen from within a container."""
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        if most == "max":
            return None
        taken = int((folder / used).read_text(encoding="ascii"))
        return int(most) - taken + _numbers(folder / "memory.stat").get(unused, 0)
    except OSError:
        return None


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number, as the kernel writes them; a unit behind it is left out."""
    words = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    return {line[0].rstrip(":"): int(line[1]) for line in words if len(line) > 1}


def cache_home() -> Path:
    """Where everything that can be made again is kept, by the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    home = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    return Path(home, "mnnsmith")
