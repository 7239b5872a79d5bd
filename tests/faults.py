"""Bundles with exactly one fault each, sealed as a converter with that fault would have left them.

The manifest's hashes fit the files, and it names the sound original: nothing but what the files
mean gives a fault away.  A fault of the program is there while a bundle is made; if it stands, it
is there while it is verified, too, as one in a model file would be.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mnnsmith.api import convert, prepare
from mnnsmith.bundle.manifest import MANIFEST
from mnnsmith.engine import Engine
from mnnsmith.engine.converter import graph_json_to_mnn, mnn_to_graph_json
from mnnsmith.files import sha256_of
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.weights import HeadRows
from mnnsmith.models import deepseek, gemma3_text, llama, mistral, mla
from mnnsmith.quant.recipe import describe
from peaky import CASES, LONG, MIXTURES, Case, make_checkpoint
from verify_samples import change_json, change_mtok, edit_json, note_hashes, without_merge

Patch = pytest.MonkeyPatch
Change = Callable[[Path], object]


@dataclass(frozen=True)
class Fault:
    """What is wrong, of the bundle of peaky's `case` by `recipe`.

    source: done to a copy of the checkpoint, of which the bundle is then made.  bundle: done to the
    finished bundle.  program: done to our code while the bundle is made.  stands: and while it is
    verified.  engine: done to our code only while it is verified.
    made_by: the recipe of which the bundle is made, though its manifest claims `recipe`.
    """

    case: str
    recipe: str = "w8g32"
    source: Change | None = None
    bundle: Change | None = None
    program: Callable[[Patch], object] | None = None
    stands: bool = False
    engine: Callable[[Patch], object] | None = None
    made_by: Mapping[str, Any] | None = None


@dataclass
class Sound:
    """Sound checkpoints and bundles, each made once."""

    folder: Path
    _made: set[Path] = field(default_factory=set)

    def source(self, case: str) -> Path:
        folder = self.folder / case
        if folder not in self._made:
            make_checkpoint(_case(case), folder)
            self._made.add(folder)
        return folder

    def bundle(self, case: str, recipe: str) -> Path:
        return self.made_of(self.source(case), recipe)

    def made_of(self, source: Path, recipe: str) -> Path:
        folder = self.folder / f"{source.name}:{recipe}"
        if folder not in self._made:
            convert(source, folder, recipe=recipe)
            self._made.add(folder)
        return folder


def _case(name: str) -> Case:
    return {**CASES, **MIXTURES, **LONG}[name]


def make_faulty(fault: Fault, source: Path, sound: Callable[[], Path], folder: Path) -> Path:
    """The bundle with the fault, in `folder`; sound: gives the bundle without it."""
    bundle = folder / "bundle"
    with _patched(fault.program):
        if fault.source is None and fault.program is None and fault.made_by is None:
            shutil.copytree(sound(), bundle)
        else:
            _convert(fault, source, folder, bundle)
    if fault.bundle is not None:
        fault.bundle(bundle)
    note_hashes(bundle)
    return bundle


def _convert(fault: Fault, source: Path, folder: Path, bundle: Path) -> None:
    """Make the bundle with the fault, and let its manifest say what a sound one's says."""
    broken, recipe = source, fault.recipe
    if fault.source is not None:
        broken = folder / "broken"
        shutil.copytree(source, broken)
        fault.source(broken)
    if fault.made_by is not None:
        recipe = str(folder / "recipe.json")
        Path(recipe).write_text(json.dumps(fault.made_by))
    convert(broken, bundle, recipe=recipe)
    honest = prepare(source, recipe=fault.recipe)

    def seal(manifest: dict[str, Any]) -> None:
        manifest["source"]["name"] = Path(honest.checkpoint.origin).name
        manifest["source"]["files"] = {p.name: sha256_of(p) for p in honest.checkpoint.files}
        manifest["recipe"] = describe(honest.recipe)

    edit_json(bundle / MANIFEST, seal)


@contextmanager
def present(fault: Fault) -> Iterator[None]:
    """The state of our code in which the bundle is verified."""
    with _patched(fault.program if fault.stands else None), _patched(fault.engine):
        yield


@contextmanager
def _patched(change: Callable[[Patch], object] | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if change is not None:
            change(patch)
        yield


# ------------------------------------------------------------------ in the checkpoint


def config(**fields: Any) -> Change:
    """Other fields of config.json; an object is merged."""

    def change(data: dict[str, Any]) -> None:
        for key, value in fields.items():
            merged = isinstance(value, dict) and isinstance(data.get(key), dict)
            data[key] = {**data[key], **value} if merged else value

    return lambda folder: edit_json(folder / "config.json", change)


def tensor(name: str, change: Callable[[np.ndarray], Any]) -> Change:
    """Change a tensor in place, or put what `change` returns there."""

    def tensors(all_: dict[str, np.ndarray]) -> None:
        found = change(all_[name])
        if found is not None:
            all_[name] = np.ascontiguousarray(found.astype(all_[name].dtype))

    return _tensors(tensors)


def exchanged(first: str, second: str) -> Change:
    """Two tensors in each other's place."""

    def change(all_: dict[str, np.ndarray]) -> None:
        all_[first], all_[second] = all_[second], all_[first]

    return _tensors(change)


def _tensors(change: Callable[[dict[str, np.ndarray]], None]) -> Change:
    def on_folder(folder: Path) -> None:
        path = folder / "model.safetensors"
        all_ = {name: np.array(values) for name, values in load_file(path).items()}
        change(all_)
        save_file(all_, path, metadata={"format": "pt"})

    return on_folder


def rows_swapped(first: int, second: int) -> Callable[[np.ndarray], None]:
    def change(w: np.ndarray) -> None:
        w[[first, second]] = w[[second, first]]

    return change


def heads_swapped(width: int) -> Callable[[np.ndarray], None]:
    """Heads 0 and 1 of a projection."""

    def change(w: np.ndarray) -> None:
        w[: 2 * width] = np.concatenate([w[width : 2 * width], w[:width]])

    return change


def groups_permuted(layer: int, width: int) -> Change:
    """Both groups of two query heads and a key-value head change places, in v and in the columns of
    o as well: another order of heads, the same function."""

    def change(all_: dict[str, np.ndarray]) -> None:
        for part, rows in (("q", 2 * width), ("k", width), ("v", width)):
            heads_swapped(rows)(all_[f"model.layers.{layer}.self_attn.{part}_proj.weight"])
        heads_swapped(2 * width)(all_[f"model.layers.{layer}.self_attn.o_proj.weight"].T)

    return _tensors(change)


def at_four_bits(w: np.ndarray) -> np.ndarray:
    """What 4 bits leave of a matrix, in blocks of 32."""
    blocks = w.astype(np.float32).reshape(-1, 32)
    low = blocks.min(1, keepdims=True)
    step = (blocks.max(1, keepdims=True) - low) / 15
    return (np.round((blocks - low) / step) * step + low).reshape(w.shape)


def tokenizer(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda folder: edit_json(folder / "tokenizer.json", change)


def template(change: Callable[[str], str]) -> Change:
    """Another chat template, wherever the checkpoint keeps it."""

    def on_folder(folder: Path) -> None:
        file = folder / "chat_template.jinja"
        if file.is_file():
            file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
            return
        edit_json(
            folder / "tokenizer_config.json",
            lambda data: data.update(chat_template=change(data["chat_template"])),
        )

    return on_folder


# ------------------------------------------------------------------ in the finished bundle


def engine_config(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda bundle: change_json(bundle / "llm_config.json", change)


def manifest(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda bundle: edit_json(bundle / MANIFEST, change)


def embedding_entry(**fields: Callable[[Any], Any]) -> Change:
    """Other values of the entry by which the engine reads embeddings."""

    def change(data: dict[str, Any]) -> None:
        entry = data["tie_embeddings"]
        entry.update({key: of(entry[key]) for key, of in fields.items()})

    return engine_config(change)


def embedding_of_the_head(bundle: Path) -> None:
    """Embeddings are read from the head's record, though the model has them apart."""
    head = _operator(mnn_to_graph_json(bundle / "llm.mnn"), "lm_head")
    entry = json.loads((bundle / "llm_config.json").read_text())["tie_embeddings"]
    start, codes, _, _, _ = head["main"]["external"]
    codes_offset = start + codes - (entry["alpha_offset"] - entry["weight_offset"])
    embedding_entry(weight_offset=lambda _: codes_offset, alpha_offset=lambda _: start + codes)(
        bundle
    )


def _operator(graph: Mapping[str, Any], name: str) -> dict[str, Any]:
    return next(op for op in graph["oplists"] if op["name"] == name)


def operator(name: str, change: Callable[[dict[str, Any]], Any]) -> Change:
    """Change the parameters of an operator of `llm.mnn`."""

    def on_bundle(bundle: Path) -> None:
        graph = mnn_to_graph_json(bundle / "llm.mnn")
        change(_operator(graph, name)["main"])
        file = bundle / "graph.json"
        file.write_text(json.dumps(graph))
        graph_json_to_mnn(file, bundle / "llm.mnn")
        file.unlink()

    return on_bundle


@dataclass(frozen=True)
class _Place:
    """A matrix stored in blocks, in the weight file; in bytes."""

    codes: int
    codes_row: int
    scales: int
    scales_row: int


def _in_weight_file(name: str, change: Callable[[bytearray, _Place], object]) -> Change:
    def on_bundle(bundle: Path) -> None:
        main = _operator(mnn_to_graph_json(bundle / "llm.mnn"), name)["main"]
        start, codes, scales, _, _ = main["external"]
        rows, cols = main["common"]["outputCount"], main["common"]["inputCount"]
        row = cols * main["quanParameter"]["aMaxOrBits"] // 8
        data = bytearray((bundle / "llm.mnn.weight").read_bytes())
        change(data, _Place(start + codes - rows * row, row, start + codes, scales // rows))
        (bundle / "llm.mnn.weight").write_bytes(data)

    return on_bundle


def stored_rows_swapped(name: str, first: int, second: int) -> Change:
    """Two rows of an operator's weight, codes and scales."""

    def change(data: bytearray, place: _Place) -> None:
        for start, size in ((place.codes, place.codes_row), (place.scales, place.scales_row)):
            one, two = (slice(start + r * size, start + (r + 1) * size) for r in (first, second))
            data[one], data[two] = data[two], data[one]

    return _in_weight_file(name, change)


def scale_and_zero_swapped(name: str) -> Change:
    """In every block, the two fp16 numbers that belong to it."""

    def change(data: bytearray, place: _Place) -> None:
        span = slice(place.scales, place.scales + place.scales_row)
        pairs = np.frombuffer(bytes(data[span]), dtype="<u2").reshape(-1, 2)
        data[span] = pairs[:, ::-1].tobytes()

    return _in_weight_file(name, change)


def mtok_without_merge(index: int) -> Change:
    return lambda bundle: change_mtok(bundle, lambda mtok: without_merge(mtok, index))


def mtok(**fields: Callable[[Any], Any]) -> Change:
    """Other values of the engine's tokenizer file."""
    return lambda bundle: change_mtok(
        bundle, lambda m: replace(m, **{key: of(getattr(m, key)) for key, of in fields.items()})
    )


# ------------------------------------------------------------------ in the program


def rope_stretched(by: float) -> Callable[[Patch], object]:
    """Frequencies of llama and its kin."""
    true = llama.rope_frequencies

    def wrong(*args: Any) -> Any:
        rope = true(*args)
        return replace(rope, inverse=(rope.inverse * by).astype(np.float32))

    return lambda patch: patch.setattr(llama, "rope_frequencies", wrong)


def rope_without_factor(patch: Patch) -> None:
    """YaRN's factor of cos and sin."""
    true = llama.rope_frequencies
    patch.setattr(llama, "rope_frequencies", lambda *args: replace(true(*args), factor=1.0))


def _shifted(g: Graph, positions: Any) -> Any:
    return g.binary("add", positions, g.integers([1], ()), "rope/shifted")


def sines_of_the_next_position(patch: Patch) -> None:
    true = llama.rope_tables

    def wrong(g: Graph, positions: Any, rope: Any, context: int, name: str) -> Any:
        cos, _ = true(g, positions, rope, context, name)
        _, sin = true(g, _shifted(g, positions), rope, context, f"{name}/next")
        return cos, sin

    patch.setattr(llama, "rope_tables", wrong)


def all_positions_shifted(patch: Patch) -> None:
    """No fault: rope is relative."""
    true = llama.rope_tables
    patch.setattr(
        llama, "rope_tables",
        lambda g, positions, *rest: true(g, _shifted(g, positions), *rest),
    )  # fmt: skip


def high_positions_wrong(patch: Patch) -> None:
    """The tables of every 4096th position are those of one step too many."""
    true = Graph.table

    def wrong(self: Graph, name: str, values: np.ndarray) -> Any:
        if name.endswith("_high"):
            values = np.concatenate([values[:1], values[2:], values[-1:]])
        return true(self, name, values)

    patch.setattr(Graph, "table", wrong)


def without_mscale(patch: Patch) -> None:
    patch.setattr(deepseek, "_mscale", lambda settings: 1.0)


def rope_key_interleaved(patch: Patch) -> None:
    """Rows of the one rope key are left as neighbours."""
    patch.setattr(
        mla, "HeadRows",
        lambda heads, stride, start, count, interleaved=False: HeadRows(
            heads, stride, start, count, interleaved and heads > 1
        ),
    )  # fmt: skip


def gains_without_one(patch: Patch) -> None:
    true = gemma3_text._gain
    patch.setattr(gemma3_text, "_gain", lambda name, size: replace(true(name, size), add=0.0))


def window_off_by_one(patch: Patch) -> None:
    true = mistral.uniform_windows

    def wrong(*args: Any, **options: Any) -> list[int | None]:
        return [w and w + 1 for w in true(*args, **options)]

    patch.setattr(mistral, "uniform_windows", wrong)


def another_activation(patch: Patch) -> None:
    """gelu where the model has silu."""
    true = llama.nn.gated_mlp

    def wrong(*args: Any) -> Any:
        return true(*("gelu_tanh" if arg == "silu" else arg for arg in args))

    patch.setattr(llama.nn, "gated_mlp", wrong)


# ------------------------------------------------------------------ while it runs


def rewind_one_too_few(patch: Patch) -> None:
    """The cache keeps one token more than it was told."""
    true = Engine.rewind
    patch.setattr(
        Engine, "rewind",
        lambda self, position: true(self, min(position + 1, self.position)),
    )  # fmt: skip


def rewind_one_too_many(patch: Patch) -> None:
    true = Engine.rewind
    patch.setattr(Engine, "rewind", lambda self, position: true(self, max(position - 1, 0)))


def later_parts_overwrite(patch: Patch) -> None:
    """A later part of a prompt takes the place of the token before it."""
    true = Engine.forward

    def wrong(self: Engine, ids: Any, **options: Any) -> Any:
        if len(ids) > 1 and self.position:
            self.rewind(self.position - 1)
        return true(self, ids, **options)

    patch.setattr(Engine, "forward", wrong)
