"""What every check of a bundle is given: the bundle, its original, and where it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from mnnsmith.bundle import Bundle
from mnnsmith.conversion.prepare import Prepared
from mnnsmith.engine import Engine
from mnnsmith.verify.references.reference import Reference

# How much is compared: "quick" answers within a minute for a small model, "full" within ten.
Level: TypeAlias = Literal["quick", "full"]
# Whose weights a reference has: the original's, or those that the bundle stores, dequantized.
Weights: TypeAlias = Literal["original", "stored"]
# (done, total), in whatever units a check counts.
Progress: TypeAlias = Callable[[int, int], None]


class OpenReference(Protocol):
    """Gives a reference with these weights, for a `with` block.

    computes: it must take any ids, and give values; else it may be one that was saved.
    """

    def __call__(
        self, weights: Weights, *, computes: bool = False
    ) -> AbstractContextManager[Reference]: ...


def no_progress(done: int, total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Context:
    """One verification.

    original: the source, prepared with the bundle's recipe; None where no check needs it.
    open_engine: `Engine` on a folder, with its keyword arguments, on the device that was asked for.
    texts, images: files of the user, in place of the shipped text and pictures.
    bisect: go on inside the first block that differs.
    """

    bundle: Bundle
    original: Prepared | None
    level: Level
    open_engine: Callable[..., Engine]
    open_reference: OpenReference
    texts: tuple[Path, ...] = ()
    threads: int | None = None
    images: tuple[Path, ...] = ()
    bisect: bool = False
    progress: Progress = no_progress
