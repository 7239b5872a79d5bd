"""An ONNX model becomes a bundle that was seen to agree with it, or an error says why not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from mnnsmith.bundle.module_bundle import write_module_bundle
from mnnsmith.bundle.staging import check_target
from mnnsmith.errors import MnnsmithError, SourceError, UsageError, VerificationError
from mnnsmith.extras import require_packages
from mnnsmith.files import is_file, sha256_of, user_path
from mnnsmith.onnx_models.arrays import read_arrays, read_user_arrays, write_arrays
from mnnsmith.onnx_models.attempt import FAILURES, Attempt, Job, attempt
from mnnsmith.onnx_models.operators import plain_operators
from mnnsmith.onnx_models.recipes import storage
from mnnsmith.onnx_models.rules.registry import all_rules
from mnnsmith.onnx_models.tasks import TIMEOUT_S, TaskFailedError, Worker
from mnnsmith.onnx_models.trials import Arrays, Shapes, candidates, from_data

Data = Mapping[str, npt.NDArray[Any]]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ConvertedModule:
    """What `convert_onnx` wrote.

    before, after: nodes by operator and size in bytes, of the original and of what the engine's
    converter got.  rewritten: how often each rule was applied.  reasons: why, by rule.
    reference: the program compared with; None where nothing was compared.
    differences: of each trial, the largest share of the outputs' largest magnitude.
    """

    path: Path
    inputs: tuple[Mapping[str, Any], ...]
    outputs: tuple[Mapping[str, Any], ...]
    recipe: str
    size_bytes: int
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    rewritten: Mapping[str, int]
    reasons: Mapping[str, str]
    notes: tuple[str, ...]
    reference: str | None
    tolerance: float
    trials: tuple[Mapping[str, Any], ...]
    differences: tuple[float, ...]


def convert_onnx(
    model: str | Path,
    output: str | Path,
    *,
    input_shapes: Sequence[Shapes] = (),
    data: Sequence[str | Path | Data] = (),
    fp16: bool = False,
    recipe: str | None = None,
    tolerance: float | None = None,
    allow_unverified: bool = False,
    force: bool = False,
    progress: Progress = lambda step: None,
    timeout_s: float = TIMEOUT_S,
    without_rules: Sequence[str] = (),
    worker: Worker | None = None,
) -> ConvertedModule:
    """Convert the ONNX model `model` to the folder `output`, whole or not at all.

    input_shapes: for each trial, sizes by name of an input; without, dynamic axes are tried at
        three sizes.  data: .npz files, or arrays by name, to compare on in place of random values.
    recipe: fp32 (default), fp16, w8, w4g32, ...  tolerance: the largest difference, as a share of
        the largest magnitude of an output; None takes what suits the recipe.
    allow_unverified: write the bundle even where nothing could be compared; the manifest says so.
        A bundle that was compared and differs is never written.
    timeout_s: bound on each step.  without_rules: rewrite rules to leave out.
    worker: one to share among many conversions; its start takes half a second.

    Raises SourceError for a damaged model, UnsupportedError for what the engine cannot do,
    VerificationError where the result differs, ConversionError or EngineError where the engine
    fails on it.
    """
    require_packages("onnx", "onnxruntime")
    model, output = user_path(model).absolute(), user_path(output)
    if not is_file(model):
        raise SourceError(f"{model}: there is no such file.")
    check_target(output, replace=force)
    kept = storage(recipe, fp16=fp16)
    allowed = kept.tolerance if tolerance is None else tolerance
    if not 0 < allowed < 1:
        raise UsageError(f"tolerance must be between 0 and 1, found {allowed:g}.")
    _check_rules(without_rules)
    with _own_or_given(worker, timeout_s) as used:
        progress("reading")
        before = _described(model, used)
        progress("running the original")
        trials, expected, program = _reference(
            model, before, used, input_shapes, data, allow_unverified
        )
        job = Job(
            model, trials, expected, kept.options, allowed, without_rules,
            refuse=not without_rules, timeout_s=timeout_s,
        )  # fmt: skip
        progress("converting and comparing")
        best, notes = _first_that_agrees(job, used, before)
        facts = _facts(model, best, before, kept.name, allowed, trials, program, notes)
        size = write_module_bundle(output, best.path, facts, replace=force)
    return _result(output, size, facts)


@contextmanager
def _own_or_given(worker: Worker | None, timeout_s: float) -> Iterator[Worker]:
    if worker is not None:
        yield worker
        return
    with (
        tempfile.TemporaryDirectory(prefix="mnnsmith-onnx-") as folder,
        Worker(Path(folder), timeout_s=timeout_s) as own,
    ):
        yield own


def _check_rules(without_rules: Sequence[str]) -> None:
    known = {rule.name for rule in all_rules()}
    if unknown := sorted(set(without_rules) - known):
        raise UsageError(f"{unknown[0]!r} is no rule; there are {', '.join(sorted(known))}.")


def _described(model: Path, worker: Worker) -> Mapping[str, Any]:
    try:
        return worker.run(
            "prepare", worker.new_folder("read"), model=str(model), only_describe=True
        )
    except TaskFailedError as error:
        raise SourceError(
            f"{model}: reading it {error}", "The file is damaged, or larger than memory."
        ) from error


def _reference(
    model: Path,
    before: Mapping[str, Any],
    worker: Worker,
    input_shapes: Sequence[Shapes],
    data: Sequence[str | Path | Data],
    allow_unverified: bool,
) -> tuple[list[Arrays], list[Arrays], str | None]:
    """Trials that the original takes, and what it gives."""
    inputs = before["inputs"]
    names = [output["name"] for output in before["outputs"]]
    _check_shapes(inputs, input_shapes)
    own = [[_own_data(inputs, one) for one in data]]
    sets = own if data else candidates(inputs, input_shapes)
    try:
        failures = []
        for trials in sets:
            values, program, failure = _run_reference(
                model, names, trials, worker, evaluator=bool(data)
            )
            if failure is None:
                return trials, values, program
            failures.append(failure)
        raise UsageError(
            f"{model}: the original itself does not run on the trial values: {failures[0]}",
            "Give shapes that it takes with --input-shape NAME=1,3,224,224, or values with --data.",
        )
    except UsageError:
        if allow_unverified and not data and not input_shapes:
            return [], [], None
        raise


def _run_reference(
    model: Path, names: list[str], trials: list[Arrays], worker: Worker, evaluator: bool
) -> tuple[list[Arrays], str, str | None]:
    folder = worker.new_folder("reference")
    feeds = [folder / f"in{i}.npz" for i in range(len(trials))]
    results = [folder / f"out{i}.npz" for i in range(len(trials))]
    for path, trial in zip(feeds, trials, strict=True):
        write_arrays(path, trial)
    try:
        told = worker.run(
            "reference", folder, model=str(model.absolute()), outputs=names,
            feeds=[str(p) for p in feeds], results=[str(p) for p in results], evaluator=evaluator,
        )  # fmt: skip
    except TaskFailedError as error:
        return [], "", f"it {error}"
    for failure in told["failures"]:
        if failure is not None:
            return [], told["program"], failure
    return [read_arrays(path) for path in results], told["program"], None


def _own_data(inputs: Sequence[Mapping[str, Any]], one: str | Path | Data) -> Arrays:
    if isinstance(one, Mapping):
        return from_data(inputs, one, "the data")
    path = user_path(one)
    return from_data(inputs, read_user_arrays(path), str(path))


def _check_shapes(inputs: Sequence[Mapping[str, Any]], input_shapes: Sequence[Shapes]) -> None:
    ranks = {p["name"]: None if p["shape"] is None else len(p["shape"]) for p in inputs}
    for name, shape in (item for one in input_shapes for item in one.items()):
        if name not in ranks:
            raise UsageError(
                f"--input-shape: the model has no input {name!r}; it has {', '.join(ranks)}."
            )
        if ranks[name] not in (None, len(shape)) or any(size < 0 for size in shape):
            raise UsageError(
                f"--input-shape: {name!r} has {ranks[name]} axes, found {list(shape)}."
            )


def _first_that_agrees(
    job: Job, worker: Worker, before: Mapping[str, Any]
) -> tuple[Attempt, list[str]]:
    """Simplified first, for speed; as it is, where that fails."""
    operators = before["operators"]
    # One node alone leaves nothing to fold, unless a function stands behind it.
    if sum(operators.values()) <= 1 and set(operators) <= plain_operators():
        try:
            return attempt(job, worker, simplified=False), []
        except FAILURES as error:
            raise _explained(job.model, error) from error
    try:
        return attempt(job, worker, simplified=True), []
    except FAILURES as first:
        try:
            best = attempt(job, worker, simplified=False)
        except FAILURES as error:
            raise _explained(job.model, first) from error
        return best, [f"not simplified, since the simplified model failed: {_line(first)}"]


def _explained(model: Path, error: MnnsmithError) -> MnnsmithError:
    hint = error.hint or "This model is refused, since what the engine makes of it is wrong."
    if isinstance(error, VerificationError):
        hint = (
            "Nothing was written. If the difference is one you can accept, allow more with "
            "--tolerance; other values to compare on come with --data."
        )
    message = error.message if str(model) in error.message else f"{model}: {error.message}"
    return type(error)(message, hint)


def _line(error: MnnsmithError) -> str:
    return error.message.splitlines()[0][:200]


def _facts(
    model: Path,
    best: Attempt,
    before: Mapping[str, Any],
    recipe: str,
    tolerance: float,
    trials: Sequence[Arrays],
    program: str | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """What the manifest holds besides the files."""
    prepared = best.prepared
    reasons = {rule.name: rule.reason for rule in all_rules() if rule.name in prepared["rewritten"]}
    used = set(prepared["used_inputs"])
    keys = ("operators", "size_bytes", "opset")
    return {
        "module": {
            "inputs": [{**i, "used": i["name"] in used} for i in prepared["inputs"]],
            "outputs": prepared["outputs"],
        },
        "recipe": {"name": recipe},
        "source": {"file": model.name, "sha256": sha256_of(model)},
        "conversion": {
            "before": {key: before[key] for key in keys},
            "after": {key: prepared[key] for key in keys},
            "rewritten": prepared["rewritten"],
            "reasons": reasons,
            "notes": [*notes, *prepared["notes"]],
        },
        "verification": {
            "verified": program is not None,
            "reference": program,
            "tolerance": tolerance,
            "trials": [{n: list(a.shape) for n, a in trial.items()} for trial in trials],
            "differences": list(best.differences),
        },
    }


def _result(output: Path, size_bytes: int, facts: Mapping[str, Any]) -> ConvertedModule:
    done, verified = facts["conversion"], facts["verification"]
    return ConvertedModule(
        path=output,
        inputs=tuple(facts["module"]["inputs"]),
        outputs=tuple(facts["module"]["outputs"]),
        recipe=facts["recipe"]["name"],
        size_bytes=size_bytes,
        before=done["before"],
        after=done["after"],
        rewritten=done["rewritten"],
        reasons=done["reasons"],
        notes=tuple(done["notes"]),
        reference=verified["reference"],
        tolerance=verified["tolerance"],
        trials=tuple(verified["trials"]),
        differences=tuple(verified["differences"]),
    )
