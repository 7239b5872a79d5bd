"""What the original model gives: ONNX Runtime, else onnx's own evaluator.  A worker's task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import UsageError
from mnnsmith.onnx_models.arrays import read_arrays, write_arrays
from mnnsmith.onnx_runtime import onnx_runtime

Arrays = dict[str, npt.NDArray[Any]]
Run = Callable[[Arrays], list[npt.NDArray[Any]]]
_LOG_FATAL = 4


def run_task(arguments: dict[str, Any]) -> dict[str, Any]:
    """arguments: model, outputs (names), feeds and results (npz files), evaluator.

    evaluator: whether to ask onnx's evaluator, too, where ONNX Runtime does not run the model.

    Gives the program's name, and for each feed None or why the model refuses it.
    """
    names = arguments["outputs"]
    path = Path(arguments["model"])
    program, run = open_reference(path, names)
    failures = _run_all(run, arguments)
    if any(failures) and arguments["evaluator"]:
        # ONNX Runtime lacks forms of some operators that onnx's own evaluator has.
        second, run = _evaluator(path, names, str(next(filter(None, failures))))
        if not any(_run_all(run, arguments)):
            return {"program": second, "failures": [None] * len(failures)}
    return {"program": program, "failures": failures}


def _run_all(run: Run, arguments: dict[str, Any]) -> list[str | None]:
    failures: list[str | None] = []
    for feed, result in zip(arguments["feeds"], arguments["results"], strict=True):
        try:
            values = run(read_arrays(Path(feed)))
        except RunFailedError as error:
            failures.append(str(error))
            continue
        write_arrays(Path(result), dict(zip(arguments["outputs"], values, strict=True)))
        failures.append(None)
    return failures


class RunFailedError(Exception):
    """The model cannot be run on these values."""


def open_reference(path: Path, names: list[str]) -> tuple[str, Run]:
    """The program that runs the model in `path`, and what runs it for the tensors `names`."""
    runtime = onnx_runtime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    runtime.set_default_logger_severity(_LOG_FATAL)
    options = runtime.SessionOptions()
    options.log_severity_level = _LOG_FATAL
    options.intra_op_num_threads = 2
    errors = (state.Fail, state.InvalidGraph, state.NotImplemented, state.InvalidArgument,
              state.RuntimeException)  # fmt: skip
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except errors as error:
        return _evaluator(path, names, str(error))

    def run(feed: Arrays) -> list[npt.NDArray[Any]]:
        try:
            return [np.asarray(v) for v in session.run(names, feed)]
        except (*errors, ValueError) as error:
            raise RunFailedError(str(error)[:400]) from error

    return f"ONNX Runtime {runtime.__version__}", run


def _evaluator(path: Path, names: list[str], refusal: str) -> tuple[str, Run]:
    import onnx
    from onnx.reference import ReferenceEvaluator

    try:
        evaluator = ReferenceEvaluator(str(path))
    except (NotImplementedError, RuntimeError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{path}: ONNX Runtime does not load it ({refusal[:300]}), and neither does onnx's own "
            f"evaluator ({str(error)[:200]}), so there is nothing to compare with.",
            "Convert without a comparison with --allow-unverified, or mend the model.",
        ) from error

    def run(feed: Arrays) -> list[npt.NDArray[Any]]:
        try:
            return [np.asarray(v) for v in evaluator.run(names, feed)]
        except Exception as error:
            raise RunFailedError(f"{type(error).__name__}: {error}"[:400]) from error

    return f"onnx {onnx.__version__} reference evaluator", run
