"""The same inputs give byte-identical bundles, wherever they lie and however many threads work."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import tiny_checkpoint as tiny
from mnnsmith.api import convert
from mnnsmith.conversion import stream

pytestmark = pytest.mark.engine


def contents(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted(folder.iterdir())}


@pytest.mark.parametrize("recipe", ["fp16", "w4g32-head8", "w8g64-sym"])
def test_threads_and_places_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    model = tmp_path / "a" / "model"
    tiny.write_checkpoint(model, hidden_size=128, num_hidden_layers=2)
    monkeypatch.setattr(stream, "_BLOCK_BYTES", 16 << 10)
    convert(model, tmp_path / "one", recipe=recipe, threads=1)
    first = contents(tmp_path / "one")
    convert(model, tmp_path / "seven", recipe=recipe, threads=7)
    assert contents(tmp_path / "seven") == first
    elsewhere = tmp_path / "b" / "deep er" / "model"
    elsewhere.parent.mkdir(parents=True)
    model.rename(elsewhere)
    for file in elsewhere.iterdir():
        os.utime(file, (1, 1))
    # Another size of the blocks of rows, too.
    monkeypatch.setattr(stream, "_BLOCK_BYTES", 1 << 20)
    convert(elsewhere, tmp_path / "moved", recipe=recipe, threads=2)
    assert contents(tmp_path / "moved") == first
    assert len(first) >= 7, "what is compared is the whole bundle"


def test_what_differs_shows_in_the_bytes(tmp_path: Path) -> None:
    """The comparison above would see another weight, even in one bit of one of them."""
    for i in (0, 1):
        config = tiny.make_config()
        tensors = tiny.make_tensors(config)
        tensors["model.layers.0.mlp.up_proj.weight"][5, 5] += 0.5 * i
        tiny.write_checkpoint(tmp_path / f"{i}" / "model", tensors=tensors)
        convert(tmp_path / f"{i}" / "model", tmp_path / f"{i}" / "out", recipe="fp16")
    a, b = (contents(tmp_path / f"{i}" / "out") for i in (0, 1))
    assert {name for name in a if a[name] != b[name]} == {"llm.mnn.weight", "mnnsmith.json"}


def test_shards_give_the_same_weights(tmp_path: Path) -> None:
    for name, shards in (("one", 1), ("three", 3)):
        tiny.write_checkpoint(tmp_path / name / "model", shards=shards)
        convert(tmp_path / name / "model", tmp_path / name / "out", recipe="w8g32")
    a, b = (contents(tmp_path / name / "out") for name in ("one", "three"))
    assert {name for name in a if a[name] != b[name]} == {"mnnsmith.json"}
    first, second = (json.loads(c["mnnsmith.json"]) for c in (a, b))
    assert len(second["source"]["files"]) == len(first["source"]["files"]) + 3
    assert all(len(h) == 64 for h in second["source"]["files"].values())
