"""Debian packages and wheels made by hand, good ones and hostile ones."""

from __future__ import annotations

import base64
import hashlib
import io
import lzma
import tarfile
import zipfile
from pathlib import Path


def tar(*members: tuple[str, bytes | str, int]) -> bytes:
    """(name, content or link target, mode or tar type); text is a link's target."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content, mode in members:
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type, entry.linkname = bytes([mode]), content
                archive.addfile(entry)
            else:
                entry.size, entry.mode = len(content), mode
                archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def symlink(name: str, target: str) -> tuple[str, str, int]:
    return name, target, tarfile.SYMTYPE[0]


def ar(*members: tuple[str, bytes]) -> bytes:
    parts = [b"!<arch>\n"]
    for name, data in members:
        head = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}".encode() + b"`\n"
        parts += [head, data, b"\n" * (len(data) % 2)]
    return b"".join(parts)


def deb_of(data: bytes, preset: int = 0) -> bytes:
    """A package whose data is the tar archive `data`."""
    return ar(
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", lzma.compress(tar(("./control", b"Package: odd", 0o644)))),
        ("data.tar.xz", lzma.compress(data, preset=preset)),
    )


def write_wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    info = f"{name}-{version}.dist-info"
    everything = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()}"
        f",{len(data)}\n"
        for path, data in everything.items()
    )
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, data in {**everything, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(path, data)
    return target
