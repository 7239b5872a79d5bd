"""`mnnsmith profile`: where a model's time goes, or which experts a text uses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mnnsmith.cli import options as o
from mnnsmith.cli import verify_module as m
from mnnsmith.cli.console import (
    MAX_INPUT_BYTES,
    ProgressBars,
    clean,
    decode,
    note,
    read_stdin,
    say,
    say_json,
)
from mnnsmith.cli.module_profile import show_module_profile
from mnnsmith.errors import MissingResourceError, UsageError

if TYPE_CHECKING:
    from mnnsmith.api import ExpertUse

_TOP = 5
Experts = Annotated[bool, typer.Option("--experts", help="Count which experts each layer chooses.")]
Text = Annotated[
    str | None,
    typer.Option(
        "--text", metavar="FILE", help="With --experts, the text; '-' reads standard input."
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="With --experts, write a page with a heat map (HTML).",
    ),
]
Repeats = Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each kind.")]


def profile(
    directory: o.BundleDir,
    experts: Experts = False,
    text: Text = None,
    output: Output = None,
    input_shape: m.InputShape = None,
    data: m.Data = None,
    repeats: Repeats = 20,
    json_output: o.Json = False,
    threads: o.Threads = None,
    memory: o.Memory = None,
    precision: o.Precision = None,
) -> None:
    """Show what each operator of a converted ONNX model takes.

    With --experts, for a language model: how often each expert of each layer is chosen while it
    reads a text.
    """
    if not experts:
        o.refuse("the times of operators; it is for --experts", text=text, output=output)
        show_module_profile(
            directory, input_shape or (), data, json_output=json_output, repeats=repeats,
            threads=threads, memory=memory, precision=precision,
        )  # fmt: skip
        return
    if text is None:
        raise UsageError(
            "--experts needs a text.", "Give --text FILE, or --text - for standard input."
        )
    o.refuse("--experts", input_shape=input_shape, data=data, precision=precision)
    _profile_experts(directory, text, output, json_output, threads, memory)


def _profile_experts(
    directory: Path,
    text: str,
    output: Path | None,
    json_output: bool,
    threads: int | None,
    memory: str | None,
) -> None:
    found = read_stdin() if text == "-" else _read(text)
    if output is not None:
        # Before the work: that the page can be written.
        _write(output, "")
    from mnnsmith import api

    with ProgressBars() as bars:
        use = api.profile_experts(
            directory, found, threads=threads, memory=memory,
            progress=lambda done, total: bars("tokens", done, total),
        )  # fmt: skip
    if output is not None:
        from mnnsmith.inspection.expert_page import expert_page

        _write(output, expert_page(use))
        note(f"wrote {output}")
    if json_output:
        say_json(as_json(use))
    else:
        _show(use)


def _read(path: str) -> str:
    from mnnsmith.files import user_path

    file = user_path(path)
    try:
        if file.stat().st_size > MAX_INPUT_BYTES:
            raise UsageError(f"{file}: longer than {MAX_INPUT_BYTES >> 20} MiB.")
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}.") from error
    return decode(data, str(file))


def _write(path: Path, page: str) -> None:
    try:
        path.expanduser().write_text(page, encoding="utf-8")
    except OSError as error:
        raise MissingResourceError(
            f"{path}: cannot be written: {error.strerror}.", "Choose another output."
        ) from error


def as_json(use: ExpertUse) -> dict[str, Any]:
    """The object that `profile --experts --json` writes; docs/deepseek.md lists its fields."""
    return {
        "model": use.model,
        "tokens": use.tokens,
        "experts": use.experts,
        "chosen": use.chosen,
        "covering": {str(part): use.covering(part) for part in (0.5, 0.9, 0.99)},
        "layers": [
            {
                "layer": layer.layer,
                "entropy_bits": layer.entropy_bits,
                "unused": layer.unused,
                "covering": {str(part): layer.covering(part) for part in (0.5, 0.9, 0.99)},
                "counts": list(layer.counts),
            }
            for layer in use.layers
        ],
    }


def _show(use: ExpertUse) -> None:
    say(clean(
        f"{use.model}: {use.tokens} tokens, {use.chosen} of {use.experts} experts for each in "
        f"{len(use.layers)} layers"
    ))  # fmt: skip
    say("  layer  entropy   50 %   90 %   99 %  unused  most chosen (by part of tokens)")
    for layer in use.layers:
        top = "  ".join(
            f"{expert} {layer.counts[expert] / use.tokens:.0%}" for expert, _ in layer.top(_TOP)
        )
        covering = "".join(f"{layer.covering(part):>7}" for part in (0.5, 0.9, 0.99))
        say(f"  {layer.layer:>5}{layer.entropy_bits:>9.2f}{covering}{layer.unused:>8}  {top}")
    parts = ", ".join(f"{use.covering(part):.0%} have {part:.0%}" for part in (0.5, 0.9, 0.99))
    say(f"of a layer's experts, {parts} of the choices; an even use has an entropy of "
        f"{math.log2(use.experts):.2f} bits")  # fmt: skip
