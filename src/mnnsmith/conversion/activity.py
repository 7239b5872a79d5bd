"""What one token uses of a model: of a mixture of experts a part, of any other nearly all.

All follows from the graph and the plan; no weight is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mnnsmith.conversion.plan import MatrixTask, Plan
from mnnsmith.graph.weights import ConstantSlot, Role, StoredRows, Table, VectorSlot
from mnnsmith.mnn.weight_records import BlockEncoding, MatrixRecord
from mnnsmith.models.language_model import LanguageModel

# What the engine takes for an expert, as it makes a module of each: measured on 1664 of them.
_EXPERT_MODULE_BYTES = 33_000


@dataclass(frozen=True)
class Experts:
    """The routed experts of a model; shared ones, which every token uses, are none of them.

    layers: numbers of the blocks that have experts.  per_layer, chosen: experts of each of them,
    and how many a token uses.
    """

    layers: tuple[int, ...]
    per_layer: int
    chosen: int

    def share_in_use(self, tokens: int) -> float:
        """The share of experts that some of `tokens` choose, if choices are even and independent.

        1 - (1 - chosen/experts)^tokens: more than a trained router uses on one kind of text.
        """
        return 1.0 - (1.0 - self.chosen / self.per_layer) ** tokens


@dataclass(frozen=True)
class Activity:
    """Parameters and bytes that one token uses.

    parameters: an embedding counts as the one row that is read, experts as those that are chosen.
    read_bytes: of the weight file, what a decode step reads; the KV cache is not in it.
    held_bytes: the engine's copy of the weights in memory, experts apart: `expert_bytes` of all of
    them, `token_expert_bytes` of those that one token uses.
    module_bytes: what the engine takes for experts beside their weights, mapped or not.
    """

    parameters: int
    read_bytes: int
    held_bytes: int
    expert_bytes: int
    token_expert_bytes: int
    module_bytes: int
    experts: Experts | None


def activity(model: LanguageModel, plan: Plan) -> Activity:
    """What one token uses of `model`, stored as `plan` has it."""
    routed = {
        node.attributes["layer"]: (node.attributes["top_k"], node.attributes["experts"])
        for node in model.graph.nodes
        if node.kind == "mixture"
    }
    parameters = read = held = all_experts = token_experts = 0.0
    for task in plan.matrices:
        record, size = task.record, task.slot.rows * task.slot.cols
        stored = record.codes_bytes + record.scales_bytes + record.bias_bytes
        if task.slot.role is Role.EMBEDDING:
            # Read from the file row by row, never held.
            parameters += 0 if model.tied else task.slot.cols
            read += stored / task.slot.rows
            continue
        share = 1.0
        if task.slot.role is Role.EXPERT:
            share = _share(task, routed)
            all_experts += _copy_bytes(record)
            token_experts += share * _copy_bytes(record)
        else:
            held += _copy_bytes(record)
        parameters += share * (size + (task.bias.size if task.bias else 0))
        read += share * stored
    for vector in plan.vectors:
        if isinstance(vector.slot, Table | StoredRows):
            held += vector.record.nbytes
            continue
        parameters += _vector_size(vector.slot)
        read += vector.record.nbytes
        held += vector.record.nbytes
    experts = None
    if routed:
        # No family has layers that differ in this.
        ((chosen, count),) = set(routed.values())
        experts = Experts(tuple(sorted(routed)), count, chosen)
    modules = sum(count for _, count in routed.values())
    return Activity(
        round(parameters), round(read), round(held), round(all_experts), round(token_experts),
        _EXPERT_MODULE_BYTES * modules, experts,
    )  # fmt: skip


def _share(task: MatrixTask, routed: dict[int, tuple[int, int]]) -> float:
    assert task.slot.layer is not None
    chosen, count = routed[task.slot.layer]
    return chosen / count


def _vector_size(slot: VectorSlot | ConstantSlot) -> int:
    return slot.size if isinstance(slot, VectorSlot) else math.prod(slot.shape)


def _copy_bytes(record: MatrixRecord) -> int:
    """A linear layer as the engine holds it at `memory: low`.

    For each block of integers a scale, an offset and a sum in fp32; float weights in fp32.
    """
    encoding = record.encoding
    bias = 4 * record.rows
    if not isinstance(encoding, BlockEncoding):
        return 4 * record.rows * record.cols + bias
    blocks = record.rows * record.cols // encoding.block
    return record.codes_bytes + 12 * blocks + bias
