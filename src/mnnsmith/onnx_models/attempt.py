"""One way from an ONNX model to the engine's: prepare, convert, run, compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.engine.converter import onnx_to_mnn
from mnnsmith.engine.module import Module
from mnnsmith.errors import ConversionError, EngineError, UsageError, VerificationError
from mnnsmith.onnx_models.compare import difference
from mnnsmith.onnx_models.prepare import PREPARED
from mnnsmith.onnx_models.tasks import MEMORY_LIMIT_BYTES, TaskFailedError, Worker
from mnnsmith.onnx_models.trials import Arrays

MODEL = "model.mnn"


@dataclass(frozen=True)
class Job:
    """What all attempts share.

    trials, expected: inputs and the original's outputs, one for each trial; both empty where
    nothing is compared.  options: of the converter.  tolerance: see `compare.difference`.
    """

    model: Path
    trials: Sequence[Arrays]
    expected: Sequence[Arrays]
    options: Sequence[str]
    tolerance: float
    without_rules: Sequence[str]
    refuse: bool
    timeout_s: float


@dataclass(frozen=True)
class Attempt:
    """A converted model that agrees with its original.

    prepared: what the worker's task `prepare` says.  differences: the largest of each trial.
    """

    path: Path
    prepared: Mapping[str, Any]
    differences: tuple[float, ...]


def attempt(job: Job, worker: Worker, *, simplified: bool) -> Attempt:
    """Raises ConversionError, EngineError or VerificationError where this way leads to nothing."""
    folder = worker.new_folder("prepare")
    try:
        prepared = worker.run(
            "prepare", folder, model=str(job.model), simplify=simplified,
            without_rules=list(job.without_rules), refuse=job.refuse,
        )  # fmt: skip
    except TaskFailedError as error:
        raise ConversionError(f"{job.model}: preparing the model {error}") from error
    path = worker.new_folder("convert") / MODEL
    onnx_to_mnn(
        folder / PREPARED, path, job.options,
        memory_limit_bytes=MEMORY_LIMIT_BYTES, timeout_s=job.timeout_s,
    )  # fmt: skip
    try:
        return Attempt(path, prepared, _differences(job, prepared, path))
    except UsageError as error:
        # The converted module has not the inputs and outputs of the original.
        raise ConversionError(f"{job.model}: {error.message}", error.hint) from error


def _differences(job: Job, prepared: Mapping[str, Any], path: Path) -> tuple[float, ...]:
    used = prepared["used_inputs"]
    outputs = {o["tensor"]: o["name"] for o in prepared["outputs"]}
    found = []
    with Module(
        path, inputs=used, outputs=list(outputs), threads=1, precision="high", memory="high",
        call_timeout_s=job.timeout_s, load_timeout_s=job.timeout_s,
    ) as module:  # fmt: skip
        pairs = list(zip(job.trials, job.expected, strict=True))
        # Once more from behind: what was read from memory that nobody wrote is another thing then.
        for trial, expected in [*pairs, *reversed(pairs)]:
            made = module.run({name: as_engine_takes(trial[name]) for name in used})
            found.append(_judge(made, outputs, trial, expected, job.tolerance))
    return tuple(found[: len(job.trials)])


def as_engine_takes(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The engine computes in float32; wider and narrower floats are turned to it."""
    if array.dtype.kind != "f":
        return array
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _judge(
    made: Mapping[str, npt.NDArray[Any]],
    outputs: Mapping[str, str],
    trial: Arrays,
    expected: Arrays,
    tolerance: float,
) -> float:
    largest = 0.0
    for tensor, name in outputs.items():
        off = difference(made[tensor], expected[name])
        if not off <= tolerance:
            shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in trial.items())
            raise VerificationError(
                f"output {name!r} differs from the original by {off:.2g} of its largest magnitude, "
                f"where {tolerance:g} is allowed (shape {list(made[tensor].shape)} against "
                f"{list(expected[name].shape)}; inputs {shapes})."
            )
        largest = max(largest, off)
    return largest


FAILURES = (ConversionError, EngineError, VerificationError)
