"""Every tensor of a checkpoint is used once, tied on purpose, or ignored with a reason."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import SourceError
from mnnsmith.graph.weights import ConstantSlot, MatrixSlot, StoredRows, Table, VectorSlot
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.sources.checkpoint import Checkpoint, Tensor, row_ranges

_SHOWN = 8
_DUPLICATE_HEAD = "lm_head.weight"


def check_tensors(model: LanguageModel, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Compare what the graph takes with what the checkpoint has.

    Returns notes on tensors that are left out.  Raises `SourceError` that lists every missing,
    unused or ill-shaped tensor.
    """
    taken: dict[str, list[npt.NDArray[np.int64]]] = defaultdict(list)
    problems: list[str] = []
    for slot in _slots(model):
        tensor = checkpoint.tensors.get(slot.tensor)
        if tensor is None:
            problems.append(f"{slot.tensor} is missing")
            continue
        rows, width = slot_rows(slot)
        if tensor.shape[1:] != width or not tensor.shape:
            wanted = [f"at least {int(rows.max()) + 1}", *map(str, width)]
            problems.append(
                f"{slot.tensor} has shape {list(tensor.shape)}, expected [{', '.join(wanted)}]"
            )
            continue
        if slot.tensor not in taken:
            # No row: raises for a type that cannot be read, before any work is done.
            tensor.rows(0, 0)
        taken[slot.tensor].append(rows)
    for name, parts in taken.items():
        problems += _row_problems(name, parts, checkpoint.tensors[name])
    unused = sorted(set(checkpoint.tensors) - {slot.tensor for slot in _slots(model)})
    ignored, notes = _ignored(model, checkpoint, unused)
    problems += [f"{name} is not used" for name in unused if name not in ignored]
    if problems:
        problems = list(dict.fromkeys(problems))
        more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
        raise SourceError(
            f"{checkpoint.origin}: its tensors do not fit model type {checkpoint.model_type}: "
            + "; ".join(problems[:_SHOWN])
            + more
            + ".",
            "Either config.json belongs to another model, or this is a variant we do not know.",
        )
    return notes


def _slots(model: LanguageModel) -> Iterable[MatrixSlot | VectorSlot | ConstantSlot]:
    if not model.tied:
        yield model.embedding
    for node in model.all_nodes():
        for slot in node.slots.values():
            if not isinstance(slot, Table | StoredRows):
                yield slot


def slot_rows(
    slot: MatrixSlot | VectorSlot | ConstantSlot,
) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """The rows of the tensor that a slot takes, and the rest of the tensor's shape."""
    if isinstance(slot, MatrixSlot):
        return slot.source_rows(), slot.source_width
    if isinstance(slot, ConstantSlot):
        return np.arange(slot.shape[0]), slot.shape[1:]
    return np.arange(slot.first_row, slot.first_row + slot.size), ()


def _row_problems(name: str, parts: list[npt.NDArray[np.int64]], tensor: Tensor) -> list[str]:
    """Every row is taken exactly once, and none beyond the end."""
    rows = np.concatenate(parts)
    if rows.max() >= tensor.shape[0]:
        return [f"{name} has shape {list(tensor.shape)}, expected {int(rows.max()) + 1} rows"]
    uses = np.bincount(rows, minlength=tensor.shape[0])
    wrong = np.flatnonzero(uses != 1)
    if not wrong.size:
        return []
    first = int(wrong[0])
    if uses[first]:
        return [f"{name} is used twice, at row {first}"]
    if first == rows.max() + 1:
        return [f"{name} has shape {list(tensor.shape)}, expected {first} rows"]
    return [f"{name} is used in part: row {first} is left out"]


def _ignored(
    model: LanguageModel, checkpoint: Checkpoint, unused: list[str]
) -> tuple[set[str], tuple[str, ...]]:
    ignored: set[str] = set()
    notes = []
    for entry in model.ignored:
        names = [n for n in unused if fnmatch.fnmatchcase(n, entry.pattern)]
        ignored.update(names)
        if names:
            notes.append(f"{len(names)} tensors {entry.pattern} left out: {entry.reason}")
    if model.tied and _DUPLICATE_HEAD in unused:
        head = checkpoint.tensors[_DUPLICATE_HEAD]
        embedding = checkpoint.tensors.get(model.embedding.tensor)
        if embedding is not None and not _equal(head, embedding):
            raise SourceError(
                f"{checkpoint.origin}: config.json ties the head to the embedding, but "
                f"{_DUPLICATE_HEAD} differs from {embedding.name}.",
                "If the head is a weight of its own, set tie_word_embeddings to false.",
            )
        ignored.add(_DUPLICATE_HEAD)
        notes.append(f"{_DUPLICATE_HEAD} left out: it equals the embedding that it is tied to")
    return ignored, tuple(notes)


def _equal(a: Tensor, b: Tensor) -> bool:
    if len(a.shape) != 2 or a.shape != b.shape:
        return False
    return all(
        np.array_equal(a.rows(start, stop), b.rows(start, stop))
        for start, stop in row_ranges(*a.shape)
    )
