"""Named arrays in a file.  Names of tensors may hold what a file's name may not, so they are kept
in a list of their own."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import UsageError

_NAMES = "names"
DATA_LIMIT_BYTES = 4 << 30


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write numeric arrays of any names."""
    held = {f"a{i}": np.asarray(a) for i, a in enumerate(arrays.values())}
    np.savez(path, **{_NAMES: np.array(list(arrays), dtype=np.str_)}, **held)  # type: ignore[arg-type]


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """What `write_arrays` wrote."""
    with np.load(path, allow_pickle=False) as file:
        names = [str(name) for name in file[_NAMES]]
        return {name: file[f"a{i}"] for i, name in enumerate(names)}


def read_user_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a user's .npz file; raises UsageError for what is none."""
    try:
        if path.stat().st_size > DATA_LIMIT_BYTES:
            raise UsageError(f"{path}: more than {DATA_LIMIT_BYTES} bytes of data.")
        with zipfile.ZipFile(path) as archive:
            expanded = sum(info.file_size for info in archive.infolist())
        if expanded > DATA_LIMIT_BYTES:
            raise UsageError(f"{path}: expands to more than {DATA_LIMIT_BYTES} bytes.")
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile, KeyError, EOFError) as error:
        raise UsageError(
            f"{path}: cannot be read as a .npz file of arrays: {error}.",
            "Write it with numpy.savez(path, input_name=array, ...).",
        ) from error
