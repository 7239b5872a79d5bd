"""`verify`: every check of a bundle against its original, in order, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mnnsmith.bundle import Bundle, open_bundle
from mnnsmith.conversion.prepare import Prepared
from mnnsmith.engine import Device, Engine, parse_device
from mnnsmith.engine.machine import MAX_THREADS
from mnnsmith.errors import MissingResourceError, MnnsmithError, UsageError
from mnnsmith.inspection.check import check
from mnnsmith.mnn.graph_json import ENGINE_VERSION
from mnnsmith.verify.checks.exact import check_exact
from mnnsmith.verify.checks.layers import check_layers
from mnnsmith.verify.checks.ranges import check_ranges
from mnnsmith.verify.checks.statistical import check_statistical
from mnnsmith.verify.checks.template import check_template
from mnnsmith.verify.checks.tokens import check_tokens
from mnnsmith.verify.checks.vision import check_vision
from mnnsmith.verify.checks.weights import check_weights
from mnnsmith.verify.context import Context, Level, Weights
from mnnsmith.verify.gates import Thresholds, judge, require_same_model
from mnnsmith.verify.original import WITHOUT_ORIGINAL, open_original
from mnnsmith.verify.output.record import record
from mnnsmith.verify.output.results_json import non_finite
from mnnsmith.verify.references.memory import lacking_memory
from mnnsmith.verify.references.reference import Reference
from mnnsmith.verify.references.shared import HINT, Chosen, References, choose_reference
from mnnsmith.verify.results import (
    CHECKS,
    FORMAT,
    Check,
    Figures,
    Finding,
    Outcome,
    Status,
    Subject,
    Verification,
)
from mnnsmith.verify.texts.user_text import read_user_texts
from mnnsmith.version import __version__
from mnnsmith.vision.load import load_picture

LEVELS: tuple[Level, ...] = ("quick", "full")
# Whose weights the reference of a check has; the others need none.
_REFERENCES: Mapping[str, tuple[Weights, ...]] = {
    "exact": ("stored",),
    "statistical": ("original",),
    "layers": ("stored", "original"),
    "vision": ("stored", "original"),
}
# Which checks an option is for.
_USERS: Mapping[str, tuple[str, ...]] = {
    "--bisect": ("layers",),
    "--text": ("tokens", "statistical", "ranges"),
    "--image": ("vision",),
    "--reference": tuple(_REFERENCES),
}
_BLIND = "the model sees no pictures"
# (check, done, total), in the check's own units
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class _Outline:
    """What is to be done, once everything that the user said is known to be right."""

    bundle: Bundle
    original: Prepared | None
    checks: tuple[str, ...]
    skipped: Mapping[str, str]
    reference: Chosen


def verify(
    bundle: str | Path,
    source: str | Path | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    level: str = "quick",
    checks: Sequence[str] | None = None,
    texts: Sequence[str | Path] = (),
    images: Sequence[str | Path] = (),
    reference: str | Path = "auto",
    save_reference: str | Path | None = None,
    bisect: bool = False,
    device: str = "local",
    thresholds: Thresholds | None = None,
    baseline: Verification | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    recorded: bool = True,
) -> Verification:
    """Compare a bundle with what it was made of.

    source: the original as `convert` takes it; None takes the hub id that the bundle names, from
    the hub's local cache.  revision, offline: for a hub id that is given.
    level: "quick" or "full".  checks: names out of `CHECKS`; None runs all that can run, and says
    of the others why they are skipped.  texts, images: files in place of the shipped text and
    pictures.
    reference: "transformers", "onnx", "auto", which takes what is installed, or a file that
    `save_reference` named in another verification.
    bisect: go on inside the first block that differs.  device: where the bundle runs, see
    `engine.parse_device`; the reference always runs here.
    thresholds, baseline: what the result is held against; each becomes a gate of it.
    recorded: note the result in the bundle's `mnnsmith.json`, without quoting `texts`.

    A check that fails, or breaks off with an error of ours, is a failed check of the result.
    Raises `UsageError` for wrong options, an original that is unknown or another model's, and
    `MissingResourceError` where a check that was asked for by name lacks a package.
    """
    began = time.monotonic()
    chosen_level, limits = _level(level), thresholds or Thresholds()
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise UsageError(f"threads must be from 1 to {MAX_THREADS}, found {threads}.")
    engines = _Engines(parse_device(device))
    chosen = choose_reference(reference, save_reference)
    files = tuple(Path(text) for text in texts)
    # Before any work: that they can be read.
    read_user_texts(files)
    pictures = tuple(Path(image) for image in images)
    for path in pictures:
        load_picture(path)
    if source is None and (revision is not None or offline):
        raise UsageError(
            "A revision, or offline, is about a source, and none is given.", "Give --source MODEL."
        )
    statistics = limits.needs_statistics or (
        baseline is not None and baseline.figures.statistical is not None
    )
    given = {"--bisect": bisect, "--text": bool(files), "--image": bool(pictures),
             "--reference": reference != "auto"}  # fmt: skip
    names = _chosen_checks(bundle, checks, chosen, statistics=statistics, given=given)
    needed = names if checks is not None else ("statistical",) if statistics else ()
    skipped = {} if "vision" not in names or _sees(bundle) else {"vision": _BLIND}
    skipped |= _lacking([name for name in names if name not in skipped], chosen, needed)
    outline = _outline(bundle, source, revision, offline, names, skipped, chosen)
    outline = _fitting(outline, engines.device, wanted=checks is not None)
    if baseline is not None:
        require_same_model(_subject(outline, engines), baseline.subject)
    context = Context(
        outline.bundle, outline.original, chosen_level, engines.open, _no_reference, files, threads,
        pictures, bisect,
    )  # fmt: skip
    report = progress or (lambda check, done, total: None)
    done, figures = _compare(outline, context, report)
    result = Verification(
        format=FORMAT,
        mnnsmith=__version__,
        engine=ENGINE_VERSION,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        level=level,
        seconds=round(time.monotonic() - began, 2),
        subject=_subject(outline, engines),
        checks=done,
        gates=(),
        figures=figures,
    )
    result = replace(result, gates=judge(result, limits, baseline))
    return record(outline.bundle, result, private=bool(files)) if recorded else result


def _level(text: str) -> Level:
    for level in LEVELS:
        if text == level:
            return level
    raise UsageError(f"level must be one of {', '.join(LEVELS)}, not {text!r:.40}.")


def _chosen_checks(
    path: str | Path,
    checks: Sequence[str] | None,
    reference: Chosen,
    *,
    statistics: bool,
    given: Mapping[str, bool],
) -> tuple[str, ...]:
    """The checks in their order, if every option is of use to one of them.

    statistics: a gate needs them.  given: whether the user gave an option.
    """
    unknown = [name for name in checks or () if name not in CHECKS]
    if unknown:
        raise UsageError(f"{unknown[0]!r:.60} is no check.", f"There are: {', '.join(CHECKS)}.")
    if checks is not None and not checks:
        raise UsageError("No check is chosen.", f"There are: {', '.join(CHECKS)}.")
    wanted = [n for n in CHECKS if n != "vision" or _sees(path)] if checks is None else checks
    chosen = tuple(name for name in _CHECKS if name in wanted)
    if "statistical" not in chosen and (statistics or reference.save_as):
        raise UsageError(
            "Thresholds, a baseline with figures, and a reference to save need the statistical "
            "check.",
            "Add it: --check " + ",".join((*chosen, "statistical")),
        )
    for option, users in _USERS.items():
        if given[option] and not set(users) & set(chosen):
            raise UsageError(
                f"{option} is of no use to {', '.join(chosen)}.",
                f"Leave it out, or add one of the checks that it is for: {', '.join(users)}.",
            )
    return chosen


def _sees(path: str | Path) -> bool:
    """Whether a bundle's model takes pictures."""
    return open_bundle(path, whole=False).manifest.model.get("vision") is not None


def _lacking(chosen: Sequence[str], reference: Chosen, needed: Collection[str]) -> dict[str, str]:
    """Checks without anything to compare with, and why.

    Raises `MissingResourceError` for those that are needed: named by the user, or by a gate.
    """
    found = [
        name for name in chosen if not set(_REFERENCES.get(name, ())) <= set(reference.weights)
    ]
    if lost := [name for name in found if name in needed]:
        raise MissingResourceError(f"{', '.join(lost)}: there is nothing to compare with.", HINT)
    return dict.fromkeys(found, f"there is nothing to compare with. {HINT}")


def _fitting(outline: _Outline, device: Device, *, wanted: bool) -> _Outline:
    """Without the checks that memory does not suffice for.

    Raises `MissingResourceError` where the user asked for them.
    """
    reasons = {name: lacking_memory(name, outline.original, device) for name in outline.checks}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    if skipped and wanted:
        name, reason = next(iter(skipped.items()))
        raise MissingResourceError(
            f"{name}: {reason}",
            f"Close other programs, take a larger machine, or leave out {', '.join(skipped)}.",
        )
    return replace(outline, skipped={**skipped, **outline.skipped})


def _outline(
    path: str | Path,
    source: str | Path | None,
    revision: str | None,
    offline: bool,
    chosen: tuple[str, ...],
    skipped: Mapping[str, str],
    reference: Chosen,
) -> _Outline:
    # What is damaged is for the check "files" to say.
    bundle = open_bundle(path, whole="files" not in chosen)
    original = None
    if source is not None or any(name not in WITHOUT_ORIGINAL for name in chosen):
        original = open_original(
            bundle, source, revision=revision, offline=offline,
            weights=any(name not in WITHOUT_ORIGINAL for name in chosen),
        )  # fmt: skip
    if reference.save_as is not None:
        _check_apart(reference.save_as, bundle, original)
    return _Outline(bundle, original, chosen, skipped, reference)


def _check_apart(path: Path, bundle: Bundle, original: Prepared | None) -> None:
    """A file that is to be written must not be one of those that are to be read."""
    place = path.resolve()
    read = [*bundle.path.iterdir(), *(original.checkpoint.files if original else ())]
    if any(place == file.resolve() for file in read):
        raise UsageError(f"{path}: is to be read, and would be replaced.", "Give another name.")


def _compare(
    outline: _Outline, context: Context, report: Progress
) -> tuple[tuple[Check, ...], Figures]:
    """Run the checks, with references that they share."""
    with ExitStack() as stack:
        references = None
        if outline.original is not None:
            references = stack.enter_context(
                References(outline.bundle, outline.original, outline.reference, context.threads)
            )
            context = replace(context, open_reference=references)
        done = [_run(name, context, outline.skipped, report) for name in outline.checks]
        figures = Figures(**{c.name: found for c, found in done if found is not None})
        checks = tuple(check for check, _ in done)
        if references is not None and figures.statistical is not None:
            checks = _saved(references, checks)
    return checks, figures


class _Engines:
    """Opens engines on a device, and remembers with which settings a bundle runs as shipped."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.settings: dict[str, str] = {}

    def open(self, folder: Path, **options: Any) -> Engine:
        engine = Engine(folder, device=self.device, **options)
        if not {"memory", "precision", "config"}.intersection(options):
            self.settings = {name: str(value) for name, value in engine.settings.items()}
        return engine


def _saved(references: References, checks: tuple[Check, ...]) -> tuple[Check, ...]:
    """Save the reference; that this fails must not lose what was found."""
    try:
        references.save()
    except MnnsmithError as error:
        finding = Finding("error", "--save-reference", error.message, error.hint)
        return tuple(
            replace(c, status="failed", findings=(*c.findings, finding))
            if c.name == "statistical"
            else c
            for c in checks
        )
    return checks


def _no_reference(weights: Weights, *, computes: bool = False) -> Reference:
    raise UsageError(f"There is no reference with {weights} weights.", "Give --source MODEL.")


class _Counted:
    """Reports the progress of one check, and knows where it ends."""

    def __init__(self, name: str, report: Progress) -> None:
        self.total = 1
        self._name = name
        self._report = report

    def __call__(self, done: int, total: int) -> None:
        self.total = total
        self._report(self._name, done, total)


def _run(
    name: str,
    context: Context,
    skipped: Mapping[str, str],
    report: Progress,
) -> tuple[Check, Any]:
    """One check and its figures; an error of ours inside of it is its failure."""
    if name in skipped:
        return Check(name, "skipped", skipped[name], 0.0), None
    counted = _Counted(name, report)
    counted(0, 1)
    began = time.monotonic()
    outcome: Outcome[Any]
    try:
        outcome = _CHECKS[name](replace(context, progress=counted))
    except MnnsmithError as error:
        finding = Finding("error", name, error.message, error.hint)
        outcome = Outcome(f"broke off: {error.message}", None, (finding,))
    outcome = _finite(name, outcome)
    failed = any(finding.severity == "error" for finding in outcome.findings)
    seconds = round(time.monotonic() - began, 2)
    counted(counted.total, counted.total)
    status: Status = "failed" if failed else "passed"
    return Check(name, status, outcome.summary, seconds, outcome.findings), outcome.figures


def _finite(name: str, outcome: Outcome[Any]) -> Outcome[Any]:
    """Figures that are no numbers say nothing, and cannot be written; that they are is a fault."""
    place = non_finite(outcome.figures, name)
    if place is None:
        return outcome
    finding = Finding("error", place, "is not a finite number, so the figures are left out.")
    return replace(outcome, figures=None, findings=(*outcome.findings, finding))


def _subject(outline: _Outline, engines: _Engines) -> Subject:
    bundle = outline.bundle
    name, revision = "itself", None
    if outline.original is not None:
        checkpoint = outline.original.checkpoint
        # Where it lies on this machine says nothing elsewhere.
        revision = checkpoint.revision
        name = checkpoint.origin if revision else Path(checkpoint.origin).name
    return Subject(
        bundle=bundle.path.resolve().name,
        model_type=str(bundle.manifest.model["model_type"]),
        recipe=bundle.manifest.recipe,
        source=name,
        source_revision=revision,
        files={name: digest for name, (digest, _) in sorted(bundle.manifest.files.items())},
        device=engines.device.name,
        settings=engines.settings,
    )


def _files(context: Context) -> Outcome[None]:
    found = check(context.bundle.path).findings
    wrong = tuple(
        Finding("error", finding.name, finding.detail, "Copy the bundle again, or convert again.")
        for finding in found
        if not finding.passed
    )
    edited = tuple(
        Finding("note", finding.name, finding.detail)
        for finding in found
        if finding.passed and finding.detail.startswith("edited")
    )
    count = len(found)
    summary = f"{len(wrong)} of {count} checks failed" if wrong else f"{count} checks passed"
    return Outcome(summary, None, (*wrong, *edited))


_CHECKS: Mapping[str, Callable[[Context], Outcome[Any]]] = {
    "files": _files,
    "weights": check_weights,
    "tokens": check_tokens,
    "template": check_template,
    "exact": check_exact,
    "statistical": check_statistical,
    "layers": check_layers,
    "ranges": check_ranges,
    "vision": check_vision,
}
