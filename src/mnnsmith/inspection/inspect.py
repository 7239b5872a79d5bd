"""What a model is and what it will cost, told from its config and its list of tensors alone."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mnnsmith.conversion.activity import Activity, Experts, activity
from mnnsmith.conversion.plan import Plan, make_plan
from mnnsmith.conversion.prepare import with_tensors
from mnnsmith.conversion.prove import LOAD_LIMIT_BYTES
from mnnsmith.errors import RecipeError, UnsupportedError
from mnnsmith.graph.weights import ConstantSlot, MatrixSlot
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.registry import build_language_model, require_supported
from mnnsmith.quant.recipe import KEEP, parse_recipe_name
from mnnsmith.sources.checkpoint import Checkpoint, read_model_type
from mnnsmith.sources.open import open_checkpoint

RECIPES = (
    "fp16",
    "w8g128",
    "w8g64",
    "w8g32",
    "w4g128",
    "w4g64",
    "w4g64-head8",
    "w4g32",
    "w4g32-head8",
)
# Measured resident memory of the converting process before its first block of weights, and per
# thread for the blocks in flight; of the engine without weights and cache.
_CONVERT_BASE_BYTES = 60_000_000
_CONVERT_THREAD_BYTES = 20_000_000
_ENGINE_BASE_BYTES = 60_000_000
# The same where it also renders templates and computes some tokens, at the end of a conversion.
_PROOF_BASE_BYTES = 80_000_000
# The context for which memory is told.
_CONTEXT_TOKENS = 2048
# The experts that this many tokens choose are called the typical working set.
_TYPICAL_TOKENS = 32


@dataclass(frozen=True)
class RoleSummary:
    """Tensors of one role: how many, their weights, and their bytes in the source."""

    tensors: int
    parameters: int
    source_bytes: int


@dataclass(frozen=True)
class MappedMemory:
    """Estimated resident memory with mapped weights, a cache of 2048 tokens at fp16 included.

    Of weights that are not resident the system reads pages anew, at the speed of the storage.
    least_bytes: only the experts of one token are resident.  typical_bytes: those that 32 tokens
    choose, if choices are even (`mnnsmith profile` shows how even they are).  most_bytes: all.
    disk_bytes: the engine's copy of the weights on disk.
    """

    least_bytes: int
    typical_bytes: int
    most_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class RecipeSummary:
    """What a recipe makes of the model; `problem` is set, and sizes are 0, where it does not fit.

    run_bytes: estimated memory of the engine with a cache of 2048 tokens at fp16.
    token_bytes: what one token reads of the weights; memory bandwidth over it is the roof of
    tokens per second.
    mapped: for a mixture of experts whose weights are mapped from disk, else None.
    """

    name: str
    weight_bytes: int
    bits_per_weight: float
    run_bytes: int
    problem: str | None = None
    token_bytes: int = 0
    mapped: MappedMemory | None = None


@dataclass(frozen=True)
class VisionSummary:
    """What sees pictures: its size, and that of a tile in pixels a side and tokens."""

    layers: int
    hidden_size: int
    tile: int
    tile_tokens: int


@dataclass(frozen=True)
class Inspection:
    """A model before conversion.

    unsupported: why it cannot be converted, or None.  Where it is set, the fields that need the
    graph are empty or 0, and the others as the config states them (0 where it does not).
    kv_bytes_per_token: at fp16, as phones hold it; double on x86.
    convert_bytes: estimated peak memory of a conversion, whatever the recipe, with the engine that
    the result is loaded in at its end.
    active_parameters: those that one token uses; an embedding counts as one row.
    experts: of a mixture of experts, else None.  vision: of a model that sees, else None.
    """

    origin: str
    format: str
    model_type: str
    unsupported: str | None
    source_dtypes: Mapping[str, int]
    parameters: int = 0
    roles: Mapping[str, RoleSummary] | None = None
    layers: int = 0
    hidden_size: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    max_context: int = 0
    sliding_window: int | None = None
    tied: bool = False
    kv_bytes_per_token: int = 0
    convert_bytes: int = 0
    recipes: tuple[RecipeSummary, ...] = ()
    notes: tuple[str, ...] = ()
    active_parameters: int = 0
    experts: Experts | None = None
    vision: VisionSummary | None = None


def inspect(model: str | Path, *, revision: str | None = None, offline: bool = False) -> Inspection:
    """Look at a model; no weight is read, and of a hub model none is fetched.

    Raises `SourceError` for damaged sources; an unsupported model is an answer, not an error.
    """
    seen: dict[str, Any] = {}

    def accept(config: Mapping[str, Any]) -> None:
        seen.update(config)
        require_supported(read_model_type(config, str(model)), str(model))

    try:
        checkpoint = open_checkpoint(
            model, revision=revision, offline=offline, weights=False, accept=accept
        )
    except UnsupportedError as error:
        return _unsupported(str(model), seen, error)
    try:
        built, unread = build_language_model(
            checkpoint.model_type, checkpoint.config, checkpoint.origin, ContextLimits()
        )
    except UnsupportedError as error:
        found = _unsupported(checkpoint.origin, checkpoint.config, error)
        return replace(
            found,
            format=checkpoint.format,
            source_dtypes=_dtypes(checkpoint),
            notes=checkpoint.notes,
        )
    checkpoint, notes = with_tensors(checkpoint, built, unread)
    dtypes = _dtypes(checkpoint)
    notes = (*checkpoint.notes, *built.notes, *notes)
    roles = _roles(built, checkpoint)
    shape = built.attention
    names = (*RECIPES, KEEP) if checkpoint.format == "gguf" else RECIPES
    recipes = [_recipe(name, built, checkpoint) for name in names]
    # What is active does not depend on how it is stored.
    used = activity(built, make_plan(built, checkpoint, parse_recipe_name("fp16")))
    return Inspection(
        checkpoint.origin, checkpoint.format, checkpoint.model_type, None, dtypes,
        parameters=sum(role.parameters for role in roles.values()),
        roles=roles,
        layers=built.layers, hidden_size=built.hidden_size,
        heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab_size=built.head.rows, max_context=built.max_context,
        sliding_window=built.sliding_window, tied=built.tied,
        kv_bytes_per_token=built.kv_bytes_per_token(2),
        convert_bytes=_CONVERT_BASE_BYTES + _CONVERT_THREAD_BYTES * (os.cpu_count() or 1)
        + _PROOF_BASE_BYTES + max(held for _, held in recipes),
        recipes=tuple(summary for summary, _ in recipes),
        notes=notes,
        active_parameters=used.parameters, experts=used.experts, vision=_vision(built),
    )  # fmt: skip


def _vision(model: LanguageModel) -> VisionSummary | None:
    seen = model.vision
    if seen is None:
        return None
    return VisionSummary(seen.layers, seen.hidden_size, seen.tile, seen.tile_tokens)


def _dtypes(checkpoint: Checkpoint) -> dict[str, int]:
    """How many tensors have which stored type, the most frequent first."""
    return dict(Counter(t.dtype for t in checkpoint.tensors.values()).most_common())


def _unsupported(origin: str, config: Mapping[str, Any], error: UnsupportedError) -> Inspection:
    """The answer for a model that cannot be converted, with what its config says plainly."""

    def number(*names: str) -> int:
        found = (config.get(name) for name in names)
        return next((value for value in found if type(value) is int and value > 0), 0)

    heads = number("num_attention_heads")
    hidden = number("hidden_size")
    name = config.get("model_type")
    return Inspection(
        origin, "gguf" if origin.lower().endswith(".gguf") else "safetensors",
        name if isinstance(name, str) else "unknown", error.message, {},
        layers=number("num_hidden_layers"), hidden_size=hidden, heads=heads,
        kv_heads=number("num_key_value_heads", "num_attention_heads"),
        head_dim=number("head_dim") or (hidden // heads if heads else 0),
        vocab_size=number("vocab_size"), max_context=number("max_position_embeddings"),
    )  # fmt: skip


def run_bytes(plan_bytes: int, kv_bytes_per_token: int, max_context: int) -> int:
    """Estimated memory of the engine: weights, a cache of up to 2048 tokens, and itself."""
    cache = kv_bytes_per_token * min(_CONTEXT_TOKENS, max_context)
    return plan_bytes + cache + _ENGINE_BASE_BYTES


def _recipe(name: str, model: LanguageModel, checkpoint: Checkpoint) -> tuple[RecipeSummary, int]:
    """A recipe, and the bytes that the engine holds as a conversion loads its result (or not)."""
    try:
        plan = make_plan(model, checkpoint, parse_recipe_name(name))
    except RecipeError as error:
        problem = error.message.removeprefix(f"Recipe {name}: {name} does not fit ")
        return RecipeSummary(name, 0, 0.0, 0, problem), 0
    used = activity(model, plan)
    rest = run_bytes(0, model.kv_bytes_per_token(2), model.max_context) + used.module_bytes
    needed = rest + plan.all_bytes
    if used.experts is not None:
        needed = rest + used.held_bytes + used.expert_bytes
    held = used.held_bytes + used.expert_bytes + used.module_bytes
    summary = RecipeSummary(
        name, plan.all_bytes, _bits_per_weight(plan), needed, None, used.read_bytes,
        _mapped(used, rest) if plan.all_integer else None,
    )  # fmt: skip
    return summary, held if plan.all_bytes <= LOAD_LIMIT_BYTES else 0


def _mapped(used: Activity, rest: int) -> MappedMemory | None:
    if used.experts is None:
        return None
    held = rest + used.held_bytes
    share = used.experts.share_in_use(_TYPICAL_TOKENS)
    return MappedMemory(
        held + used.token_expert_bytes,
        held + round(share * used.expert_bytes),
        held + used.expert_bytes,
        used.held_bytes + used.expert_bytes,
    )


def _bits_per_weight(plan: Plan) -> float:
    tasks = [task for part in plan.files for task in part.matrices]
    stored = sum(t.record.codes_bytes + t.record.scales_bytes for t in tasks)
    return 8 * stored / sum(t.slot.rows * t.slot.cols for t in tasks)


def _roles(model: LanguageModel, checkpoint: Checkpoint) -> dict[str, RoleSummary]:
    """Tensors by role; a head that is the embedding counts there, all vectors together."""
    names: dict[str, set[str]] = defaultdict(set)
    names[model.embedding.role.value].add(model.embedding.tensor)
    routers = {node.name for node in model.graph.nodes}
    for node in model.all_nodes():
        for slot in node.slots.values():
            if isinstance(slot, MatrixSlot):
                names[slot.role.value].add(slot.tensor)
            elif isinstance(slot, ConstantSlot):
                names["routers" if node.name in routers else "positions"].add(slot.tensor)
    matrices = set().union(*names.values())
    if model.tied:
        names["head"].discard(model.head.tensor)
    names["norms and biases"] = set(checkpoint.tensors) - matrices
    return {
        role: RoleSummary(
            len(found),
            sum(math.prod(checkpoint.tensors[n].shape) for n in found),
            sum(checkpoint.tensors[n].nbytes for n in found),
        )
        for role, found in names.items()
        if found
    }
