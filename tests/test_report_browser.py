"""The report in a real browser: what is drawn, in light and dark, on a phone and on paper."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mnnsmith.report.page import report_page
from verification_samples import verification

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome on the path")
# Added to a copy of the page (the page itself has no script): measures what the browser laid out.
MEASURE = """<script>addEventListener("load", () => {
const style = getComputedStyle(document.body);
const boxes = [...document.querySelectorAll("svg circle, svg rect")].map(e => {
  const s = e.ownerSVGElement.getBoundingClientRect(), b = e.getBoundingClientRect();
  return b.left >= s.left - 1 && b.right <= s.right + 1
    && b.top >= s.top - 1 && b.bottom <= s.bottom + 1;
});
document.body.innerHTML = "<pre id=found></pre>" + document.body.innerHTML;
document.getElementById("found").textContent = JSON.stringify({
  ground: style.backgroundColor, ink: style.color,
  page: document.documentElement.scrollWidth, window: document.documentElement.clientWidth,
  marks: boxes.length, inside: boxes.every(x => x),
  fills: [...new Set(
    [...document.querySelectorAll("svg rect")].map(e => getComputedStyle(e).fill))],
  requests: performance.getEntriesByType("resource").length,
});
});</script>"""


def browse(page: str, folder: Path, *options: str) -> str:
    """What Chromium prints for the page."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000",
        f"--user-data-dir={folder / 'profile'}", *options, file.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def measured(folder: Path, *options: str) -> dict[str, object]:
    page = report_page([verification(fails=True), verification("other", kl=0.3)])
    shown = browse(page.replace("</body>", MEASURE + "</body>"), folder, "--dump-dom", *options)
    found = re.search(r'<pre id="found">(.*?)</pre>', shown)
    assert found is not None
    result: dict[str, object] = json.loads(html.unescape(found[1]))
    return result


def brightness(colour: object) -> int:
    return sum(int(part) for part in re.findall(r"\d+", str(colour))[:3])


def test_everything_is_drawn_inside_its_chart(tmp_path: Path) -> None:
    found = measured(tmp_path, "--window-size=1200,900")
    assert found["inside"] is True
    assert isinstance(found["marks"], int) and found["marks"] > 300
    assert found["requests"] == 0
    assert len(found["fills"]) >= 3  # type: ignore[arg-type]


def test_light_and_dark(tmp_path: Path) -> None:
    light = measured(tmp_path / "a", "--blink-settings=preferredColorScheme=1")
    dark = measured(tmp_path / "b", "--blink-settings=preferredColorScheme=0")
    assert brightness(light["ground"]) > 700 > 150 > brightness(light["ink"])
    assert brightness(dark["ground"]) < 100 < 600 < brightness(dark["ink"])
    assert light["fills"] != dark["fills"]


def test_a_narrow_window_does_not_scroll_sideways(tmp_path: Path) -> None:
    found = measured(tmp_path, "--window-size=500,900")
    assert found["page"] == found["window"]


def test_it_prints(tmp_path: Path) -> None:
    paper = tmp_path / "paper.pdf"
    page = report_page([verification(fails=True)])
    browse(page, tmp_path, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    data = paper.read_bytes()
    assert data.startswith(b"%PDF-")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 12


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
