"""Timing a converted model on its own trial shapes, or on what a user gives."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.bundle.manifest import MANIFEST, MODULE_KIND, read_any_manifest
from mnnsmith.engine.module import Module, TensorInfo
from mnnsmith.engine.module_profile import ModuleProfile, profile
from mnnsmith.errors import UsageError
from mnnsmith.files import user_path
from mnnsmith.onnx_models.arrays import read_user_arrays
from mnnsmith.onnx_models.hot_spots import advice

_SEED = 1
_ELEMENT_LIMIT = 1 << 28
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class ProfiledModule:
    """What was measured, and what follows from it: see `ModuleProfile`; advice: sentences."""

    profile: ModuleProfile
    advice: tuple[str, ...]


def profile_module(
    directory: str | os.PathLike[str],
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    data: str | os.PathLike[str] | Arrays | None = None,
    repeats: int = 20,
    threads: int | None = None,
    precision: str | None = None,
    memory: str | None = None,
) -> ProfiledModule:
    """Time the model in the bundle `directory`, or the `.mnn` file of that name.

    input_shapes: sizes of inputs; for others the first shape that the conversion was compared at.
    data: arrays by name or the path of a .npz file; None makes random ones, integers 0 and 1.
    repeats: runs of each kind.  threads: None is one per usable core.  precision, memory: None is
    "normal".

    Raises UsageError for wrong options, BundleError for what is no bundle, EngineError when the
    engine fails.
    """
    path = user_path(os.fspath(directory))
    _refuse_language_model(path)
    if data is not None:
        feeds = data if isinstance(data, Mapping) else read_user_arrays(user_path(os.fspath(data)))
    else:
        shapes = {**trial_shapes(path), **(input_shapes or {})}
        with Module(path, threads=1) as module:
            inputs = module.inputs
        unknown = sorted(set(input_shapes or {}) - {one.name for one in inputs})
        if unknown:
            known = ", ".join(one.name for one in inputs)
            raise UsageError(f"{path}: there is no input {unknown[0]!r}; the model takes {known}.")
        generator = np.random.default_rng(_SEED)
        feeds = {one.name: _random(one, shapes.get(one.name), generator) for one in inputs}
    found = profile(
        path, feeds, repeats=repeats, threads=threads,
        precision=precision or "normal", memory=memory or "normal",
    )  # fmt: skip
    return ProfiledModule(found, advice(found))


def _refuse_language_model(path: Path) -> None:
    if (path / MANIFEST).is_file() and read_any_manifest(path).data.get("kind") != MODULE_KIND:
        raise UsageError(
            f"{path}: holds a language model, which the engine does not time by operator.",
            "For a mixture of experts, --experts shows which of them a text uses.",
        )


def trial_shapes(path: Path) -> dict[str, list[int]]:
    """The shapes of inputs that a bundle was first compared at; none for a bare file."""
    if not (path / MANIFEST).is_file():
        return {}
    verification = read_any_manifest(path).data.get("verification")
    trials = verification.get("trials") if isinstance(verification, dict) else None
    first = trials[0] if isinstance(trials, list) and trials else None
    if not isinstance(first, dict):
        return {}
    return {
        name: shape
        for name, shape in first.items()
        if isinstance(shape, list) and all(type(size) is int for size in shape)
    }


def _random(
    info: TensorInfo, shape: Sequence[int] | None, generator: np.random.Generator
) -> npt.NDArray[Any]:
    if shape is None:
        if None in info.shape:
            raise UsageError(
                f"input {info.name} has the shape {info.shape}: a size is missing.",
                f"Give it with --input-shape {info.name}=1,3,224,224, or data with --data.",
            )
        shape = [size for size in info.shape if size is not None]
    if min(shape, default=1) < 0 or math.prod(shape) > _ELEMENT_LIMIT:
        raise UsageError(
            f"input {info.name} of shape {list(shape)}: up to {_ELEMENT_LIMIT} values."
        )
    if info.dtype == "float32":
        return generator.standard_normal(shape, dtype=np.float32)
    # As a mask or a token id, either value is one that any model takes.
    return generator.integers(0, 2, shape, dtype=info.dtype)
