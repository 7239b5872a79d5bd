"""The plan of a conversion: every weight's place and form in the bundle, before any is read.

All sizes follow from the config and the recipe, so the plan knows the exact size of the weights,
and rows can later be written in any order and by several threads.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from mnnsmith.errors import ConversionError, RecipeError, SourceError
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.weights import ConstantSlot, MatrixSlot, Role, StoredRows, Table, VectorSlot
from mnnsmith.mnn.graph_json import Record
from mnnsmith.mnn.weight_records import (
    BlockEncoding,
    Encoding,
    FloatEncoding,
    MatrixRecord,
    VectorRecord,
    matrix_record,
)
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.quant.keep import nearest_scheme
from mnnsmith.quant.recipe import Recipe, Target
from mnnsmith.quant.scheme import BLOCKS, Scheme
from mnnsmith.sources.checkpoint import Checkpoint, Tensor


@dataclass(frozen=True)
class MatrixTask:
    """One matrix to write.

    name: the operator that uses it, or "embedding".  carried: the source's blocks are copied, not
    quantized anew.  note: where the recipe's wish did not fit.
    """

    name: str
    slot: MatrixSlot
    tensor: Tensor
    record: MatrixRecord
    bias: VectorSlot | None
    carried: bool
    note: str | None

    @property
    def scheme_name(self) -> str:
        """How the weight is stored, as recipes name it."""
        return scheme_of(self.record.encoding).name


@dataclass(frozen=True)
class VectorTask:
    """A vector or a table to write at `record`, `padding` zero bytes after it.

    encoding: the embedding's, where the slot is `StoredRows`.
    """

    slot: VectorSlot | ConstantSlot | StoredRows | Table
    record: VectorRecord
    padding: int = 0
    encoding: Encoding | None = None


@dataclass(frozen=True)
class WeightPlan:
    """Everything that will stand in one weight file.

    records: by operator and part, for the graph.  weight_bytes: the size of the file.
    """

    matrices: tuple[MatrixTask, ...]
    vectors: tuple[VectorTask, ...]
    records: dict[tuple[str, str], Record]
    weight_bytes: int
    notes: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Weights, a shared embedding counted once."""
        seen = {
            (t.slot.tensor, t.slot.first_row, t.slot.heads): t.slot.rows * t.slot.cols
            for t in self.matrices
        }
        vectors = sum(v.slot.size for v in self.vectors if isinstance(v.slot, VectorSlot))
        vectors += sum(
            math.prod(v.slot.shape) for v in self.vectors if isinstance(v.slot, ConstantSlot)
        )
        biases = sum(t.bias.size for t in self.matrices if t.bias is not None)
        return sum(seen.values()) + vectors + biases

    @property
    def blockwise(self) -> bool:
        """Whether every integer weight has a scale per block, not per row."""
        encodings = [t.record for t in self.matrices]
        integer = [r for r in encodings if isinstance(r.encoding, BlockEncoding)]
        return bool(integer) and all(
            isinstance(r.encoding, BlockEncoding) and r.encoding.block < r.cols for r in integer
        )

    @property
    def all_integer(self) -> bool:
        """Whether every linear layer is stored in integers (embeddings are read row by row)."""
        linear = [t.record for t in self.matrices if t.slot.role is not Role.EMBEDDING]
        return all(isinstance(record.encoding, BlockEncoding) for record in linear)

    def schemes(self) -> dict[str, int]:
        """How many matrices are stored in which scheme."""
        return dict(Counter(task.scheme_name for task in self.matrices).most_common())


@dataclass(frozen=True)
class Plan(WeightPlan):
    """`llm.mnn.weight`, and for a model that sees `visual.mnn.weight`.

    embedding: the record that embeddings are read from (the head's own if shared).
    """

    embedding: MatrixRecord
    vision: WeightPlan | None = None

    @property
    def files(self) -> tuple[WeightPlan, ...]:
        """The plan of each weight file."""
        return (self,) if self.vision is None else (self, self.vision)

    @property
    def all_bytes(self) -> int:
        """The size of all weight files."""
        return sum(plan.weight_bytes for plan in self.files)

    @property
    def all_parameters(self) -> int:
        """Weights of language and vision."""
        return sum(plan.parameters for plan in self.files)


def make_plan(model: LanguageModel, checkpoint: Checkpoint, recipe: Recipe) -> Plan:
    """Lay out every weight of `model`.

    Raises `RecipeError` where the recipe does not fit, `SourceError` for tensors that are missing.
    """
    used: set[int] = set()
    planner = _Planner(checkpoint, recipe, used)
    planner.add_graph(model.graph)
    embedding = planner.add_embedding(model)
    vision = None
    if model.vision is not None:
        seen = _Planner(checkpoint, recipe, used, embedding)
        seen.add_graph(model.vision.graph)
        vision = seen.result()
    _check_rules(recipe, used, checkpoint.origin)
    language = planner.result()
    return Plan(
        language.matrices, language.vectors, language.records, language.weight_bytes,
        (*language.notes, *(() if vision is None else vision.notes)), embedding, vision,
    )  # fmt: skip


def _check_rules(recipe: Recipe, used: set[int], origin: str) -> None:
    """A rule that matches nothing is a mistake that would go unseen."""
    unused = sorted(set(range(len(recipe.rules))) - used)
    if unused:
        rule = recipe.rules[unused[0]]
        raise RecipeError(
            f"Recipe {recipe.name}: rule {unused[0]} ({rule.describe()}) decides about no weight "
            f"of {origin}.",
            "It names nothing in this model, or an earlier rule takes all that it names.",
        )


def scheme_of(encoding: Encoding) -> Scheme:
    """The recipe's word for a stored form."""
    if isinstance(encoding, FloatEncoding):
        return Scheme(encoding.bits)
    # A block of another width is a whole row, which schemes write without a block.
    block = encoding.block if encoding.block in BLOCKS else 0
    return Scheme(encoding.bits, block, encoding.symmetric, encoding.scale_bits)


class _Planner:
    """Places records one after the other."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        used: set[int],
        embedding: MatrixRecord | None = None,
    ) -> None:
        """used: collects the numbers of the rules that decided about a weight.

        embedding: how it is stored, for a graph that holds rows of it.
        """
        self._checkpoint = checkpoint
        self._embedding = embedding
        self._recipe = recipe
        self.matrices: list[MatrixTask] = []
        self.vectors: list[VectorTask] = []
        self.records: dict[tuple[str, str], Record] = {}
        self._notes: list[str] = []
        self._used = used
        self.end = 0
        if recipe.keep and checkpoint.format != "gguf":
            raise RecipeError(
                f"Recipe keep carries over the blocks of a GGUF file; {checkpoint.origin} is "
                f"{checkpoint.format}.",
                "Choose another recipe, for example w4g64-head8.",
            )

    def add_graph(self, graph: Graph) -> None:
        """Place every weight of a graph, in the order of its operators."""
        for node in graph.all_nodes():
            for part, slot in node.slots.items():
                key = (node.name, part)
                if isinstance(slot, MatrixSlot):
                    bias = node.slots.get("bias")
                    assert bias is None or isinstance(bias, VectorSlot)
                    self.add_matrix(key, slot, bias)
                elif node.kind == "rms_norm" and isinstance(slot, VectorSlot):
                    # The engine wants an offset beside the gain: zeros.
                    self.add_vector(key, slot, 4 * slot.size, padding=4 * slot.size)
                elif node.kind == "layer_norm" and isinstance(slot, VectorSlot):
                    self.add_vector(key, slot, 4 * slot.size)
                elif isinstance(slot, Table):
                    self.add_vector(key, slot, slot.values.nbytes)
                elif isinstance(slot, ConstantSlot | StoredRows):
                    self.add_vector(key, slot, 4 * math.prod(slot.shape))

    def add_vector(
        self,
        key: tuple[str, str],
        slot: VectorSlot | ConstantSlot | StoredRows | Table,
        nbytes: int,
        padding: int = 0,
    ) -> None:
        record = VectorRecord(self.end, nbytes + padding)
        self.end += record.nbytes
        self.records[key] = record
        encoding = None
        if isinstance(slot, StoredRows):
            assert self._embedding is not None
            encoding = self._embedding.encoding
        self.vectors.append(VectorTask(slot, record, padding, encoding))

    def add_matrix(
        self, key: tuple[str, str], slot: MatrixSlot, bias: VectorSlot | None
    ) -> MatrixTask:
        tensor = self._tensor(slot)
        encoding, carried, note = self._encoding(slot, tensor)
        record = matrix_record(self.end, slot.rows, slot.cols, encoding, bias is not None)
        self.end = record.end
        self.records[key] = record
        task = MatrixTask(key[0], slot, tensor, record, bias, carried, note)
        self.matrices.append(task)
        return task

    def add_embedding(self, model: LanguageModel) -> MatrixRecord:
        """The embedding's own record, or the head's where both are one tensor in one form."""
        slot = model.embedding
        encoding, _, _ = self._encoding(slot, self._tensor(slot))
        if model.tied:
            head = next(t for t in self.matrices if t.slot.role is Role.HEAD)
            if head.record.encoding == encoding:
                return head.record
            self._notes.append(
                f"the embedding is stored a second time, as {scheme_of(encoding).name}: the recipe "
                f"gives the head, which is the same tensor, {head.scheme_name}"
            )
        return self.add_matrix(("embedding", "weight"), slot, None).record

    def result(self) -> WeightPlan:
        """The file as it was laid out; notes of the matrices come first, equal ones counted."""
        counted = Counter(task.note for task in self.matrices if task.note is not None)
        notes = (*(f"{n} x {note}" for note, n in counted.items()), *self._notes)
        return WeightPlan(tuple(self.matrices), tuple(self.vectors), self.records, self.end, notes)

    def _tensor(self, slot: MatrixSlot) -> Tensor:
        tensor = self._checkpoint.tensors.get(slot.tensor)
        if tensor is None:
            raise SourceError(f"{self._checkpoint.origin}: the tensor {slot.tensor} is missing.")
        return tensor

    def _encoding(self, slot: MatrixSlot, tensor: Tensor) -> tuple[Encoding, bool, str | None]:
        """How a weight is stored, whether its blocks are carried over, and a note."""
        if self._recipe.keep:
            return self._kept(slot, tensor)
        target = Target(slot.tensor, slot.role.value, slot.layer, slot.rows, slot.cols)
        choice = self._recipe.choose(target)
        if choice.rule is not None:
            self._used.add(choice.rule)
        return _encoding(choice.scheme, slot.cols), False, choice.note

    def _kept(self, slot: MatrixSlot, tensor: Tensor) -> tuple[Encoding, bool, str | None]:
        blocks = tensor.block_format
        if blocks is not None and not slot.transposed:
            # An offset is the sum of two fp16 numbers; fp32 keeps it.
            bits = 16 if blocks.symmetric else 32
            return BlockEncoding(blocks.bits, blocks.block, blocks.symmetric, bits), True, None
        scheme = nearest_scheme(tensor.dtype)
        note = None
        if blocks is not None:
            note = f"{tensor.dtype} cannot be carried over transposed, stored as {scheme.name}"
        elif not scheme.is_float:
            note = f"{tensor.dtype} has no counterpart, requantized as {scheme.name}"
        elif tensor.dtype != "F16":
            note = f"{tensor.dtype} stored as {scheme.name}"
        return _encoding(scheme, slot.cols), False, note


def _encoding(scheme: Scheme, cols: int) -> Encoding:
    if scheme.is_float:
        return FloatEncoding(scheme.bits)
    block = scheme.block or cols
    if cols % block:
        raise ConversionError(f"{scheme.name} does not divide a width of {cols}.")
    return BlockEncoding(scheme.bits, block, scheme.symmetric, scheme.scale_bits)
