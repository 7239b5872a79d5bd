"""Weights mapped from disk: the folder that the engine keeps its own copy of them in.

With `use_mmap` the engine writes the weights, in the order in which it computes with them, to files
in `tmp_path` and maps these; a later load finds the files and reads no weights.  It takes whatever
lies there for right: files of another bundle, of other settings or half written give garbage or a
crash, and two engines would write to the same pages.  So a folder of this cache belongs to one
bundle with one set of settings, and one engine at a time holds its lock.  A mark that is written
after a load that ended well says what the files are; without it, or when it says something else,
they are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mnnsmith.engine.machine import (
    cache_home,
    cpu_features,
    installed_version,
    usable_processors,
)

_log = logging.getLogger(__name__)

_MARK, _LOCK, _PRIVATE = "complete.json", ".lock", "private-"
_JSON_LIMIT_BYTES = 96 << 20
_SYNCED = "*sync.static"
# The engine's copy has scales in fp32 and a sum for each block: 1.24 times the file for 4 bits in
# blocks of 64 (measured), 28 bytes in place of 18 for symmetric blocks of 32.
_COPY_FACTOR, _COPY_REST_BYTES = 1.6, 32 << 20
_DEFAULT_THREADS = 4


@dataclass(frozen=True)
class MappingState:
    """How an engine's weights are held.

    state: "off" (in memory); "caller" (mapped as the configuration says, in a folder that it names
    or one that goes with the engine); "new" (mapped, this load writes the files); "ready" (mapped,
    files of an earlier load); "private" (mapped, files that go with the engine).
    folder: where the files are, None for the first two.  note: why it is not the best, or None.
    """

    state: str
    folder: Path | None = None
    note: str | None = None


class MappedWeights:
    """The claim of one engine on a folder of the cache, from before its load to its end."""

    def __init__(
        self, mapping: MappingState, identity: Mapping[str, Any], lock_fd: int | None
    ) -> None:
        self.mapping = mapping
        self._identity = identity
        self._lock_fd = lock_fd
        private = mapping.folder if mapping.state == "private" else None
        self._finalizer = weakref.finalize(self, _let_go, lock_fd, private, os.getpid())

    @property
    def overrides(self) -> dict[str, Any]:
        """Keys for the engine's configuration."""
        if self.mapping.state == "caller":
            return {}
        if self.mapping.folder is None:
            return {"use_mmap": False}
        # Private files are removed here; the engine need not keep an account of them.
        cached = self.mapping.state != "private"
        return {"tmp_path": str(self.mapping.folder), "use_cached_mmap": cached}

    @property
    def inherited(self) -> tuple[int, ...]:
        """File descriptors for the engine's process: the lock lasts as long as either lives."""
        return () if self._lock_fd is None else (self._lock_fd,)

    def loaded(self) -> None:
        """The load ended well: mark new files as complete."""
        folder = self.mapping.folder
        if self.mapping.state == "new" and folder is not None and any(folder.glob(_SYNCED)):
            _write_mark(folder, {**self._identity, "usable": True, "files": _sizes(folder)})

    def failed(self) -> bool:
        """The load failed.  Gives whether loading without mapped weights is worth a try.

        Files that an earlier load left and this one could not use are removed, and a mark is left
        not to map this bundle again.
        """
        folder = self.mapping.folder
        if self.mapping.state != "ready" or folder is None:
            return False
        _empty(folder)
        _write_mark(folder, {**self._identity, "usable": False, "files": {}})
        note = "the engine could not load the weights that it had mapped before"
        self.mapping = MappingState("off", note=note)
        _log.info("weights are not mapped: %s", note)
        return True

    def release(self) -> None:
        """Give the folder back; the engine's process must have ended.  Twice is fine."""
        self._finalizer()


def claim(bundle: Path, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> MappedWeights:
    """Decide how the weights of `bundle` are held, and take the folder for them.

    config: the bundle's configuration with the caller's `overrides`.  Never raises: whatever stands
    against mapping is told in the note, and the weights are then held in memory.
    """
    if not config.get("use_mmap"):
        return in_memory(None)
    if "use_mmap" in overrides or "tmp_path" in overrides or config.get("kvcache_mmap"):
        return MappedWeights(MappingState("caller"), {}, None)
    memory = config.get("memory", "low")
    if memory != "low":
        # The copy would be in floats, eight times the size, and the engine crashes on finding it.
        return in_memory(
            f"memory is {memory!r}, and only the integer weights of 'low' can be mapped"
        )
    try:
        root = cache_root()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _prune(root)
        return _claim(root, bundle, config)
    except OSError as error:
        return in_memory(f"the cache cannot be used: {error}")


def in_memory(note: str | None) -> MappedWeights:
    """No claim at all: the weights are held in memory, for the reason that the note gives."""
    if note is not None:
        _log.info("weights are not mapped: %s", note)
    return MappedWeights(MappingState("off", note=note), {}, None)


def cache_root() -> Path:
    """The folder of all mapped weights."""
    return cache_home() / "mapped"


def cache_bytes() -> int:
    """Disk space that mapped weights take (the files have holes)."""
    return sum(_disk_bytes(folder) for folder in _folders(cache_root()))


def clear_cache() -> tuple[int, int]:
    """Remove all mapped weights that no engine uses: bytes freed, folders still in use."""
    freed = in_use = 0
    root = cache_root()
    for folder in _folders(root):
        lock = _lock(root, folder.name)
        if lock is None:
            in_use += 1
            continue
        freed += _disk_bytes(folder)
        _remove(root, folder.name)
        os.close(lock)
    return freed, in_use


def clear_unused() -> None:
    """Remove mapped weights of bundles that are gone or changed (each new engine does so, too)."""
    with contextlib.suppress(OSError):
        _prune(cache_root())


# --- claiming -----------------------------------------------------------------------------------


def _claim(root: Path, bundle: Path, config: Mapping[str, Any]) -> MappedWeights:
    identity = _identity(bundle, config)
    name = _digest({key: identity[key] for key in ("bundle", "settings")})
    needed = int(_COPY_FACTOR * identity["weights"]["bytes"]) + _COPY_REST_BYTES
    lock = _lock(root, name)
    if lock is None:
        return _private(root, identity, needed)
    folder = root / name
    try:
        mark = _read_mark(folder)
        if mark is not None and {key: mark.get(key) for key in identity} == identity:
            if mark.get("usable") is not True:
                os.close(lock)
                return in_memory("the engine failed on mapped weights of this bundle before")
            if mark.get("files") == _sizes(folder):
                return MappedWeights(MappingState("ready", folder), identity, lock)
        _empty(folder)
        note = _no_room(root, needed)
        if note is None:
            return MappedWeights(MappingState("new", folder), identity, lock)
    except BaseException:
        os.close(lock)
        raise
    _remove(root, name)
    os.close(lock)
    return in_memory(note)


def _private(root: Path, identity: Mapping[str, Any], needed: int) -> MappedWeights:
    """Files of this engine alone: the folder of the bundle is in another one's use."""
    note = _no_room(root, needed)
    if note is not None:
        return in_memory(note)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PRIVATE, dir=root))
        lock = _lock(root, folder.name)
        # Another process may have taken the new folder for a stale one before it was locked.
        if lock is not None and folder.is_dir():
            break
        if lock is not None:
            os.close(lock)
    note = "another engine uses the mapped weights of this bundle; this one wrote its own"
    _log.info("%s", note)
    return MappedWeights(MappingState("private", folder, note), identity, lock)


def _no_room(root: Path, needed: int) -> str | None:
    free = shutil.disk_usage(root).free
    if free >= needed:
        return None
    return f"mapping needs {needed / 1e6:.0f} MB of disk space, {root} has {free / 1e6:.0f} MB free"


def _identity(bundle: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine's files depend on: the bundle's bytes, the engine, machine and settings."""
    threads = config.get("thread_num", _DEFAULT_THREADS)
    hashes = (_read_object(bundle / "mnnsmith.json") or {}).get("files")
    return {
        "bundle": os.path.realpath(bundle),
        "weights": _file(bundle, config["llm_weight"], hashes),
        "graph": _file(bundle, config["llm_model"], hashes),
        "engine": installed_version("MNN") or "unknown",
        "cpu": list(cpu_features()),
        "settings": {
            "memory": config.get("memory", "low"),
            "precision": config.get("precision", "low"),
            "dynamic_option": config.get("dynamic_option", 0),
            "backend_type": config.get("backend_type", "cpu"),
            "mmap_size": config.get("mmap_size"),
            "thread_num": min(threads, usable_processors()) if type(threads) is int else threads,
        },
    }


def _file(bundle: Path, name: str, hashes: Any) -> dict[str, Any]:
    """A file's size and time, and its hash if the manifest has it (none is computed here)."""
    status = (bundle / name).stat()
    found: dict[str, Any] = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    if isinstance(hashes, dict) and isinstance(hashes.get(name), dict):
        found["sha256"] = hashes[name].get("sha256")
    return found


# --- locks, marks, folders ----------------------------------------------------------------------


def _lock(root: Path, name: str) -> int | None:
    """Take the lock of a folder: a file beside it, held by the kernel until all holders end."""
    path = root / f"{name}{_LOCK}"
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        # The one before may have removed the file between the two calls.
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _let_go(lock_fd: int | None, private: Path | None, owner_pid: int) -> None:
    if lock_fd is None:
        return
    if private is not None and os.getpid() == owner_pid:
        _remove(private.parent, private.name)
    os.close(lock_fd)


def _prune(root: Path) -> None:
    """Remove what nobody will use again: of bundles that are gone or changed, or half written."""
    for folder in _folders(root):
        if _of_a_bundle(folder):
            continue
        lock = _lock(root, folder.name)
        if lock is None:
            continue
        # Looked at again: its engine may have finished in between.
        if not _of_a_bundle(folder):
            _remove(root, folder.name)
        os.close(lock)


def _of_a_bundle(folder: Path) -> bool:
    mark = _read_mark(folder)
    if mark is None:
        return False
    bundle, weights = mark.get("bundle"), mark.get("weights")
    if not isinstance(bundle, str) or not isinstance(weights, dict) or "\0" in bundle:
        return False
    for path in Path(bundle).glob("*.weight"):
        status = path.stat()
        if [status.st_size, status.st_mtime_ns] == [weights.get("bytes"), weights.get("mtime_ns")]:
            return True
    return False


def _folders(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from (path for path in sorted(root.iterdir()) if path.is_dir())


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _remove(root: Path, name: str) -> None:
    """Remove a folder whose lock is held, and the lock's file."""
    shutil.rmtree(root / name, ignore_errors=True)
    (root / f"{name}{_LOCK}").unlink(missing_ok=True)


def _sizes(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if p.name != _MARK}


def _disk_bytes(folder: Path) -> int:
    return sum(512 * path.lstat().st_blocks for path in folder.iterdir())


def _write_mark(folder: Path, mark: Mapping[str, Any]) -> None:
    temporary = folder / f".{_MARK}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(mark, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / _MARK)


def _read_mark(folder: Path) -> dict[str, Any] | None:
    return _read_object(folder / _MARK)


def _read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object, None where there is no such file or something else in it."""
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read(_JSON_LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]
