"""From the text that a user writes to the device that it names."""

from __future__ import annotations

from mnnsmith.engine.device import Device, LocalDevice
from mnnsmith.engine.emulated import DEFAULT_CPU, EmulatedDevice
from mnnsmith.engine.ssh import parse_ssh
from mnnsmith.errors import UsageError

DEVICE_FORMS = "local, arm64, arm64:CPU, ssh:[USER@]HOST[:PORT][/FOLDER]"


def parse_device(text: str) -> Device:
    """The device of a text: "local", "arm64", "arm64:cortex-a76" (see `emulated.CPUS`), or
    "ssh:user@host" (see `SshDevice`).

    Nothing is looked for yet: what a device lacks shows when something is run on it.  Raises
    UsageError for any other text.
    """
    kind, colon, rest = text.partition(":")
    if text == LocalDevice.name:
        return LocalDevice()
    if kind == "arm64" and (rest or not colon):
        return EmulatedDevice(rest or DEFAULT_CPU)
    if kind == "ssh" and colon:
        return parse_ssh(rest)
    raise UsageError(f"{text!r:.200} names no device.", f"Give one of: {DEVICE_FORMS}.")
