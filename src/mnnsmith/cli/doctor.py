"""`mnnsmith doctor`: what this machine has, what it lacks and how to get it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mnnsmith.cli import options as o
from mnnsmith.cli.console import Style, format_bytes, note, say, say_json, table
from mnnsmith.errors import EngineError, MissingResourceError, MnnsmithError
from mnnsmith.version import __version__

_LOW_DISK_BYTES = 2 << 30
_DEVELOPER_EXTRAS = ("dev",)
_PURPOSES = {
    "reference": "comparing with the original",
    "onnx": "ONNX models: converting them, exporting, a reference without torch",
    "video": "frames of video files",
    "vision": "pictures",
}

NoSelfTest = Annotated[
    bool, typer.Option("--no-self-test", help="Do not convert and run a tiny model.")
]
ClearCache = Annotated[
    bool, typer.Option("--clear-cache", help="Remove the mapped weights that no engine uses.")
]


@dataclass(frozen=True)
class Finding:
    """Something that is missing or wrong, and what to do about it."""

    problem: str
    remedy: str


def doctor(
    json_output: o.Json = False, no_self_test: NoSelfTest = False, clear_cache: ClearCache = False
) -> None:
    """Show versions, processor features and disk space, and prove that the engine works.

    Ends with exit code 7 when the engine does not work.
    """
    from mnnsmith.engine.machine import installed_version

    findings: list[Finding] = []
    base, extras = _requirements()
    report: dict[str, Any] = {
        "mnnsmith": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: installed_version(name) for name in base},
        "extras": _extras(extras, findings),
        "processor": _processor(findings),
        "disk": _disk(findings),
        "mapped_weights": _mapped_weights(clear_cache),
        "devices": _devices(findings),
    }
    for name, version in report["packages"].items():
        if version is None:
            problem = f"The package {name} is not installed."
            findings.append(Finding(problem, f"Install it: pip install {name}"))
    failure = None if no_self_test else _self_test(report)
    report["findings"] = [{"problem": f.problem, "remedy": f.remedy} for f in findings]
    if json_output:
        say_json(report)
    else:
        _show(report)
    if failure is not None:
        raise EngineError(f"The engine's self-test failed: {failure.message}", failure.hint)


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Package names that the installed mnnsmith asks for, and those of each extra."""
    import importlib.metadata

    base: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("mnnsmith") or ():
        match = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", line)
        if match is not None and extra is None:
            base.append(match[0])
        elif match is not None and extra is not None and extra[1] not in _DEVELOPER_EXTRAS:
            extras.setdefault(extra[1], []).append(match[0])
    return base, extras


def _extras(
    extras: dict[str, list[str]], findings: list[Finding]
) -> dict[str, dict[str, str | None]]:
    from mnnsmith.engine.machine import installed_version

    found = {
        extra: {name: installed_version(name) for name in names} for extra, names in extras.items()
    }
    for extra, versions in found.items():
        missing = [name for name, version in versions.items() if version is None]
        if missing:
            findings.append(
                Finding(
                    f"The optional extra {extra!r} is not installed ({', '.join(missing)}), which "
                    f"is for {_PURPOSES[extra]}.",
                    f"pip install {' '.join(missing)}",
                )
            )
    return found


def _processor(findings: list[Finding]) -> dict[str, Any]:
    from mnnsmith.engine.machine import cpu_features, usable_processors

    features = cpu_features()
    if features and platform.machine() == "x86_64" and "avx2" not in features:
        findings.append(
            Finding("The processor has no AVX2: models run many times slower.", "Use another one.")
        )
    return {
        "name": _processor_name(),
        "cores_usable": usable_processors(),
        "cores": os.cpu_count(),
        "features": list(features),
        "memory_bytes": _memory_bytes(),
    }


def _processor_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _disk(findings: list[Finding]) -> dict[str, dict[str, Any]]:
    import tempfile

    from huggingface_hub import constants

    places = {
        "here": Path.cwd(),
        "temporary": Path(tempfile.gettempdir()),
        "hub cache": Path(constants.HF_HUB_CACHE),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, path in places.items():
        present = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(present).free
        found[name] = {"path": str(path), "free_bytes": free}
        if free < _LOW_DISK_BYTES:
            findings.append(
                Finding(
                    f"Only {format_bytes(free)} are free at {path}.",
                    "Free some space, or convert to a folder on another disk.",
                )
            )
    return found


def _mapped_weights(clear: bool) -> dict[str, Any]:
    """The cache of mapped weights, emptied first if `clear`."""
    from mnnsmith.engine import mapped

    root = mapped.cache_root()
    try:
        cleared: dict[str, Any] = {}
        if clear:
            freed, in_use = mapped.clear_cache()
            cleared = {"freed_bytes": freed, "in_use": in_use}
        return {"path": str(root), "bytes": mapped.cache_bytes(), **cleared}
    except OSError as error:
        raise MissingResourceError(
            f"{root}: cannot be read or cleared: {error.strerror}.", "Check its permissions."
        ) from error


def _devices(findings: list[Finding]) -> dict[str, str]:
    """Name -> "ready", or what it lacks."""
    from mnnsmith.devices.known import known_devices

    states = known_devices()
    for remedy in sorted({state.remedy for state in states if state.remedy}):
        names = [state.name for state in states if state.remedy == remedy]
        size = format_bytes(max(s.download_bytes for s in states if s.remedy == remedy))
        findings.append(
            Finding(
                f"Not prepared ({size} to download), needed only to run bundles on emulated "
                f"processors: {', '.join(names)}.",
                remedy,
            )
        )
    return {s.name: "ready" if s.ready else s.missing or "not on this machine" for s in states}


def _self_test(report: dict[str, Any]) -> MnnsmithError | None:
    """Let the engine compute, then convert and run a tiny model.  Gives what went wrong.

    The report tells how it went.
    """
    from mnnsmith.selftest import run_self_test

    try:
        result = run_self_test()
    except MnnsmithError as error:
        report["self_test"] = {"passed": False, "message": error.message}
        return error
    report["self_test"] = {"passed": True, "seconds": round(result.seconds, 2)}
    return None


def _show(report: dict[str, Any]) -> None:
    style = Style(sys.stdout)

    def section(title: str, rows: list[tuple[str, str]]) -> None:
        say(title, style.bold)
        say(table(rows))

    say(f"mnnsmith {report['mnnsmith']}, Python {report['python']}, {report['system']}")
    section("packages", [(n, v or "missing") for n, v in report["packages"].items()])
    for extra, versions in report["extras"].items():
        rows = [(name, version or "not installed") for name, version in versions.items()]
        section(f"extra {extra!r}, for {_PURPOSES[extra]}", rows)
    processor = report["processor"]
    memory = processor["memory_bytes"]
    section(
        "processor",
        [
            ("name", processor["name"]),
            ("cores", f"{processor['cores_usable']} usable of {processor['cores']}"),
            ("features", " ".join(processor["features"]) or "unknown"),
            ("memory", format_bytes(memory) if memory else "unknown"),
        ],
    )
    disk = report["disk"].items()
    section("disk", [(n, f"{format_bytes(d['free_bytes'])} free at {d['path']}") for n, d in disk])
    cache = report["mapped_weights"]
    say(f"mapped weights: {format_bytes(cache['bytes'])} at {cache['path']}")
    if "freed_bytes" in cache:
        used = f", {cache['in_use']} in use and kept" if cache["in_use"] else ""
        say(f"  cleared: {format_bytes(cache['freed_bytes'])}{used}")
    section("devices", list(report["devices"].items()))
    test = report.get("self_test")
    if test is None:
        note("(the engine's self-test was left out)")
    elif test["passed"]:
        say(f"engine self-test passed ({test['seconds']} s)", style.green)
    else:
        say("engine self-test failed", style.red)
    for finding in report["findings"]:
        say(f"- {finding['problem']}\n  {finding['remedy']}")
