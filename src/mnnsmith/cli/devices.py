"""`mnnsmith devices`: where bundles can run, and preparing what is not there by itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mnnsmith.cli import options as o
from mnnsmith.cli.console import ProgressBars, Style, format_bytes, note, say, say_json
from mnnsmith.errors import UsageError

if TYPE_CHECKING:
    from mnnsmith.devices.known import DeviceState

ACTIONS = ("prepare", "remove")
ARM64 = "arm64"

Action = Annotated[
    str | None,
    typer.Argument(metavar="[prepare|remove]", help="What to do; nothing: show the devices."),
]
Name = Annotated[str | None, typer.Argument(metavar="[arm64]", help="With what.")]
Mirror = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="MNNSMITH_DEBIAN_MIRROR",
        help="Fetch Debian packages from this mirror; their hashes are pinned.",
    ),
]


def devices(
    action: Action = None, name: Name = None, mirror: Mirror = None, json_output: o.Json = False
) -> None:
    """Show where bundles can run; prepare or remove the emulated ARM device."""
    if action is None:
        from mnnsmith.devices.known import known_devices

        states = known_devices()
        if json_output:
            say_json({"devices": [_facts(state) for state in states]})
        else:
            _show(states)
        return
    if action not in ACTIONS:
        raise UsageError(f"{action!r:.80} is no action.", f"Choose one of: {', '.join(ACTIONS)}.")
    if name != ARM64:
        raise UsageError(
            f"{action}: {name!r:.80} is no device that is prepared."
            if name
            else f"{action}: no device is named.",
            f"For example: mnnsmith devices {action} {ARM64}",
        )
    if action == "remove":
        _remove(json_output)
    else:
        _prepare(mirror, json_output)


def _prepare(mirror: str | None, json_output: bool) -> None:
    from mnnsmith.devices.arm64 import arm64_bytes, prepare_arm64
    from mnnsmith.engine.emulated import arm64_pins

    total = arm64_pins().download_bytes
    done = 0
    note(f"Fetching {format_bytes(total)} of Debian packages and wheels, unless they are here ...")
    with ProgressBars(byte_stages=("download",)) as bars:

        def advance(fetched_bytes: int) -> None:
            nonlocal done
            done += fetched_bytes
            bars("download", done, total)

        found = prepare_arm64(mirror, advance)
    size = arm64_bytes() or 0
    if json_output:
        say_json({"folder": str(found.folder), "disk_bytes": size, "seconds": found.seconds})
    elif found.seconds:
        say(f"arm64 is ready: {format_bytes(size)} at {found.folder} ({found.seconds:.0f} s)")
    else:
        say(f"arm64 was ready: {format_bytes(size)} at {found.folder}")


def _remove(json_output: bool) -> None:
    from mnnsmith.devices.arm64 import remove_arm64

    freed = remove_arm64()
    if json_output:
        say_json({"freed_bytes": freed})
    else:
        say(f"arm64 is removed: {format_bytes(freed)} freed")


def _facts(state: DeviceState) -> dict[str, Any]:
    return {
        "name": state.name,
        "about": state.about,
        "ready": state.ready,
        "missing": state.missing or state.unsupported,
        "remedy": state.remedy,
        "download_bytes": state.download_bytes,
        "disk_bytes": state.disk_bytes,
    }


def _show(states: tuple[DeviceState, ...]) -> None:
    style = Style(sys.stdout)
    width = max(len(state.name) for state in states)
    for state in states:
        word = "ready" if state.ready else state.missing or "not here"
        say(f"{state.name:<{width}}  {word:<12}  {state.about}", style.green if state.ready else "")
    for text in sorted({state.unsupported for state in states if state.unsupported}):
        say(text)
    for remedy, size in sorted({(s.remedy, s.download_bytes) for s in states if s.remedy}):
        say(f"\nPrepare it ({format_bytes(size)} to download):  {remedy}")
    disk = max(state.disk_bytes for state in states)
    if disk:
        say(f"\narm64 takes {format_bytes(disk)}; remove it:  mnnsmith devices remove {ARM64}")
