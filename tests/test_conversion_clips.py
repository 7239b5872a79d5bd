"""The recipe option `clip`: what is named is kept within its limit, and nothing else changes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exact import assert_same, prompt
from mnnsmith.api import Engine, convert, prepare
from mnnsmith.bundle import Bundle
from mnnsmith.errors import RecipeError
from mnnsmith.quant.recipe import Clip, describe, parse_recipe
from mnnsmith.verify.checks.probe import Probe
from peaky import CASES, MIXTURES, make_checkpoint
from tiny_checkpoint import write_checkpoint

IDS = prompt(70)
ACT = "layer1/mlp/act"


def recipe(folder: Path, *clips: tuple[str, object], default: str = "fp16") -> Path:
    path = folder / f"recipe{len(list(folder.iterdir()))}.json"
    rules = [{"value": value, "limit": limit} for value, limit in clips]
    path.write_text(json.dumps({"name": "clipped", "default": default, "clip": rules}))
    return path


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        ("layer0/mlp/act", "clip must be a list"),
        (["layer0/mlp/act"], "clip 0: must be an object"),
        ([{"value": "a", "limit": 1}, {"value": "a"}], "clip 1: limit must be a number"),
        ([{"limit": 1.0}], "clip 0: value must be a name"),
        ([{"value": "", "limit": 1.0}], "value must be a name"),
        ([{"value": "a" * 501, "limit": 1.0}], "value must be a name"),
        ([{"value": 3, "limit": 1.0}], "value must be a name"),
        ([{"value": "a", "limit": 1.0, "low": 0}], "unknown key 'low'"),
        *(
            ([{"value": "a", "limit": limit}], "limit must be a number above 0 and at most 65504")
            for limit in (0, -1, 65505, 1e30, True, "60000", None, float("nan"), float("inf"))
        ),
    ],
)
def test_wrong_clips_are_refused(clip: object, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe({"default": "fp16", "clip": clip}, "r.json")


@pytest.mark.parametrize("default", ["w4g64", "keep"])
def test_clips_are_read_back_from_a_manifest(default: str) -> None:
    data = {"default": default, "clip": [{"value": "layer?/mlp/*", "limit": 60000}]}
    made = parse_recipe(data, "r.json")
    assert made.clips == (Clip("layer?/mlp/*", 60000.0),)
    assert parse_recipe(describe(made), "the manifest") == made
    assert "clip" not in describe(parse_recipe({"default": "fp16"}, "r.json"))


@pytest.mark.parametrize(
    "value",
    [
        *("layer9/mlp/act", "model.layers.0.mlp", "attention_mask", "mask/*", "input_ids"),
        *("logits", "layer0/attention/rope/cos", "position*"),
    ],
)
def test_a_clip_that_names_nothing_is_refused(value: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    with pytest.raises(RecipeError, match=r"clip 1 .* names no value") as caught:
        prepare(tmp_path / "model", recipe=recipe(tmp_path, ("layer0/mlp/up", 5), (value, 5)))
    assert value in caught.value.message


def test_the_first_clip_that_matches_decides(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", num_hidden_layers=2)
    first, all_of_them = ("layer1/mlp/act", 7), ("layer*/mlp/act", 9)
    ready = prepare(tmp_path / "model", recipe=recipe(tmp_path, first, all_of_them))
    limits = {n.name: n.attributes["limit"] for n in ready.model.graph.nodes if n.kind == "clip"}
    layers = ready.model.layers
    assert limits == {f"layer{i}/mlp/act/clip": 7.0 if i == 1 else 9.0 for i in range(layers)}
    assert f"layer*/mlp/act is clipped to 9 ({layers - 1} values)" in ready.notes
    with pytest.raises(RecipeError, match="clip 1"):
        prepare(tmp_path / "model", recipe=recipe(tmp_path, all_of_them, first))


# ------------------------------------------------------------------ on the engine


@pytest.mark.engine
@pytest.mark.reference
@pytest.mark.parametrize(
    ("name", "values"),
    [
        # Packed channels, heads (NHWC), the sum of a norm with two outputs, odd widths.
        ("llama-headdim", (ACT, "layer0/attention/rope/q", "layer1/mlp_norm/sum")),
        # Plain tensors.
        ("deepseek_v2", ("layer1/mlp/router/logits", "layer2/attention/k_nope/heads")),
    ],
)
def test_values_beyond_are_clipped_and_the_others_stay(
    name: str, values: tuple[str, ...], tmp_path: Path
) -> None:
    make_checkpoint({**CASES, **MIXTURES}[name], tmp_path / "model")
    open_exact = functools.partial(Engine, memory="high", precision="high")
    made = recipe(tmp_path, *((value, 0.75) for value in values))
    bundle = convert(tmp_path / "model", tmp_path / "bundle", recipe=made)
    assert bundle.manifest.data["recipe"]["clip"][0] == {"value": values[0], "limit": 0.75}
    graph = prepare(tmp_path / "model", recipe=made).model.graph
    for tokens in (1, 3, 70):
        names = [part for value in values for part in (value, f"{value}/clip")]
        with Probe(bundle, graph, names, open_exact) as probe:
            found = probe.run(IDS[:tokens])
        for value in values:
            before, after = found[value], found[f"{value}/clip"]
            np.testing.assert_array_equal(after, np.clip(before, -0.75, 0.75))
            assert before.min() < -0.75 and before.max() > 0.75, value


@pytest.mark.engine
@pytest.mark.reference
def test_a_limit_that_nothing_reaches_changes_no_bit(tmp_path: Path) -> None:
    make_checkpoint(MIXTURES["qwen3_moe"], tmp_path / "model")
    outputs = []
    for name, chosen in (("plain", "w4g32-head8"), ("clipped", None)):
        given = chosen or recipe(tmp_path, ("*", 65504), default="w4g32")
        if chosen is None:
            data = json.loads(Path(given).read_text())
            data["rules"] = [{"role": r, "scheme": "w8g32"} for r in ("head", "embedding")]
            Path(given).write_text(json.dumps(data))
        bundle = convert(tmp_path / "model", tmp_path / name, recipe=given)
        for memory in ("high", "low"):
            with Engine(bundle.path, memory=memory) as engine:
                outputs.append(engine.forward(IDS, all_positions=True))
    np.testing.assert_array_equal(outputs[0], outputs[2])
    np.testing.assert_array_equal(outputs[1], outputs[3])


@contextmanager
def clamped(model: Any, module: str, limit: float) -> Iterator[None]:
    """A transformers model that clamps what goes into `module`."""
    parts = dict(model.named_modules())
    handle = parts[module].register_forward_pre_hook(
        lambda _, given: (given[0].clamp(-limit, limit),)
    )
    yield
    handle.remove()


def logits(bundle: Bundle, ids: list[int]) -> np.ndarray:
    with Engine(bundle.path, memory="high", precision="high", all_logits=True) as engine:
        return engine.forward(ids, all_positions=True)


@pytest.mark.engine
@pytest.mark.reference
def test_a_clipped_bundle_equals_transformers_with_a_clamp(tmp_path: Path) -> None:
    import torch

    model = make_checkpoint(CASES["llama"], tmp_path / "model")
    with torch.no_grad():
        plain = model(torch.tensor([IDS])).logits[0].double().numpy()
        with clamped(model, "model.layers.1.mlp.down_proj", 0.3):
            expected = model(torch.tensor([IDS])).logits[0].double().numpy()
    assert np.abs(expected - plain).max() > 0.1 * plain.std()
    bundle = convert(tmp_path / "model", tmp_path / "bundle", recipe=recipe(tmp_path, (ACT, 0.3)))
    assert_same(logits(bundle, IDS), expected, "clipped")


@pytest.mark.engine
@pytest.mark.reference
def test_experts_are_clipped_inside(tmp_path: Path) -> None:
    make_checkpoint(MIXTURES["mixtral"], tmp_path / "model")
    outputs = []
    for pattern in ("layer1/mlp/expert*/act", "layer1/mlp/expert0/act"):
        made = recipe(tmp_path, (pattern, 1e-9))
        bundle = convert(tmp_path / "model", tmp_path / f"b{len(outputs)}", recipe=made)
        graph = prepare(tmp_path / "model", recipe=made).model.graph
        open_exact = functools.partial(Engine, memory="high", precision="high")
        with Probe(bundle, graph, ["layer1/mlp/mixture", "layer0/mlp/mixture"], open_exact) as p:
            outputs.append(p.run(IDS))
    np.testing.assert_array_equal(*(found["layer0/mlp/mixture"] for found in outputs))
    every, one = (np.abs(found["layer1/mlp/mixture"]).max(-1) for found in outputs)
    assert every.max() < 1e-6
    assert one.max() > 0.1
