"""Values to try a model on: a user's own, or seeded random ones at several shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import UsageError

Arrays = dict[str, npt.NDArray[Any]]
Port = Mapping[str, Any]
Shapes = Mapping[str, Sequence[int]]

SEED = 20240
# Sizes of dynamic axes: the leading one is taken for the batch.
_BATCHES = (1, 2, 3)
# In this order until the original takes them: lengths of texts, sizes of pictures.
_LENGTHS = ((8, 12, 17), (32, 64, 96), (224, 256, 224), (1, 1, 1), (512, 1024, 512))
# Largest values of integers, in the order tried: token ids first, then masks and counts.
_INTEGER_LIMITS = (100, 10, 2)
_ELEMENT_LIMIT = 1 << 28


def candidates(inputs: Sequence[Port], shapes: Sequence[Shapes]) -> list[list[Arrays]]:
    """Sets of trials, likelier ones first; a set is good if the original takes all its trials.

    shapes: what the user gave, one mapping for each trial; else dynamic axes are guessed.
    """
    lengths = [None] if shapes or not _dynamic(inputs) else list(_LENGTHS)
    limits = _INTEGER_LIMITS if _has_integers(inputs) else _INTEGER_LIMITS[:1]
    return [_trials(inputs, shapes, chosen, limit) for chosen in lengths for limit in limits]


def _trials(
    inputs: Sequence[Port], shapes: Sequence[Shapes], lengths: Sequence[int] | None, limit: int
) -> list[Arrays]:
    generator = np.random.default_rng(SEED)
    trials = []
    count = max(len(shapes), len(lengths or ()), 1)
    for index in range(count):
        given = shapes[index] if shapes else {}
        sizes: dict[str, int] = {}
        trial = {}
        for port in inputs:
            shape = tuple(given.get(port["name"], ())) if port["name"] in given else None
            if shape is None:
                length = lengths[index] if lengths else _LENGTHS[0][index % 3]
                shape = _shape(port, _BATCHES[index % 3], length, sizes)
            trial[port["name"]] = _values(port, shape, limit, generator)
        trials.append(trial)
    return trials


def _shape(port: Port, batch: int, length: int, sizes: dict[str, int]) -> tuple[int, ...]:
    """The declared shape with sizes for its dynamic axes; one name has one size."""
    if port["shape"] is None:
        raise UsageError(
            f"Input {port['name']!r} has no declared rank.",
            f"Give its shape with --input-shape {port['name']}=1,3,224,224, or data with --data.",
        )
    shape = []
    for axis, size in enumerate(port["shape"]):
        if isinstance(size, int) and size >= 0:
            shape.append(size)
        elif isinstance(size, str):
            shape.append(sizes.setdefault(size, batch if axis == 0 else length))
        else:
            shape.append(batch if axis == 0 else length)
    return tuple(shape)


def _values(
    port: Port, shape: tuple[int, ...], limit: int, generator: np.random.Generator
) -> npt.NDArray[Any]:
    if math.prod(shape) > _ELEMENT_LIMIT:
        raise UsageError(
            f"Input {port['name']!r} would have {math.prod(shape)} values.",
            "Give a smaller shape with --input-shape.",
        )
    dtype = np.dtype(port["dtype"])
    if dtype.kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(dtype)
    return generator.integers(0, limit, shape).astype(dtype)


def _dynamic(inputs: Sequence[Port]) -> bool:
    return any(
        not isinstance(size, int) or size < 0
        for port in inputs
        for size in port["shape"] or (None,)
    )


def _has_integers(inputs: Sequence[Port]) -> bool:
    return any(np.dtype(port["dtype"]).kind in "iu" for port in inputs)


def from_data(inputs: Sequence[Port], data: Mapping[str, npt.NDArray[Any]], where: str) -> Arrays:
    """The user's arrays as the model declares them; raises UsageError for what does not fit."""
    names = [port["name"] for port in inputs]
    missing, unknown = sorted(set(names) - set(data)), sorted(set(data) - set(names))
    if missing or unknown:
        raise UsageError(
            f"{where}: holds {', '.join(data) or 'nothing'}; the model takes {', '.join(names)}."
        )
    trial = {}
    for port in inputs:
        array, dtype = data[port["name"]], np.dtype(port["dtype"])
        if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise UsageError(f"{where}: {port['name']} is {array.dtype}, the model takes {dtype}.")
        trial[port["name"]] = array.astype(dtype)
    return trial
