"""The parts of the page about one or several bundles; each is "" where its numbers are missing."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from mnnsmith.report.chart import Line, histogram, line_chart, shares
from mnnsmith.report.markup import figure, legend, table, tag, text
from mnnsmith.report.style import SERIES
from mnnsmith.verify.output.figure_text import number, percent, statistical_rows
from mnnsmith.verify.results import (
    Finding,
    StatisticalFigures,
    StoredWeight,
    TokenScore,
    Verification,
)

# Divergence in nats from which a token of the sample gets the next stronger colour.
_HEAT_STEPS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_WORST_TOKENS = 8
_MOST_FINDINGS = 40


def bundle_name(v: Verification) -> str:
    """How the page calls a bundle."""
    return f"{v.subject.bundle} ({v.subject.recipe})"


def verdict(v: Verification) -> str:
    word = "passed" if v.passed else "failed"
    return tag("span", text(v.verdict), class_=f"verdict {word}")


def series(number: int) -> str:
    """The colour class of the n-th bundle or kind."""
    return f"s{number % SERIES}"


# ------------------------------------------------------------------ all bundles together


def summary(found: Sequence[Verification]) -> str:
    """The figures that decide, side by side."""
    rows = [
        ["verdict", *(verdict(v) for v in found)],
        ["source", *(text(v.subject.source) for v in found)],
        ["recipe", *(tag("code", text(v.subject.recipe)) for v in found)],
        ["weights", *(_weights_size(v) for v in found)],
        ["exact: largest KL", *(_exact(v) for v in found)],
        *_statistical_rows(found),
        ["first layer that differs", *(_first(v) for v in found)],
        ["largest activation", *(_largest(v) for v in found)],
        ["where it ran", *(text(v.subject.device) for v in found)],
        ["level, date", *(text(f"{v.level}, {v.date}") for v in found)],
    ]
    head = ["", *(text(v.subject.bundle) for v in found)]
    return table(head, rows)


def _statistical_rows(found: Sequence[Verification]) -> list[list[str]]:
    """The rows of `statistical_rows`, a column for each bundle."""
    columns = [
        None if v.figures.statistical is None else statistical_rows(v.figures.statistical)
        for v in found
    ]
    names = next(([name for name, _, _ in column] for column in columns if column), ["KL, nats"])
    rows = [[name, *(_cell(column, i) for column in columns)] for i, name in enumerate(names)]
    return [*rows, ["tokens of text", *(_tokens(v) for v in found)]]


def _cell(column: Sequence[tuple[str, str, str]] | None, row: int) -> str:
    if column is None:
        return "not measured"
    _, value, interval = column[row]
    return text(f"{value} [{interval}]" if interval else value)


def _tokens(v: Verification) -> str:
    figures = v.figures.statistical
    return "not measured" if figures is None else text(figures.tokens)


def _weights_size(v: Verification) -> str:
    weights = v.figures.weights
    if weights is None:
        return "not measured"
    size = sum(w.stored_bytes for w in weights.matrices)
    parameters = sum(w.parameters for w in weights.matrices)
    return text(f"{size / 1e6:.1f} MB, {8 * size / max(1, parameters):.2f} bits a weight")


def _exact(v: Verification) -> str:
    return "not measured" if v.figures.exact is None else text(number(v.figures.exact.max_kl))


def _first(v: Verification) -> str:
    layers = v.figures.layers
    if layers is None:
        return "not measured"
    return "none" if layers.first is None else tag("code", text(layers.first))


def _largest(v: Verification) -> str:
    ranges = v.figures.ranges
    if ranges is None or not ranges.values:
        return "not measured"
    worst = max(ranges.values, key=lambda value: value.max_abs)
    part = worst.max_abs / ranges.limit
    return text(f"{number(worst.max_abs)} in {worst.name} ({part:.1%} of fp16's largest)")


def distribution(found: Sequence[Verification]) -> str:
    """How the divergence of single tokens is spread, and by section of the text."""
    parts = []
    for i, v in enumerate(found):
        figures = v.figures.statistical
        if figures is None:
            continue
        spread = figures.kl_histogram
        chart = histogram(spread.edges, spread.counts, series(i), x_title="KL of a token (nats)")
        caption = f"{figures.tokens} tokens, against {figures.reference}."
        parts.append(
            tag("div", tag("h3", text(bundle_name(v))), figure(chart, caption), _sections(figures))
        )
    if not parts:
        return ""
    grid = tag("div", *parts, class_="bundles")
    return tag("section", tag("h2", "Next-token distributions"), grid)


def _sections(figures: StatisticalFigures) -> str:
    rows = [
        [text(s.name), text(s.tokens), text(number(s.kl)), text(percent(s.top1)),
         text(f"{s.reference_perplexity:.2f}"), text(f"{s.perplexity:.2f}")]
        for s in figures.sections
    ]  # fmt: skip
    head = ["text", "tokens", "KL", "same best", "perplexity", "of the bundle"]
    return table(head, rows)


def ranges(found: Sequence[Verification]) -> str:
    """The largest activation of every block against the largest number of fp16."""
    having = [(i, v, v.figures.ranges) for i, v in enumerate(found) if v.figures.ranges]
    known = {r.layer for _, _, f in having for r in f.values if r.layer is not None}
    if not known:
        return ""
    labels = [str(layer) for layer in sorted(known)]
    lines = []
    for i, v, figures in having:
        largest: dict[str, float] = {}
        for value in figures.values:
            place = str(value.layer)
            largest[place] = max(value.max_abs, largest.get(place, 0.0))
        points = [largest.get(label) for label in labels]
        lines.append(Line(bundle_name(v), series(i), points))
    limit = having[0][2].limit
    chart = line_chart(
        labels, lines, x_title="block", y_title="largest magnitude",
        limit=(f"fp16 ends at {limit:g}", limit),
    )  # fmt: skip
    keys = legend([(series(i), bundle_name(v)) for i, v, _ in having])
    caption = "Phones compute in fp16: what goes beyond becomes infinite there."
    return tag("section", tag("h2", "Range of activations"), keys, figure(chart, caption))


# ------------------------------------------------------------------ one bundle after the other


def checks(v: Verification) -> str:
    """Every check and gate with its outcome, and all findings."""
    rows = [
        [text(c.name), tag("span", text(c.status), class_=c.status), text(c.summary),
         text(f"{c.seconds:.1f} s")]
        for c in v.checks
    ] + [
        [text(g.name), _gate_status(g.passed), text(f"{g.found}; limit {g.limit}"), ""]
        for g in v.gates
    ]  # fmt: skip
    findings = [(c.name, f) for c in v.checks for f in c.findings]
    shown = "".join(_finding(name, f) for name, f in findings[:_MOST_FINDINGS])
    if len(findings) > _MOST_FINDINGS:
        shown += tag("li", text(f"and {len(findings) - _MOST_FINDINGS} more in the JSON result"))
    listed = tag("ul", shown, class_="findings") if shown else ""
    return table(["check", "", "what it found", "time"], rows) + listed


def _gate_status(passed: bool) -> str:
    word = "passed" if passed else "failed"
    return tag("span", word, class_=word)


def _finding(check: str, f: Finding) -> str:
    hint = "" if f.hint is None else tag("span", f" {text(f.hint)}", class_="note")
    kind = tag("strong", text(f.severity), class_=f.severity)
    return tag("li", kind, text(f" {check}, "), tag("code", text(f.where)), text(f": {f.message}"),
               hint)  # fmt: skip


def sample(v: Verification) -> str:
    """A text, each token coloured by how far the bundle's expectation is from the original's."""
    figures = v.figures.statistical
    if figures is None or not figures.sample:
        return ""
    limits = ["0", *(f"{step:g}" for step in _HEAT_STEPS)]
    keys = legend([
        (f"h{i}", f"from {limit}") for i, limit in enumerate(limits)
    ])  # fmt: skip
    spans = "".join(_token(score) for score in figures.sample)
    told = tag("p", text(
        "Colour: KL between the two models' expectations for this token, in nats. Underlined: "
        "they would have written different tokens. Rest on a token to see both."
    ))  # fmt: skip
    body = tag("div", spans, class_="sample")
    worst = sorted(figures.sample, key=lambda s: -s.kl)[:_WORST_TOKENS]
    rows = [
        [
            *(tag("code", text(repr(part))) for part in (s.text, s.reference_best, s.best)),
            text(number(s.kl)),
            text(_probability(s.reference_loss)),
            text(_probability(s.loss)),
        ]
        for s in worst
    ]
    head = ["token", "original's best", "bundle's best", "KL", "original gave it", "bundle gave it"]
    return tag("h3", text(bundle_name(v))) + told + keys + body + tag(
        "p", "Where they differ most:"
    ) + table(head, rows)  # fmt: skip


def _token(score: TokenScore) -> str:
    heat = bisect_right(_HEAT_STEPS, score.kl)
    differs = " differs" if score.best != score.reference_best else ""
    told = (
        f"KL {score.kl:.4f}; original: {score.reference_best!r}, bundle: {score.best!r}; "
        f"probability {_probability(score.reference_loss)} and {_probability(score.loss)}"
    )
    return tag("span", text(score.text), class_=f"h{heat}{differs}", title=told)


def _probability(loss: float) -> str:
    return f"{math.exp(-max(0.0, loss)):.1%}"


def sizes(v: Verification) -> str:
    """Where the bytes of the weights are."""
    figures = v.figures.weights
    if figures is None:
        return ""
    groups: dict[tuple[str, str], list[StoredWeight]] = {}
    for weight in figures.matrices:
        groups.setdefault((weight.role, weight.scheme), []).append(weight)
    ordered = sorted(groups.items(), key=lambda item: -sum(w.stored_bytes for w in item[1]))
    sized = [
        (f"{role}, {scheme}", series(i), float(sum(w.stored_bytes for w in members)))
        for i, ((role, scheme), members) in enumerate(ordered)
    ]
    rows = [
        [text(name), text(len(members)), text(f"{sum(w.parameters for w in members) / 1e6:.2f} M"),
         text(f"{size / 1e6:.2f} MB"), text(_error_range(members))]
        for (name, _, size), (_, members) in zip(sized, ordered, strict=True)
    ]  # fmt: skip
    bar = shares(sized, "Bytes of the weights by group")
    head = ["group", "matrices", "weights", "stored", "error of a matrix: least to largest"]
    caption = "Bytes of the weights, by what they do and how they are stored."
    return (
        tag("h3", text(bundle_name(v)))
        + legend([(style, name) for name, style, _ in sized])
        + figure(bar, caption)
        + table(head, rows)
    )


def _error_range(members: Sequence[StoredWeight]) -> str:
    errors = [w.error for w in members]
    return f"{number(min(errors))} to {number(max(errors))}"


def provenance(v: Verification) -> str:
    """What was compared, with hashes and settings, so that it can be done again."""
    s = v.subject
    settings = ", ".join(f"{key} {value}" for key, value in s.settings.items())
    rows = [
        ["bundle", text(s.bundle)],
        ["model type", text(s.model_type)],
        [
            "source",
            text(s.source + ("" if s.source_revision is None else f" @ {s.source_revision}")),
        ],
        ["engine", text(f"MNN {v.engine}, {settings}" if settings else f"MNN {v.engine}")],
        ["made by", text(f"mnnsmith {v.mnnsmith}")],
        *([text(name), tag("code", text(digest))] for name, digest in s.files.items()),
    ]
    return tag("h3", text(bundle_name(v))) + table(["", ""], rows)
