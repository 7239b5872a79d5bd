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


@dataclass(frozen=True)
class MatrixSlot:
    """A linear layer's weight, [rows, cols] = [output width, input width].

    tensor: the checkpoint's name for it.
    first_row: where in the tensor the slot begins (a fused tensor fills several slots).
    layer: index of the block that it belongs to, None outside of the blocks.
    """

    tensor: str
    rows: int
    cols: int
    role: Role
    layer: int | None = None
    first_row: int = 0


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


Slot: TypeAlias = MatrixSlot | VectorSlot | Table
