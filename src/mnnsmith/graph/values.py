"""Values of the graph: tensors with a shape, a memory layout and an element type."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

# A dimension is a size, or the name of a size that is known at run time only ("seq", "context"),
# or a product of such names and a size, as `multiple` writes it.
Dim: TypeAlias = int | str


def multiple(count: int, symbol: str) -> Dim:
    """A dimension of `count` times a size that is known at run time only."""
    return symbol if count == 1 else f"{count}*{symbol}"


def split_dimension(dim: Dim) -> tuple[int, str]:
    """A dimension as (known factor, names); no name where all is known, "a*b" for a product."""
    if isinstance(dim, int):
        return dim, ""
    factor, star, symbol = dim.partition("*")
    return (int(factor), symbol) if star and factor.isdigit() else (1, dim)


class Layout(Enum):
    """How the engine lays a tensor out; operators check it, only `convert` changes it.

    NC4HW4 packs channels by the width of the vector unit; linear layers and norms work on it.
    """

    NCHW = "NCHW"
    NHWC = "NHWC"
    NC4HW4 = "NC4HW4"


class DType(Enum):
    """Element types that our graphs use."""

    FLOAT = "float"
    INT32 = "int32"


@dataclass(frozen=True)
class Value:
    """One tensor of a graph. `index` is its place in the graph's list of values."""

    index: int
    name: str
    shape: tuple[Dim, ...]
    layout: Layout
    dtype: DType = DType.FLOAT

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.shape))
        return f"{self.name} [{dims}] {self.layout.value} {self.dtype.value}"
