"""The report as text: well formed, complete, safe with hostile names, and independent of others."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from mnnsmith.report.chart import Line, histogram, line_chart
from mnnsmith.report.page import report_page
from mnnsmith.report.style import SERIES, stylesheet
from mnnsmith.verify.results import Figures, Finding, Verification
from verification_samples import LAYERS, verification


def parsed(page: str) -> ET.Element:
    """The page as XML, which it is but for its first line and the tags without an end."""
    body = page.removeprefix("<!doctype html>\n")
    return ET.fromstring(re.sub(r"<meta ([^>]*)>", r"<meta \1/>", body))


def texts(page: str) -> str:
    return " ".join("".join(parsed(page).itertext()).split())


def test_one_bundle() -> None:
    found = verification(fails=True)
    page = report_page([found])
    shown = texts(page)
    assert "Verification of smol-w4 failed" in shown
    assert "failed, 1 check skipped: template" in shown
    assert "1 of 3, for 32 tokens; the others leave at token 17, 29" in shown
    assert "layer7/attention/mix" in shown
    for check in found.checks:
        assert check.summary in shown
    assert shown.count("max-kl") == 1
    for title in ("Layer by layer", "Next-token distributions", "Where the bundle disagrees",
                  "Range of activations", "Size of the weights", "Provenance"):  # fmt: skip
        assert title in shown
    assert "f" * 64 in shown


def test_what_it_sees_has_a_chart_and_figures() -> None:
    assert "What it sees" not in texts(report_page([verification()]))
    page = report_page([verification(sees=True), verification("text only")])
    shown = texts(page)
    assert shown.count("What it sees") == 1 and "KL after pictures, nats" in shown
    titles = [e.text or "" for e in parsed(page).iter("title")]
    # Of two bundles with 30 blocks of text, and the tower's 12; the embeddings and the connector
    # are part of the residual stream.
    for kind, more in (("residual", 2), ("attention", 0), ("mlp", 0)):
        found = [t for t in titles if t.startswith(f"{kind}, exact, ")]
        assert len(found) == 2 * LAYERS + 12 + more


def test_bundles_stand_side_by_side_in_their_order() -> None:
    names = ["first", "second", "third"]
    page = report_page([verification(name, kl=0.001 * (i + 1)) for i, name in enumerate(names)])
    head = re.search(r"<thead>(.*?)</thead>", page)
    assert head is not None
    assert re.findall(r">(\w+)</th>", head[1]) == names
    for kl in ("0.001 [", "0.002 [", "0.003 ["):
        assert kl in texts(page)


def test_every_layer_has_its_point() -> None:
    root = parsed(report_page([verification()]))
    titles = [e.text or "" for e in root.iter("title")]
    for kind in ("residual", "attention", "mlp"):
        for way in ("shipped", "exact"):
            assert len([t for t in titles if t.startswith(f"{kind}, {way}, ")]) == LAYERS


def test_a_point_stands_at_its_value() -> None:
    """A decade up is a fixed way up, and the limit lies where a point of that value would."""
    chart = ET.fromstring(
        line_chart(
            ["0", "1", "2", "3"], [Line("a", "s0", [1.0, 10.0, None, 100.0])],
            x_title="block", y_title="size", limit=("end", 10.0),
        )
    )  # fmt: skip
    ys = [float(e.attrib["cy"]) for e in chart.iter("circle")]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert ys[0] > ys[1]
    limit = next(e for e in chart.iter("line") if e.attrib["class"] == "limit")
    assert float(limit.attrib["y1"]) == pytest.approx(ys[1], abs=0.1)
    path = next(chart.iter("path")).attrib["d"]
    assert path.count("M") == 2  # The line breaks where the point is missing.


def test_bars_are_as_tall_as_their_counts() -> None:
    chart = ET.fromstring(histogram([1e-4, 1e-3, 1e-2, 1e-1], [1, 4, 2], "s0", x_title="KL"))
    heights = [float(e.attrib["height"]) for e in chart.iter("rect")]
    assert heights[1] == pytest.approx(4 * heights[0], abs=0.3)
    assert heights[2] == pytest.approx(2 * heights[0], abs=0.3)


def test_hostile_names_stay_text() -> None:
    evil = "</title><script>alert(1)</script><img src=x onerror=y>\"'\x1b[2J"
    base = verification()
    subject = replace(base.subject, bundle=evil, source=evil, recipe=evil)
    check = replace(base.checks[0], findings=(Finding("error", evil, evil, evil),), summary=evil)
    page = report_page([replace(base, subject=subject, checks=(check,))])
    assert "<script" not in page and "<img" not in page and "\x1b" not in page
    assert "<script>alert(1)</script>" in texts(page)


def test_the_page_needs_nothing_else() -> None:
    page = report_page([verification()])
    assert not re.search(r'(src|href|url\(|@import|https?:)\s*=?\s*["\'(]?\s*\w', page)
    assert "<script" not in page and "<link" not in page


def test_what_was_not_measured_is_said() -> None:
    base = verification()
    page = report_page([replace(base, figures=Figures(), gates=())])
    assert "not measured" in texts(page)
    assert "Layer by layer" not in texts(page)


def test_the_same_result_gives_the_same_bytes() -> None:
    assert report_page([verification()]) == report_page([verification()])


def test_more_bundles_than_colours() -> None:
    many: list[Verification] = [verification(f"b{i}") for i in range(SERIES + 2)]
    assert f"b{SERIES + 1}" in report_page(many)
    assert f".s{SERIES - 1}" in stylesheet() and f".s{SERIES}" not in stylesheet()
