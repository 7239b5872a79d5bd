"""Unpacking Debian packages and wheels into a folder, with Python's own means.

A `.deb` is an `ar` archive (deb(5)): `debian-binary`, `control.tar.*` and `data.tar.xz`, whose
paths are those of a whole system.  Nothing of an archive leaves its folder: names must be plain, no
parent may be a link, links must end inside, and sizes are bounded before anything is written.
"""

from __future__ import annotations

import io
import lzma
import os
import posixpath
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from mnnsmith.errors import SourceError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_AR_MAGIC, _AR_HEADER_BYTES, _AR_END = b"!<arch>\n", 60, b"`\n"
_DATA = "data.tar.xz"
_COPY_BYTES = 1 << 20
# Of one archive: a qemu-user-static of Debian has 380 MB in 140 files, a stdlib 700 files.
_UNPACKED_LIMIT_BYTES = 512 << 20
_FILES_LIMIT = 20_000
# What `xz -9` needs; the format allows 4 GiB.
_XZ_MEMORY_BYTES = 80 << 20
_AR_MEMBERS_LIMIT = 16


@dataclass
class _Target:
    """A folder that an archive is written into, and what of its bounds is left."""

    folder: Path
    where: str
    bytes_left: int = _UNPACKED_LIMIT_BYTES
    files_left: int = _FILES_LIMIT

    def take(self, size_bytes: int) -> None:
        """Count one more member, wanted or not."""
        self.files_left -= 1
        self.bytes_left -= size_bytes
        if self.files_left < 0 or self.bytes_left < 0:
            raise SourceError(
                f"{self.where}: unpacks to more than {_UNPACKED_LIMIT_BYTES >> 20} MiB or "
                f"{_FILES_LIMIT} files."
            )

    def place(self, name: str) -> Path:
        """Where a member goes; its parents are made, none of them is a link."""
        path = self.folder
        *parents, last = name.split("/")
        for part in parents:
            path = path / part
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise SourceError(f"{self.where}: {name!r:.200} leads through a link or a file.")
            path.mkdir(exist_ok=True)
        path = path / last
        if path.is_symlink() or path.exists():
            raise SourceError(f"{self.where}: {name!r:.200} is there already.")
        return path

    def write(self, name: str, source: IO[bytes], size_bytes: int, executable: bool) -> None:
        with open(self.place(name), "xb") as file:
            left = size_bytes
            while left:
                block = source.read(min(left, _COPY_BYTES))
                if not block:
                    raise SourceError(f"{self.where}: {name!r:.200} is cut short.")
                file.write(block)
                left -= len(block)
            os.fchmod(file.fileno(), 0o755 if executable else 0o644)

    def link(self, name: str, target: str) -> None:
        """A symbolic link; an absolute one means the system that the folder holds."""
        base = posixpath.dirname(name)
        goal = posixpath.normpath(
            target.lstrip("/") if target.startswith("/") else posixpath.join(base, target)
        )
        if not target or "\0" in target or goal.split("/")[0] in ("..", "."):
            raise SourceError(f"{self.where}: the link {name!r:.200} leaves the archive.")
        self.place(name).symlink_to(posixpath.relpath(goal, base or "."))


def plain_name(name: str, where: str) -> str:
    """A member's path without `./` and a last `/`; raises SourceError where it is no plain path."""
    plain = name.removeprefix("./").removesuffix("/")
    if plain in ("", "."):
        return ""
    if "\0" in plain or "\\" in plain or any(part in ("", ".", "..") for part in plain.split("/")):
        raise SourceError(f"{where}: {name!r:.200} is no plain path inside the archive.")
    return plain


def unpack_deb(package: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Write the files of a Debian package whose path (`usr/bin/env`) is `wanted` into `folder`.

    Raises SourceError for what is no such package, is damaged, or would write elsewhere.
    """
    target = _Target(folder, package.name)
    try:
        with open(package, "rb") as file:
            data = _Unxz(file, _data_member(file, package.name), package.name)
            stream = io.BufferedReader(data, _COPY_BYTES)
            with tarfile.open(fileobj=stream, mode="r|", bufsize=_COPY_BYTES) as archive:
                for member in archive:
                    _unpack_member(archive, member, target, wanted)
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError, OverflowError) as error:
        raise SourceError(f"{package.name}: a damaged package: {error}.") from error


def unpack_wheel(wheel: Path, folder: Path) -> None:
    """Write all files of a wheel into `folder`, as an import path.  Raises as `unpack_deb`."""
    target = _Target(folder, wheel.name)
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                target.take(member.file_size)
                name = plain_name(member.filename, wheel.name)
                if member.is_dir() or not name:
                    continue
                with archive.open(member) as source:
                    target.write(name, source, member.file_size, executable=False)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise SourceError(f"{wheel.name}: a damaged wheel: {error}.") from error


def _unpack_member(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    target: _Target,
    wanted: Callable[[str], bool],
) -> None:
    target.take(member.size)
    name = plain_name(member.name, target.where)
    if not name or member.isdir() or not wanted(name):
        return
    if member.issym():
        target.link(name, member.linkname)
        return
    source = archive.extractfile(member) if member.isreg() else None
    if source is None:
        raise SourceError(f"{target.where}: {name!r:.200} is neither a file nor a symbolic link.")
    with source:
        target.write(name, source, member.size, executable=bool(member.mode & 0o100))


def _data_member(file: BinaryIO, where: str) -> int:
    """Go to the data of the package: its size."""
    if file.read(len(_AR_MAGIC)) != _AR_MAGIC:
        raise SourceError(f"{where}: no Debian package (it does not begin as an ar archive).")
    for _ in range(_AR_MEMBERS_LIMIT):
        header = file.read(_AR_HEADER_BYTES)
        if len(header) != _AR_HEADER_BYTES or header[58:] != _AR_END:
            break
        name, digits = header[:16].decode("ascii", "replace").rstrip(" /"), header[48:58].strip()
        if not digits.isdigit():
            break
        size_bytes = int(digits)
        if name == _DATA:
            return size_bytes
        # Members begin at even places.
        file.seek(size_bytes + size_bytes % 2, os.SEEK_CUR)
    raise SourceError(f"{where}: a damaged package: it has no {_DATA}.")


class _Unxz(io.RawIOBase):
    """The decompressed stream of one xz member, with bounds on memory and on what comes out.

    `lzma.open` would allow both to be anything.
    """

    def __init__(self, file: BinaryIO, size_bytes: int, where: str) -> None:
        self._file = file
        self._left = size_bytes
        self._where = where
        self._out_left = _UNPACKED_LIMIT_BYTES
        self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        part = b""
        while not part and not self._decompressor.eof:
            part = self._decompressor.decompress(self._more(), max_length=len(view))
        self._out_left -= len(part)
        if self._out_left < 0:
            raise SourceError(
                f"{self._where}: unpacks to more than {_UNPACKED_LIMIT_BYTES >> 20} MiB."
            )
        view[: len(part)] = part
        return len(part)

    def _more(self) -> bytes:
        if not self._decompressor.needs_input:
            return b""
        block = self._file.read(min(self._left, _COPY_BYTES))
        self._left -= len(block)
        if not block:
            raise EOFError("it is cut short")
        return block
