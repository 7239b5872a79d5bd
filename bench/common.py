"""What the benchmark scripts share: measuring a command, provenance, tables, result files.

Standard library only: the measuring process stays small, because Linux counts the memory of the
process that starts a command as a floor of that command's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
RESULTS = BENCH / "results"
WORK = BENCH / "work"
SAMPLE_INTERVAL_S = 0.02
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PACKAGES = ("mnnsmith", "MNN", "numpy", "tokenizers")


@dataclass(frozen=True)
class Measured:
    """One run of a command and of every process it started.

    wall_s: seconds from start to end.  cpu_s: user and system seconds of all processes.
    peak_rss_bytes: the most memory that one of the processes held (the kernel's own count).
    peak_main_bytes: the same of the command's first process alone, sampled every 20 ms.
    peak_tree_bytes: the largest sum over all processes alive at one moment, sampled every 20 ms;
    pages that two processes share count twice.
    """

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    peak_main_bytes: int
    peak_tree_bytes: int


def measure(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    log: Path,
) -> Measured:
    """Run `command` to its end; its output goes to `log`.  Ends the script if the command fails."""
    with log.open("wb") as out:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env=None if env is None else {**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        sampler = _TreeSampler(process.pid)
        sampler.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
    sampler.stop()
    if process.returncode != 0:
        tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise SystemExit(f"{command[0]} ended with status {process.returncode}:\n{tail}")
    return Measured(
        wall_s,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024,
        sampler.main_bytes,
        max(sampler.peak_bytes, usage.ru_maxrss * 1024),
    )


class _TreeSampler(threading.Thread):
    """Samples the resident memory of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._ended = threading.Event()
        self.peak_bytes = 0
        self.main_bytes = 0

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_INTERVAL_S):
            self.main_bytes = max(self.main_bytes, _high_water_bytes(self._pid))
            self.peak_bytes = max(self.peak_bytes, _tree_rss_bytes(self._pid))

    def stop(self) -> None:
        self._ended.set()
        self.join()


def _high_water_bytes(pid: int) -> int:
    """The kernel's count of the most memory a process has held so far."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    fields = (line.split() for line in status.splitlines() if line.startswith("VmHWM:"))
    return next((int(field[1]) * 1024 for field in fields), 0)


def _tree_rss_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
        children = [
            int(child)
            for thread in os.listdir(f"/proc/{pid}/task")
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split()
        ]
    except (OSError, IndexError):
        return 0  # It ended between two looks.
    return pages * _PAGE_BYTES + sum(_tree_rss_bytes(child) for child in children)


def interleaved(
    contestants: Mapping[str, Callable[[int], Any]], repeats: int
) -> dict[str, list[Any]]:
    """Run the contestants in turns (A B, B A, A B, ...), so that a busy moment hits all of them.

    Each is called with the number of the round; its results are kept in order.
    """
    results: dict[str, list[Any]] = {name: [] for name in contestants}
    for index in range(repeats):
        turns = list(contestants.items())
        for name, run in reversed(turns) if index % 2 else turns:
            note(f"round {index + 1} of {repeats}: {name}")
            results[name].append(run(index))
    return results


@dataclass(frozen=True)
class Spread:
    """min, median and max of repeated measurements."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        found = list(values)
        return cls(min(found), statistics.median(found), max(found))

    def text(self, form: str = ".1f") -> str:
        """`median (min to max)`; the median alone if there is no spread to show."""
        median, low, high = (format(v, form) for v in (self.median, self.low, self.high))
        return median if low == high else f"{median} ({low} to {high})"


def spreads(runs: Sequence[Measured]) -> dict[str, Spread]:
    """The spread of every field of `Measured`, by its name."""
    names = Measured.__dataclass_fields__
    return {name: Spread.of(getattr(run, name) for run in runs) for name in names}


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Spread:
    """The spread of a/b over rounds: noise that hits both runs of a round cancels."""
    return Spread.of(x / y for x, y in zip(a, b, strict=True))


def megabytes(spread: Spread) -> str:
    """A spread in bytes as MB (10^6 bytes)."""
    return Spread(spread.low / 1e6, spread.median / 1e6, spread.high / 1e6).text(".0f")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table; the first column is text, the others are figures."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(repeats: int, **more: Any) -> dict[str, Any]:
    """What a figure needs to be trusted or repeated: command, versions, machine, load."""
    script, *arguments = sys.argv
    return {
        "command": " ".join(["python", f"bench/{Path(script).name}", *map(_plain, arguments)]),
        "commit": _commit(),
        "versions": {name: _version(name) for name in _PACKAGES} | {
            "python": platform.python_version()
        },
        "cpu": _cpu_model(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES,
        "system": f"{platform.system()} {platform.machine()}",
        "repeats": repeats,
        "load_average_before": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **more,
    }  # fmt: skip


def provenance_line(facts: Mapping[str, Any]) -> str:
    """The line under a table."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    load = f"{facts['load_average_before']:.1f}"
    if "load_average_after" in facts:
        load += f" before, {facts['load_average_after']:.1f} after"
    repeats = facts["repeats"]
    return (
        f"`{facts['command']}`; {repeats} round{'' if repeats == 1 else 's'}, "
        f"{facts['cpu_count']} cores of {facts['cpu']}, {facts['memory_bytes'] / 1e9:.0f} GB, "
        f"{facts['system']}; {versions}; commit {facts['commit']}; load average {load}."
    )


def finish(name: str, facts: dict[str, Any], results: Any, text: str, path: Path | None) -> None:
    """Print the table and write the JSON file (by default bench/results/NAME.json)."""
    facts["load_average_after"] = os.getloadavg()[0]
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"provenance": facts, "results": _plain_data(results), "table": text}
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\n{text}\n\n{provenance_line(facts)}")


def parser(purpose: str | None) -> argparse.ArgumentParser:
    """The options that all scripts share."""
    found = argparse.ArgumentParser(
        description=purpose, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    found.add_argument("--work", type=Path, default=WORK, help="folder for models and bundles")
    found.add_argument("--json", type=Path, default=None, help="result file")
    found.add_argument("--repeats", type=int, default=3, help="rounds")
    return found


def mnnsmith_command() -> Path:
    """The console script of this environment."""
    path = Path(sys.executable).with_name("mnnsmith")
    if not path.is_file():
        raise SystemExit("mnnsmith is not installed in this environment: pip install .")
    return path


def note(text: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _plain(argument: str) -> str:
    """An argument without the folders of this machine."""
    head, equals, value = argument.partition("=")
    if equals and "/" in value:
        return f"{head}={Path(value).name.upper()}"
    return Path(argument).name.upper() if "/" in argument else argument


def _plain_data(value: Any) -> Any:
    if isinstance(value, Measured | Spread):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(item) for item in value]
    return value


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"
