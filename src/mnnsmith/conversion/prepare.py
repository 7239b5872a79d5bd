"""Deciding a conversion in full, from the small files and the list of tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mnnsmith.conversion.account import check_tensors
from mnnsmith.conversion.clips import add_clips
from mnnsmith.conversion.generation import Recommended, recommended_sampling
from mnnsmith.conversion.pictures import canvas_layout, picture_facts
from mnnsmith.conversion.plan import Plan, make_plan
from mnnsmith.conversion.planned import planned_tensors
from mnnsmith.errors import RecipeError, SourceError, UsageError
from mnnsmith.files import read_json_object, user_path
from mnnsmith.mnn.config_files import PictureFacts
from mnnsmith.mnn.mtok import MtokReport, make_mtok
from mnnsmith.models.canvas import CanvasLayout
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.registry import build_language_model, require_supported
from mnnsmith.quant.recipe import DEFAULT_RECIPE, KEEP, Recipe, parse_recipe, parse_recipe_name
from mnnsmith.sources.checkpoint import Checkpoint, read_model_type
from mnnsmith.sources.open import open_checkpoint

_RECIPE_LIMIT_BYTES = 4 << 20
# What `visual.mnn` takes: tiles, or a whole picture.
STANDARD, CANVAS = "standard", "canvas"
PROFILES = (STANDARD, CANVAS)


@dataclass(frozen=True)
class Prepared:
    """A conversion that is decided in full, with no weight read.

    sampling: how the model's authors would have it sampled.  mtok: the engine's tokenizer file;
    tokenizer: what to know of it.  fetched: whether the weights are on this machine.
    pictures: of a model that sees, else None.  canvas: of one that takes whole pictures.
    """

    checkpoint: Checkpoint
    model: LanguageModel
    plan: Plan
    recipe: Recipe
    sampling: Recommended
    mtok: bytes
    tokenizer: MtokReport
    fetched: bool
    notes: tuple[str, ...]
    pictures: PictureFacts | None = None
    canvas: CanvasLayout | None = None

    @property
    def bundle_bytes(self) -> int:
        """Size of the finished bundle, less than a percent off (the graph is estimated)."""
        tokenizer = len(self.checkpoint.tokenizer.tokenizer_json.encode())
        operators = sum(1 for _ in self.model.all_nodes())
        return self.plan.all_bytes + len(self.mtok) + tokenizer + 600 * operators


def prepare(
    model: str | Path,
    *,
    recipe: str | Path | Recipe | None = None,
    revision: str | None = None,
    offline: bool = False,
    max_context: int | None = None,
    vision: str | None = None,
    fetch: bool = False,
) -> Prepared:
    """Open `model` and decide everything; raises what `convert` would raise before its work.

    recipe: its name, a JSON file, or the recipe itself.  vision: as for `convert`.
    fetch: False leaves the weights of a hub model where they are, and takes its tensors to be those
    that its config asks for.  True fetches them, once all else is known to be right.
    """
    if vision not in (None, *PROFILES):
        raise UsageError(f"vision must be one of {', '.join(PROFILES)}, not {vision!r}.")
    chosen = recipe if recipe is None or isinstance(recipe, Recipe) else load_recipe(recipe)

    def decide(revision: str | None, weights: bool) -> Prepared:
        checkpoint = open_checkpoint(
            model, revision=revision, offline=offline, weights=weights, accept=_accept(model)
        )
        return _decide(checkpoint, chosen, max_context, vision)

    ready = decide(revision, False)
    if fetch and not ready.fetched:
        ready = decide(ready.checkpoint.revision, True)
    return ready


def load_recipe(recipe: str | Path) -> Recipe:
    """A recipe by name, or from a JSON file (a path that ends in .json)."""
    if not str(recipe).endswith(".json"):
        return parse_recipe_name(str(recipe))
    path = user_path(recipe)
    if not path.is_file():
        raise RecipeError(f"{path}: there is no such recipe file.")
    try:
        data = read_json_object(path, _RECIPE_LIMIT_BYTES)
    except SourceError as error:
        raise RecipeError(error.message, error.hint) from error
    return parse_recipe(data, str(path))


def with_tensors(
    checkpoint: Checkpoint, model: LanguageModel, unread: Sequence[str]
) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint with tensors that fit the model, and notes.

    They are its own, or those that the config asks for where the weights are not fetched yet.
    unread: config keys that the model file did not look at.
    """
    if checkpoint.tensors:
        notes = check_tensors(model, checkpoint)
    else:
        dtype = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
        checkpoint = replace(checkpoint, tensors=planned_tensors(model, dtype))
        notes = ("told from config.json alone; the weights are not fetched yet",)
    if unread:
        notes = (*notes, f"config keys without effect here: {', '.join(unread)}")
    return checkpoint, notes


def _accept(model: str | Path) -> Callable[[Mapping[str, Any]], object]:
    return lambda config: require_supported(read_model_type(config, str(model)), str(model))


def _decide(
    checkpoint: Checkpoint, chosen: Recipe | None, max_context: int | None, vision: str | None
) -> Prepared:
    recipe = chosen or parse_recipe_name(KEEP if checkpoint.format == "gguf" else DEFAULT_RECIPE)
    limits = ContextLimits(max_context, recipe.mla)
    model, unread = build_language_model(
        checkpoint.model_type, checkpoint.config, checkpoint.origin, limits
    )
    clipped = add_clips(model.graph, recipe)
    fetched = bool(checkpoint.tensors)
    checkpoint, notes = with_tensors(checkpoint, model, unread)
    pictures = None if model.vision is None else picture_facts(model.vision, checkpoint)
    canvas = None
    if model.vision is None and vision is not None:
        raise UsageError(f"{checkpoint.origin}: sees no pictures; leave out --vision.")
    if model.vision is not None and vision == CANVAS:
        canvas = canvas_layout(model.vision, checkpoint)
        graph = model.vision.of_canvas(model.embedding, canvas)
        model = replace(model, vision=replace(model.vision, graph=graph))
    plan = make_plan(model, checkpoint, recipe)
    sampling = recommended_sampling(checkpoint.generation, checkpoint.origin)
    mtok, report = make_mtok(checkpoint.tokenizer)
    return Prepared(
        checkpoint, model, plan, recipe, sampling, mtok, report, fetched,
        (*checkpoint.notes, *model.notes, *clipped, *notes, *plan.notes, *sampling.notes,
         *_tokenizer_notes(report, model.head.rows)),
        pictures, canvas,
    )  # fmt: skip


def _tokenizer_notes(tokenizer: MtokReport, rows: int) -> list[str]:
    """What an app that tokenizes with the engine should know; `rows` are those of the embedding."""
    notes = [f"the engine's own tokenizer differs: {text}" for text in tokenizer.differences]
    if tokenizer.vocab_size > rows:
        notes.append(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {rows} embeddings: ids from "
            f"{rows} on must not be fed"
        )
    return notes
