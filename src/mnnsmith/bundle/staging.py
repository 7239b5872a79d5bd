"""Writing a folder whole or not at all.

The new folder grows beside its place under a hidden name and takes the place in one step when it is
whole.  Whatever happens before that (an error, Ctrl-C, a kill, a full disk), the old one is intact.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mnnsmith.errors import MissingResourceError, UsageError

_PARTIAL = ".mnnsmith-partial-"
_LOCK = ".lock"
# Linux: swap two paths in one step.
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@contextmanager
def staged_folder(target: Path, *, replace: bool, needed_bytes: int) -> Iterator[Path]:
    """Give an empty folder to fill; on a clean exit it becomes `target`.

    replace: an existing `target` is exchanged for the new one; without it, it is an error.
    Raises `UsageError` if `target` exists, `MissingResourceError` if the disk has less than
    `needed_bytes` free.
    """
    target = Path(os.path.abspath(target))
    check_target(target, replace=replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target)
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes:
        raise MissingResourceError(
            f"{target.parent}: the bundle needs {needed_bytes / 1e6:.0f} MB, the disk has "
            f"{free / 1e6:.0f} MB free.",
            "Free some space, or choose an output on another disk.",
        )
    partial = target.parent / f".{target.name}{_PARTIAL}{os.getpid()}"
    partial.mkdir()
    lock = os.open(partial / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield partial
        os.unlink(partial / _LOCK)
        _sync(partial)
        _install(partial, target)
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)


def check_target(target: Path, *, replace: bool) -> None:
    """Whether `target` may be written, before any work is done."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise UsageError(f"{target}: exists and is not a folder.", "Choose another output.")
    if not any(target.iterdir()):
        return
    if not replace:
        raise UsageError(
            f"{target}: exists already.", "Choose another output, or replace it with --force."
        )
    if not (target / "mnnsmith.json").is_file():
        raise UsageError(
            f"{target}: is not empty and holds no mnnsmith bundle; --force replaces bundles only.",
            "Choose another output, or empty the folder yourself.",
        )


def _install(partial: Path, target: Path) -> None:
    """Put `partial` in the place of `target`; what was there is then at `partial`."""
    if not os.path.lexists(target):
        os.rename(partial, target)
    elif not any(target.iterdir()):
        target.rmdir()
        os.rename(partial, target)
    elif not _exchange(partial, target):
        # A file system without exchange: the place is empty for an instant between the two.
        aside = partial.with_name(partial.name + "-old")
        os.rename(target, aside)
        os.rename(partial, target)
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    status = libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    if status == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise MissingResourceError(f"{b}: cannot be replaced: {os.strerror(code)}.")


def _remove_stale(target: Path) -> None:
    """Remove what killed conversions to the same target left; live ones hold their lock."""
    for partial in target.parent.glob(f".{_escaped(target.name)}{_PARTIAL}*"):
        try:
            lock = os.open(partial / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _sync(folder: Path) -> None:
    """Bring the files to the disk before the folder takes its place."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
