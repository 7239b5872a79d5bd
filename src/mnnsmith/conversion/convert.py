"""The main job: open a checkpoint, turn its config into a graph, stream weights to a bundle."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mnnsmith.bundle import Bundle, open_bundle
from mnnsmith.bundle.bundle import TOKENIZER_JSON
from mnnsmith.bundle.manifest import write_manifest
from mnnsmith.bundle.staging import check_target, staged_folder
from mnnsmith.conversion.account import check_tensors
from mnnsmith.conversion.activity import activity
from mnnsmith.conversion.plan import Plan, make_plan
from mnnsmith.conversion.prove import Proof, prove_bundle
from mnnsmith.conversion.stream import disk_error, read_vector, write_weights
from mnnsmith.engine.converter import graph_json_to_mnn
from mnnsmith.errors import RecipeError, SourceError, UsageError
from mnnsmith.files import read_json_object, sha256_of, user_path
from mnnsmith.mnn.config_files import (
    MODEL_FILE,
    TOKENIZER_FILE,
    WEIGHT_FILE,
    ModelFacts,
    llm_config,
    run_config,
)
from mnnsmith.mnn.graph_json import ENGINE_VERSION, Weights, graph_json
from mnnsmith.mnn.mtok import MtokReport, write_mtok
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.registry import build_language_model, require_supported
from mnnsmith.quant.recipe import (
    DEFAULT_RECIPE,
    KEEP,
    Recipe,
    describe,
    parse_recipe,
    parse_recipe_name,
)
from mnnsmith.sources.checkpoint import Checkpoint, read_model_type
from mnnsmith.sources.open import open_checkpoint
from mnnsmith.version import __version__

# (stage, done, total): stages are "tokenizer", "weights" (bytes), "graph" and "proof" (steps).
ProgressCallback = Callable[[str, int, int], None]
# Room for the graph, the configuration and the manifest beside the files whose size is known.
_SMALL_FILES_BYTES = 16 << 20
_RECIPE_LIMIT_BYTES = 4 << 20
_MAX_THREADS = 1024
# What generation_config.json may say: types, least and largest value.
_SAMPLING = {
    "temperature": ((int, float), 0.0, 100.0),
    "top_k": ((int,), 0, 1 << 20),
    "top_p": ((int, float), 0.0, 1.0),
    "min_p": ((int, float), 0.0, 1.0),
    "repetition_penalty": ((int, float), 0.01, 10.0),
}


@dataclass(frozen=True)
class Prepared:
    """A conversion that is decided in full, with no weight read."""

    checkpoint: Checkpoint
    model: LanguageModel
    plan: Plan
    recipe: Recipe
    notes: tuple[str, ...]

    @property
    def bundle_bytes(self) -> int:
        """Size of the finished bundle, less than a percent off (graph and tokenizer estimated)."""
        tokenizer = len(self.checkpoint.tokenizer.tokenizer_json.encode())
        operators = sum(1 for _ in self.model.graph.all_nodes())
        return self.plan.weight_bytes + 2 * tokenizer + 600 * operators


def prepare(
    model: str | Path,
    *,
    recipe: str | Path | None = None,
    revision: str | None = None,
    offline: bool = False,
    max_context: int | None = None,
) -> Prepared:
    """Open `model` and decide everything; raises what `convert` would raise before its work."""
    chosen = None if recipe is None else load_recipe(recipe)
    checkpoint = open_checkpoint(
        model, revision=revision, offline=offline,
        accept=lambda config: require_supported(read_model_type(config, str(model)), str(model)),
    )  # fmt: skip
    if chosen is None:
        chosen = parse_recipe_name(KEEP if checkpoint.format == "gguf" else DEFAULT_RECIPE)
    limits = ContextLimits(max_context, chosen.mla)
    language_model, unread = build_language_model(
        checkpoint.model_type, checkpoint.config, checkpoint.origin, limits
    )
    notes = check_tensors(language_model, checkpoint)
    if unread:
        notes = (*notes, f"config keys without effect here: {', '.join(unread)}")
    plan = make_plan(language_model, checkpoint, chosen)
    ready = Prepared(
        checkpoint, language_model, plan, chosen,
        (*checkpoint.notes, *language_model.notes, *notes, *plan.notes),
    )  # fmt: skip
    sampling_defaults(ready)
    return ready


def convert(
    model: str | Path,
    output: str | Path,
    *,
    recipe: str | Path | None = None,
    revision: str | None = None,
    offline: bool = False,
    max_context: int | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> Bundle:
    """Convert a checkpoint to a bundle at `output`, whole or not at all.

    model: a Hugging Face folder, a `.gguf` file, or a hub id (`org/name`).
    recipe: a name (`w4g64-head8`, see `quant.recipe`) or a JSON file; by default `keep` for GGUF,
    `w4g64-head8` for others.  revision, offline: for hub ids.  max_context: tokens, by default the
    model's own limit.  force: replace an existing bundle.  threads: by default all cores.

    Raises `MnnsmithError` of the kind that fits; then nothing was written and an existing bundle is
    untouched.
    """
    report = progress or (lambda stage, done, total: None)
    if threads is not None and not 1 <= threads <= _MAX_THREADS:
        raise UsageError(f"threads must be from 1 to {_MAX_THREADS}, not {threads}.")
    target = user_path(output)
    check_target(target, replace=force)
    ready = prepare(
        model, recipe=recipe, revision=revision, offline=offline, max_context=max_context
    )
    _check_sources_apart(target, ready.checkpoint)
    workers = threads or os.cpu_count() or 1
    needed = ready.bundle_bytes + _SMALL_FILES_BYTES
    with (
        staged_folder(target, replace=force, needed_bytes=needed) as folder,
        ThreadPoolExecutor(max_workers=1) as background,
    ):
        hashes = {p: background.submit(sha256_of, p) for p in ready.checkpoint.files}
        try:
            _fill(folder, ready, hashes, workers, report)
        except OSError as error:
            raise disk_error(target, error) from error
        finally:
            background.shutdown(wait=True, cancel_futures=True)
    return open_bundle(target)


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


def _check_sources_apart(target: Path, checkpoint: Checkpoint) -> None:
    """A folder that is replaced must not hold the checkpoint."""
    folder = target.resolve()
    for path in checkpoint.files:
        if folder in path.resolve().parents:
            raise UsageError(
                f"{target}: holds {path}, which is to be converted; replacing the folder would "
                "delete it.",
                "Choose another output.",
            )


def _fill(
    folder: Path,
    ready: Prepared,
    hashes: Mapping[Path, Future[str]],
    threads: int,
    report: ProgressCallback,
) -> None:
    """Write every file of the bundle into `folder`."""
    checkpoint, plan = ready.checkpoint, ready.plan
    # First, because a tokenizer that cannot be expressed should not cost the time of the weights.
    report("tokenizer", 0, 1)
    tokenizer = write_mtok(checkpoint.tokenizer, folder / TOKENIZER_FILE)
    (folder / TOKENIZER_JSON).write_text(checkpoint.tokenizer.tokenizer_json, encoding="utf-8")
    report("tokenizer", 1, 1)
    write_weights(
        plan, checkpoint, folder / WEIGHT_FILE, threads=threads,
        progress=lambda done, total: report("weights", done, total),
    )  # fmt: skip
    report("graph", 0, 1)
    _write_graph(folder, ready)
    _write_configs(folder, ready)
    report("graph", 1, 1)
    report("proof", 0, 1)
    proof = prove_bundle(folder, ready.model, plan, checkpoint.tokenizer)
    _write_manifest(folder, ready, hashes, proof, tokenizer)
    report("proof", 1, 1)


def _write_graph(folder: Path, ready: Prepared) -> None:
    weights = Weights(ready.plan.records, lambda slot: read_vector(slot, ready.checkpoint))
    source = folder / "graph.json"
    source.write_text(json.dumps(graph_json(ready.model.graph, weights)), encoding="utf-8")
    graph_json_to_mnn(source, folder / MODEL_FILE)
    source.unlink()


def _write_configs(folder: Path, ready: Prepared) -> None:
    model, tokenizer = ready.model, ready.checkpoint.tokenizer
    facts = ModelFacts(
        ready.checkpoint.model_type, model.hidden_size, model.layers, model.max_context,
        model.attention.scale, model.sliding_window,
        model.attention.kv_heads, model.attention.head_dim,
    )  # fmt: skip
    files = {
        "llm_config.json": llm_config(
            facts, ready.plan.embedding, tokenizer.chat_template,
            tokenizer.bos_token, tokenizer.eos_token,
        ),
        "config.json": run_config(
            sampling_defaults(ready), blockwise=ready.plan.blockwise, fits_fp16=model.fits_fp16,
            mapped=model.mixture and ready.plan.all_integer,
        ),
    }  # fmt: skip
    for name, data in files.items():
        text = json.dumps(data, indent=1, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def sampling_defaults(ready: Prepared) -> dict[str, Any]:
    """How the model's authors would have it sampled; {} means greedy.

    Raises `SourceError` for a value that means nothing.
    """
    generation = ready.checkpoint.generation
    where = f"{ready.checkpoint.origin}: generation_config.json"
    sampled = generation.get("do_sample")
    if sampled is not None and type(sampled) is not bool:
        raise SourceError(f"{where}: do_sample must be true or false, not {sampled!r:.60}.")
    if not sampled:
        return {}
    found = {}
    for key, (kinds, low, high) in _SAMPLING.items():
        value = generation.get(key)
        if value is None:
            continue
        if kinds == (int,) and isinstance(value, float) and value.is_integer():
            # JSON written by other tools may say 50.0.
            value = int(value)
        if type(value) not in kinds or not low <= value <= high:
            raise SourceError(
                f"{where}: {key} must be from {low} to {high}, not {value!r:.60}.",
                "Correct the file, or take the key out.",
            )
        # 0 switches top-k off.
        if (key, value) != ("top_k", 0):
            found[key] = value
    return found


def _write_manifest(
    folder: Path,
    ready: Prepared,
    hashes: Mapping[Path, Future[str]],
    proof: Proof,
    tokenizer: MtokReport,
) -> None:
    checkpoint, model, plan = ready.checkpoint, ready.model, ready.plan
    origin = checkpoint.origin
    used = activity(model, plan)
    names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    write_manifest(folder, {
        "mnnsmith": __version__,
        "engine": ENGINE_VERSION,
        "source": {
            # Where it lay on this machine says nothing elsewhere, and would change the bytes.
            "name": origin if checkpoint.revision else _file_name(origin),
            "format": checkpoint.format,
            "revision": checkpoint.revision,
            "files": {_file_name(path): future.result() for path, future in hashes.items()},
        },
        "model": {
            "model_type": checkpoint.model_type,
            "parameters": plan.parameters,
            "active_parameters": used.parameters,
            "token_bytes": used.read_bytes,
            "experts": None if used.experts is None else asdict(used.experts),
            "layers": model.layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.head.rows,
            "max_context": model.max_context,
            "sliding_window": model.sliding_window,
            "stop_ids": [i for i in checkpoint.tokenizer.stop_ids if i < model.head.rows],
            "kv_elements_per_token": model.kv_bytes_per_token(1),
        },
        "tokens": {"bos": checkpoint.tokenizer.bos_token, "eos": checkpoint.tokenizer.eos_token},
        "generation": sampling_defaults(ready),
        "recipe": describe(ready.recipe),
        "weights": {
            task.name: {
                "tensor": task.slot.tensor,
                "scheme": task.scheme_name,
                "source": task.tensor.dtype,
                "carried": task.carried,
            }
            for task in plan.matrices
        },
        "tokenizer": {
            "rewritten": list(tokenizer.rewritten),
            "engine_differences": list(tokenizer.differences),
        },
        "notes": [*ready.notes, *proof.notes, *_tokenizer_notes(tokenizer, model.head.rows)],
        "proof": proof.data,
        "files": {
            name: {"sha256": sha256_of(folder / name), "bytes": (folder / name).stat().st_size}
            for name in names
        },
    })  # fmt: skip


def _file_name(path: str | Path) -> str:
    """The last part of a path as text; bytes that are no text become U+FFFD."""
    return os.fsencode(Path(path).name).decode("utf-8", "replace")


def _tokenizer_notes(tokenizer: MtokReport, rows: int) -> list[str]:
    """What an app that tokenizes with the engine should know; `rows` are those of the embedding."""
    notes = [f"the engine's own tokenizer differs: {text}" for text in tokenizer.differences]
    if tokenizer.vocab_size > rows:
        notes.append(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {rows} embeddings: ids from "
            f"{rows} on must not be fed"
        )
    return notes
