"""Reading files that people give us: JSON within bounds, hashes, exact reads at an offset."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from mnnsmith.errors import SourceError

# Larger than any config, index or tokenizer in use (tokenizer.json of 250k tokens: 35 MB).
JSON_LIMIT_BYTES = 256 << 20
_LFS_MAGIC = b"version https://git-lfs"
_HASH_BLOCK_BYTES = 1 << 20


def read_text(path: Path, limit_bytes: int = JSON_LIMIT_BYTES) -> str:
    """The whole file as UTF-8 text; raises `SourceError` if absent, too large or not text."""
    try:
        size = path.stat().st_size
        if size > limit_bytes:
            raise SourceError(f"{path}: {size} bytes are more than the {limit_bytes} we accept.")
        if not path.is_file():
            raise SourceError(f"{path}: not a regular file.")
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}.") from error
    if data.startswith(_LFS_MAGIC):
        raise lfs_error(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: not UTF-8 text (byte {error.start}).") from error


def parse_json(text: str, where: str) -> Any:
    """Parse JSON, refusing what Python accepts beyond the standard's meaning: duplicate keys."""
    if not text.strip():
        raise SourceError(f"{where}: the file is empty.", "Download it again.")
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise SourceError(f"{where}: nested too deeply.") from None
    except ValueError as error:
        raise SourceError(f"{where}: not valid JSON: {error}.") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file whose top level is an object."""
    value = parse_json(read_text(path), str(path))
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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found
