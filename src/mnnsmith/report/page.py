"""The page: one file of HTML that needs nothing else, no script and no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mnnsmith.report import layers, sections
from mnnsmith.report.markup import tag, text
from mnnsmith.report.style import stylesheet
from mnnsmith.verify.results import Verification


def report_page(found: Sequence[Verification]) -> str:
    """The page on one or more verifications, in the order given."""
    title = ", ".join(v.subject.bundle for v in found)
    meta = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    )
    head = tag("head", meta, tag("title", text(f"Verification of {title}")),
               tag("style", stylesheet()))  # fmt: skip
    body = tag(
        "body",
        tag("h1", text(f"Verification of {title}"), " ", *_verdict(found)),
        sections.summary(found),
        _each("Checks", found, lambda v: _titled(v, sections.checks(v), found)),
        layers.layers(found),
        layers.vision(found),
        sections.distribution(found),
        _each("Where the bundle disagrees", found, sections.sample),
        sections.ranges(found),
        _each("Size of the weights", found, sections.sizes),
        _each("Provenance", found, sections.provenance),
    )
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def _verdict(found: Sequence[Verification]) -> list[str]:
    return [sections.verdict(found[0])] if len(found) == 1 else []


def _titled(v: Verification, content: str, found: Sequence[Verification]) -> str:
    if len(found) == 1:
        return content
    return tag("h3", text(sections.bundle_name(v)), " ", sections.verdict(v)) + content


def _each(title: str, found: Sequence[Verification], part: Callable[[Verification], str]) -> str:
    """A section with a part for each bundle, or nothing where no bundle has one."""
    parts = "".join(part(v) for v in found)
    return tag("section", tag("h2", title), parts) if parts else ""
