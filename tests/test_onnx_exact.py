"""Exported models equal transformers, family by family: prompts, batches, decoding, inner values.

The checkpoints have peaky attention, so a wrong mask, rope or scale shows at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from exact import Pair, log_softmax
from mnnsmith.api import convert, export_onnx, prepare
from mnnsmith.verify.references.onnx_reference import open_onnx
from mnnsmith.verify.stored.checkpoint import stored_checkpoint
from onnx_runs import OnnxModel
from peaky import CASES, MIXTURES, make_checkpoint

pytestmark = [pytest.mark.reference]

ALL = {**CASES, **MIXTURES}
DECODE_STEPS = 8
# Longer than every window of the checkpoints.
LONG = 130
# Of the spread of logits, and in nats.  transformers' own float32 is 9.5e-5 off its float64 (qwen3,
# whose gains make attention sharp).
MAX_ERROR, MAX_KL = 2e-4, 3e-9


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices as small as these are multiplied faster by one thread than by several."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    return Pair(folder, make_checkpoint(ALL[request.param], folder))


def kl(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    p, q = log_softmax(expected), log_softmax(actual.astype(np.float64))
    return (np.exp(p) * (p - q)).sum(-1)


def assert_same(actual: np.ndarray, expected: np.ndarray, where: str) -> None:
    error = np.abs(actual - expected).max() / expected.std()
    worst = kl(expected, actual).max()
    assert error < MAX_ERROR and worst < MAX_KL, f"{where}: error {error:.3g}, KL {worst:.3g}"


def check_texts(path: Path, pair: Pair) -> None:
    """A long prompt; two texts of different lengths, then decoded together, one step at a time."""
    model = OnnxModel(path)
    ids = pair.prompt(LONG)
    assert_same(model.start([ids])[0], pair.logits(ids), "prompt")
    first, second = pair.prompt(60), pair.prompt(43)
    cut = {60: 60 - DECODE_STEPS, 43: 43 - DECODE_STEPS}
    logits = model.start([first[: cut[60]], second[: cut[43]]])
    assert_same(logits[0], pair.logits(first)[: cut[60]], "the longer text")
    assert_same(logits[1, -cut[43] :], pair.logits(second)[: cut[43]], "the padded text")
    for step in range(DECODE_STEPS):
        at = [cut[60] + step, cut[43] + step]
        logits = model.go_on([[first[at[0]]], [second[at[1]]]])
        assert_same(logits[0], pair.logits(first)[at[0]][None], f"step {step}")
        assert_same(logits[1], pair.logits(second)[at[1]][None], f"step {step}, padded")


@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_an_exported_model_equals_transformers(pair: Pair, tmp_path: Path) -> None:
    import onnx

    exported = export_onnx(pair.folder, tmp_path / "model.onnx")
    onnx.checker.check_model(str(exported.path), full_check=True)
    check_texts(exported.path, pair)


@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_inner_values_equal_those_of_transformers(pair: Pair) -> None:
    import torch

    ready = prepare(pair.folder, recipe="fp16")
    seen: dict[str, np.ndarray] = {}

    def watch(name: str) -> None:
        def hook(module: object, arguments: object, output: object) -> None:
            found = output[0] if isinstance(output, tuple) else output
            seen[name] = found.numpy()[0]

        handles.append(pair.model.get_submodule(modules[name]).register_forward_hook(hook))

    modules = {mark.value.name: mark.module for mark in ready.model.graph.landmarks}
    handles: list[torch.utils.hooks.RemovableHandle] = []
    for name in modules:
        watch(name)
    ids = pair.prompt(60)
    try:
        with torch.no_grad():
            pair.model(torch.tensor([ids]))
    finally:
        for handle in handles:
            handle.remove()
    windows = np.array([pair.prompt(61)[:60], ids])
    with open_onnx(ready.checkpoint, ready.model, threads=1) as reference:
        run = reference.run(windows, list(seen))
        assert_same(reference.logits(run.hidden[1]), pair.logits(ids), "logits")
    assert len(seen) == 3 * ready.model.layers
    for name, expected in seen.items():
        error = np.abs(run.values[name][1] - expected).max() / expected.std()
        assert error < 2 * MAX_ERROR, f"{name}: {error:.3g}"


LATENT = ["deepseek_v2", "deepseek_v3-yarn"]


@pytest.mark.parametrize("pair", LATENT, indirect=True)
def test_the_latent_form_equals_transformers(pair: Pair, tmp_path: Path) -> None:
    check_texts(export_onnx(pair.folder, tmp_path / "model.onnx", mla="latent").path, pair)


OPERATORS = ["gemma3_text", "deepseek_v3-yarn", "qwen2_moe"]


@pytest.mark.parametrize("opset", [13, 17, 23])
@pytest.mark.parametrize("pair", OPERATORS, indirect=True)
def test_every_operator_set_gives_the_same(pair: Pair, opset: int, tmp_path: Path) -> None:
    import onnx

    exported = export_onnx(pair.folder, tmp_path / "model.onnx", opset=opset, kv_cache=False)
    onnx.checker.check_model(str(exported.path), full_check=True)
    assert onnx.load(str(exported.path), load_external_data=False).opset_import[0].version == opset
    ids = pair.prompt(43)
    model = OnnxModel(exported.path)
    assert [i.name for i in model.session.get_outputs()] == ["logits"]
    assert_same(model.start([ids, ids[:20]])[0], pair.logits(ids), f"opset {opset}")


@pytest.mark.parametrize("pair", ["llama-tied", "gemma3_text", "qwen2_moe"], indirect=True)
def test_weights_stored_in_fp16_compute_as_in_float32(pair: Pair, tmp_path: Path) -> None:
    """The checkpoint is in fp16, so that nothing is lost."""
    whole = export_onnx(pair.folder, tmp_path / "whole.onnx")
    half = export_onnx(pair.folder, tmp_path / "half.onnx", dtype="fp16-weights")
    assert half.data.stat().st_size < 0.9 * whole.data.stat().st_size
    check_texts(half.path, pair)


HALF = ["llama-tied", "qwen3", "phi3", "deepseek_v3-yarn", "qwen2_moe"]


@pytest.mark.parametrize("pair", HALF, indirect=True)
def test_fp16_is_as_good_as_that_of_transformers(pair: Pair, tmp_path: Path) -> None:
    import torch
    import transformers

    exported = export_onnx(pair.folder, tmp_path / "model.onnx", dtype="fp16")
    ids = pair.prompt(LONG)
    expected = pair.logits(ids)
    model = OnnxModel(exported.path)
    found = kl(expected, model.start([ids])[0]).mean()
    halved = transformers.AutoModelForCausalLM.from_pretrained(pair.folder, dtype=torch.float16)
    with torch.no_grad():
        theirs = kl(expected, halved(torch.tensor([ids])).logits[0].float().numpy()).mean()
    assert 0 < found < 2 * theirs, f"KL {found:.3g}, transformers' {theirs:.3g}"
    # With the cache, whose element type is the model's.
    model.start([ids[:-1]])
    step = kl(expected[-1:], model.go_on([ids[-1:]])[0]).max()
    assert step < 100 * theirs


@pytest.mark.engine
def test_a_reference_with_the_weights_of_a_bundle(tmp_path: Path) -> None:
    """Head and embedding are one tensor in the original, and stored apart with different bits."""
    from exact import dequantized

    folder, recipe = tmp_path / "model", "w4g32-head8"
    pair = Pair(folder, make_checkpoint(CASES["llama-tied"], folder))
    bundle = convert(folder, tmp_path / "bundle", recipe=recipe)
    ready = prepare(folder, recipe=recipe)
    held = dequantized(pair, bundle.path, recipe, tmp_path / "held")
    ids = held.prompt(43)
    with open_onnx(stored_checkpoint(bundle, ready), ready.model, threads=1) as reference:
        logits = reference.logits(reference.run(np.array([ids])).hidden[0])
    assert_same(logits, held.logits(ids), "stored weights")
    assert kl(pair.logits(ids), logits).max() > 1e-4
