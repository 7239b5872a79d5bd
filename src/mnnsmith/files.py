"""Reading files that people give us: paths, bounded JSON, hashes, exact reads."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

from mnnsmith.errors import MissingResourceError, SourceError, UsageError

# Larger than any index or tokenizer in use (tokenizer.json of 250k tokens: 35 MB, 1.5 million
# values, half a million lists).  Parsed, a file of empty lists would take 25 times its size.
JSON_LIMIT_BYTES = 64 << 20
_MAX_VALUES = 8_000_000
_MAX_CONTAINERS = 2_000_000
_SHOWN_CHARS = 80
# Only text that has half of a surrogate pair, or escapes it, can hold one alone.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
_LFS_MAGIC = b"version https://git-lfs"
_HASH_BLOCK_BYTES = 1 << 20
# Of two writes within less, a coarse clock may give both the same time.
_SETTLED_NS = 2_000_000_000


def user_path(path: str | Path) -> Path:
    """A path as a person typed it, `~` replaced; raises `UsageError` if it can be no path."""
    try:
        found = Path(path).expanduser()
        # Fails for too long a name, a NUL character, half a surrogate pair.
        os.stat(found)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return found
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{str(path)!r:.200} cannot be used as a path: {reason}.") from error
    return found


def output_file(path: str | Path, *, regular: bool = False) -> Path:
    """A path that a file can be written to, known before the work that it is to keep.

    regular: devices and pipes are refused, too: what is put in place whole would replace them.
    Raises `UsageError` that says what stands against it.
    """
    if not str(path):
        raise UsageError("The name of an output file is empty.", "Give the name of a file.")
    found = user_path(path)
    target = Path(os.path.realpath(found))
    if target.is_dir():
        raise UsageError(f"{found}: is a folder.", "Give the name of a file.")
    if not target.parent.is_dir():
        raise UsageError(f"{found}: there is no folder {target.parent}.", "Make it first.")
    device = target.exists() and not target.is_file()
    if device and regular:
        raise UsageError(f"{found}: is no regular file.", "Give the name of a file.")
    if not os.access(target if device else target.parent, os.W_OK):
        raise UsageError(f"{found}: cannot be written.", "Check permissions.")
    return found


def is_file(path: Path) -> bool:
    """Whether there is such a file; a name that no file can have (too long, say) is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """The whole file; raises `SourceError` if absent, too large or not a regular file."""
    try:
        size = path.stat().st_size
        if size > limit_bytes:
            raise SourceError(f"{path}: {size} bytes are more than the {limit_bytes} we accept.")
        if not path.is_file():
            raise SourceError(f"{path}: not a regular file.")
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise SourceError(f"{str(path)!r:.200} cannot be a file's name: {error}.") from error


def read_text(path: Path, limit_bytes: int = JSON_LIMIT_BYTES) -> str:
    """The whole file as UTF-8 text; raises `SourceError` if absent, too large or not text."""
    data = read_bytes(path, limit_bytes)
    if data.startswith(_LFS_MAGIC):
        raise lfs_error(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: not UTF-8 text (byte {error.start}).") from error


def check_json_bounds(text: str, where: str) -> None:
    """Refuse JSON that would take gigabytes once parsed, by a count that may be somewhat high."""
    containers = text.count("[") + text.count("{")
    if containers > _MAX_CONTAINERS or text.count(",") > _MAX_VALUES:
        raise SourceError(
            f"{where}: holds more lists, objects or values than the {_MAX_CONTAINERS} or "
            f"{_MAX_VALUES} that we accept."
        )


def parse_json(text: str, where: str) -> Any:
    """Parse JSON, refusing what has no one meaning: duplicate keys, half a surrogate pair."""
    if not text.strip():
        raise SourceError(f"{where}: the file is empty.", "Download it again.")
    check_json_bounds(text, where)
    try:
        value = json.loads(text, object_pairs_hook=_object)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except RecursionError:
        raise SourceError(f"{where}: nested too deeply.") from None
    except UnicodeEncodeError:
        raise SourceError(f"{where}: a text in it is no Unicode (half a surrogate pair).") from None
    except ValueError as error:
        raise SourceError(f"{where}: not valid JSON: {error}.") from error


def read_json_object(path: Path, limit_bytes: int = JSON_LIMIT_BYTES) -> dict[str, Any]:
    """A JSON file whose top level is an object."""
    value = parse_json(read_text(path, limit_bytes), str(path))
    if not isinstance(value, dict):
        raise SourceError(f"{path}: expected a JSON object, found a {type(value).__name__}.")
    return value


def lfs_error(path: Path) -> SourceError:
    """The error for a Git LFS pointer in place of a file."""
    return SourceError(
        f"{path}: this is a Git LFS pointer, not the file itself.",
        "Fetch the real file, for example with `git lfs pull`.",
    )


def is_lfs_pointer(head: bytes) -> bool:
    """Whether a file that begins so is a Git LFS pointer."""
    return head.startswith(_LFS_MAGIC)


class OpenFile:
    """A file kept open for reads at an offset, from any thread.

    Raises `SourceError` if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened: {error.strerror}.") from error

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


def pread_exact(fd: int, nbytes: int, offset: int, where: str) -> bytearray:
    """`nbytes` at `offset`; a file that ends early is an error."""
    buffer = bytearray(nbytes)
    view = memoryview(buffer)
    done = 0
    while done < nbytes:
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise SourceError(f"{where}: cannot be read: {error.strerror}.") from error
        if got == 0:
            raise SourceError(
                f"{where}: the file ends at byte {offset + done}, "
                f"{nbytes - done} bytes before the tensor does.",
                "It is truncated, or changed while it was read; download it again.",
            )
        done += got
    return buffer


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read block by block."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sha256_once(path: Path) -> str:
    """As `sha256_of`, of a file that this process may have read before.

    It is read again if its path, place, size or time differ, or the time is so recent that a write
    may not have changed it.  Not for what is to be looked at for damage.
    """
    path = path.resolve()
    stat = path.stat()
    if time.time_ns() - stat.st_mtime_ns < _SETTLED_NS:
        return sha256_of(path)
    return _sha256_of_state(path, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))


@functools.lru_cache(maxsize=1024)
def _sha256_of_state(path: Path, state: tuple[int, ...]) -> str:
    return sha256_of(path)


def replace_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all: what was there is replaced in one step.

    Through a symbolic link the file behind it is replaced; a device or pipe is written to.  Raises
    `MissingResourceError` where it cannot be written.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        mode = target.stat().st_mode & 0o777 if target.exists() else None
        part = target.with_name(f".{target.name[:80]}-{secrets.token_hex(4)}.part")
        try:
            with part.open("x", encoding="utf-8") as file:
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise MissingResourceError(
            f"{path}: cannot be written: {error.strerror}.", "Choose another place, or free space."
        ) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                shown = repr(name)[:_SHOWN_CHARS]
                raise ValueError(f"the key {shown} stands twice in one object")
            seen.add(name)
    return found
