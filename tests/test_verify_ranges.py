"""Activations beyond fp16 are found, and the recommended clip keeps them within it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from exact import assert_same, prompt
from mnnsmith.api import Engine, convert, prepare
from mnnsmith.bundle import open_bundle
from mnnsmith.conversion.prepare import Prepared
from mnnsmith.engine.emulated import PREPARE_COMMAND, EmulatedDevice
from mnnsmith.errors import UsageError
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.verify.checks.ranges import check_ranges, layer_numbers, measured
from mnnsmith.verify.context import Context
from mnnsmith.verify.texts.windows import shipped_sections
from peaky import CASES, MIXTURES, load_reference, make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.reference]

ACT = "layer1/mlp/act"
# As it was before the tests got a cache of their own; the emulated device lies there.
CACHE = os.environ.get("XDG_CACHE_HOME", "")


def context(bundle: Path, original: Prepared, *texts: Path) -> Context:
    def no_reference(_: object) -> Any:
        raise AssertionError("ranges need no reference")

    return Context(open_bundle(bundle), original, "full", Engine, no_reference, texts, 1)


def scale(model: Path, factors: dict[str, float]) -> None:
    tensors = load_file(model / "model.safetensors")
    for name, factor in factors.items():
        tensors[name] = (tensors[name].astype(np.float32) * factor).astype(np.float16)
        assert np.isfinite(tensors[name]).all()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A llama whose second block has values of some 100,000 between up and down, and no others."""
    folder = tmp_path_factory.mktemp("overflow")
    make_checkpoint(CASES["llama"], folder)
    mlp = "model.layers.1.mlp"
    scale(folder, {
        f"{mlp}.up_proj.weight": 2.0**12, f"{mlp}.gate_proj.weight": 2.0**3,
        f"{mlp}.down_proj.weight": 2.0**-13,
    })  # fmt: skip
    return folder, load_reference(folder)


@contextmanager
def watched(model: Any, module: str, limit: float | None = None) -> Iterator[list[np.ndarray]]:
    """What goes into a module of a transformers model, which can be clamped first."""
    seen: list[np.ndarray] = []

    def hook(_: Any, given: tuple[Any, ...]) -> Any:
        seen.append(given[0][0].numpy().copy())
        return None if limit is None else (given[0].clamp(-limit, limit),)

    handle = dict(model.named_modules())[module].register_forward_pre_hook(hook)
    yield seen
    handle.remove()


def reference(model: Any, ids: list[int], limit: float | None = None) -> tuple[np.ndarray, ...]:
    """Logits and the input of the second block's down projection."""
    import torch

    with torch.no_grad(), watched(model, "model.layers.1.mlp.down_proj", limit) as seen:
        logits = model(torch.tensor([ids])).logits[0].double().numpy()
    return logits, seen[0]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    # One window.
    path.write_text(shipped_sections()[4].text[:300])
    return path


def test_what_overflows_is_found_and_the_recommended_clip_mends_it(
    overflowing: tuple[Path, Any], text: Path, tmp_path: Path
) -> None:
    folder, model = overflowing
    convert(folder, tmp_path / "plain", recipe="fp16")
    original = prepare(folder, recipe="fp16")
    outcome = check_ranges(context(tmp_path / "plain", original, text))
    errors = [f for f in outcome.findings if f.severity == "error"]
    assert [f.where for f in errors] == ["layer 1"]
    assert f"{ACT} " in errors[0].message and "fp16" in errors[0].message

    tokenizer = TextTokenizer(open_bundle(tmp_path / "plain").tokenizer_json())
    ids = tokenizer.encode(text.read_text())[: outcome.figures.tokens]
    plain, values = reference(model, ids)
    largest = next(v for v in outcome.figures.values if v.name == ACT)
    token, channel = np.unravel_index(np.abs(values).argmax(), values.shape)
    assert largest.max_abs > 65504 and largest.layer == 1
    assert (largest.token, largest.channel) == (token, channel)
    assert largest.max_abs == pytest.approx(np.abs(values).max(), rel=1e-4)

    clip = json.loads(str(errors[0].hint).split('"clip": ', 1)[1])
    assert [entry["value"] for entry in clip] == [ACT]
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"name": "clipped", "default": "fp16", "clip": clip}))
    convert(folder, tmp_path / "clipped", recipe=recipe)
    mended = check_ranges(context(tmp_path / "clipped", prepare(folder, recipe=recipe), text))
    assert not mended.findings
    passed_on = next(v for v in mended.figures.values if v.name == f"{ACT}/clip")
    assert passed_on.max_abs == clip[0]["limit"] == 60000

    clamped, _ = reference(model, ids, 60000.0)
    assert np.abs(clamped - plain).max() > 0.01 * plain.std()
    for name, expected in (("plain", plain), ("clipped", clamped)):
        with Engine(tmp_path / name, memory="high", precision="high") as engine:
            assert_same(engine.forward(ids, all_positions=True), expected, name)


def test_a_bundle_that_computes_in_float32_gets_notes(
    overflowing: tuple[Path, Any], text: Path, tmp_path: Path
) -> None:
    bundle = convert(overflowing[0], tmp_path / "bundle", recipe="fp16")
    config = json.loads((bundle.path / "config.json").read_text())
    (bundle.path / "config.json").write_text(json.dumps({**config, "precision": "normal"}))
    original = prepare(overflowing[0], recipe="fp16")
    outcome = check_ranges(context(bundle.path, original, text))
    assert {f.severity for f in outcome.findings} == {"note"}
    assert "float32" in outcome.summary


@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v3"])
def test_every_block_has_its_largest_value(name: str, tmp_path: Path) -> None:
    make_checkpoint({**CASES, **MIXTURES}[name], tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "bundle", recipe="fp16")
    original = prepare(tmp_path / "model", recipe="fp16")
    outcome = check_ranges(context(tmp_path / "bundle", original))
    figures = outcome.figures
    assert figures.limit == 65504 and figures.tokens > 500
    layers = [value.layer for value in figures.values if value.layer is not None]
    assert layers == sorted(layers) and set(layers) == {0, 1, 2}
    inside = [f for f in outcome.findings if "expert" in f.message]
    assert bool(inside) == original.model.mixture
    graph = original.model.graph
    numbers = layer_numbers(graph)
    for mark in graph.landmarks:
        assert numbers[mark.value.name] == mark.layer
        assert mark.value.name in measured(graph)
    assert {f"layer{i}/attention/o" for i in range(3)} < set(measured(graph))


def test_scores_are_bounded_from_above(tmp_path: Path) -> None:
    """The bound is one: no score of transformers is larger; and it is not far from the largest."""
    import torch

    from mnnsmith.verify.checks import ranges

    model = make_checkpoint(CASES["llama"], tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "bundle", recipe="fp16")
    original = prepare(tmp_path / "model", recipe="fp16")
    given = context(tmp_path / "bundle", original)
    windows = ranges._windows(given)[:1]
    found = {v.name: v for v in ranges._measure(given, original.model.graph, windows)}
    seen: list[Any] = []
    attention = model.model.layers[1].self_attn
    handle = attention.register_forward_hook(lambda _m, _i, out: seen.append(out[1]))
    with torch.no_grad():
        model(torch.tensor(windows[0])[None], output_attentions=True)
    handle.remove()
    # Of softmax only differences of scores are left: they span at least so much.
    weights = seen[0][0].clamp_min(1e-30).log()
    rows = torch.ones_like(weights).tril().bool()
    spans = [float(row[m].max() - row[m].min()) for row, m in zip(weights[0], rows[0], strict=True)]
    bound = found["layer1/attention/mix/scores"].max_abs
    assert max(spans) / 2 <= bound < 20 * max(spans)


def test_without_an_original_it_says_what_is_missing(
    overflowing: tuple[Path, Any], tmp_path: Path
) -> None:
    bundle = convert(overflowing[0], tmp_path / "bundle", recipe="fp16")
    with pytest.raises(UsageError, match="original"):
        check_ranges(Context(bundle, None, "quick", Engine, functools.partial(Engine)))


@pytest.mark.slow
def test_on_arm_in_fp16_there_are_no_numbers_without_the_clip_and_near_ones_with_it(
    overflowing: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE)
    device = EmulatedDevice("max")
    if not device.folder.is_dir():
        pytest.skip(f"the emulated device is not prepared: {PREPARE_COMMAND}")
    folder, model = overflowing
    recipe = tmp_path / "recipe.json"
    clip = [{"value": ACT, "limit": 60000}]
    recipe.write_text(json.dumps({"default": "fp16", "clip": clip}))
    convert(folder, tmp_path / "plain", recipe="fp16")
    convert(folder, tmp_path / "clipped", recipe=recipe)
    ids = prompt(24)
    expected, values = reference(model, ids, 60000.0)
    assert (np.abs(values) > 65504).any()

    def logits(name: str, precision: str) -> np.ndarray:
        with Engine(
            tmp_path / name, device=device, memory="high", precision=precision, threads=1
        ) as engine:
            return engine.forward(ids, all_positions=True)

    assert not np.isfinite(logits("plain", "low")).any()
    clipped = logits("clipped", "low")
    assert np.isfinite(clipped).all()
    assert np.abs(clipped - expected).max() < 0.15 * expected.std()
    assert_same(logits("clipped", "high"), expected, "clipped, in float32")
