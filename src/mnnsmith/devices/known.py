"""Which devices there are, and which of them can be used now."""

from __future__ import annotations

from dataclasses import dataclass

from mnnsmith.devices.arm64 import arm64_bytes
from mnnsmith.engine.device import LocalDevice
from mnnsmith.engine.emulated import CPUS, PREPARE_COMMAND, EmulatedDevice, arm64_pins, check_host
from mnnsmith.errors import UnsupportedError


@dataclass(frozen=True)
class DeviceState:
    """A device, and whether it can be used.

    missing, remedy: what it lacks and how to get it, None where it is ready or can never be.
    unsupported: why it cannot be had on this machine.  download_bytes: of the remedy.
    disk_bytes: that it takes now.
    """

    name: str
    about: str
    missing: str | None = None
    remedy: str | None = None
    unsupported: str | None = None
    download_bytes: int = 0
    disk_bytes: int = 0

    @property
    def ready(self) -> bool:
        return self.missing is None and self.unsupported is None


def known_devices() -> tuple[DeviceState, ...]:
    """All devices that need no name of a host; nothing is started."""
    return (
        DeviceState(LocalDevice.name, "this machine"),
        *(_emulated(cpu, about) for cpu, about in CPUS.items()),
    )


def _emulated(cpu: str, about: str) -> DeviceState:
    name = EmulatedDevice(cpu).name
    try:
        check_host()
    except UnsupportedError as error:
        return DeviceState(name, about, unsupported=error.message)
    size = arm64_bytes()
    if size is not None:
        return DeviceState(name, about, disk_bytes=size)
    return DeviceState(
        name, about, "not prepared", PREPARE_COMMAND, download_bytes=arm64_pins().download_bytes
    )
