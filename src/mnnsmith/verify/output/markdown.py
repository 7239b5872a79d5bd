"""A verification as Markdown, for pull requests and release notes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mnnsmith.verify.output.figure_text import number, percent, statistical_rows, vision_rows
from mnnsmith.verify.results import (
    Check,
    StatisticalFigures,
    StoredWeight,
    Verification,
    VisionFigures,
)

_MARKS = {"passed": "✅", "failed": "❌", "skipped": "➖"}
_SEVERITIES = {"error": "❌", "warning": "⚠️", "note": "ℹ️"}
# Whatever would be a table's edge, markup or a control character is shown as text.
_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def render(result: Verification) -> str:
    """The verdict, the checks, the figures with their intervals, gates, and all findings."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Verification) -> Iterator[str]:
    subject = result.subject
    mark = _MARKS["passed" if result.passed else "failed"]
    yield f"## {mark} {_text(subject.bundle)}: verification {result.verdict}"
    yield ""
    revision = f" at {_text(subject.source_revision)}" if subject.source_revision else ""
    yield (
        f"{_text(subject.model_type)}, recipe {_text(subject.recipe)}, against "
        f"{_text(subject.source)}{revision}; level {result.level}, device "
        f"{_text(subject.device)}, {result.seconds:.0f} s."
    )
    yield ""
    yield from _table(("check", "", "found", "s"), [_check_row(check) for check in result.checks])
    if result.gates:
        rows = [
            (gate.name, _MARKS["passed" if gate.passed else "failed"], gate.limit, gate.found)
            for gate in result.gates
        ]
        yield from _table(("gate", "", "limit", "found"), rows)
    figures = result.figures
    if figures.statistical is not None:
        yield from _statistical(figures.statistical)
    if figures.vision is not None:
        yield from _vision(figures.vision)
    if figures.weights is not None:
        yield from _weights(figures.weights.matrices)
    yield from _findings(result.checks)
    settings = ", ".join(f"{name} {value}" for name, value in subject.settings.items())
    yield (
        f"mnnsmith {_text(result.mnnsmith)}, MNN {_text(result.engine)}, {_text(result.date)}"
        f"{'; ' + _text(settings) if settings else ''}"
    )


def _check_row(check: Check) -> tuple[str, str, str, str]:
    return check.name, _MARKS[check.status], check.summary, f"{check.seconds:.1f}"


def _statistical(figures: StatisticalFigures) -> Iterator[str]:
    yield f"### As shipped, against {_text(figures.reference)}, on {figures.tokens} tokens"
    yield ""
    yield from _table(("figure", "value", "95 % interval"), statistical_rows(figures))
    sections = [
        (section.name, str(section.tokens), number(section.kl), percent(section.top1),
         f"{section.perplexity:.4g}", f"{section.reference_perplexity:.4g}")
        for section in figures.sections
    ]  # fmt: skip
    names = ("text", "tokens", "KL", "same best", "perplexity", "original's")
    yield from _table(names, sections)


def _vision(figures: VisionFigures) -> Iterator[str]:
    yield f"### Vision, against {_text(figures.reference)}, on {figures.text_tokens} tokens"
    yield ""
    yield from _table(("figure", "value", "95 % interval"), vision_rows(figures))


def _weights(matrices: tuple[StoredWeight, ...]) -> Iterator[str]:
    """By role and scheme: what they take and what rounding cost."""
    groups: dict[tuple[str, str], list[StoredWeight]] = {}
    for matrix in matrices:
        groups.setdefault((matrix.role, matrix.scheme), []).append(matrix)
    yield "### Stored weights"
    yield ""
    rows = [
        (role, scheme, str(len(found)), f"{sum(m.stored_bytes for m in found) / 1e6:.1f}",
         number(max(m.error for m in found)))
        for (role, scheme), found in groups.items()
    ]  # fmt: skip
    yield from _table(("role", "scheme", "matrices", "MB", "largest error"), rows)


def _findings(checks: tuple[Check, ...]) -> Iterator[str]:
    found = [(check.name, finding) for check in checks for finding in check.findings]
    if not found:
        return
    yield "### Findings"
    yield ""
    for name, finding in found:
        # Four spaces keep lines of a difference inside of the list's entry, as they are.
        first, *others = finding.message.splitlines() or [""]
        yield f"- {_SEVERITIES[finding.severity]} **{_text(name)}**, {_text(finding.where)}: " + (
            _text(first)
        )
        if others:
            yield ""
            yield from (f"      {_CONTROL.sub('�', line)}" for line in others)
            yield ""
        if finding.hint:
            yield f"  {_text(finding.hint)}"
    yield ""


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for row in rows:
        yield f"| {' | '.join(_text(cell) for cell in row)} |"
    yield ""


def _text(text: str) -> str:
    """One line that means itself."""
    line = " ".join(_CONTROL.sub("�", text).split("\n"))
    return _SPECIAL.sub(r"\\\1", line)
