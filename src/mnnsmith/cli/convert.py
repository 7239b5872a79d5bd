"""`mnnsmith convert`: a checkpoint, or any ONNX model, becomes a bundle."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mnnsmith.cli import convert_module as m
from mnnsmith.cli import options as o
from mnnsmith.cli.console import (
    ProgressBars,
    clean,
    format_bytes,
    format_count,
    say,
    say_json,
    table,
)
from mnnsmith.errors import UsageError

if TYPE_CHECKING:
    from mnnsmith.api import Bundle, Prepared

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Folder to write the bundle to."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be written; read no weights.")
]
Vision = Annotated[
    str | None,
    typer.Option(
        "--vision", metavar="standard|canvas",
        help="How a model that sees takes pictures: as tiles, or whole, for apps that send text "
        "alone.",
    ),
]  # fmt: skip
Force = Annotated[bool, typer.Option("--force", help="Replace a bundle that is there already.")]


def convert(
    model: o.ModelName,
    output: Output = None,
    recipe: o.Recipe = None,
    max_context: o.MaxContext = None,
    vision: Vision = None,
    revision: o.Revision = None,
    offline: o.Offline = False,
    dry_run: DryRun = False,
    force: Force = False,
    threads: o.Threads = None,
    input_shape: m.InputShape = None,
    data: m.Data = None,
    fp16: m.Half = False,
    tolerance: m.Tolerance = None,
    allow_unverified: m.AllowUnverified = False,
    json_output: o.Json = False,
) -> None:
    """Convert a checkpoint to a bundle, whole or not at all.

    Without --recipe a GGUF file keeps its own blocks (keep), others become w4g32-head8.  An .onnx
    file is converted as it is, compared with ONNX Runtime, and written only where both agree.
    """
    if Path(model).suffix.lower() == ".onnx":
        o.refuse("an ONNX model", max_context=max_context, revision=revision, offline=offline,
                 dry_run=dry_run, threads=threads)  # fmt: skip
        if output is None:
            raise UsageError("Where should the bundle go?", "Give a folder with -o DIR.")
        m.convert_module(
            model, output, input_shape=input_shape or (), data=data or (), fp16=fp16,
            recipe=recipe, tolerance=tolerance, allow_unverified=allow_unverified, force=force,
            json_output=json_output,
        )  # fmt: skip
        return
    o.refuse("a language model", input_shape=input_shape, data=data, fp16=fp16,
             tolerance=tolerance, allow_unverified=allow_unverified)  # fmt: skip
    if output is None and not dry_run:
        raise UsageError("Where should the bundle go?", "Give a folder with -o DIR, or --dry-run.")
    from mnnsmith import api

    if dry_run:
        prepared = api.prepare(
            model, recipe=recipe, revision=revision, offline=offline, max_context=max_context,
            vision=vision,
        )  # fmt: skip
        _show(_plan(prepared), prepared.notes, json_output)
        return
    assert output is not None
    with ProgressBars() as progress:
        bundle = api.convert(
            model,
            output,
            recipe=recipe,
            revision=revision,
            offline=offline,
            max_context=max_context,
            vision=vision,
            force=force,
            threads=threads,
            progress=progress,
        )
    _show(_result(bundle), tuple(bundle.manifest.data.get("notes", ())), json_output)
    if not json_output:
        _say_unproved(bundle)


def _show(facts: dict[str, Any], notes: tuple[str, ...], json_output: bool) -> None:
    if json_output:
        say_json({**facts, "notes": list(notes)})
        return
    shown = {name: value for name, value in facts.items() if name != "loaded"}
    shown["parameters"] = format_count(facts["parameters"])
    shown["bundle_bytes"] = format_bytes(facts["bundle_bytes"])
    say(table([(name.removesuffix("_bytes"), str(value)) for name, value in shown.items()], ""))
    for text in notes:
        say(clean(f"note: {text}", sys.stdout))


def _say_unproved(bundle: Bundle) -> None:
    """Where the bundle was too large to load, what does so."""
    if bundle.manifest.data.get("proof", {}).get("loaded"):
        return
    from mnnsmith.mnn.config_files import WEIGHT_FILE

    size = format_bytes(bundle.manifest.files[WEIGHT_FILE][1])
    where = shlex.quote(str(bundle.path))
    say(clean(
        f"not loaded here ({size} of weights): run `mnnsmith check {where} --load`", sys.stdout
    ))  # fmt: skip


def _plan(prepared: Prepared) -> dict[str, Any]:
    return {
        "model": prepared.checkpoint.origin,
        "model_type": prepared.checkpoint.model_type,
        "parameters": prepared.plan.parameters,
        "recipe": prepared.recipe.name,
        "max_context": prepared.model.max_context,
        "bundle_bytes": prepared.bundle_bytes,
    }


def _result(bundle: Bundle) -> dict[str, Any]:
    model = bundle.manifest.model
    return {
        "bundle": str(bundle.path),
        "model_type": model["model_type"],
        "parameters": model["parameters"],
        "recipe": bundle.manifest.recipe,
        "max_context": bundle.max_context,
        "bundle_bytes": bundle.size_bytes,
        "loaded": bool(bundle.manifest.data.get("proof", {}).get("loaded")),
    }
