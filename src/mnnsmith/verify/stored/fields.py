"""Fields of a bundle's JSON, each of the type that it must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import BundleError

# Far above any size or place in a weight file.
_LARGEST = 1 << 48
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


class Fields:
    """An object of an untrusted file; `where` names it in errors (`BundleError`)."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self._data = data
        self.where = where

    def member(self, key: str) -> Fields:
        """An object within."""
        value = self._data.get(key)
        if not isinstance(value, dict):
            raise self._error(key, "an object", value)
        return Fields(value, f"{self.where}: {key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number from zero on."""
        value = self._data.get(key, default)
        if type(value) is not int or not 0 <= value < _LARGEST:
            raise self._error(key, "a whole number", value)
        return value

    def integers(self, key: str, least: int) -> list[int]:
        """At least that many whole numbers from zero on."""
        value = self._data.get(key)
        if (
            not isinstance(value, list)
            or len(value) < least
            or not all(type(v) is int and 0 <= v < _LARGEST for v in value)
        ):
            raise self._error(key, f"{least} whole numbers", value)
        return value

    def numbers(self, key: str, size: int) -> npt.NDArray[np.float32]:
        """float32 [size], finite."""
        value = self._data.get(key)
        if (
            not isinstance(value, list)
            or len(value) != size
            or not all(type(v) in (int, float) and abs(v) <= _LARGEST_FLOAT for v in value)
        ):
            raise self._error(key, f"{size} numbers", value)
        return np.array(value, dtype=np.float32)

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._data.get(key, default)
        if not isinstance(value, str):
            raise self._error(key, "a text", value)
        return value

    def _error(self, key: str, expected: str, found: object) -> BundleError:
        return BundleError(f"{self.where}: {key} must be {expected}, found {found!r:.80}.")
