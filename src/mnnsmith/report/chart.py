"""Charts as inline SVG: lines over layers on a logarithmic scale, bars of a histogram, shares.

Every mark has a `<title>`, which browsers show on hover and readers of a screen read out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mnnsmith.report.markup import tag, text

_WIDTH, _HEIGHT = 860, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 40
# Decades that an axis shows at most, from the largest value down.
_DECADES = 12
_MOST_LABELS = 20


@dataclass(frozen=True)
class Line:
    """One series: a point for each place on the x axis, None where there is none.

    style: class of its colour.  dashed: for what is compared with another series of that colour.
    """

    name: str
    style: str
    values: Sequence[float | None]
    dashed: bool = False


def line_chart(
    labels: Sequence[str],
    lines: Sequence[Line],
    *,
    x_title: str,
    y_title: str,
    limit: tuple[str, float] | None = None,
) -> str:
    """Positive values over the places `labels`, logarithmic; zero and less lie on the x axis.

    limit: a named value that gets a line of its own.
    """
    known = [v for line in lines for v in line.values if v is not None and v > 0]
    if limit is not None:
        known.append(limit[1])
    if not known:
        return ""
    scale = _LogScale.around(known)
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(labels) - 1)
    places = [_LEFT + step * i for i in range(len(labels))]
    parts = [*_log_axis(scale), *_x_axis(labels, places, x_title), _y_title(y_title)]
    if limit is not None:
        y = scale.y(limit[1])
        parts.append(_rule(_LEFT, y, _WIDTH - _RIGHT, y, "limit"))
        label = tag("text", text(limit[0]), x=_WIDTH - _RIGHT, y=_n(y + 13), text_anchor="end")
        parts.append(label)
    for line in lines:
        parts += _drawn(line, labels, places, scale)
    return _svg(parts, f"{y_title} by {x_title}")


def histogram(
    edges: Sequence[float], counts: Sequence[int], style: str, *, x_title: str, width: int = 420
) -> str:
    """Bars of equal width between `edges`, which are labelled as powers of ten."""
    total = sum(counts)
    if not total:
        return ""
    height, most = 180, max(counts)
    bar = (width - _LEFT - _RIGHT) / len(counts)
    bottom = height - _BOTTOM
    parts = [_rule(_LEFT, bottom, width - _RIGHT, bottom)]
    for i, count in enumerate(counts):
        tall = (bottom - _TOP) * count / most
        low, high = edges[i], edges[i + 1]
        told = f"{low:.1e} to {high:.1e}: {count} tokens ({count / total:.1%})"
        parts.append(
            tag(
                "rect", tag("title", text(told)), class_=style, stroke="none",
                x=_n(_LEFT + bar * i + 0.5), y=_n(bottom - tall),
                width=_n(max(0.5, bar - 1)), height=_n(tall),
            )
        )  # fmt: skip
    for i, edge in enumerate(edges):
        if edge > 0 and abs(math.log10(edge) - round(math.log10(edge))) < 1e-6:
            x = _LEFT + bar * i
            parts.append(_rule(x, bottom, x, bottom + 4))
            label = f"1e{round(math.log10(edge))}"
            parts.append(tag("text", label, x=_n(x), y=bottom + 16, text_anchor="middle"))
    middle = (_LEFT + width - _RIGHT) / 2
    parts.append(tag("text", text(x_title), x=_n(middle), y=height - 6, text_anchor="middle"))
    parts.append(tag("text", f"{most / total:.0%}", x=_LEFT - 6, y=_TOP + 9, text_anchor="end"))
    return _svg(parts, x_title, width, height)


def shares(parts: Sequence[tuple[str, str, float]], told: str) -> str:
    """One bar in parts: (name, class of the colour, size); `told` describes it."""
    total = sum(size for _, _, size in parts)
    if not total:
        return ""
    x, drawn = 0.0, []
    for name, style, size in parts:
        width = _WIDTH * size / total
        title = tag("title", text(f"{name}: {size / total:.1%}"))
        drawn.append(
            tag(
                "rect", title, class_=style, stroke="none",
                x=_n(x), y=0, width=_n(max(0.5, width - 1)), height=26,
            )
        )  # fmt: skip
        x += width
    return _svg(drawn, told, _WIDTH, 26)


@dataclass(frozen=True)
class _LogScale:
    """Powers of ten from `low` to `high`, drawn from the bottom up."""

    low: int
    high: int

    @classmethod
    def around(cls, values: Sequence[float]) -> _LogScale:
        high = math.ceil(math.log10(max(values)) + 1e-9)
        low = math.floor(math.log10(min(values)) - 1e-9)
        return cls(max(low, high - _DECADES), high)

    def y(self, value: float) -> float:
        place = (math.log10(value) - self.low) / (self.high - self.low) if value > 0 else 0.0
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * min(1.0, max(0.0, place))


def _log_axis(scale: _LogScale) -> list[str]:
    parts = []
    step = 1 if scale.high - scale.low <= 8 else 2
    for power in range(scale.low, scale.high + 1, step):
        y = scale.y(10.0**power)
        parts.append(_rule(_LEFT, y, _WIDTH - _RIGHT, y))
        parts.append(tag("text", f"1e{power}", x=_LEFT - 6, y=_n(y + 4), text_anchor="end"))
    return parts


def _x_axis(labels: Sequence[str], places: Sequence[float], title: str) -> list[str]:
    step = max(1, math.ceil(len(labels) / _MOST_LABELS))
    bottom = _HEIGHT - _BOTTOM
    parts = [
        tag("text", text(label), x=_n(x), y=bottom + 16, text_anchor="middle")
        for label, x in list(zip(labels, places, strict=True))[::step]
    ]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [*parts, tag("text", text(title), x=_n(middle), y=_HEIGHT - 6, text_anchor="middle")]


def _y_title(title: str) -> str:
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    return tag(
        "text", text(title), x=12, y=_n(middle), text_anchor="middle",
        transform=f"rotate(-90 12 {_n(middle)})",
    )  # fmt: skip


def _drawn(
    line: Line, labels: Sequence[str], places: Sequence[float], scale: _LogScale
) -> list[str]:
    """The series as a line that breaks where a point is missing, with its points on top."""
    points = [
        (x, scale.y(v), label, v)
        for x, v, label in zip(places, line.values, labels, strict=True)
        if v is not None
    ]
    style = f"line {line.style}" + (" dashed" if line.dashed else "")
    way: list[str] = []
    before = False
    for x, value in zip(places, line.values, strict=True):
        if value is not None:
            way.append(f"{'L' if before else 'M'}{_n(x)} {_n(scale.y(value))}")
        before = value is not None
    marks = [
        tag(
            "circle", tag("title", text(f"{line.name}, {label}: {value:.3g}")),
            class_=line.style, cx=_n(x), cy=_n(y), r=2.2,
        )
        for x, y, label, value in points
    ]  # fmt: skip
    return [tag("path", class_=style, d=" ".join(way), style="fill: none"), *marks]


def _rule(x1: float, y1: float, x2: float, y2: float, style: str = "rule") -> str:
    return tag("line", class_=style, x1=_n(x1), y1=_n(y1), x2=_n(x2), y2=_n(y2))


def _svg(parts: Sequence[str], told: str, width: int = _WIDTH, height: int = _HEIGHT) -> str:
    return tag(
        "svg", *parts, role="img", aria_label=told, width=width, height=height,
        viewBox=f"0 0 {width} {height}",
    )  # fmt: skip


def _n(value: float) -> str:
    """A coordinate, short and the same on every machine."""
    return f"{value:.1f}".rstrip("0").rstrip(".")
