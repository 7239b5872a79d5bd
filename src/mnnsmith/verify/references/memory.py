"""Whether a check fits into memory: some run the engine in float, whatever a bundle stores."""

from __future__ import annotations

from mnnsmith.conversion.prepare import Prepared
from mnnsmith.engine import Device
from mnnsmith.engine.machine import free_memory_bytes
from mnnsmith.engine.ssh import SshDevice

# These open the engine at `memory: high`, where it holds every weight as float32.
_IN_FLOAT = ("exact", "layers", "ranges", "vision")
_WEIGHT_BYTES = 4
# Of two processes, the cache and what a prompt takes.
_OVERHEAD_BYTES = 512 << 20


def lacking_memory(check: str, original: Prepared | None, device: Device) -> str | None:
    """Why there is too little memory for a check; None where it fits, or is not known.

    Only of engines on this machine: what another one has free is its own to say.
    """
    if check not in _IN_FLOAT or original is None or isinstance(device, SshDevice):
        return None
    needed = _WEIGHT_BYTES * original.plan.parameters + _OVERHEAD_BYTES
    free = free_memory_bytes()
    if needed <= free:
        return None
    return f"needs about {needed / 1e9:.1f} GB at memory: high, {free / 1e9:.1f} GB are free."
