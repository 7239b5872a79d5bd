"""`mnnsmith convert model.onnx`: any other model becomes a bundle that agrees with it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mnnsmith.cli.console import clean, format_bytes, note, say, say_json, table
from mnnsmith.errors import UsageError

if TYPE_CHECKING:
    from mnnsmith.api import ConvertedModule

InputShape = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=1,3,224,224",
        help="ONNX: a shape to try; the same name again is one more trial.",
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE.npz", help="ONNX: arrays by input name to compare on."),
]
Half = Annotated[bool, typer.Option("--fp16", help="ONNX: store weights in 16 bits.")]
Tolerance = Annotated[
    float | None,
    typer.Option(
        metavar="T",
        help="ONNX: the largest difference, as a share of an output's largest magnitude"
        " [default: 0.001, more for smaller weights].",
    ),
]
AllowUnverified = Annotated[
    bool,
    typer.Option(
        "--allow-unverified", help="ONNX: write the bundle even where nothing can be compared."
    ),
]


def convert_module(
    model: str,
    output: Path,
    *,
    input_shape: Sequence[str],
    data: Sequence[Path],
    fp16: bool,
    recipe: str | None,
    tolerance: float | None,
    allow_unverified: bool,
    force: bool,
    json_output: bool,
) -> None:
    """Convert, and show what was done and how well it agrees."""
    from mnnsmith import api

    told = api.convert_onnx(
        model,
        output,
        input_shapes=parse_shapes(input_shape),
        data=data,
        fp16=fp16,
        recipe=recipe,
        tolerance=tolerance,
        allow_unverified=allow_unverified,
        force=force,
        progress=note,
    )
    if json_output:
        say_json({**dataclasses.asdict(told), "path": str(told.path)})
    else:
        _show(told)


def parse_shapes(texts: Sequence[str]) -> list[dict[str, tuple[int, ...]]]:
    """`x=1,3` `x=2,3` as one mapping for each trial; raises UsageError."""
    trials: list[dict[str, tuple[int, ...]]] = []
    for text in texts:
        name, separator, sizes = text.rpartition("=")
        try:
            shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
        except ValueError:
            separator = ""
        if not separator or not name:
            raise UsageError(f"--input-shape: {text!r} is not of the form NAME=1,3,224,224.")
        trial = next((one for one in trials if name not in one), None)
        if trial is None:
            trials.append(trial := {})
        trial[name] = shape
    return trials


def _show(told: ConvertedModule) -> None:
    before, after = told.before, told.after
    nodes = (sum(before["operators"].values()), sum(after["operators"].values()))
    rows = [
        ("bundle", str(told.path)),
        ("nodes", f"{nodes[0]} -> {nodes[1]}"),
        ("operators", _changes(before["operators"], after["operators"])),
        ("size", f"{format_bytes(before['size_bytes'])} -> {format_bytes(told.size_bytes)}"),
        ("recipe", told.recipe),
    ]
    for trial, off in zip(told.trials, told.differences, strict=True):
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in trial.items())
        rows.append(("agrees to", f"{off:.1e} of the largest magnitude ({shapes or 'no inputs'})"))
    say(table(rows, ""))
    for rule, count in told.rewritten.items():
        say(clean(f"rewritten: {rule} x {count} ({told.reasons[rule]})", sys.stdout))
    for text in told.notes:
        say(clean(f"note: {text}", sys.stdout))
    if told.reference is None:
        say("not verified: nothing could be compared")
    else:
        say(clean(f"compared with {told.reference}, {told.tolerance:g} allowed", sys.stdout))


def _changes(before: dict[str, int], after: dict[str, int]) -> str:
    """Only what differs, by operator."""
    names = sorted(set(before) | set(after))
    changed = [f"{n} {before.get(n, 0)} -> {after.get(n, 0)}" for n in names
               if before.get(n, 0) != after.get(n, 0)]  # fmt: skip
    return ", ".join(changed) or "unchanged"
