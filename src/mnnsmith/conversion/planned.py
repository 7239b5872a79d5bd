"""The tensors that a model needs, told from its graph: for models that are not fetched yet."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mnnsmith.conversion.account import slot_rows
from mnnsmith.errors import SourceError
from mnnsmith.graph.weights import StoredRows, Table
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.sources.checkpoint import F32, BlockFormat, QuantizedRows, Tensor

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor whose shape and type are known and whose values are elsewhere."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]

    @property
    def block_format(self) -> BlockFormat | None:
        return None

    def rows(self, start: int, stop: int) -> F32:
        raise SourceError(f"{self.name}: rows {start}:{stop} are not here; fetch the model first.")

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        raise SourceError(f"{self.name}: rows {start}:{stop} are not here; fetch the model first.")


def planned_tensors(model: LanguageModel, torch_dtype: object) -> dict[str, Tensor]:
    """Every tensor that the graph takes; `torch_dtype` is the config's, by default bfloat16."""
    dtype = _DTYPES.get(str(torch_dtype), "BF16")
    shapes: dict[str, tuple[int, ...]] = {}
    slots = [slot for node in model.all_nodes() for slot in node.slots.values()]
    for slot in (model.embedding, *slots):
        if isinstance(slot, Table | StoredRows):
            continue
        rows, width = slot_rows(slot)
        seen = shapes.get(slot.tensor, (0,))
        shapes[slot.tensor] = (max(int(rows.max()) + 1, seen[0]), *width)
    return {name: PlannedTensor(name, shape, dtype) for name, shape in shapes.items()}
