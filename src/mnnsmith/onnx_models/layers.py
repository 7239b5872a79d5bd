"""Where a converted model leaves its original: tensor by tensor, and the first that differs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.engine.module import Module
from mnnsmith.engine.module_graph import OperatorInfo
from mnnsmith.errors import SourceError, UsageError
from mnnsmith.extras import require_packages
from mnnsmith.files import is_file, user_path
from mnnsmith.onnx_models.arrays import read_user_arrays, write_arrays
from mnnsmith.onnx_models.attempt import as_engine_takes
from mnnsmith.onnx_models.profile import trial_shapes
from mnnsmith.onnx_models.tasks import TaskFailedError, Worker
from mnnsmith.onnx_models.trials import Arrays, candidates, from_data

TOLERANCE = 1e-3


@dataclass(frozen=True)
class TensorComparison:
    """A tensor that the converted model and the original both name.

    operator: what computes it in the original.  status: "equal"; "shifted": it holds what the
    original calls `compared_with`, a little later; "differs"; "unmatched": of another size than
    all that it could be.  difference: of the largest magnitude in the original; None where that
    says nothing (integers, infinities, another size).
    """

    name: str
    operator: str
    status: str
    compared_with: str
    difference: float | None
    shape: tuple[int, ...]

    @property
    def agrees(self) -> bool:
        return self.status in ("equal", "shifted")


@dataclass(frozen=True)
class LayerComparison:
    """Rows in the order in which the converted model computes them.

    divergence: the first tensor that differs and after which nothing agrees any more; a tensor
    that differs alone holds something that the original has no name for.
    original_tensors: how many the original computes.  program: what ran it.
    """

    rows: tuple[TensorComparison, ...]
    divergence: TensorComparison | None
    original_tensors: int
    program: str
    shapes: Mapping[str, tuple[int, ...]]
    tolerance: float

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)


def compare_layers(
    directory: str | os.PathLike[str],
    source: str | os.PathLike[str],
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    data: str | os.PathLike[str] | Mapping[str, npt.NDArray[Any]] | None = None,
    tolerance: float = TOLERANCE,
    threads: int | None = None,
    worker: Worker | None = None,
) -> LayerComparison:
    """Compare the bundle in `directory` with the ONNX model `source`, all tensors that both have.

    input_shapes: sizes of inputs, for others those that the conversion was compared at.
    data: arrays by name or a .npz file, in place of random ones.
    tolerance: the largest difference of a tensor that agrees, of its largest magnitude.
    worker: one to share with other calls.

    Raises UsageError for wrong options or a source of other inputs, SourceError for a damaged
    one, EngineError when the engine fails.
    """
    require_packages("onnx", "onnxruntime")
    path, model = user_path(os.fspath(directory)), user_path(os.fspath(source)).absolute()
    if not is_file(model):
        raise SourceError(f"{model}: there is no such file.")
    if worker is not None:
        return _compared(path, model, input_shapes or {}, data, tolerance, threads, worker)
    with (
        tempfile.TemporaryDirectory(prefix="mnnsmith-layers-") as folder,
        Worker(Path(folder)) as own,
    ):
        return _compared(path, model, input_shapes or {}, data, tolerance, threads, own)


def _compared(
    path: Path,
    model: Path,
    input_shapes: Mapping[str, Sequence[int]],
    data: str | os.PathLike[str] | Mapping[str, npt.NDArray[Any]] | None,
    tolerance: float,
    threads: int | None,
    worker: Worker,
) -> LayerComparison:
    described = _run(worker, "prepare", worker.new_folder("read"), model, only_describe=True)
    if data is None:
        shapes = {**trial_shapes(path), **input_shapes}
        sets = [trials[0] for trials in candidates(described["inputs"], [shapes] if shapes else [])]
    else:
        arrays = data if isinstance(data, Mapping) else read_user_arrays(user_path(os.fspath(data)))
        sets = [from_data(described["inputs"], arrays, str(model))]
    feed = _first_that_runs(model, [o["name"] for o in described["outputs"]], sets, worker)
    found, operators = _engine_values(path, feed, threads)
    folder = worker.new_folder("layers")
    write_arrays(folder / "feed.npz", feed)
    write_arrays(folder / "found.npz", found)
    told = _run(
        worker, "layers", folder, model, feed=str(folder / "feed.npz"),
        found=str(folder / "found.npz"), tolerance=tolerance,
    )  # fmt: skip
    rows = tuple(TensorComparison(**{**row, "shape": tuple(row["shape"])}) for row in told["rows"])
    floats = {name for name, value in found.items() if value.dtype.kind == "f" and value.size > 1}
    return LayerComparison(
        rows=rows,
        divergence=first_divergence(rows, operators, floats),
        original_tensors=told["tensors"],
        program=told["program"],
        shapes={name: value.shape for name, value in feed.items()},
        tolerance=tolerance,
    )


def first_divergence(
    rows: Sequence[TensorComparison], operators: Sequence[OperatorInfo], floats: set[str]
) -> TensorComparison | None:
    """The first row that differs and leads to no tensor of `floats` that agrees.

    Integers prove nothing: the position of the largest value may stay where values are wrong.
    """
    good = {row.name for row in rows if row.agrees and row.name in floats}
    leads_to_good: set[str] = set()
    for operator in reversed(operators):
        if any(name in good or name in leads_to_good for name in operator.outputs):
            leads_to_good.update(operator.inputs)
    return next(
        (row for row in rows if row.status == "differs" and row.name not in leads_to_good), None
    )


def _run(
    worker: Worker, task: str, folder: Path, model: Path, **arguments: Any
) -> Mapping[str, Any]:
    try:
        return worker.run(task, folder, model=str(model), **arguments)
    except TaskFailedError as error:
        raise SourceError(
            f"{model}: running it {error}", "The file is damaged, or larger than memory."
        ) from error


def _first_that_runs(
    model: Path, outputs: list[str], sets: Sequence[Arrays], worker: Worker
) -> Arrays:
    """The first inputs that the original takes: the engine does not notice an index too large."""
    failures = []
    for feed in sets:
        folder = worker.new_folder("try")
        write_arrays(folder / "feed.npz", feed)
        told = _run(
            worker, "reference", folder, model, outputs=outputs, feeds=[str(folder / "feed.npz")],
            results=[str(folder / "result.npz")], evaluator=True,
        )  # fmt: skip
        if told["failures"] == [None]:
            return feed
        failures.append(told["failures"][0])
    raise UsageError(
        f"{model}: the original does not run on the values: {failures[0]}",
        "Give shapes that it takes with --input-shape NAME=1,3,224,224, or values with --data.",
    )


def _engine_values(
    path: Path, feed: Arrays, threads: int | None
) -> tuple[dict[str, npt.NDArray[Any]], tuple[OperatorInfo, ...]]:
    """Every tensor that the converted model computes, in its order."""
    with Module(path, threads=1) as module:
        operators, inputs = module.operators, [one.name for one in module.inputs]
    unknown = [name for name in inputs if name not in feed]
    if unknown:
        raise UsageError(
            f"{path}: takes {', '.join(inputs)}, the original {', '.join(feed) or 'nothing'}.",
            "Give the model that the bundle was made of.",
        )
    names = dict.fromkeys(
        name for operator in operators if operator.computes for name in operator.outputs
    )
    with Module(
        path, outputs=list(names), threads=threads, precision="high", memory="high"
    ) as module:
        return module.run({name: as_engine_takes(np.asarray(feed[name])) for name in inputs}), (
            operators
        )
