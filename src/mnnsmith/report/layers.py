"""The parts of the page about values inside: layer by layer, of the text and of what sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mnnsmith.report.chart import Line, line_chart
from mnnsmith.report.markup import figure, legend, table, tag, text
from mnnsmith.report.sections import bundle_name, series
from mnnsmith.verify.output.figure_text import number, vision_rows
from mnnsmith.verify.results import LayerFigures, ValueDifference, Verification, VisionFigures

_KINDS = ("residual", "attention", "mlp")


def layers(found: Sequence[Verification]) -> str:
    """Errors of the residual stream of every bundle, then of every part of each block."""
    having = [(i, v, v.figures.layers) for i, v in enumerate(found) if v.figures.layers]
    if not having:
        return ""
    parts = []
    if len(having) > 1:
        labels = _layer_labels([layer for _, _, layer in having])
        lines = [
            Line(bundle_name(v), series(i), _by_layer(figures.shipped, "residual", labels))
            for i, v, figures in having
        ]
        chart = line_chart(labels, lines, x_title="block", y_title="relative error")
        keys = legend([(series(i), bundle_name(v)) for i, v, _ in having])
        caption = "Residual stream after every block, as shipped, against the original."
        parts.append(keys + figure(chart, caption))
    parts += [_one_bundle_layers(v, figures) for _, v, figures in having]
    return tag("section", tag("h2", "Layer by layer"), *parts)


def _one_bundle_layers(v: Verification, figures: LayerFigures) -> str:
    labels = _layer_labels([figures])
    lines = []
    for at, kind in enumerate(_KINDS):
        lines.append(Line(f"{kind}, shipped", series(at), _by_layer(figures.shipped, kind, labels)))
        exact = _by_layer(figures.exact, kind, labels)
        lines.append(Line(f"{kind}, exact", series(at), exact, dashed=True))
    chart = line_chart(labels, lines, x_title="block", y_title="relative error")
    keys = legend([(series(at), kind) for at, kind in enumerate(_KINDS)])
    caption = (
        f"Solid: as shipped, against the original. Dashed: at memory high, against "
        f"{figures.reference} with the bundle's own weights; what differs there is a fault. "
        f"{figures.tokens} tokens."
    )
    return (
        tag("h3", text(bundle_name(v)))
        + keys
        + figure(chart, caption)
        + _bisected(figures.bisected)
    )


def vision(found: Sequence[Verification]) -> str:
    """Errors of the tower and the connector of every bundle that sees."""
    parts = [
        _one_bundle_vision(v, v.figures.vision) for v in found if v.figures.vision is not None
    ]  # fmt: skip
    return tag("section", tag("h2", "What it sees"), *parts) if parts else ""


def _one_bundle_vision(v: Verification, figures: VisionFigures) -> str:
    values = (*figures.shipped, *figures.exact)
    known = {d.layer for d in values if d.layer is not None}
    last = max(known, default=0) + 1
    labels = [*(str(layer) for layer in sorted(known)), str(last)]
    # The connector stands behind the last block.
    exact, shipped = ([d if d.layer is not None else replace(d, layer=last, kind="residual")
                       for d in part] for part in (figures.exact, figures.shipped))  # fmt: skip
    lines = []
    for at, kind in enumerate(_KINDS):
        lines.append(Line(f"{kind}, shipped", series(at), _by_layer(shipped, kind, labels)))
        lines.append(
            Line(f"{kind}, exact", series(at), _by_layer(exact, kind, labels), dashed=True)
        )
    chart = line_chart(labels, lines, x_title="block of the tower", y_title="relative error")
    keys = legend([(series(at), kind) for at, kind in enumerate(_KINDS)])
    caption = (
        f"Solid: as shipped, against the original. Dashed: at memory high, against "
        f"{figures.reference} with the bundle's own weights. Block -1 are the embeddings of "
        f"patches, {last} is the connector. {figures.tiles} tiles."
    )
    rows = [[text(name), text(value), text(interval_)]
            for name, value, interval_ in vision_rows(figures)]  # fmt: skip
    told = table(["", "", "95 % interval"], rows)
    inside = _bisected(figures.bisected)
    return tag("h3", text(bundle_name(v))) + keys + figure(chart, caption) + told + inside


def _bisected(values: Sequence[ValueDifference]) -> str:
    if not values:
        return ""
    rows = [
        [tag("code", text(d.name)), text(d.kind), text(number(d.error)), text(f"{d.cosine:.6f}"),
         text("–" if d.allowed is None else number(d.allowed))]
        for d in values
    ]  # fmt: skip
    head = ["operator", "kind", "relative error", "cosine", "allowed"]
    told = tag("p", "Inside the first block that differs, operator by operator.")
    return told + table(head, rows)


def _layer_labels(figures: Sequence[LayerFigures]) -> list[str]:
    known = {d.layer for f in figures for d in (*f.shipped, *f.exact) if d.layer is not None}
    return [str(layer) for layer in sorted(known)]


def _by_layer(
    values: Sequence[ValueDifference], kind: str, labels: Sequence[str]
) -> list[float | None]:
    found = {str(d.layer): d.error for d in values if d.kind == kind}
    return [found.get(label) for label in labels]
