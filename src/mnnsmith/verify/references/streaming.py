"""Weights of a transformers model, all at once or block by block around each block's forward."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.sources.checkpoint import Checkpoint, Tensor
from mnnsmith.verify.references.module_weights import Piece, fill, parameter_pieces
from mnnsmith.verify.references.reference import IDS
from mnnsmith.verify.references.torch_model import decoder_of


@dataclass(frozen=True)
class _Slot:
    """A parameter (or saved buffer) of a module, and the tensors that fill it.

    key: its name within its block, by which the next block uses its memory again.  empty: what
    stands there while it is not filled.
    """

    module: Any
    leaf: str
    key: str
    empty: Any
    pieces: tuple[Piece, ...]


class StreamedModel:
    """A model built without weights whose blocks are filled as they are run.

    All but the blocks and the embedding is filled by the first run.  The embedding holds the rows
    of the tokens in hand only, which are fed by their place among them; the head is left to the
    caller.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint, pool: ThreadPoolExecutor) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._pool = pool
        self._layers = list(decoder_of(model).layers)
        self._embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._blocks = [self._slots(layer) for layer in self._layers]
        others = {id(module) for layer in self._layers for module in layer.modules()}
        others |= {id(self._embedding), id(head)}
        self._rest: list[_Slot] = []
        for name, module in model.named_modules():
            if id(module) not in others:
                self._rest += self._own_slots(module, name)
        self._buffers: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._rest_filled = False

    def load_all(self) -> None:
        """Fill every parameter, for good."""
        head = self._model.get_output_embeddings()
        tied = head.weight is self._embedding.weight
        slots = [*self._rest, *(slot for block in self._blocks for slot in block)]
        slots += self._own_slots(self._embedding, "embedding")
        if not tied:
            slots += self._own_slots(head, "head")
        for slot in slots:
            self._fill(slot, reuse=False)
        if tied:
            head.weight = self._embedding.weight

    def fill_rest(self) -> None:
        """Fill what is neither a block nor the embedding, such as vision, if it is not yet."""
        if not self._rest_filled:
            for slot in self._rest:
                self._fill(slot, reuse=False)
            self._rest_filled = True

    @contextmanager
    def running(self, ids: IDS) -> Iterator[IDS]:
        """Within, blocks are filled before their forward and emptied after it; gives the ids to
        feed."""
        import torch

        self.fill_rest()
        unique, places = np.unique(ids, return_inverse=True)
        name = f"{self._names[id(self._embedding)]}.weight"
        table = torch.from_numpy(_rows_of(self._checkpoint.tensors[name], unique))
        empty = self._embedding.weight
        self._embedding.weight = torch.nn.Parameter(table, requires_grad=False)
        handles = []
        for layer, slots in zip(self._layers, self._blocks, strict=True):
            handles.append(layer.register_forward_pre_hook(self._before(slots)))
            handles.append(layer.register_forward_hook(self._after(slots)))
        try:
            yield places.reshape(ids.shape)
        finally:
            for handle in handles:
                handle.remove()
            for slots in self._blocks:
                self._empty(slots)
            self._embedding.weight = empty
            self._buffers = {}

    def _before(self, slots: list[_Slot]) -> Any:
        def hook(module: Any, arguments: Any) -> None:
            keys = {(slot.key, tuple(slot.empty.shape)) for slot in slots}
            # Of the block before: what has the same shape is used again, the rest given back.
            self._buffers = {key: t for key, t in self._buffers.items() if key in keys}
            for slot in slots:
                self._fill(slot, reuse=True)

        return hook

    def _after(self, slots: list[_Slot]) -> Any:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            self._empty(slots)

        return hook

    def _fill(self, slot: _Slot, *, reuse: bool) -> None:
        import torch

        key = (slot.key, tuple(slot.empty.shape))
        data = self._buffers.get(key) if reuse else None
        if data is None:
            data = torch.empty(slot.empty.shape, dtype=torch.float32)
        if reuse:
            self._buffers[key] = data
        fill(data.numpy(), slot.pieces, self._pool)
        _put(slot, data)

    def _empty(self, slots: list[_Slot]) -> None:
        for slot in slots:
            _put(slot, slot.empty)

    def _slots(self, top: Any) -> list[_Slot]:
        """Those of a module and all within, by their names within."""
        return [
            slot for name, module in top.named_modules() for slot in self._own_slots(module, name)
        ]

    def _own_slots(self, module: Any, key: str) -> list[_Slot]:
        """Those of one module, buffers that a checkpoint holds included."""
        prefix = self._names[id(module)]
        saved = {
            leaf: buffer
            for leaf, buffer in module._buffers.items()
            if buffer is not None and leaf not in module._non_persistent_buffers_set
        }
        own = {leaf: p for leaf, p in module._parameters.items() if p is not None} | saved
        return [
            _Slot(
                module, leaf, f"{key}.{leaf}", value,
                parameter_pieces(f"{prefix}.{leaf}", tuple(value.shape), self._checkpoint),
            )
            for leaf, value in own.items()
        ]  # fmt: skip


def _put(slot: _Slot, data: Any) -> None:
    import torch

    if slot.leaf in slot.module._buffers:
        slot.module._buffers[slot.leaf] = data
    elif isinstance(data, torch.nn.Parameter):
        slot.module._parameters[slot.leaf] = data
    else:
        slot.module._parameters[slot.leaf] = torch.nn.Parameter(data, requires_grad=False)


def _rows_of(tensor: Tensor, wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Some rows of a tensor, ascending; runs of neighbours are read at once."""
    out = np.empty((len(wanted), *tensor.shape[1:]), dtype=np.float32)
    breaks = np.flatnonzero(np.diff(wanted) != 1) + 1
    at = 0
    for run in np.split(wanted, breaks):
        out[at : at + len(run)] = tensor.rows(int(run[0]), int(run[-1]) + 1)
        at += len(run)
    return out
