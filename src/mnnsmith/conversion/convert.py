"""The main job: open a checkpoint, turn its config into a graph, stream weights to a bundle."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mnnsmith.bundle import Bundle, open_bundle
from mnnsmith.bundle.bundle import TOKENIZER_JSON
from mnnsmith.bundle.manifest import write_manifest
from mnnsmith.bundle.staging import check_target, staged_folder
from mnnsmith.conversion.activity import activity
from mnnsmith.conversion.plan import WeightPlan
from mnnsmith.conversion.prepare import CANVAS, STANDARD, Prepared, prepare
from mnnsmith.conversion.prove import Proof, prove_bundle
from mnnsmith.conversion.slots import read_vector
from mnnsmith.conversion.stream import disk_error, write_weights
from mnnsmith.engine.converter import graph_json_to_mnn
from mnnsmith.errors import SourceError, UsageError
from mnnsmith.files import sha256_of, user_path
from mnnsmith.graph.graph import Graph
from mnnsmith.mnn.config_files import (
    MODEL_FILE,
    TOKENIZER_FILE,
    VISION_MODEL_FILE,
    VISION_WEIGHT_FILE,
    WEIGHT_FILE,
    ModelFacts,
    PictureFacts,
    llm_config,
    picture_config,
    run_config,
)
from mnnsmith.mnn.graph_json import ENGINE_VERSION, Weights, graph_json
from mnnsmith.models.canvas import CanvasLayout
from mnnsmith.quant.recipe import describe
from mnnsmith.sources.checkpoint import Checkpoint
from mnnsmith.version import __version__

# (stage, done, total): stages are "tokenizer", "weights" (bytes), "graph" and "proof" (steps).
ProgressCallback = Callable[[str, int, int], None]
# Room for the graph, the configuration and the manifest beside the files whose size is known.
_SMALL_FILES_BYTES = 16 << 20
_MAX_THREADS = 1024


def convert(
    model: str | Path,
    output: str | Path,
    *,
    recipe: str | Path | None = None,
    revision: str | None = None,
    offline: bool = False,
    max_context: int | None = None,
    vision: str | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> Bundle:
    """Convert a checkpoint to a bundle at `output`, whole or not at all.

    model: a Hugging Face folder, a `.gguf` file, or a hub id (`org/name`).
    recipe: a name (`w4g64-head8`, see `quant.recipe`) or a JSON file; by default `keep` for GGUF,
    `w4g32-head8` for others.  revision, offline: for hub ids.  max_context: tokens, by default the
    model's own limit.  vision: of a model that sees, "standard" (the default: it takes tiles, which
    mnnsmith and apps in C++ feed) or "canvas" (it takes whole pictures, for apps that send text
    alone).  force: replace an existing bundle.  threads: by default all cores.

    Raises `MnnsmithError` of the kind that fits; then nothing was written and an existing bundle is
    untouched.
    """
    report = progress or (lambda stage, done, total: None)
    if threads is not None and not 1 <= threads <= _MAX_THREADS:
        raise UsageError(f"threads must be from 1 to {_MAX_THREADS}, not {threads}.")
    target = user_path(output)
    check_target(target, replace=force)
    ready = prepare(
        model,
        recipe=recipe,
        revision=revision,
        offline=offline,
        max_context=max_context,
        vision=vision,
        fetch=True,
    )
    _check_sources_apart(target, ready.checkpoint)
    workers = threads or os.cpu_count() or 1
    needed = ready.bundle_bytes + _SMALL_FILES_BYTES
    with (
        staged_folder(target, replace=force, needed_bytes=needed) as folder,
        ThreadPoolExecutor(max_workers=1) as background,
    ):
        hashes = {p: background.submit(_source_hash, p) for p in ready.checkpoint.files}
        try:
            _fill(folder, ready, hashes, workers, report)
        except OSError as error:
            raise disk_error(target, error) from error
        finally:
            background.shutdown(wait=True, cancel_futures=True)
    return open_bundle(target)


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


def _source_hash(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}.") from error


def _fill(
    folder: Path,
    ready: Prepared,
    hashes: Mapping[Path, Future[str]],
    threads: int,
    report: ProgressCallback,
) -> None:
    """Write every file of the bundle into `folder`."""
    checkpoint, plan = ready.checkpoint, ready.plan
    report("tokenizer", 0, 1)
    (folder / TOKENIZER_FILE).write_bytes(ready.mtok)
    (folder / TOKENIZER_JSON).write_text(checkpoint.tokenizer.tokenizer_json, encoding="utf-8")
    report("tokenizer", 1, 1)
    _write_weights(folder, ready, threads, report)
    report("graph", 0, 1)
    _write_graph(folder, MODEL_FILE, ready.model.graph, plan, checkpoint)
    if ready.model.vision is not None and plan.vision is not None:
        vision = ready.model.vision.graph
        _write_graph(folder, VISION_MODEL_FILE, vision, plan.vision, checkpoint)
    for name, data in config_files(ready).items():
        text = json.dumps(data, indent=1, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    report("graph", 1, 1)
    report("proof", 0, 1)
    proof = prove_bundle(folder, ready.model, plan, checkpoint.tokenizer)
    _write_manifest(folder, ready, hashes, proof)
    report("proof", 1, 1)


def _write_weights(folder: Path, ready: Prepared, threads: int, report: ProgressCallback) -> None:
    before = 0
    for plan, name in zip(ready.plan.files, (WEIGHT_FILE, VISION_WEIGHT_FILE), strict=False):

        def progress(done: int, _: int, before: int = before) -> None:
            report("weights", before + done, ready.plan.all_bytes)

        write_weights(plan, ready.checkpoint, folder / name, threads=threads, progress=progress)
        before += plan.weight_bytes


def _write_graph(
    folder: Path, name: str, graph: Graph, plan: WeightPlan, checkpoint: Checkpoint
) -> None:
    weights = Weights(plan.records, lambda slot: read_vector(slot, checkpoint))
    source = folder / "graph.json"
    source.write_text(json.dumps(graph_json(graph, weights)), encoding="utf-8")
    graph_json_to_mnn(source, folder / name)
    source.unlink()


def config_files(ready: Prepared) -> dict[str, dict[str, Any]]:
    """What the engine is told of the model, and of the device: JSON objects by file."""
    model, tokenizer = ready.model, ready.checkpoint.tokenizer
    facts = ModelFacts(
        ready.checkpoint.model_type, model.hidden_size, model.layers, model.max_context,
        model.attention.scale if model.vision is None else None, model.sliding_window,
        model.attention.kv_heads, model.attention.head_dim,
    )  # fmt: skip
    return {
        "llm_config.json": llm_config(
            facts, ready.plan.embedding, tokenizer.chat_template,
            tokenizer.bos_token, tokenizer.eos_token,
        ) | ({} if ready.pictures is None else _pictures(ready.pictures, ready.canvas)),
        "config.json": run_config(
            ready.sampling.values, blockwise=ready.plan.blockwise, float16=model.float16,
            mapped=model.mixture and ready.plan.all_integer,
        ),
    }  # fmt: skip


def _pictures(facts: PictureFacts, canvas: CanvasLayout | None) -> dict[str, Any]:
    return picture_config(facts, None if canvas is None else canvas.lengths)


def _write_manifest(
    folder: Path,
    ready: Prepared,
    hashes: Mapping[Path, Future[str]],
    proof: Proof,
) -> None:
    checkpoint, model, plan = ready.checkpoint, ready.model, ready.plan
    tokenizer = checkpoint.tokenizer
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
            "parameters": plan.all_parameters,
            "active_parameters": used.parameters,
            "token_bytes": used.read_bytes,
            "experts": None if used.experts is None else asdict(used.experts),
            "layers": model.layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.head.rows,
            "max_context": model.max_context,
            "sliding_window": model.sliding_window,
            "stop_ids": [i for i in tokenizer.stop_ids if i < model.head.rows],
            "kv_elements_per_token": model.kv_bytes_per_token(1),
            "vision": _vision(ready),
        },
        "tokens": {
            "bos": tokenizer.bos_token,
            "eos": tokenizer.eos_token,
            "named": dict(tokenizer.special_tokens),
        },
        "generation": ready.sampling.values,
        "recipe": describe(ready.recipe),
        "weights": {
            (task.name if part is plan else f"visual/{task.name}"): {
                "tensor": task.slot.tensor,
                "scheme": task.scheme_name,
                "source": task.tensor.dtype,
                "carried": task.carried,
            }
            for part in plan.files
            for task in part.matrices
        },
        "tokenizer": {
            "rewritten": list(ready.tokenizer.rewritten),
            "engine_differences": list(ready.tokenizer.differences),
        },
        "notes": [*ready.notes, *proof.notes],
        "proof": proof.data,
        "files": {
            name: {"sha256": sha256_of(folder / name), "bytes": (folder / name).stat().st_size}
            for name in names
        },
    })  # fmt: skip


def _vision(ready: Prepared) -> dict[str, Any] | None:
    """What a run time needs to make tiles and ids of pictures, and what the tower is."""
    vision, plan = ready.model.vision, ready.plan.vision
    if vision is None or plan is None:
        return None
    return {
        "profile": STANDARD if ready.canvas is None else CANVAS,
        "layers": vision.layers,
        "hidden_size": vision.hidden_size,
        "parameters": plan.parameters,
        "tile": vision.tile,
        "tile_tokens": vision.tile_tokens,
        "image_token": vision.image_token,
        "processor": dict(ready.checkpoint.processor),
    }


def _file_name(path: str | Path) -> str:
    """The last part of a path as text; bytes that are no text become U+FFFD."""
    return os.fsencode(Path(path).name).decode("utf-8", "replace")
