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
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mnnsmith.bundle.manifest import MANIFEST, UNLISTED, read_any_manifest
from mnnsmith.errors import BundleError, MissingResourceError, UsageError

# `.NAME` + _PARTIAL + random: the new folder; with _LOCK after it, the lock that its maker holds;
# with _OLD after it, the old folder while neither has the place.
_PARTIAL = ".mnnsmith-partial-"
_LOCK = ".lock"
_OLD = ".old"
# Linux: swap two paths in one step.
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# Opening a lock file of this name: gone meanwhile, another user's, or no file that we made.
_NOT_OURS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP)


@contextmanager
def staged_folder(target: Path, *, replace: bool, needed_bytes: int) -> Iterator[Path]:
    """Give an empty folder to fill; on a clean exit it becomes `target`.

    replace: an existing bundle at `target` is exchanged for the new one, else it is an error.
    What is at `target` is looked at before the work and again at its end, so that nothing that
    came there meanwhile is lost.
    Raises `UsageError` if `target` exists or may not be replaced, `MissingResourceError` if the
    disk has less than `needed_bytes` free, or the place cannot be written.
    """
    # Through a symbolic link: the folder it leads to is replaced, not the link.
    target = Path(os.path.realpath(target))
    with partial_folder(target, "the bundle", needed_bytes=needed_bytes) as partial:
        check_target(target, replace=replace)
        yield partial
        try:
            sync_files(partial)
            _install(partial, target, replace)
        except OSError as error:
            raise _cannot_write(target, error) from error


@contextmanager
def partial_folder(target: Path, what: str, *, needed_bytes: int) -> Iterator[Path]:
    """Give an empty hidden folder beside `target`; at the end it is removed with all it holds.

    what: that which is written, as messages name it.
    What killed runs for the same target left is removed first.  Raises `MissingResourceError` if
    the disk has less than `needed_bytes` free, or the place cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        free = shutil.disk_usage(target.parent).free
        lock = _take_lock(target)
    except OSError as error:
        raise _cannot_write(target, error) from error
    partial = target.parent / lock.name.removesuffix(_LOCK)
    try:
        if free < needed_bytes:
            raise MissingResourceError(
                f"{target.parent}: {what} needs {needed_bytes / 1e6:.0f} MB, the disk has "
                f"{free / 1e6:.0f} MB free.",
                "Free some space, or choose an output on another disk.",
            )
        _make(partial, target)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.path.unlink(missing_ok=True)
        os.close(lock.fd)


def check_target(target: Path, *, replace: bool) -> None:
    """Whether `target` may be written, before any work is done."""
    try:
        _check_target(target, replace)
    except OSError as error:
        raise _cannot_write(target, error) from error


def _check_target(target: Path, replace: bool) -> None:
    name = str(target)
    if name != os.fsencode(name).decode("utf-8", "replace"):
        raise UsageError(
            f"{name!a}: the path is not UTF-8 text, and the engine would not open it.",
            "Choose another output.",
        )
    above = next(p for p in target.absolute().parents if os.path.lexists(p))
    if not above.is_dir():
        raise UsageError(f"{target}: {above} is not a folder.", "Choose another output.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise MissingResourceError(
            f"{target}: {above} cannot be written.", "Check permissions, or choose another output."
        )
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise UsageError(f"{target}: exists and is not a folder.", "Choose another output.")
    if not replace and any(target.iterdir()):
        raise UsageError(
            f"{target}: exists already.", "Choose another output, or replace it with --force."
        )
    # Through a link it is the folder behind it that goes.
    _check_disposable(Path(os.path.realpath(target)), target)


def _check_disposable(folder: Path, target: Path) -> None:
    """Whether `folder`, which has or had the place `target`, may be deleted.

    It must be empty or a bundle, and what a user put beside a bundle's files must not go with them.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise UsageError(f"{target}: is no folder any more.", "Choose another output.")
    names = {path.name for path in folder.iterdir()}
    if not names:
        return
    if MANIFEST not in names:
        raise UsageError(
            f"{target}: is not empty and holds no mnnsmith bundle; --force replaces bundles only.",
            "Choose another output, or empty the folder yourself.",
        )
    try:
        known = {*read_any_manifest(folder).files, *UNLISTED}
    except BundleError:
        # A damaged bundle, which is to be replaced; it cannot say what belongs to it.
        return
    if foreign := sorted(names - known):
        raise UsageError(
            f"{target}: holds files that are not the bundle's ({', '.join(foreign[:4])}), which "
            "--force would delete.",
            "Move them away, or choose another output.",
        )


class _Lock:
    """An open lock file; the kernel lets go of it when its process ends, however it ends."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd, self.name = path, fd, path.name


def _take_lock(target: Path) -> _Lock:
    while True:
        fd, name = tempfile.mkstemp(suffix=_LOCK, prefix=_prefix(target), dir=target.parent)
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Another process may have taken the new file for a stale one before it was locked.
        if os.fstat(fd).st_nlink:
            return _Lock(Path(name), fd)
        os.close(fd)


def _make(partial: Path, target: Path) -> None:
    try:
        partial.mkdir()
    except OSError as error:
        raise _cannot_write(target, error) from error


def _cannot_write(target: Path, error: OSError) -> MissingResourceError:
    return MissingResourceError(
        f"{target}: cannot be written: {error.strerror or error}.",
        "Check its name, permissions and free space, or choose another output.",
    )


def _install(partial: Path, target: Path, replace: bool) -> None:
    """Put `partial` in the place of `target`; a bundle that was there is then at `partial`.

    The work took its time, so what is at `target` now may be another thing than when it began.
    """
    _check_target(target, replace)
    if not replace or not os.path.lexists(target) or not any(target.iterdir()):
        # Of a folder, rename(2) takes a free place or that of an empty folder; all else it refuses.
        try:
            os.rename(partial, target)
        except OSError:
            _check_target(target, replace)
            raise
    elif _exchange(partial, target):
        # Now nobody can put anything more into the old one by its name.
        try:
            _check_disposable(partial, target)
        except UsageError:
            _exchange(partial, target)
            raise
    else:
        _replace_in_two_steps(partial, target)


def _replace_in_two_steps(partial: Path, target: Path) -> None:
    """For a file system without exchange: the place is empty for an instant.

    If this process dies then, the next run puts the old one back.
    """
    aside = partial.with_name(partial.name + _OLD)
    os.rename(target, aside)
    try:
        _check_disposable(aside, target)
        os.rename(partial, target)
    except (UsageError, OSError):
        os.rename(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two paths in one step; False where the system cannot."""
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
    """Clear up after killed conversions to the same target; live ones hold their lock.

    What another user left in a shared folder is not ours to remove, and does not stand in the way.
    """
    for lock in target.parent.glob(f"{_escaped(_prefix(target))}*{_LOCK}"):
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in _NOT_OURS:
                continue
            raise
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial = lock.with_name(lock.name.removesuffix(_LOCK))
            aside = lock.with_name(partial.name + _OLD)
            if aside.is_dir() and not os.path.lexists(target):
                os.rename(aside, target)
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(partial, ignore_errors=True)
            lock.unlink(missing_ok=True)
        except (BlockingIOError, PermissionError):
            continue
        finally:
            os.close(fd)


def _prefix(target: Path) -> str:
    return f".{target.name}{_PARTIAL}"


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def sync_files(folder: Path) -> None:
    """Bring the files to the disk before the folder takes its place."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
