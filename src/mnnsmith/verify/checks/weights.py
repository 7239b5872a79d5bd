"""Every stored weight against the original's: is it what quantizing that very row may give?

And is the graph that reads them the original's?
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from mnnsmith.conversion.plan import MatrixTask, scheme_of
from mnnsmith.conversion.prepare import Prepared
from mnnsmith.conversion.slots import read_vector
from mnnsmith.engine.machine import usable_processors
from mnnsmith.errors import MnnsmithError, UsageError
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.weights import MatrixSlot, Role, Table
from mnnsmith.verify.checks.graph import VISUAL, compare_graph
from mnnsmith.verify.context import Context
from mnnsmith.verify.results import Finding, Outcome, StoredWeight, WeightFigures
from mnnsmith.verify.stored.checkpoint import printed_value
from mnnsmith.verify.stored.records import StoredMatrix
from mnnsmith.verify.stored.rows import (
    RowDifference,
    WideScale,
    compare_rows,
    find_rows,
    rows_at_a_time,
)
from mnnsmith.verify.stored.weights import (
    EMBEDDING,
    StoredWeights,
    read_stored_vision,
    read_stored_weights,
)

# An error that many times the median of its peers is worth a word; fewer peers say nothing.
_FAR_ABOVE = 4.0
_LEAST_PEERS = 4
# Rows that are looked for among the original's, to say where they come from.
_LOOKED_FOR = 16
_HINT = "Convert the model again; if it stays so, please report it with the model's name."


@dataclass(frozen=True)
class _Part:
    """The weights of language or vision.  prefix: of its operators' names in results."""

    prefix: str
    graph: Graph
    stored: StoredWeights


def check_weights(context: Context) -> Outcome[WeightFigures]:
    """Compare every matrix, gain, bias, constant and the embedding with the original, and all that
    the graph says of its operators.

    All of the weights are read once, a block of rows at a time, by `context.threads` threads.

    Raises `UsageError` without an original, `BundleError` or `SourceError` where one of the two
    cannot be read at all; all else is a finding.
    """
    original = context.original
    if original is None:
        raise UsageError("Weights cannot be compared without the original.", "Give --source MODEL.")
    parts = [_Part("", original.model.graph, read_stored_weights(context.bundle, original.model))]
    vision = original.model.vision
    if vision is not None:
        seen = read_stored_vision(context.bundle, vision.graph)
        parts.append(_Part(VISUAL, vision.graph, seen))
    findings = [_within(part, finding) for part in parts for finding in part.stored.problems]
    figures: list[StoredWeight] = []
    tasks = [*_pairs(parts[0].stored, original), *_vision_pairs(parts[1:], original)]
    with ThreadPoolExecutor(context.threads or usable_processors()) as pool:
        for task, matrix, difference in _differences(pool, tasks):
            figures.append(_figure(task, matrix, difference))
            context.progress(len(figures), len(tasks))
            findings += _scheme_findings(task, matrix)
            if difference.off.size:
                findings.append(_row_finding(task, matrix, difference))
    for part in parts:
        findings += [_within(part, finding) for finding in _vector_findings(part, original)]
    wrong = {finding.where for finding in findings if finding.severity == "error"}
    findings += compare_graph(context.bundle, original, wrong)
    findings += _outliers([figure for figure in figures if figure.operator not in wrong])
    return Outcome(_summary(figures, findings), WeightFigures(tuple(figures)), tuple(findings))


def _pairs(stored: StoredWeights, original: Prepared) -> Iterator[tuple[MatrixTask, StoredMatrix]]:
    """What was to be written, and what is there; an embedding that shares the head's is one."""
    model, plan = original.model, original.plan
    tasks = {task.name: task for task in plan.matrices}
    head = next(task for task in plan.matrices if task.slot.role is Role.HEAD)
    embedding = stored.matrices.get(EMBEDDING)
    if embedding is not None and EMBEDDING not in tasks:
        head_matrix = stored.matrices.get(head.name)
        if head_matrix is None or not embedding.same_place(head_matrix):
            tasks[EMBEDDING] = replace(head, name=EMBEDDING, slot=model.embedding, bias=None)
    for name, task in tasks.items():
        if name in stored.matrices:
            yield task, stored.matrices[name]


def _vision_pairs(
    parts: Sequence[_Part], original: Prepared
) -> Iterator[tuple[MatrixTask, StoredMatrix]]:
    """The same of vision; names get its prefix."""
    for part in parts:
        plan = original.plan.vision
        assert plan is not None
        for task in plan.matrices:
            if task.name in part.stored.matrices:
                yield replace(task, name=part.prefix + task.name), part.stored.matrices[task.name]


def _within(part: _Part, finding: Finding) -> Finding:
    """A finding on a part, with the prefix of its names."""
    return replace(finding, where=part.prefix + finding.where) if part.prefix else finding


def _differences(
    pool: ThreadPoolExecutor, tasks: Sequence[tuple[MatrixTask, StoredMatrix]]
) -> Iterator[tuple[MatrixTask, StoredMatrix, RowDifference]]:
    """Compare block by block, some matrices ahead of the one that is asked for."""
    work = [
        (task, matrix, start, stop)
        for task, matrix in tasks
        for start, stop in rows_at_a_time(matrix)
    ]
    results = pool.map(lambda item: compare_rows(*item), work)
    for task, matrix in tasks:
        parts = [next(results) for _ in rows_at_a_time(matrix)]
        yield task, matrix, RowDifference.of(parts)


def _figure(task: MatrixTask, matrix: StoredMatrix, difference: RowDifference) -> StoredWeight:
    return StoredWeight(
        operator=task.name,
        tensor=task.slot.tensor,
        scheme=scheme_of(matrix.encoding).name,
        role=task.slot.role.value,
        layer=task.slot.layer,
        parameters=matrix.rows * matrix.cols,
        stored_bytes=matrix.nbytes,
        error=difference.relative_error,
        steps=difference.steps,
    )


def _scheme_findings(task: MatrixTask, matrix: StoredMatrix) -> list[Finding]:
    """A matrix that is stored otherwise than the recipe says."""
    found = scheme_of(matrix.encoding)
    expected = scheme_of(task.record.encoding)
    if found == expected:
        return []
    fewer = found.bits_per_weight(matrix.cols) < expected.bits_per_weight(matrix.cols)
    text = f"{task.name} is stored as {found.name}; the recipe asks for {expected.name}."
    hint = "Was the bundle converted with another recipe? Else convert the model again."
    return [Finding("error" if fewer else "warning", task.name, text, hint)]


def _row_finding(task: MatrixTask, matrix: StoredMatrix, difference: RowDifference) -> Finding:
    """Rows that rounding does not explain, and whether they are other rows of the tensor."""
    off = difference.off
    where = f"{task.name} ({task.slot.tensor})"
    steps = "" if difference.steps is None else f", by up to {difference.steps:.3g} steps"
    text = (
        f"{where}: {off.size} of {matrix.rows} rows are off by more than rounding{steps}; the "
        f"first is row {_source_row(task.slot, int(off[0]))}"
    )
    wanted = [int(row) for row in off[:_LOOKED_FOR]]
    origins = find_rows(task, matrix, wanted)
    moved = [
        f"row {_source_row(task.slot, row)} holds row {_source_row(task.slot, origin)}"
        for row, origin in zip(wanted, origins, strict=True)
        if origin is not None and origin != row
    ]
    if moved:
        text += f". Rows stand in other places: {', '.join(moved[:4])}"
        text += " ..." if len(moved) > 4 or off.size > _LOOKED_FOR else ""
    elif difference.wide is not None and difference.wide.row in off:
        text += f". {_wide_scale(task, difference.wide)}"
    return Finding("error", task.name, text + ".", _HINT)


def _wide_scale(task: MatrixTask, wide: WideScale) -> str:
    """That steps are wider than they need be, which is as good as fewer bits."""
    needs = f"{wide.times:.3g} times what the row needs"
    if not np.isfinite(wide.times):
        needs = "not zero, as it should be"
    return f"The scale of block {wide.block} of row {_source_row(task.slot, wide.row)} is {needs}"


def _source_row(slot: MatrixSlot, row: int) -> int:
    """The tensor's row (its column, of a part that is stored transposed) of a slot's row."""
    return row if slot.transposed else int(slot.source_rows()[row])


def _vector_findings(found_in: _Part, original: Prepared) -> Iterator[Finding]:
    """Gains, biases, routers and computed tables must be equal to the last bit."""
    nodes = {node.name: node for node in found_in.graph.all_nodes()}
    for (name, part), vector in found_in.stored.vectors.items():
        slot = nodes[name].slots[part]
        tensor = "computed" if isinstance(slot, Table) else slot.tensor
        try:
            expected = read_vector(slot, original.checkpoint).reshape(-1)
            found = printed_value(vector, expected)
        except MnnsmithError as error:
            yield Finding("error", name, error.message, error.hint)
            continue
        other = np.flatnonzero(found != expected)
        if other.size:
            first = int(other[0])
            text = (
                f"{name}: {part} ({tensor}): {other.size} of {expected.size} values differ, first "
                f"number {first}: found {found[first]:.6g}, expected {expected[first]:.6g}."
            )
            yield Finding("error", name, text, _HINT)


def _outliers(figures: Sequence[StoredWeight]) -> Iterator[Finding]:
    """Matrices whose error is far above that of their peers, which often marks damaged weights."""
    peers: dict[tuple[str, str], list[StoredWeight]] = defaultdict(list)
    for figure in figures:
        peers[figure.role, figure.scheme].append(figure)
    for (role, scheme), group in peers.items():
        usual = median(figure.error for figure in group)
        for figure in group if len(group) >= _LEAST_PEERS else ():
            if figure.error > _FAR_ABOVE * usual > 0:
                yield Finding(
                    "warning",
                    figure.operator,
                    f"{figure.operator}: storing it as {scheme} costs an error of "
                    f"{figure.error:.2%}; the usual one of {role} weights here is {usual:.2%}.",
                    "Give this tensor more bits or a narrower block in a recipe file.",
                )


def _summary(figures: Sequence[StoredWeight], findings: Sequence[Finding]) -> str:
    errors = sum(finding.severity == "error" for finding in findings)
    parameters = sum(figure.parameters for figure in figures)
    worst = max((figure.error for figure in figures), default=0.0)
    head = f"{len(figures)} matrices, {parameters / 1e6:.1f} million weights"
    if errors:
        return f"{head}: {errors} {'is' if errors == 1 else 'are'} not what the original gives"
    return f"{head}: all within rounding, error at most {worst:.2%}"
