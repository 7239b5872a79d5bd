"""Where a bundle runs: what starts the runner there, and how files get there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

RUNNER = Path(__file__).with_name("runner.py")


@dataclass(frozen=True)
class Launch:
    """How the runner is started; it then speaks its protocol on stdin and stdout.

    environment: the whole environment of the command, None for our own.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] | None = None


class Device(Protocol):
    """A place where bundles run.

    time_factor: limits of time for this machine are multiplied by it.
    maps_weights: whether the engine may map weights from this machine's cache.
    """

    @property
    def name(self) -> str:
        """The text that `parse_device` makes this device of."""
        ...

    @property
    def time_factor(self) -> float: ...

    @property
    def maps_weights(self) -> bool: ...

    def launch(self, script: Path = RUNNER) -> Launch:
        """Make a runner ready to start: `runner.py`, or one that needs that beside it.

        Raises MissingResourceError that names what to do when the device lacks something,
        EngineError when it cannot be reached.
        """
        ...

    def send(self, bundle: Path) -> str:
        """Make the files of a bundle readable there; gives its folder there.

        Raises EngineError.
        """
        ...


@dataclass(frozen=True)
class LocalDevice:
    """This machine and this Python."""

    name: ClassVar[str] = "local"
    time_factor: ClassVar[float] = 1.0
    maps_weights: ClassVar[bool] = True

    def launch(self, script: Path = RUNNER) -> Launch:
        return Launch((sys.executable, str(script)))

    def send(self, bundle: Path) -> str:
        return str(bundle)
