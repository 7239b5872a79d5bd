"""`mnnsmith verify`: a bundle against what it was made of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mnnsmith.cli import options as o
from mnnsmith.cli import verify_module as m
from mnnsmith.cli.console import ProgressBars, Style, clean, note, say, table
from mnnsmith.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from mnnsmith.verify.results import Verification

_STDOUT = "-"
_MAX_LINES = 16

Source = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="What the bundle was made of [default: the hub model it names, from the cache].",
    ),
]
Level = Annotated[
    str, typer.Option(metavar="LEVEL", help="quick (a minute for a small model) or full.")
]
Checks = Annotated[
    str | None,
    typer.Option(
        "--check",
        metavar="NAMES",
        help="Of files,weights,tokens,template,exact,statistical,layers,ranges,vision "
        "[default: all].",
    ),
]
Texts = Annotated[
    list[Path] | None,
    typer.Option(
        "--text", metavar="FILE", help="Verify on this text instead; may be given several times."
    ),
]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image", metavar="FILE", help="Show it this picture instead; may be given several times."
    ),
]
Reference = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="What computes the original: auto, transformers, onnx, or a saved reference.",
    ),
]
SaveReference = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Keep what the original gives, for other bundles of it."),
]
MaxKl = Annotated[
    float | None, typer.Option(metavar="NATS", help="Fail when the mean KL is larger.")
]
MinTop1 = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="Fail when the best token is the same less often (0.95)."),
]
MaxPplIncrease = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="Fail when perplexity grows by more (0.02 is 2 %)."),
]
Baseline = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Fail when it is worse than this --json, beyond noise."),
]
Bisect = Annotated[
    bool, typer.Option("--bisect", help="Go on inside the first block that differs.")
]
Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE", help="Where the bundle runs: local, arm64, arm64:CPU, ssh:HOST."
    ),
]
NoRecord = Annotated[
    bool, typer.Option("--no-record", help="Leave the bundle's mnnsmith.json as it is.")
]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the whole result; '-' is stdout."),
]
MarkdownFile = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", help="Write it for a pull request.")
]
JunitFile = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Write it as JUnit XML.")
]


def verify(
    directory: o.BundleDir,
    source: Source = None,
    level: Level = "quick",
    check: Checks = None,
    text: Texts = None,
    image: Images = None,
    reference: Reference = "auto",
    save_reference: SaveReference = None,
    bisect: Bisect = False,
    device: Device = "local",
    max_kl: MaxKl = None,
    min_top1: MinTop1 = None,
    max_ppl_increase: MaxPplIncrease = None,
    baseline: Baseline = None,
    revision: o.Revision = None,
    offline: o.Offline = False,
    threads: o.Threads = None,
    no_record: NoRecord = False,
    json_file: JsonFile = None,
    markdown: MarkdownFile = None,
    junit: JunitFile = None,
    layers: m.Layers = False,
    input_shape: m.InputShape = None,
    data: m.Data = None,
) -> None:
    """Compare a bundle with its original; exit code 9 when they differ where they must not."""
    outputs = _outputs(directory, json_file, markdown, junit)
    if source is not None and Path(source).suffix.lower() == ".onnx":
        o.refuse(
            "an ONNX model", check=check, text=text, image=image, save_reference=save_reference,
            bisect=bisect, max_kl=max_kl, min_top1=min_top1, max_ppl_increase=max_ppl_increase,
            baseline=baseline, revision=revision, markdown=markdown, junit=junit,
        )  # fmt: skip
        m.verify_module(
            directory, source, layers=layers, input_shape=input_shape or (), data=data,
            threads=threads, json_file=json_file,
        )  # fmt: skip
        return
    o.refuse("a language model", layers=layers, input_shape=input_shape, data=data)
    from mnnsmith import api
    from mnnsmith.verify.gates import Thresholds

    thresholds = Thresholds(max_kl, min_top1, max_ppl_increase)
    old = None if baseline is None else api.read_verification(baseline)
    with ProgressBars() as progress:
        result = api.verify(
            directory,
            source,
            revision=revision,
            offline=offline,
            level=level,
            checks=None if check is None else _names(check),
            texts=text or (),
            images=image or (),
            reference=reference,
            save_reference=save_reference,
            bisect=bisect,
            device=device,
            thresholds=thresholds,
            baseline=old,
            threads=threads,
            progress=progress,
            recorded=not no_record,
        )
    _write(result, outputs)
    if json_file == _STDOUT:
        from mnnsmith.verify.output.results_json import to_json

        say(to_json(result).rstrip("\n"))
    else:
        _show(result)
    if result.skipped:
        note(f"This is no full verification; skipped: {', '.join(result.skipped)}.")
    if not result.passed:
        failed = [check.name for check in result.checks if check.status == "failed"]
        failed += [gate.name for gate in result.gates if not gate.passed]
        raise VerificationError(
            f"{directory}: the verification failed: {', '.join(failed)}.",
            "docs/verify.md says what each check proves and what to do when it fails.",
        )


def _names(given: str) -> tuple[str, ...]:
    return tuple(name for part in given.split(",") if (name := part.strip()))


def _outputs(
    directory: Path, json_file: str | None, markdown: Path | None, junit: Path | None
) -> dict[str, Path]:
    """Where what goes, if each place can be written: known before the work, not after it."""
    from mnnsmith.files import output_file, user_path

    given = {"json": json_file, "markdown": markdown, "junit": junit}
    outputs = {
        kind: output_file(path)
        for kind, path in given.items()
        if path is not None and path != _STDOUT
    }
    bundle = user_path(directory).resolve()
    places = [path.resolve() for path in outputs.values()]
    for path, place in zip(outputs.values(), places, strict=True):
        if place.parent == bundle and place.exists():
            raise UsageError(f"{path}: is a file of the bundle.", "Give another name.")
        regular = place.is_file() or not place.exists()
        if regular and places.count(place) > 1:
            raise UsageError(f"{path}: is given twice.", "Give each output a file of its own.")
    return outputs


def _write(result: Verification, outputs: dict[str, Path]) -> None:
    from mnnsmith.files import replace_text
    from mnnsmith.verify.output import junit, markdown, results_json

    writers = {"json": results_json.to_json, "markdown": markdown.render, "junit": junit.render}
    for kind, path in outputs.items():
        # A bundle's name may hold bytes that are no text.
        replace_text(path, results_json.to_plain(writers[kind](result)))
        note(f"wrote {path}")


def _show(result: Verification) -> None:
    subject = result.subject
    say(
        f"{subject.bundle}: {subject.model_type}, {subject.recipe}, against {subject.source} "
        f"({result.level}, {subject.device})"
    )
    style = Style(sys.stdout)
    marks = {"passed": ("ok  ", ""), "failed": ("FAIL", style.red), "skipped": ("skip", style.dim)}
    for check in result.checks:
        mark, colour = marks[check.status]
        say(f"{mark}  {check.name:<12}{check.seconds:>6.1f} s  {_line(check.summary)}", colour)
    for gate in result.gates:
        mark, colour = marks["passed" if gate.passed else "failed"]
        say(f"{mark}  {gate.name:<20}  {_line(gate.found)}, limit {_line(gate.limit)}", colour)
    if rows := _figures(result):
        say(table(rows))
    for check in result.checks:
        for finding in check.findings:
            lines = f"{finding.severity}: {check.name}: {finding.where}: {finding.message}"
            # What comes out of a file must not look like a line of its own.
            shown = lines.splitlines()
            cut = [*shown[:_MAX_LINES], "..."] if len(shown) > _MAX_LINES else shown
            say("\n     ".join(cut), style.red if finding.severity == "error" else "")
            if finding.hint and finding.severity != "note":
                say(f"     {_line(finding.hint)}")
    sure = style.bold if result.skipped else style.green
    say(result.verdict, sure if result.passed else style.red)


def _figures(result: Verification) -> list[tuple[str, str]]:
    from mnnsmith.verify.output.figure_text import statistical_rows, vision_rows

    statistical, vision = result.figures.statistical, result.figures.vision
    rows = [] if statistical is None else statistical_rows(statistical)
    rows += [] if vision is None else vision_rows(vision)
    return [
        (name, f"{value}  ({interval})" if interval else value) for name, value, interval in rows
    ]


def _line(text: str) -> str:
    return clean(" ".join(text.split("\n")), sys.stdout)
