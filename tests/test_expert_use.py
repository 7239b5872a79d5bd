"""Which experts a text uses: the counts are transformers' own, and the page and the table hold."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mnnsmith.api import convert, open_bundle, profile_experts
from mnnsmith.bundle import Bundle
from mnnsmith.engine import mapped
from mnnsmith.errors import BundleError, UnsupportedError, UsageError
from mnnsmith.inspection.expert_page import expert_page
from mnnsmith.inspection.expert_use import ExpertUse, LayerUse, count_choices, write_twin
from tiny_checkpoint import write_checkpoint
from tiny_mixture import CHOSEN, EXPERTS, LAYERS, write_mixture

CONTEXT = 128
USE = ExpertUse("a <b> & c", 10, 4, 2, (LayerUse(1, (10, 5, 5, 0)), LayerUse(2, (20, 0, 0, 0))))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("use")
    write_mixture(folder / "model")
    return convert(folder / "model", folder / "bundle", recipe="w4g32")


# --- numbers ------------------------------------------------------------------------------------


def test_numbers_of_a_layer() -> None:
    first, second = USE.layers
    assert first.shares == (0.5, 0.25, 0.25, 0.0)
    assert first.entropy_bits == pytest.approx(1.5)
    assert (second.entropy_bits, math.copysign(1, second.entropy_bits)) == (0.0, 1.0)
    assert [first.covering(part) for part in (0.5, 0.75, 0.76, 1.0)] == [1, 2, 3, 3]
    assert (first.unused, second.unused) == (1, 3)
    assert first.top(3) == ((0, 0.5), (1, 0.25), (2, 0.25))
    # Of 4 experts, the mean of 2 and 1.
    assert USE.covering(0.75) == pytest.approx(1.5 / 4)


# --- the page -----------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags must close in order; cells of the map are collected."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.titles: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "!doctype"):
            self.open.append(tag)
        if tag == "rect":
            self.cells.append(str(dict(attributes)["class"]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["title"]:
            self.titles.append(data)


def test_the_page_stands_alone_and_shows_every_cell() -> None:
    text = expert_page(USE)
    page = Page(text)
    assert len(page.cells) == 8
    # Twice, once and never an even share; four times is the last but one step's end.
    assert page.cells == ["c6", "c4", "c4", "c0", "c8", "c0", "c0", "c0"]
    assert "layer 1, expert 1: 5 tokens (50.0%)" in page.titles
    assert "a <b> & c" not in text and "a &lt;b&gt; &amp; c" in text
    assert not re.search(r"https?:|<script|@import|url\(", text)
    light, dark = (set(re.findall(r"--c\d: (#\w+)", part)) for part in text.split("@media"))
    assert len(light) == len(dark) == 9 and not light & dark


# --- the engine ---------------------------------------------------------------------------------


@pytest.mark.engine
def test_every_token_counts_once_for_each_choice(bundle: Bundle) -> None:
    steps: list[tuple[int, int]] = []
    text = "The quick brown fox. " * 16
    found = profile_experts(bundle, text, progress=lambda *step: steps.append(step))
    assert (found.tokens, found.experts, found.chosen) == (len(text), EXPERTS, CHOSEN)
    assert [layer.layer for layer in found.layers] == list(range(LAYERS))
    for layer in found.layers:
        assert sum(layer.counts) == CHOSEN * len(text)
        assert max(layer.counts) <= len(text)
    # The context holds less than the text: each piece begins anew.
    assert bundle.max_context == CONTEXT
    assert steps == [(128, 336), (256, 336), (336, 336)]
    parts = [profile_experts(bundle, text[i : i + CONTEXT]) for i in range(0, len(text), CONTEXT)]
    for i, layer in enumerate(found.layers):
        total = np.sum([part.layers[i].counts for part in parts], axis=0)
        assert layer.counts == tuple(total.tolist())


@pytest.mark.engine
def test_nothing_is_left_behind(bundle: Bundle, tmp_path: Path) -> None:
    mapped.clear_cache()
    names = sorted(path.name for path in bundle.path.iterdir())
    profile_experts(bundle, "abc")
    assert sorted(path.name for path in bundle.path.iterdir()) == names
    assert mapped.cache_bytes() == 0


@pytest.mark.engine
def test_the_twin_differs_in_two_names_only(bundle: Bundle, tmp_path: Path) -> None:
    write_twin(bundle, tmp_path / "twin")
    graph, twin = ((path / "llm.mnn").read_bytes() for path in (bundle.path, tmp_path / "twin"))
    other = [i for i, pair in enumerate(zip(graph, twin, strict=True)) if pair[0] != pair[1]]
    places = {i // 16 for i in other}
    assert 0 < len(other) <= 6 * 6 and len(places) <= 12
    assert twin.count(b"\6\0\0\0logits\0") == graph.count(b"\6\0\0\0router\0") > 0
    assert twin.count(b"\6\0\0\0router\0") == graph.count(b"\6\0\0\0logits\0") > 0


@pytest.mark.engine
def test_what_cannot_be_profiled(bundle: Bundle, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "dense")
    dense = convert(tmp_path / "dense", tmp_path / "dense bundle", recipe="fp16")
    with pytest.raises(UnsupportedError, match="no experts"):
        profile_experts(dense, "abc")
    with pytest.raises(UsageError, match="no tokens"):
        profile_experts(bundle, "")
    for told in (3, {}, {"layers": [0], "per_layer": 4, "chosen": 5}, {"layers": [], "per_layer": 4,
                 "chosen": 1}, {"layers": [0, 1], "per_layer": 1 << 30, "chosen": 1}):  # fmt: skip
        data = {**bundle.manifest.data, "model": {**bundle.manifest.model, "experts": told}}
        damaged = dataclasses.replace(
            bundle, manifest=dataclasses.replace(bundle.manifest, data=data)
        )
        with pytest.raises(BundleError):
            profile_experts(damaged, "abc")


@pytest.mark.engine
def test_a_graph_without_choices(bundle: Bundle, tmp_path: Path) -> None:
    other = tmp_path / "old"
    other.mkdir()
    for path in bundle.path.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    graph = (other / "llm.mnn").read_bytes()
    (other / "llm.mnn").write_bytes(graph.replace(b"router\0", b"rooter\0"))
    with pytest.raises(BundleError, match="does not hold"):
        profile_experts(open_bundle(other), "abc")


@pytest.mark.engine
def test_the_command(bundle: Bundle, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from mnnsmith.cli.main import app

    def run(*arguments: str, text: str | None = None, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["profile", str(bundle.path), *arguments], input=text)
        assert result.exit_code == code, result.output
        return result.stdout

    page = tmp_path / "page.html"
    (tmp_path / "text").write_text("Grüße aus der Küche")
    table = run("--experts", "--text", str(tmp_path / "text"), "-o", str(page))
    assert table.splitlines()[0].startswith("model: 22 tokens, 2 of 6 experts for each in 3 layers")
    assert len(Page(page.read_text(encoding="utf-8")).cells) == LAYERS * EXPERTS
    found = json.loads(run("--experts", "--json", "--text", "-", text="abc"))
    assert [sum(layer["counts"]) for layer in found["layers"]] == [3 * CHOSEN] * LAYERS
    run("--text", str(tmp_path / "text"), code=2)
    run("--experts", "--text", str(tmp_path / "none"), code=2)
    run("--experts", "--text", "-", "-o", str(tmp_path / "no" / "page"), text="abc", code=8)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    run("--experts", "--text", str(tmp_path / "bytes"), code=2)


# --- against transformers -----------------------------------------------------------------------


@pytest.mark.engine
@pytest.mark.reference
@pytest.mark.parametrize("name", ["deepseek_v3-yarn", "qwen2_moe", "mixtral"])
def test_counts_equal_transformers(name: str, tmp_path: Path) -> None:
    from peaky import MIXTURES, VOCAB, make_checkpoint
    from routing_probe import choose_by_reference

    model = make_checkpoint(MIXTURES[name], tmp_path / "model")
    bundle = convert(tmp_path / "model", tmp_path / "bundle", recipe="fp16")
    ids = np.random.default_rng(0).integers(2, VOCAB, 700).tolist()
    expected = choose_by_reference(model, ids).experts
    found = count_choices(bundle, ids, memory="high")
    assert len(found.layers) == expected.shape[1]
    for i, layer in enumerate(found.layers):
        counts = np.bincount(expected[:, i].ravel(), minlength=found.experts)
        assert layer.counts == tuple(counts.tolist())
        # The premise: the choices are not even, so that equal counts say something.
        assert counts.max() > 1.2 * counts.min()
