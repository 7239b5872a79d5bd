"""Parameters of transformers' modules out of a checkpoint's tensors, a range of rows at a time.

transformers 5 keeps experts fused, `X.experts.gate_up_proj` [experts, 2 * inner, hidden] and
`X.experts.down_proj` [experts, hidden, inner]; a `Checkpoint` has the tensors of one expert each.
Mixtral's published names are others than those of its modules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mnnsmith.errors import BundleError, SourceError
from mnnsmith.sources.checkpoint import F32, Checkpoint, Tensor, row_ranges
from mnnsmith.verify.stored.checkpoint import StoredTensor

_BLOCK_BYTES = 8 << 20
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FUSED_NAME = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MIXTRAL_BLOCK = ".block_sparse_moe."


@dataclass(frozen=True)
class Piece:
    """`tensor`, whole, at row `at` of a parameter seen as [rows, width]."""

    tensor: Tensor
    at: int


def parameter_pieces(name: str, shape: Sequence[int], checkpoint: Checkpoint) -> tuple[Piece, ...]:
    """The tensors that fill the parameter or buffer `name` of transformers' model.

    Raises `SourceError` where one is missing or does not fit.
    """
    fused = _FUSED_NAME.fullmatch(name)
    if fused is None or len(shape) != 3:
        tensor = _tensor(_own_names(name), checkpoint)
        _check(name, tensor, tuple(shape))
        return (Piece(tensor, 0),)
    experts, rows, cols = shape
    parts = _FUSED[fused[2]]
    height = rows // len(parts)
    pieces = []
    for expert in range(experts):
        for i, part in enumerate(parts):
            tensor = _tensor(_expert_names(fused[1], expert, part), checkpoint)
            _check(name, tensor, (height, cols))
            pieces.append(Piece(tensor, expert * rows + i * height))
    return tuple(pieces)


def module_of_tensor(tensor: str) -> str:
    """A checkpoint's name in transformers' terms, as modules are named."""
    return tensor.replace(_MIXTRAL_BLOCK, ".mlp.")


def fill(out: F32, pieces: Sequence[Piece], pool: ThreadPoolExecutor) -> None:
    """Write the pieces into float32 `out` of the parameter's shape, on all threads of the pool."""
    # Of a convolution, a row is a whole kernel.
    row = math.prod(pieces[0].tensor.shape[1:])
    flat = out.reshape(-1, row)
    # Collected, so that an error of any of them comes up.
    list(pool.map(lambda work: _copy(flat, *work), _work(pieces)))


def _work(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int, int]]:
    for piece in pieces:
        shape = piece.tensor.shape
        for start, stop in row_ranges(shape[0], math.prod(shape[1:]), _BLOCK_BYTES):
            yield piece, start, stop


def _copy(flat: F32, piece: Piece, start: int, stop: int) -> None:
    values = piece.tensor.rows(start, stop)
    if not np.isfinite(values).all():
        if isinstance(piece.tensor, StoredTensor):
            raise BundleError(
                f"{piece.tensor.name}: the bundle holds values that are not finite in rows {start} "
                f"to {stop}.",
                "Its weight file is damaged: mnnsmith verify --check weights names the rows.",
            )
        raise SourceError(
            f"{piece.tensor.name}: rows {start} to {stop} hold values that are not finite.",
            "The file is damaged, or the model was already broken when it was saved.",
        )
    flat[piece.at + start : piece.at + stop] = values.reshape(stop - start, -1)


def _own_names(name: str) -> tuple[str, ...]:
    return name, name.replace(".mlp.", _MIXTRAL_BLOCK)


def _expert_names(prefix: str, expert: int, part: str) -> tuple[str, ...]:
    mixtral = prefix.replace(".mlp.", _MIXTRAL_BLOCK)
    return (
        f"{prefix}.{expert}.{part}.weight",
        f"{mixtral}.{expert}.{_MIXTRAL[part]}.weight",
    )


def _tensor(names: Sequence[str], checkpoint: Checkpoint) -> Tensor:
    for name in names:
        if name in checkpoint.tensors:
            return checkpoint.tensors[name]
    raise SourceError(
        f"{checkpoint.origin}: transformers needs the tensor {names[0]}, which is not there.",
        "Either config.json belongs to another model, or this is a variant we do not know.",
    )


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise SourceError(
            f"{tensor.name} has shape {list(tensor.shape)}; transformers needs {list(shape)} "
            f"for {name}.",
            "Either config.json belongs to another model, or this is a variant we do not know.",
        )
