"""A reference run kept in a file, so that many bundles of one model are judged by one run.

The file holds token ids, the hidden states before the head and the head itself, so that logits need
neither the original nor torch, and what it was made of.  A causal model computes the same for the
beginning of a text as for the whole, so a window also answers for every shorter one that begins it
(but for rope whose frequencies depend on the length of the text, beyond its original context).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.conversion.prepare import Prepared
from mnnsmith.errors import MissingResourceError, SourceError, UsageError
from mnnsmith.files import parse_json, sha256_once
from mnnsmith.sources.checkpoint import read_whole
from mnnsmith.verify.references.array_file import ArrayFile, write_arrays
from mnnsmith.verify.references.reference import F32, IDS, PictureReference, Reference, ReferenceRun
from mnnsmith.verify.stored.checkpoint import head_tensor

_FORMAT = 1
_META, _HEAD = "meta", "head"
_META_LIMIT_BYTES = 16 << 20
_SHOWN = 4
# Of the spread of the logits: how far those of the head alone may be from the reference's own.
_HEAD_TOLERANCE = 1e-3
_AGAIN = "Make it anew with --save-reference."


class RecordingReference:
    """A reference that keeps what it was asked to run; runs that another one begins with are
    dropped."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self.runs: list[ReferenceRun] = []

    @property
    def name(self) -> str:
        return self._reference.name

    @property
    def pictures(self) -> PictureReference | None:
        return self._reference.pictures

    @property
    def computes(self) -> bool:
        return self._reference.computes

    def available(self) -> Collection[str]:
        return self._reference.available()

    def run(self, ids: IDS, values: Sequence[str] = ()) -> ReferenceRun:
        run = self._reference.run(ids, values)
        self.runs = [old for old in self.runs if not _covers(run, old)]
        if not any(_covers(old, run) for old in self.runs):
            self.runs.append(run)
        return run

    def decisive(self, ids: IDS) -> npt.NDArray[np.bool_]:
        return self._reference.decisive(ids)

    def logits(self, hidden: F32) -> F32:
        return self._reference.logits(hidden)

    def __enter__(self) -> RecordingReference:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reference.__exit__(kind, value, trace)


def save_reference(
    path: Path,
    reference: Reference,
    runs: Iterable[ReferenceRun],
    original: Prepared,
) -> None:
    """Write `runs` of `reference` to `path`, whole or not at all; an existing file is replaced.

    original: what the reference computes with, whose files are hashed.  Raises
    `MissingResourceError` where the file cannot be written, `UsageError` for no run at all.
    """
    kept = list(runs)
    if not kept:
        raise UsageError("There is no reference run to save.")
    head = read_whole(head_tensor(original.model, original.checkpoint))
    _check_head(reference, kept[0], head)
    arrays: dict[str, npt.NDArray[Any]] = {_HEAD: _packed(head)}
    windows: list[dict[str, Any]] = []
    for run in kept:
        sure = reference.decisive(run.ids)
        names = sorted(run.values)
        for i, ids in enumerate(run.ids):
            number = len(windows)
            windows.append({"decisive": bool(sure[i]), "values": names})
            arrays[f"ids/{number}"] = ids
            arrays[f"hidden/{number}"] = run.hidden[i]
            for j, name in enumerate(names):
                arrays[f"values/{number}/{j}"] = run.values[name][i]
    meta = {
        "format": _FORMAT,
        "name": reference.name,
        "model_type": original.checkpoint.model_type,
        "files": _hashes(original),
        "windows": windows,
    }
    text = json.dumps(meta, sort_keys=True).encode()
    arrays[_META] = np.frombuffer(text, dtype=np.uint8)
    try:
        write_arrays(path, arrays)
    except OSError as error:
        raise MissingResourceError(
            f"{path}: cannot be written: {error.strerror or error}.",
            "Free some space, or choose another file; nothing was left behind.",
        ) from error


@dataclass(frozen=True)
class _Window:
    number: int
    ids: IDS
    decisive: bool
    values: Mapping[str, int]


class SavedReference:
    """`Reference` out of a file of `save_reference`; it can run what was run then."""

    def __init__(self, path: Path) -> None:
        """Raises `SourceError` for a file that is damaged, or none of ours."""
        self._path = path
        self._file = ArrayFile(path)
        try:
            self._meta = _meta(self._file)
            self._windows = [self._window(i, w) for i, w in enumerate(self._meta["windows"])]
            self._head = _unpacked(self._file.read(_HEAD, 2, "fui"), path)
        except BaseException:
            self._file.close()
            raise

    @property
    def name(self) -> str:
        return f"{self._meta['name']}, saved"

    @property
    def pictures(self) -> None:
        """Pictures are not saved."""
        return None

    def check_original(self, original: Prepared) -> None:
        """See that it was made of these very files; raises `SourceError` that names one."""
        found = _hashes(original)
        expected = self._meta["files"]
        other = sorted(
            name for name in {*found, *expected} if found.get(name) != expected.get(name)
        )
        if other:
            raise SourceError(
                f"{self._path}: it is the reference of another original: "
                f"{', '.join(other[:_SHOWN])} differ from those of {original.checkpoint.origin}.",
                _AGAIN,
            )

    @property
    def computes(self) -> bool:
        return False

    def available(self) -> Collection[str]:
        """Values that every window has."""
        names = [set(window.values) for window in self._windows]
        return set.intersection(*names) if names else set()

    def run(self, ids: IDS, values: Sequence[str] = ()) -> ReferenceRun:
        """As `Reference.run`, of windows that are there; raises `UsageError` for others."""
        windows, n = [self._find(row) for row in ids], ids.shape[1]
        for window in windows:
            lost = sorted(set(values) - window.values.keys())
            if lost:
                raise UsageError(f"{self._path}: holds no values of {lost[0]!r:.80}.", _AGAIN)
        hidden = np.stack([self._hidden(window)[:n] for window in windows])
        found = {
            name: np.stack([self._value(window, name)[:n] for window in windows]) for name in values
        }
        return ReferenceRun(ids, hidden, found)

    def decisive(self, ids: IDS) -> npt.NDArray[np.bool_]:
        """As `Reference.decisive`; of the beginning of a window, what holds for the whole."""
        return np.array([self._find(row).decisive for row in ids], dtype=np.bool_)

    def logits(self, hidden: F32) -> F32:
        """As `Reference.logits`."""
        if hidden.ndim != 2 or hidden.shape[1] != self._head.shape[1]:
            raise UsageError(
                f"{self._path}: hidden states are [rows, {self._head.shape[1]}], found "
                f"{list(hidden.shape)}."
            )
        logits: F32 = hidden @ self._head.T
        return logits

    def __enter__(self) -> SavedReference:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def _window(self, number: int, entry: Any) -> _Window:
        ids = self._file.read(f"ids/{number}", 1, "i").astype(np.int64)
        return _Window(
            number, ids, entry["decisive"], {name: j for j, name in enumerate(entry["values"])}
        )

    def _find(self, row: IDS) -> _Window:
        fitting = (w for w in self._windows if np.array_equal(w.ids[: len(row)], row))
        found = next(fitting, None)
        if found is None:
            raise UsageError(
                f"{self._path}: holds no run of these {len(row)} tokens (it has "
                f"{len(self._windows)} windows of other texts).",
                f"It was made of another text, or at another level. {_AGAIN}",
            )
        return found

    def _hidden(self, window: _Window) -> F32:
        return self._rows(f"hidden/{window.number}", window, self._head.shape[1])

    def _value(self, window: _Window, name: str) -> F32:
        return self._rows(f"values/{window.number}/{window.values[name]}", window, None)

    def _rows(self, member: str, window: _Window, width: int | None) -> F32:
        """float32 [tokens of the window, width]."""
        array = self._file.read(member, 2, "f")
        if len(array) != len(window.ids) or width not in (None, array.shape[1]):
            raise SourceError(
                f"{self._path}: {member} has shape {list(array.shape)} for {len(window.ids)} "
                "tokens: the file is damaged.",
                _AGAIN,
            )
        if not np.isfinite(array).all():
            raise SourceError(f"{self._path}: {member} holds values that are not finite.", _AGAIN)
        return array.astype(np.float32, copy=False)


def _covers(longer: ReferenceRun, other: ReferenceRun) -> bool:
    """Whether every window of `other`, with its values, begins one of `longer`."""
    if not set(other.values) <= set(longer.values):
        return False
    n = other.ids.shape[1]
    heads = {row[:n].tobytes() for row in longer.ids}
    return n <= longer.ids.shape[1] and all(row.tobytes() in heads for row in other.ids)


def _check_head(reference: Reference, run: ReferenceRun, head: F32) -> None:
    """The head alone must give the reference's logits: nothing may come after it."""
    hidden = np.ascontiguousarray(run.hidden[0, :2])
    expected = reference.logits(hidden)
    error = np.abs(hidden @ head.T - expected).max()
    if not error <= _HEAD_TOLERANCE * expected.std():
        raise SourceError(
            f"{reference.name}: its logits are {error:.3g} off those of the head's weight; such a "
            "run cannot be saved."
        )


def _hashes(original: Prepared) -> dict[str, str]:
    return {path.name: sha256_once(path) for path in original.checkpoint.files}


def _packed(head: F32) -> npt.NDArray[Any]:
    """The same values in half the bytes, where they came from 16 bits: fp16, or the upper halves
    (uint16) of bf16."""
    bits = head.view(np.uint32)
    if not (bits & np.uint32(0xFFFF)).any():
        upper: npt.NDArray[np.uint16] = (bits >> np.uint32(16)).astype(np.uint16)
        return upper
    with np.errstate(over="ignore"):
        half = head.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), head) else head


def _unpacked(packed: npt.NDArray[Any], path: Path) -> F32:
    if packed.dtype == np.uint16:
        values: F32 = (packed.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return values
    if packed.dtype not in (np.float16, np.float32):
        raise SourceError(f"{path}: its head is stored as {packed.dtype}.", _AGAIN)
    return packed.astype(np.float32, copy=False)


def _meta(file: ArrayFile) -> dict[str, Any]:
    """The description, every field of the type that it must have."""
    array = file.read(_META, 1, "u", limit_bytes=_META_LIMIT_BYTES)
    where = f"{file.path}: its description"
    try:
        data = parse_json(array.astype(np.uint8).tobytes().decode("utf-8"), where)
    except UnicodeDecodeError as error:
        raise SourceError(f"{where} is not text.", _AGAIN) from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise SourceError(
            f"{where} is of another format than {_FORMAT}.",
            f"Use the version of mnnsmith that wrote it. {_AGAIN}",
        )
    windows, files = data.get("windows"), data.get("files")
    sound = (
        isinstance(data.get("name"), str)
        and isinstance(files, dict)
        and all(isinstance(value, str) for value in files.values())
        and isinstance(windows, list)
        and all(_is_window(window) for window in windows)
    )
    if not sound:
        raise SourceError(f"{where} lacks a field, or has one of another type.", _AGAIN)
    return data


def _is_window(entry: object) -> bool:
    if not isinstance(entry, dict) or type(entry.get("decisive")) is not bool:
        return False
    names = entry.get("values")
    return isinstance(names, list) and all(isinstance(name, str) for name in names)
