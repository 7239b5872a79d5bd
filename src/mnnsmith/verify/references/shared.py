"""The references of one verification: chosen once, each opened once and shared by the checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

from mnnsmith.bundle import Bundle
from mnnsmith.conversion.prepare import Prepared
from mnnsmith.engine.machine import free_memory_bytes
from mnnsmith.errors import MissingResourceError, UsageError
from mnnsmith.files import output_file, user_path
from mnnsmith.verify.context import Weights
from mnnsmith.verify.references.onnx_reference import open_onnx
from mnnsmith.verify.references.reference import Reference
from mnnsmith.verify.references.saved_reference import (
    RecordingReference,
    SavedReference,
    save_reference,
)
from mnnsmith.verify.references.transformers_reference import open_transformers
from mnnsmith.verify.stored.checkpoint import stored_checkpoint

Program: TypeAlias = Literal["transformers", "onnx"]
_Kind: TypeAlias = Literal["original", "stored", "saved"]
HINT = 'Install one: pip install "mnnsmith[reference]" (torch) or "mnnsmith[onnx]" (without torch).'
_PACKAGES: dict[Program, tuple[str, ...]] = {
    "transformers": ("torch", "transformers"),
    "onnx": ("onnx", "onnxruntime"),
}


def installed_program() -> Program | None:
    """The program to compare with, by what is installed; transformers first, it knows no graph of
    ours."""
    return next((program for program in _PACKAGES if _installed(program)), None)


def _installed(program: Program) -> bool:
    return all(importlib.util.find_spec(package) for package in _PACKAGES[program])


@dataclass(frozen=True)
class Chosen:
    """program: what computes; None where nothing is installed.  saved: runs of the original with
    its own weights, in a file, which need no program.  save_as: where to save them."""

    program: Program | None
    saved: Path | None = None
    save_as: Path | None = None

    @property
    def weights(self) -> tuple[Weights, ...]:
        """What there can be references with."""
        if self.program is not None:
            return ("original", "stored")
        return () if self.saved is None else ("original",)


def choose_reference(reference: str | Path, save_as: str | Path | None) -> Chosen:
    """Understand "auto", "transformers", "onnx", or the path of a saved one.

    Raises `UsageError` for what is neither, and for a place where nothing can be saved;
    `MissingResourceError` for a program that is not installed.
    """
    save = None if save_as is None else output_file(save_as, regular=True)
    if reference in _PACKAGES:
        program: Program = "onnx" if reference == "onnx" else "transformers"
        if not _installed(program):
            raise MissingResourceError(f"The reference {program} is not installed.", HINT)
        return Chosen(program, save_as=save)
    if reference == "auto":
        return Chosen(installed_program(), save_as=save)
    path = user_path(reference)
    if not path.is_file():
        raise UsageError(
            f"{str(reference)!r:.200} is no reference, nor a file.",
            "Give auto, transformers, onnx, or a file that --save-reference wrote.",
        )
    if save is not None:
        raise UsageError("A reference that comes out of a file cannot be saved again.")
    return Chosen(installed_program(), path)


class References:
    """Opens references and keeps them while checks may want them again.

    What is free for both at once decides, as the first one is opened, whether they are kept; one
    that is to be saved is.  Close it, or use it in a `with` block.
    """

    def __init__(
        self, bundle: Bundle, original: Prepared, chosen: Chosen, threads: int | None
    ) -> None:
        self._bundle = bundle
        self._original = original
        self._chosen = chosen
        self._threads = threads
        self._keep: bool | None = None
        self._open: dict[_Kind, Reference] = {}
        self._users: dict[_Kind, int] = {}
        self._recording: RecordingReference | None = None

    @contextmanager
    def __call__(self, weights: Weights, *, computes: bool = False) -> Iterator[Reference]:
        """Lend a reference: when its user is done, the next one finds it as it is.

        computes: not one out of a file.  Only what is run without it is recorded.
        """
        from_file = weights == "original" and self._chosen.saved is not None and not computes
        kind: _Kind = "saved" if from_file else weights
        if kind not in self._open:
            if self._keep is None:
                self._keep = self._fit_together()
            self._open[kind] = self._new(kind)
        self._users[kind] = self._users.get(kind, 0) + 1
        reference = self._open[kind]
        if kind == "original" and not computes and self._chosen.save_as is not None:
            self._recording = self._recording or RecordingReference(reference)
            reference = self._recording
        try:
            yield reference
        finally:
            self._release(kind)

    def save(self) -> None:
        """Write what the original's reference ran, if that was asked for."""
        if self._recording is not None and self._chosen.save_as is not None:
            save_reference(
                self._chosen.save_as, self._recording, self._recording.runs, self._original
            )

    def __enter__(self) -> References:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for opened in list(self._open):
            self._open.pop(opened).__exit__(kind, value, trace)

    def _fit_together(self) -> bool:
        # Both in float32, and room for what else a check holds.
        parameters = self._original.plan.parameters
        return 4 * 4 * parameters < free_memory_bytes()

    def _new(self, kind: _Kind) -> Reference:
        if kind != "saved":
            return self._computed(kind)
        assert self._chosen.saved is not None
        saved = SavedReference(self._chosen.saved)
        saved.check_original(self._original)
        return saved

    def _computed(self, weights: Weights) -> Reference:
        original = self._original
        checkpoint = original.checkpoint
        if weights == "stored":
            checkpoint = stored_checkpoint(self._bundle, original)
        if self._chosen.program == "onnx":
            return open_onnx(checkpoint, original.model, threads=self._threads)
        return open_transformers(checkpoint, original.model, threads=self._threads)

    def _release(self, kind: _Kind) -> None:
        self._users[kind] -= 1
        recorded = kind == "original" and self._recording is not None
        if not (self._users[kind] or self._keep or recorded):
            self._open.pop(kind).__exit__(None, None, None)
