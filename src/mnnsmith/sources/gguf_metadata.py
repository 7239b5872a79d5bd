"""Typed access to the metadata of a GGUF model, by the keys of its architecture."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.sources.gguf_file import GgufFile, MetadataArray

_INTEGER_LIMIT = 1 << 31
# Keys that change what a model computes and that none of our architectures has; any value but the
# given one is refused.
_WITHOUT = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.temperature_length": 0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "router_logit_softcapping": 0.0,
    "residual_scale": 0.0,
    "embedding_scale": 0.0,
    "logit_scale": 0.0,
    "use_parallel_residual": False,
}


class Metadata:
    """Typed access to the keys of one architecture; a missing or wrong one is a SourceError."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._values = file.metadata
        self.origin = str(file.paths[0])
        self._prefix = architecture

    def get(self, key: str) -> Any:
        """The value of `{architecture}.{key}`, or None."""
        return self._values.get(f"{self._prefix}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 0; an array (one number per layer) must hold equal ones."""
        value = self.get(key)
        if value is None:
            value = default
        if isinstance(value, MetadataArray):
            distinct = np.unique(value.numbers()).tolist()
            if len(distinct) > 1:
                raise UnsupportedError(
                    f"{self.origin}: {self._prefix}.{key} differs between layers ({distinct[:4]}); "
                    "models whose layers are not alike are not supported."
                )
            value = distinct[0] if distinct else None
        if type(value) is not int or not 0 <= value < _INTEGER_LIMIT:
            raise self._wrong(key, "a whole number", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; float32 values as the decimal that they were written from."""
        value = self.get(key)
        if value is None:
            value = default
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, "a finite number", value)
        return shortest(float(value))

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def refuse_others(self) -> None:
        """Refuse the keys that change the computation in a way that no config field expresses."""
        for key, harmless in _WITHOUT.items():
            value = self.get(key)
            if value is not None and value != harmless:
                raise UnsupportedError(
                    f"{self.origin}: {self._prefix}.{key} is {value!r:.40}, which changes what the "
                    "model computes and is not supported."
                )

    def _wrong(self, key: str, expected: str, value: Any) -> SourceError:
        name = f"{self._prefix}.{key}"
        if value is None:
            return SourceError(
                f"{self.origin}: the metadata lacks {name}.",
                "The file is incomplete, or was made by an old converter; take a newer one.",
            )
        return SourceError(f"{self.origin}: {name} must be {expected}, not {value!r:.60}.")


def shortest(value: float) -> float:
    """The shortest decimal that gives the same float32: 1e-05 for 9.99999974e-06.

    Metadata holds float32 where config.json had a decimal number; this gives that number back.
    """
    single = np.float32(value)
    return float(str(single)) if float(single) == value else value
