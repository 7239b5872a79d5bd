"""The reference in its three ways: by transformers' own reader, filled by us, and streamed."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from exact import prompt
from mnnsmith.api import Engine, convert, prepare
from mnnsmith.conversion.prepare import Prepared
from mnnsmith.errors import (
    EngineError,
    MissingResourceError,
    SourceError,
    UnsupportedError,
    UsageError,
)
from mnnsmith.verify.checks.probe import Probe, readable
from mnnsmith.verify.references import transformers_reference
from mnnsmith.verify.references.transformers_reference import open_transformers
from mnnsmith.verify.stored.checkpoint import stored_checkpoint
from peaky import CASES, MIXTURES, load_reference, make_checkpoint
from routing_probe import routing_is_decisive
from test_deepseek_checkpoints import to_fp8

pytestmark = [pytest.mark.reference]

ALL = {**CASES, **MIXTURES}
QUICK = (
    "llama-tied", "llama-llama3-hub", "mistral-window", "phi3-longrope-hub", "gemma3_text-hub",
    "deepseek_v2-yarn", "deepseek_v3-hub", "mixtral-hub", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
IDS = np.array([prompt(60, seed) for seed in range(3)])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: more threads only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    assert torch.get_num_threads() == 1, "a reference leaves the number of threads as it was"
    torch.set_num_threads(before)


def plain(model: Any, ids: np.ndarray, modules: dict[str, str]) -> tuple[np.ndarray, dict]:
    """Logits of transformers itself, window after window, and what these modules give."""
    import torch

    kept: dict[str, list[np.ndarray]] = {name: [] for name in modules}
    named = dict(model.named_modules())
    handles = []
    for name, module in modules.items():

        def hook(_: Any, __: Any, output: Any, name: str = name) -> None:
            kept[name].append((output[0] if isinstance(output, tuple) else output).numpy().copy())

        handles.append(named[module].register_forward_hook(hook))
    with torch.no_grad():
        logits = np.concatenate([model(torch.from_numpy(row[None])).logits.numpy() for row in ids])
    for handle in handles:
        handle.remove()
    return logits, {name: np.concatenate(parts) for name, parts in kept.items()}


def assert_close(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    error = np.abs(found.astype(np.float64) - expected).max() / expected.std()
    assert found.dtype == np.float32 and error < 2e-4, f"{what}: {error:.3g} of the spread"


def ours(ready: Prepared) -> Prepared:
    """The same with tensors that transformers' reader is not offered."""
    return replace(ready, checkpoint=replace(ready.checkpoint, files=()))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ALL]
)
def test_every_way_equals_transformers(name: str, tmp_path: Path) -> None:
    model = make_checkpoint(ALL[name], tmp_path)
    ready = prepare(tmp_path, recipe="fp16")
    marks = {mark.value.name: mark.module for mark in ready.model.graph.landmarks}
    logits, values = plain(model, IDS, marks)
    names = set()
    for source, streamed in ((ready, False), (ours(ready), False), (ours(ready), True)):
        opened = open_transformers(source.checkpoint, source.model, streamed=streamed, threads=1)
        with opened as reference:
            names.add(reference.name)
            assert set(marks) <= set(reference.available())
            run = reference.run(IDS, list(marks))
            flat = reference.logits(run.hidden.reshape(-1, run.hidden.shape[-1]))
            assert_close(flat.reshape(logits.shape), logits, f"{reference.name}: logits")
            for value, expected in values.items():
                assert_close(run.values[value], expected, f"{reference.name}: {value}")
            sure = [routing_is_decisive(model, row.tolist()) for row in IDS]
            found = reference.decisive(IDS)
            assert found.shape == (3,) and found.dtype == np.bool_
            if all(sure):
                assert found.all()
            # Streamed weights are read anew; nothing of the first run is left.
            again = reference.run(IDS[:1, :17])
            assert_close(again.hidden, run.hidden[:1, :17], f"{reference.name}: again")
    assert len(names) == 3


INNER = (
    ("llama-tied", "w4g32-embed8"),
    ("llama-bias", "w4g32"),
    ("phi3-longrope", "w8g64"),
    ("gemma3_text", "w8g32-sym"),
    ("qwen2_moe", "w4g32-sym"),
    ("mixtral", "w8g32"),
    ("deepseek_v2-grouped", "w4g32-head8"),
    ("deepseek_v3-yarn", "w8g32-sym-latent"),
)


@pytest.mark.engine
@pytest.mark.parametrize(("name", "recipe"), INNER)
def test_inner_values_are_those_of_the_engine(name: str, recipe: str, tmp_path: Path) -> None:
    """Every value that the reference offers, with the weights that the bundle stores."""
    model = make_checkpoint(ALL[name], tmp_path / "source")
    bundle = convert(tmp_path / "source", tmp_path / "bundle", recipe=recipe)
    ready = prepare(tmp_path / "source", recipe=recipe)
    stored = stored_checkpoint(bundle, ready)
    drawn = (prompt(60, seed) for seed in range(40))
    ids = next(row for row in drawn if routing_is_decisive(model, row))
    with open_transformers(stored, ready.model, streamed=True, threads=1) as reference:
        names = [v.name for v in readable(ready.model.graph) if v.name in reference.available()]
        assert set(names) == set(reference.available())
        assert reference.decisive(np.array([ids])).all()
        run = reference.run(np.array([ids]), names)
        logits = reference.logits(run.hidden[0])
    with engine_at_high(bundle.path) as engine:
        assert_close(engine.forward(ids, all_positions=True), logits, "logits")
    with Probe(bundle, ready.model.graph, names, engine_at_high) as probe:
        found = probe.run(ids)
    for value in names:
        assert_close(found[value], run.values[value][0], value)
    kinds = Counter(node.kind for node in ready.model.graph.nodes)
    # Of every linear layer but the head the output or, in latent attention, at least o's input.
    latent = recipe.endswith("latent")
    assert len(names) > (kinds["linear"] - 1 if not latent else 8 * ready.model.layers)


def engine_at_high(folder: Path, **options: Any) -> Engine:
    return Engine(folder, memory="high", precision="high", **options)


@pytest.mark.parametrize("streamed", [False, True])
def test_windows_in_batches(
    streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for two windows at a time all is the same, routers and inner values included."""
    make_checkpoint(ALL["qwen2_moe"], tmp_path)
    ready = prepare(tmp_path, recipe="fp16")
    ids = np.array([prompt(33, seed) for seed in range(5)])
    opened = open_transformers(ready.checkpoint, ready.model, streamed=streamed, threads=1)
    with opened as reference:
        names = list(reference.available())
        expected, sure = reference.run(ids, names), reference.decisive(ids)
        sizes: list[int] = []
        floats = transformers_reference._floats_per_token(ready.model, 33)
        monkeypatch.setattr(transformers_reference, "_ACTIVATIONS_BYTES", 2 * 33 * 4 * floats)
        layer = reference._torch_model.base_model.layers[0]
        handle = layer.self_attn.register_forward_pre_hook(
            lambda _, __, named: sizes.append(len(named["hidden_states"])), with_kwargs=True
        )
        found = reference.run(ids, names)
        handle.remove()
        assert sizes == [2, 2, 1]
        np.testing.assert_array_equal(reference.decisive(ids), sure)
        assert_close(found.hidden, expected.hidden, "hidden")
        for name in names:
            assert_close(found.values[name], expected.values[name], name)


def test_frequencies_are_exact_and_blocks_are_emptied(tmp_path: Path) -> None:
    """What is computed from the config equals transformers' own to the last bit."""
    model = make_checkpoint(ALL["llama-llama3-hub"], tmp_path)
    ready = prepare(tmp_path, recipe="fp16")
    with open_transformers(ready.checkpoint, ready.model, streamed=True, threads=1) as reference:
        reference.run(IDS)
        own = reference._torch_model
        expected = dict(model.named_buffers())
        for name, buffer in own.named_buffers():
            assert buffer.dtype == expected[name].dtype and buffer.equal(expected[name]), name
        assert {p.device.type for p in own.base_model.layers.parameters()} == {"meta"}
        assert reference._streaming._buffers == {}


def test_a_gguf_file(smollm2_gguf: Path) -> None:
    """Blocks, rows reordered for rope, a tied head: it goes on as people would."""
    ready = prepare(smollm2_gguf)
    text = "The capital of France is Paris. The capital of Germany is"
    tokenizer = Tokenizer.from_str(ready.checkpoint.tokenizer.tokenizer_json)
    ids = np.array([tokenizer.encode(text).ids])
    with open_transformers(ready.checkpoint, ready.model, streamed=True, threads=2) as reference:
        best = int(reference.logits(reference.run(ids).hidden[0, -1:]).argmax())
    assert tokenizer.decode([best]).strip() == "Berlin"


def test_fp8_weights(tmp_path: Path) -> None:
    """Scaled as our tensors say; transformers would want a GPU for them."""
    import torch
    from safetensors.torch import load_file, save_file

    make_checkpoint(ALL["qwen3"], tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    floats, packed = {}, {}
    for name, value in tensors.items():
        if name.endswith("_proj.weight"):
            code, scale, back = to_fp8(value.float())
            packed |= {name: code, f"{name}_scale_inv": scale}
            floats[name] = back
        else:
            floats[name] = packed[name] = value.float()
    shutil.copytree(tmp_path / "source", tmp_path / "fp8")
    save_file(packed, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    save_file(floats, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    }  # fmt: skip
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    ready = prepare(tmp_path / "fp8", recipe="fp32")
    with open_transformers(ready.checkpoint, ready.model, streamed=False, threads=1) as reference:
        found = reference.logits(reference.run(IDS[:1]).hidden[0])
    with torch.no_grad():
        expected = load_reference(tmp_path / "source")(torch.from_numpy(IDS[:1])).logits[0]
    assert_close(found, expected.numpy(), "logits")


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    make_checkpoint(ALL["llama"], tmp_path)
    ready = prepare(tmp_path, recipe="fp16")
    checkpoint = ready.checkpoint
    with open_transformers(checkpoint, ready.model, threads=1) as reference:
        with pytest.raises(UsageError, match="no value 'layer9'"):
            reference.run(IDS, ["layer9"])
        with pytest.raises(UsageError, match=r"ids 0 to 384 are outside of a vocabulary of 384"):
            reference.run(np.array([[0, 384]]))
        with pytest.raises(UsageError, match=r"\[windows, n\], found \[3\]"):
            reference.run(np.array([1, 2, 3]))
    unknown = replace(checkpoint, files=(), config={**checkpoint.config, "hidden_act": "nothing"})
    with pytest.raises(UnsupportedError, match=r"does not build llama.*nothing"):
        open_transformers(unknown, ready.model, threads=1)
    tensors = dict(checkpoint.tensors)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    lacking = replace(checkpoint, files=(), tensors=tensors)
    with pytest.raises(SourceError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        open_transformers(lacking, ready.model, threads=1)
    wider = replace(checkpoint, files=(), config={**checkpoint.config, "intermediate_size": 160})
    with pytest.raises(SourceError, match=r"\[192, 128\]; transformers needs \[160, 128\]"):
        open_transformers(wider, ready.model, threads=1)


def test_an_original_that_gives_no_numbers(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    make_checkpoint(ALL["llama"], tmp_path, dtype="float32")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for part in ("up", "down"):
        tensors[f"model.layers.1.mlp.{part}_proj.weight"][:] *= np.float32(1e25)
    save_file(tensors, file, metadata={"format": "pt"})
    ready = prepare(tmp_path, recipe="fp32")
    opened = open_transformers(ready.checkpoint, ready.model, threads=1)
    with opened as reference, pytest.raises(SourceError, match=r"not finite for 180 of 180 tokens"):
        reference.run(IDS)


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), MemoryError()])
def test_too_little_memory(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    make_checkpoint(ALL["llama"], tmp_path)
    ready = prepare(tmp_path, recipe="fp16")
    with open_transformers(ready.checkpoint, ready.model, threads=1) as reference:
        monkeypatch.setattr(type(reference), "_hidden", fails)
        with pytest.raises(EngineError, match=r"memory|MemoryError") as found:
            reference.run(IDS)
    assert "memory is short" in str(found.value.hint)


def test_routers_that_are_not_found_are_no_sure_ones(tmp_path: Path) -> None:
    make_checkpoint(ALL["qwen3_moe"], tmp_path)
    ready = prepare(tmp_path, recipe="fp16")
    with open_transformers(ready.checkpoint, ready.model, threads=1) as reference:
        assert reference.decisive(IDS).shape == (3,)
        for name, module in list(reference._torch_model.named_modules()):
            if name.endswith(".mlp") and hasattr(module, "experts"):
                module.router = module.gate
                del module.gate
        with pytest.raises(UnsupportedError, match="no module is named"):
            reference.decisive(IDS[:, ::-1])


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(ALL["llama"], tmp_path)
    ready = prepare(tmp_path, recipe="fp16")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingResourceError, match=r"pip install 'mnnsmith\[reference\]'"):
        open_transformers(ready.checkpoint, ready.model)
