"""Arrays by name in one file, in numpy's npz form, read without trust.

Members are stored, not compressed, so that none can be larger than the file; a header is believed
only if it accounts for every byte of its member.
"""

from __future__ import annotations

import math
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import SourceError
from mnnsmith.files import output_file

_HEADER_LIMIT_BYTES = 4096
_MAGIC, _HEADER_AT = b"\x93NUMPY\x01\x00", 10
_HEADER = re.compile(
    rb"\{'descr': '([<|](?:f[248]|[iu][1248]))', 'fortran_order': False, "
    rb"'shape': \(((?:\d{1,15}, ?)*(?:\d{1,15})?)\), \}\s*"
)
_MAX_MEMBERS = 1 << 16
_SUFFIX = ".npy"


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write all arrays beside `path`, then give them its name in one step; raises `OSError`.

    Through a symbolic link the file behind it is replaced.  What is no regular file (a device, say)
    would be replaced by one, so `UsageError` is raised.
    """
    target = Path(os.path.realpath(output_file(path, regular=True)))
    partial = target.with_name(f".{target.name[:80]}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for key, array in arrays.items():
                    # Its date is fixed: equal arrays are equal bytes.
                    member = zipfile.ZipInfo(key + _SUFFIX)
                    with archive.open(member, "w", force_zip64=True) as out:
                        np.lib.format.write_array(
                            out, np.ascontiguousarray(array), allow_pickle=False
                        )
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


class ArrayFile:
    """An open file of `write_arrays`; raises `SourceError` for all that is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except FileNotFoundError as error:
            raise SourceError(f"{path}: there is no such file.") from error
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise self._damaged(f"it cannot be opened: {error}") from error
        infos = self._archive.infolist()
        self._members = {info.filename: info for info in infos}
        size = path.stat().st_size
        if len(self._members) != len(infos) or len(infos) > _MAX_MEMBERS:
            self.close()
            raise self._damaged("it has too many members, or two of one name")
        for info in infos:
            stored = info.compress_type == zipfile.ZIP_STORED
            if not stored or info.file_size != info.compress_size or info.file_size > size:
                self.close()
                raise self._damaged(f"{info.filename!r:.80} is compressed, or larger than the file")

    def read(
        self, name: str, rank: int, kinds: str, *, limit_bytes: int | None = None
    ) -> npt.NDArray[Any]:
        """The array of that name: of this rank, and of one of these kinds of numpy's types."""
        info = self._members.get(name + _SUFFIX)
        if info is None:
            raise self._damaged(f"it has no {name}")
        if limit_bytes is not None and info.file_size > limit_bytes:
            raise self._damaged(f"{name} has {info.file_size} bytes")
        try:
            raw = self._archive.read(info)
            array = _parse(raw)
        except (OSError, EOFError, ValueError, zipfile.BadZipFile, RuntimeError) as error:
            raise self._damaged(f"{name}: {error}") from error
        if array.ndim != rank or array.dtype.kind not in kinds:
            raise self._damaged(f"{name} is {array.dtype} {list(array.shape)}")
        return array

    def close(self) -> None:
        self._archive.close()

    def _damaged(self, what: str) -> SourceError:
        return SourceError(
            f"{self.path}: {what}; the file is damaged, or no saved reference.",
            "Make it anew with --save-reference.",
        )


def _parse(raw: bytes) -> npt.NDArray[Any]:
    """A member of the npy form (version 1), without a copy; raises `ValueError`."""
    size = int.from_bytes(raw[len(_MAGIC) : _HEADER_AT], "little")
    header = _HEADER.fullmatch(raw[_HEADER_AT : _HEADER_AT + size])
    if not raw.startswith(_MAGIC) or size > _HEADER_LIMIT_BYTES or header is None:
        raise ValueError("its header is not that of an array of numbers")
    dtype = np.dtype(header[1].decode())
    shape = tuple(int(number) for number in header[2].split(b",") if number.strip())
    at = _HEADER_AT + size
    if math.prod(shape) * dtype.itemsize != len(raw) - at:
        raise ValueError(f"{len(raw) - at} bytes are no {dtype} of shape {list(shape)}")
    return np.frombuffer(raw, dtype=dtype, offset=at).reshape(shape)
