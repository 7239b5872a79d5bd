"""What memory is free: the system's, and what control groups leave of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mnnsmith.engine.machine import free_memory_bytes

GB = 1 << 30


def machine(root: Path, groups: str, files: dict[str, object]) -> Path:
    """A machine with 8 GB available, whose files of control groups are these."""
    given = {
        "proc/meminfo": f"MemTotal: {16 * GB >> 10} kB\nMemAvailable: {8 * GB >> 10} kB\n",
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{Path(name).parent}/memory.stat": "anon 5" for name in files},
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in given.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {}, 8 * GB),
        ("0::/a/b", {"a/b/memory.max": "max", "a/b/memory.current": GB}, 8 * GB),
        # The limit of a group above counts; cached files can go.
        (
            "0::/a/b",
            {
                "a/b/memory.max": 6 * GB, "a/b/memory.current": GB,
                "a/memory.max": 4 * GB, "a/memory.current": 3 * GB,
                "a/memory.stat": f"anon 5\ninactive_file {GB}",
            },
            2 * GB,
        ),
        # Within a container, the group's own folder is the top.
        ("0::/outside/x", {"memory.max": 3 * GB, "memory.current": GB}, 2 * GB),
        (
            "5:cpu,memory:/docker/x\n1:name=systemd:/docker/x",
            {
                "memory/docker/x/memory.limit_in_bytes": 2 * GB,
                "memory/docker/x/memory.usage_in_bytes": GB,
                "memory/memory.limit_in_bytes": 9223372036854771712,
                "memory/memory.usage_in_bytes": GB,
            },
            GB,
        ),
        ("0::/", {"memory.max": GB, "memory.current": 2 * GB}, 0),
    ],
)  # fmt: skip
def test_the_least_of_the_limits_counts(
    groups: str, files: dict[str, object], expected: int, tmp_path: Path
) -> None:
    assert free_memory_bytes(machine(tmp_path, groups, files)) == expected


def test_of_this_machine() -> None:
    assert 0 < free_memory_bytes() < 1 << 50
