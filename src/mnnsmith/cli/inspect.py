"""`mnnsmith inspect`: what a model or a bundle is, and what it costs, before any weight is read."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mnnsmith.cli import options as o
from mnnsmith.cli.console import clean, format_bytes, format_count, say, say_json, table

if TYPE_CHECKING:
    from mnnsmith.api import Bundle, Inspection

Target = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|DIR",
        help="A Hugging Face folder, a .gguf file, a hub id (org/name), or a bundle.",
    ),
]


def inspect(
    model: Target,
    revision: o.Revision = None,
    offline: o.Offline = False,
    json_output: o.Json = False,
) -> None:
    """Show what a model is, what each recipe makes of it, and whether it is supported."""
    from mnnsmith import api

    if (Path(model).expanduser() / "mnnsmith.json").is_file():
        bundle = api.open_bundle(model)
        facts = _bundle_facts(bundle)
        if json_output:
            say_json(facts)
        else:
            _show_bundle(facts)
        return
    found = api.inspect(model, revision=revision, offline=offline)
    if json_output:
        say_json(dataclasses.asdict(found))
    else:
        _show_model(found)


def _show_model(found: Inspection) -> None:
    dtypes = ", ".join(f"{count} x {dtype}" for dtype, count in found.source_dtypes.items())
    kind = "; ".join(part for part in (found.format, dtypes) if part)
    say(clean(f"{found.origin}: {found.model_type} ({kind})", sys.stdout))
    if found.unsupported is not None:
        say(clean(f"not supported: {found.unsupported}", sys.stdout))
        if stated := _stated(found):
            say(table(stated))
        return
    say("supported")
    window = f", sliding window {found.sliding_window}" if found.sliding_window else ""
    say(
        table(
            [
                ("parameters", format_count(found.parameters)),
                *_active(found),
                ("layers", f"{found.layers} of width {found.hidden_size}"),
                (
                    "attention",
                    f"{found.heads} heads of {found.head_dim}, {found.kv_heads} for keys and "
                    f"values{window}",
                ),
                *_vision(found),
                ("vocabulary", f"{found.vocab_size}{', head tied' if found.tied else ''}"),
                ("context", f"{found.max_context} tokens"),
                ("cache", f"{format_bytes(found.kv_bytes_per_token)} a token at fp16"),
                ("memory to convert", f"about {format_bytes(found.convert_bytes)}"),
            ]
        )
    )
    say("tensors")
    say(
        table(
            [
                (
                    role,
                    f"{entry.tensors:>5}  {format_count(entry.parameters):>8}  "
                    f"{format_bytes(entry.source_bytes):>9}",
                )
                for role, entry in (found.roles or {}).items()
            ]
        )
    )
    say("recipes            weights   bits  read per token   memory to run")
    for recipe in found.recipes:
        if recipe.problem is not None:
            say(f"  {recipe.name:<14}  does not fit: {recipe.problem}")
            continue
        say(
            f"  {recipe.name:<14}{format_bytes(recipe.weight_bytes):>10}"
            f"{recipe.bits_per_weight:>7.2f}{format_bytes(recipe.token_bytes):>16}"
            f"{format_bytes(recipe.run_bytes):>16}"
        )
    _show_mapped(found)
    for text in found.notes:
        say(clean(f"note: {text}", sys.stdout))


def _stated(found: Inspection) -> list[tuple[str, str]]:
    """What the config of an unsupported model says."""
    rows = [
        ("layers", found.layers), ("width", found.hidden_size), ("heads", found.heads),
        ("vocabulary", found.vocab_size), ("context", found.max_context),
    ]  # fmt: skip
    return [(name, str(value)) for name, value in rows if value]


def _active(found: Inspection) -> list[tuple[str, str]]:
    """What one token uses; nothing to tell of a model that is all in use."""
    if found.experts is None:
        return []
    experts = found.experts
    return [
        ("active", f"{format_count(found.active_parameters)} for one token"),
        (
            "experts",
            f"{experts.chosen} of {experts.per_layer} for each token, in {len(experts.layers)} "
            "layers",
        ),
    ]


def _vision(found: Inspection) -> list[tuple[str, str]]:
    seen = found.vision
    if seen is None:
        return []
    return [
        ("vision", f"{seen.layers} layers of width {seen.hidden_size}"),
        ("pictures", f"tiles of {seen.tile} pixels, {seen.tile_tokens} tokens each"),
    ]


def _show_mapped(found: Inspection) -> None:
    mapped = [(recipe.name, recipe.mapped) for recipe in found.recipes if recipe.mapped]
    if not mapped:
        return
    say("memory with mapped weights: with the experts of 1 token, of 32 tokens, all")
    for name, memory in mapped:
        sizes = (memory.least_bytes, memory.typical_bytes, memory.most_bytes)
        cells = "".join(f"{format_bytes(size):>11}" for size in sizes)
        say(f"  {name:<14}{cells}   ({format_bytes(memory.disk_bytes)} on disk)")


def _bundle_facts(bundle: Bundle) -> dict[str, Any]:
    data = bundle.manifest.data
    return {
        "bundle": str(bundle.path),
        "size_bytes": bundle.size_bytes,
        "model": dict(bundle.manifest.model),
        "recipe": data["recipe"],
        "source": {name: value for name, value in data["source"].items() if name != "files"},
        "made_by": {name: data.get(name) for name in ("mnnsmith", "engine")},
        "generation": dict(bundle.manifest.generation),
        "chat_template": bundle.chat_template is not None,
        "verification": data.get("verification"),
        "notes": data.get("notes", []),
        "files": {name: size for name, (_, size) in bundle.manifest.files.items()},
    }


def _show_bundle(facts: dict[str, Any]) -> None:
    model, made_by = facts["model"], facts["made_by"]
    say(f"{facts['bundle']}: a bundle of {format_bytes(facts['size_bytes'])}")
    say(
        table(
            [
                ("model", f"{facts['source'].get('name')} ({model['model_type']})"),
                ("parameters", format_count(model.get("parameters", 0))),
                *_bundle_activity(model),
                ("recipe", str(facts["recipe"]["name"])),
                ("context", f"{model['max_context']} tokens"),
                ("end tokens", ", ".join(map(str, model["stop_ids"]))),
                ("chat template", "yes" if facts["chat_template"] else "no"),
                ("sampling", ", ".join(f"{k} {v}" for k, v in facts["generation"].items())
                 or "greedy"),
                ("made by", f"mnnsmith {made_by['mnnsmith']} for MNN {made_by['engine']}"),
                ("verified", _verified(facts["verification"])),
            ]
        )
    )  # fmt: skip
    say(table([(name, format_bytes(size)) for name, size in facts["files"].items()]))
    for text in facts["notes"]:
        say(clean(f"note: {text}", sys.stdout))


def _verified(noted: Any) -> str:
    """What the manifest notes of the last verification, which anybody may have written there."""
    if not isinstance(noted, dict):
        return "no (mnnsmith verify)"
    from mnnsmith.verify.results import CHECKS

    verdict = "passed" if noted.get("passed") is True else "failed"
    checks = noted.get("checks")
    names: dict[bool, list[str]] = {False: [], True: []}
    for name in CHECKS:
        check = checks.get(name) if isinstance(checks, dict) else None
        if isinstance(check, dict):
            names[check.get("status") == "skipped"].append(name)
    where = f"{noted.get('level')} on {noted.get('device')}, {noted.get('date')}"
    skipped = f"; skipped: {', '.join(names[True])}" if names[True] else ""
    return f"{verdict}: {', '.join(names[False])}{skipped} ({where})"


def _bundle_activity(model: dict[str, Any]) -> list[tuple[str, str]]:
    """What one token uses, of bundles that tell it."""
    rows = []
    experts = model.get("experts")
    if isinstance(experts, dict):
        rows.append(("active", f"{format_count(model['active_parameters'])} for one token"))
        rows.append(("experts", f"{experts.get('chosen')} of {experts.get('per_layer')}"))
    seen = model.get("vision")
    if isinstance(seen, dict):
        size, tokens = seen.get("tile"), seen.get("tile_tokens")
        rows.append(("pictures", f"tiles of {size} pixels, {tokens} tokens each"))
    if type(model.get("token_bytes")) is int:
        rows.append(("read per token", format_bytes(model["token_bytes"])))
    return rows
