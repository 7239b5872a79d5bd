"""Inner values of a bundle are those that its graph computes, and those of transformers."""

from __future__ import annotations

import errno
import functools
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exact import prompt
from mnnsmith.api import Engine, convert, prepare
from mnnsmith.bundle import Bundle
from mnnsmith.engine.converter import mnn_to_graph_json
from mnnsmith.errors import BundleError, EngineError, MissingResourceError, UsageError
from mnnsmith.graph.graph import Graph
from mnnsmith.mnn.net_extension import extend_net, tensor_names
from mnnsmith.verify.checks import probe as probe_module
from mnnsmith.verify.checks.probe import Probe, readable
from peaky import CASES, MIXTURES, make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.reference]

IDS = prompt(70)
EXACT = functools.partial(Engine, memory="high", precision="high")


@dataclass(frozen=True)
class Made:
    source: Path
    bundle: Bundle
    graph: Graph
    model: Any


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    name, recipe = request.param
    folder = tmp_path_factory.mktemp(name)
    model = make_checkpoint({**CASES, **MIXTURES}[name], folder / "model")
    bundle = convert(folder / "model", folder / "bundle", recipe=recipe)
    graph = prepare(folder / "model", recipe=recipe).model.graph
    return Made(folder / "model", bundle, graph, model)


def module_outputs(model: Any, modules: set[str], ids: list[int]) -> dict[str, np.ndarray]:
    """What modules of a transformers model give, [len(ids), width]."""
    import torch

    seen: dict[str, np.ndarray] = {}

    def hook(name: str, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        seen[name] = tensor.reshape(len(ids), -1).numpy()

    handles = [
        module.register_forward_hook(lambda _m, _i, out, name=name: hook(name, out))
        for name, module in model.named_modules()
        if name in modules
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return seen


LAYOUTS = [("qwen3", "w4g32-head8-fit"), ("deepseek_v3", "w4g32-fit"), ("gemma3_text", "fp16")]


@pytest.mark.parametrize("made", LAYOUTS, indirect=True)
@pytest.mark.parametrize("memory", ["high", "low"])
def test_every_value_is_read_and_the_logits_are_bit_for_bit_the_bundles(
    made: Made, memory: str
) -> None:
    """Prompt, split and decode: the twin computes what the bundle computes."""
    names = [value.name for value in readable(made.graph)]
    assert len(names) > 60
    with Engine(made.bundle.path, memory=memory, all_logits=True) as engine:
        expected = [engine.forward(IDS[:64], all_positions=True)]
        expected += [engine.forward(IDS[64:69], all_positions=True), engine.forward(IDS[69:])[None]]
    with Probe(made.bundle, made.graph, names, functools.partial(Engine, memory=memory)) as probe:
        parts = [probe.run(IDS[:64]), probe.run(IDS[64:69]), probe.run(IDS[69:])]
        assert probe.engine.position == len(IDS)
    for part, logits in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(part["logits"], logits)
        assert list(part) == names
        assert all(values.shape[0] == logits.shape[0] for values in part.values())


@pytest.mark.parametrize(
    "made", [("llama-bias", "fp16"), ("phi3", "fp16"), ("qwen2_moe", "fp16")], indirect=True
)
def test_landmarks_are_what_the_modules_give(made: Made) -> None:
    marks = {mark.value.name: mark.module for mark in made.graph.landmarks}
    outputs = module_outputs(made.model, set(marks.values()), IDS)
    with Probe(made.bundle, made.graph, list(marks), EXACT) as probe:
        values = probe.run(IDS)
    for name, module in marks.items():
        expected = outputs[module]
        error = np.linalg.norm(values[name] - expected) / np.linalg.norm(expected)
        assert error < 1e-4, name


@pytest.mark.parametrize("made", [("llama", "fp16")], indirect=True)
def test_heads_are_one_after_another(made: Made) -> None:
    """A rotated query keeps the length of what was projected, head by head."""
    with Probe(
        made.bundle, made.graph, ["layer1/attention/rope/q", "layer1/attention/q"], EXACT
    ) as p:
        values = p.run(IDS)
    before, after = (values[f"layer1/attention/{n}"].reshape(70, 4, 32) for n in ("q", "rope/q"))
    np.testing.assert_allclose(
        np.linalg.norm(after, axis=-1), np.linalg.norm(before, axis=-1), rtol=1e-4
    )
    np.testing.assert_allclose(after[0], before[0], rtol=1e-5)
    assert np.abs(after - before).max() > 1


@pytest.mark.parametrize("made", [("mixtral", "fp16")], indirect=True)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer9/mlp/up", "no such value"),
        ("layer1/mlp/expert0/up", "inside an expert"),
        ("attention_mask", "no row for each token"),
    ],
)
def test_what_cannot_be_read_is_said(made: Made, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Probe(made.bundle, made.graph, [name], EXACT)


@pytest.mark.parametrize("made", [("llama", "fp16")], indirect=True)
def test_wrong_uses_are_refused(made: Made) -> None:
    with pytest.raises(UsageError, match="no value"):
        Probe(made.bundle, made.graph, [], EXACT)
    with Probe(made.bundle, made.graph, ["logits", "layer0/mlp/act"], EXACT) as probe:
        for ids in ([384], [-1], []):
            with pytest.raises(UsageError):
                probe.run(ids)
        assert probe.run([383])["logits"].shape == (1, 384)
    with pytest.raises(EngineError):
        probe.run([1])


@pytest.mark.parametrize("made", [("llama", "fp16")], indirect=True)
def test_no_room_for_the_copy_and_a_graph_beyond_all_bounds(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(probe_module, "extend_net", _disk_full)
        with pytest.raises(MissingResourceError, match="No space left on device") as found:
            Probe(made.bundle, made.graph, ["logits"], EXACT)
    assert "TMPDIR" in str(found.value.hint)
    shutil.copytree(made.bundle.path, tmp_path / "bundle")
    # A sparse file: it takes no room on the disk, and all memory if it is read.
    os.truncate(tmp_path / "bundle" / "llm.mnn", 1 << 40)
    monkeypatch.setattr(probe_module, "GRAPH_LIMIT_BYTES", 1 << 20)
    sparse = replace(made.bundle, path=tmp_path / "bundle")
    with pytest.raises(BundleError, match="more than the 1048576 bytes"):
        Probe(sparse, made.graph, ["logits"], EXACT)


def _disk_full(*_: Any) -> bytes:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("made", [("deepseek_v2", "fp16")], indirect=True)
def test_a_bundle_of_another_graph_is_named(made: Made, tmp_path: Path) -> None:
    other = prepare(made.source, recipe="fp16-latent").model.graph
    with pytest.raises(BundleError, match="layer1/attention/q/0"):
        Probe(made.bundle, other, ["layer1/attention/q/0"], EXACT)


@pytest.fixture(scope="module")
def nets(tiny_bundle: tuple[Path, Any]) -> Iterator[tuple[bytes, bytes]]:
    net = (tiny_bundle[0] / "llm.mnn").read_bytes()
    yield net, net


def test_an_extended_graph_holds_the_old_one_unchanged(
    nets: tuple[bytes, bytes], tmp_path: Path
) -> None:
    net, addition = nets
    both = extend_net(net, addition, {0: "renamed tensor"})
    assert net in both
    names = tensor_names(net)
    assert tensor_names(both) == ["renamed tensor", *names[1:], *names]
    (tmp_path / "a.mnn").write_bytes(net)
    (tmp_path / "b.mnn").write_bytes(both)
    before, after = (mnn_to_graph_json(tmp_path / f"{n}.mnn") for n in "ab")
    assert after["oplists"] == before["oplists"] * 2
    assert after["tensorNumber"] == 2 * len(names)
    changed = {"oplists", "tensorName", "tensorNumber"}
    assert {k: v for k, v in after.items() if k not in changed} == {
        k: v for k, v in before.items() if k not in changed
    }


def test_damaged_graphs_give_our_error_or_a_file(nets: tuple[bytes, bytes]) -> None:
    net, addition = nets
    draw = random.Random(0)
    for data in (b"", b"\0" * 3, b"\xff" * 64, net[:40]):
        with pytest.raises(BundleError):
            tensor_names(data)
    for _ in range(300):
        broken = bytearray(net)
        for _ in range(draw.choice((1, 4, 30))):
            broken[draw.randrange(min(len(net), 4000))] = draw.randrange(256)
        try:
            if tensor_names(bytes(broken)):
                extend_net(bytes(broken), addition, {0: "x"})
        except BundleError as error:
            assert "damaged" in error.message
