"""`mnnsmith verify DIR --source model.onnx`: a converted model against its original, inside too."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mnnsmith.cli.console import Style, note, say, say_json, table
from mnnsmith.cli.convert_module import parse_shapes
from mnnsmith.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from mnnsmith.api import LayerComparison, TensorComparison

Layers = Annotated[
    bool, typer.Option("--layers", help="ONNX: show every tensor inside that both have.")
]
InputShape = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=SIZES", help="ONNX: the shape of an input, such as image=1,3,224,224"
        " [default: one that the conversion was compared at].",
    ),
]  # fmt: skip
Data = Annotated[
    Path | None, typer.Option("--data", metavar="FILE.npz", help="ONNX: inputs by name.")
]
_STDOUT = "-"
_NAME_WIDTH = 48


def one_shape_each(texts: Sequence[str]) -> Mapping[str, Sequence[int]]:
    """What `--input-shape` gives, where there is one trial; raises UsageError."""
    trials = parse_shapes(texts)
    if len(trials) > 1:
        raise UsageError("--input-shape: one shape for each input is enough here.")
    return trials[0] if trials else {}


def verify_module(
    directory: Path,
    source: str,
    *,
    layers: bool,
    input_shape: Sequence[str],
    data: Path | None,
    threads: int | None,
    json_file: str | None,
) -> None:
    """Compare, show, and raise VerificationError where the two part."""
    shapes = one_shape_each(input_shape)
    from mnnsmith import api
    from mnnsmith.files import replace_text, user_path

    found = api.compare_layers(directory, source, input_shapes=shapes, data=data, threads=threads)
    if json_file == _STDOUT:
        say_json(as_json(found))
    else:
        _show(found, source, directory, every=layers)
        if json_file is not None:
            path = user_path(json_file)
            replace_text(path, json.dumps(as_json(found), indent=2, ensure_ascii=False) + "\n")
            note(f"wrote {path}")
    if (first := found.divergence) is not None:
        raise VerificationError(
            f"{directory}: differs from {source} at tensor {first.name!r}, which {first.operator} "
            f"computes ({_off(first)}; {found.tolerance:g} is allowed).",
            "With --layers every tensor is shown; --data gives other inputs to compare on.",
        )


def as_json(found: LayerComparison) -> dict[str, Any]:
    """The object that `--json` writes; docs/cli.md lists its fields."""
    return {**dataclasses.asdict(found), "passed": found.divergence is None}


def _show(found: LayerComparison, source: str, directory: Path, *, every: bool) -> None:
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in found.shapes.items())
    say(f"{directory} against {source} ({found.program}), {shapes or 'no inputs'}")
    style = Style(sys.stdout)
    for row in found.rows if every else ():
        mark, colour = ("ok  ", "") if row.agrees else ("    ", style.dim)
        if row == found.divergence:
            mark, colour = "FAIL", style.red
        name = row.name if len(row.name) <= _NAME_WIDTH else "…" + row.name[1 - _NAME_WIDTH :]
        also = f"  (holds {row.compared_with})" if row.status == "shifted" else ""
        say(f"{mark}  {name:<{_NAME_WIDTH}}  {row.operator:<20}  {_off(row)}{also}", colour)
    agreeing = [row for row in found.rows if row.agrees]
    largest = max((row.difference or 0.0 for row in agreeing), default=0.0)
    alone = [row for row in found.rows if not row.agrees]
    say(table([
        ("compared", f"{len(found.rows)} tensors of the {found.original_tensors} that the original "
                     "computes; the others have no name of their own in the converted one"),
        ("agree", f"{len(agreeing)}, to {largest:.1e} of their largest magnitudes or closer"),
        ("other", f"{len(alone)} tensors with no counterpart, or beyond {found.tolerance:g}"),
    ]))  # fmt: skip
    passed = found.divergence is None
    say("passed" if passed else "failed", style.green if passed else style.red)


def _off(row: TensorComparison) -> str:
    if row.status == "unmatched":
        return "no counterpart of this size"
    if row.difference is None:
        return "differs" if row.status == "differs" else "equal"
    return f"{row.difference:.1e} of the largest magnitude"
