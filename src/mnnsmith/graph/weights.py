"""Weight slots: places of the graph that a checkpoint tensor fills, read only when written.

A slot names the tensor, the rows that it takes and how they are ordered; it holds no data.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt


class Role(str, Enum):
    """What a weight does, as recipes name it."""

    EMBEDDING = "embedding"
    HEAD = "head"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERT = "expert"
    VISION = "vision"
    PATCH = "patch"


@dataclass(frozen=True)
class HeadRows:
    """The same part of every head: rows start .. start+count of each `stride` rows.

    interleaved: rows 0, 2, 4, .. of the part, then 1, 3, 5, ..: rope's pairs brought to halves.
    """

    heads: int
    stride: int
    start: int
    count: int
    interleaved: bool = False

    def indices(self) -> npt.NDArray[np.int64]:
        """Row of the tensor for each row of the slot, [heads * count]."""
        part = np.arange(self.count)
        if self.interleaved:
            part = np.concatenate([part[0::2], part[1::2]])
        heads = np.arange(self.heads)[:, None] * self.stride
        return (heads + self.start + part).reshape(-1)


@dataclass(frozen=True)
class MatrixSlot:
    """A linear layer's weight, [rows, cols] = [output width, input width].

    tensor: the checkpoint's name for it.
    first_row: where in the tensor the slot begins (a fused tensor fills several slots).
    layer: index of the block that it belongs to, None outside of the blocks.
    heads: which rows of each head it takes, counted from `first_row`; None takes them in order.
    transposed: the tensor's part is [cols, rows].
    kernel: the shape that a row has in the tensor where that is a convolution's,
    [channels, height, width]; its product is `cols`.
    """

    tensor: str
    rows: int
    cols: int
    role: Role
    layer: int | None = None
    first_row: int = 0
    heads: HeadRows | None = None
    transposed: bool = False
    kernel: tuple[int, ...] = ()

    def source_rows(self) -> npt.NDArray[np.int64]:
        """Rows of the tensor that the slot takes, in the slot's order (before transposing)."""
        if self.heads is not None:
            return self.first_row + self.heads.indices()
        return np.arange(
            self.first_row, self.first_row + (self.cols if self.transposed else self.rows)
        )

    @property
    def source_width(self) -> tuple[int, ...]:
        """Shape of one of the tensor's rows that the slot takes."""
        return self.kernel or ((self.rows if self.transposed else self.cols),)


@dataclass(frozen=True)
class ConstantSlot:
    """A whole tensor kept in float32 as a constant of the graph, such as a router's weight."""

    tensor: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredRows:
    """Rows of the embedding as the bundle stores it, and so as the engine looks them up.

    tensor: the embedding's name.  rows: which of its rows, in this order.
    """

    tensor: str
    rows: tuple[int, ...]
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.width


@dataclass(frozen=True)
class VectorSlot:
    """A bias or a norm's gain, [size] float32; `add` is added to each element.

    Gemma stores a norm's gain minus one.
    """

    tensor: str
    size: int
    first_row: int = 0
    add: float = 0.0


@dataclass(frozen=True)
class Table:
    """A small float32 constant that is computed, not read."""

    values: npt.NDArray[np.float32]


Slot: TypeAlias = MatrixSlot | VectorSlot | ConstantSlot | StoredRows | Table
