"""Stored weights against the original: sound bundles pass, each injected fault is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnnsmith.api import convert, open_bundle, prepare
from mnnsmith.conversion.plan import MatrixTask
from mnnsmith.conversion.prepare import Prepared
from mnnsmith.conversion.slots import matrix_rows
from mnnsmith.errors import BundleError
from mnnsmith.graph.weights import VectorSlot
from mnnsmith.mnn.weight_records import BlockEncoding, VectorRecord, pack_codes, pack_scales
from mnnsmith.quant.round_to_nearest import round_to_nearest
from mnnsmith.sources.checkpoint import read_whole
from mnnsmith.verify.checks.weights import check_weights
from mnnsmith.verify.context import Context
from mnnsmith.verify.references.transformers_reference import open_transformers
from mnnsmith.verify.results import Finding, Outcome, WeightFigures
from mnnsmith.verify.stored import weights as stored_weights
from mnnsmith.verify.stored.checkpoint import stored_checkpoint
from peaky import CASES, MIXTURES, make_checkpoint
from test_keep_exact import SCHEMES

pytestmark = [pytest.mark.engine, pytest.mark.reference]

SOUND = (
    ("llama-tied", "w4g32"), ("llama-tied", "w8"), ("llama-bias", "w4g64-head8"),
    ("llama", "fp16"), ("llama", "fp32"), ("qwen3", "w4g32-scale32"), ("phi3", "w8g32-sym"),
    ("gemma3_text", "w4g64-sym"), ("deepseek_v3-yarn", "w8g32-sym-latent"), ("mixtral", "w4"),
    ("qwen2_moe", "w4g32-sym"),
)  # fmt: skip


def checked(bundle: Path, ready: Prepared) -> Outcome[WeightFigures]:
    def unused(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights are compared without engine and reference")

    opened = open_bundle(bundle, whole=False)
    return check_weights(Context(opened, ready, "quick", unused, unused, threads=2))


def errors(outcome: Outcome[WeightFigures]) -> list[Finding]:
    return [finding for finding in outcome.findings if finding.severity == "error"]


@pytest.mark.parametrize(("name", "recipe"), SOUND)
def test_sound_bundles_pass(name: str, recipe: str, tmp_path: Path) -> None:
    make_checkpoint({**CASES, **MIXTURES}[name], tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "bundle", recipe=recipe)
    ready = prepare(tmp_path / "source", recipe=recipe)
    outcome = checked(tmp_path / "bundle", ready)
    assert not errors(outcome), outcome.findings
    found = {figure.operator: figure for figure in outcome.figures.matrices}
    assert found.keys() == {task.name for task in ready.plan.matrices}
    for figure in found.values():
        if recipe == "fp32":
            assert figure.error == 0 and figure.steps is None
        elif recipe == "fp16":
            assert figure.error == 0  # The checkpoint is fp16 itself.
        else:
            assert figure.steps is not None and 0.4 < figure.steps < 0.6
            assert 0.001 < figure.error < (0.02 if figure.scheme.startswith("w8") else 0.2)


@pytest.mark.parametrize("kind", SCHEMES)
def test_carried_blocks_are_exact(tmp_path: Path, kind: str) -> None:
    from gguf import GGMLQuantizationType as Type
    from gguf.quants import quantize

    from gguf_samples import llama_tensors, write_llama

    stored: dict[str, Any] = {
        name: values if values.ndim == 1 else (kind, quantize(values, Type[kind]))
        for name, values in llama_tensors(seed=3).items()
    }
    stored = {name: value for name, value in stored.items() if isinstance(value, tuple)}
    write_llama(tmp_path / "m.gguf", tensors=stored)
    convert(tmp_path / "m.gguf", tmp_path / "out", recipe="keep")
    ready = prepare(tmp_path / "m.gguf", recipe="keep")
    outcome = checked(tmp_path / "out", ready)
    assert not errors(outcome), outcome.findings
    assert all(figure.error < 1e-6 for figure in outcome.figures.matrices)
    # One code of one block, by one step.
    task = ready.plan.matrices[3]
    patch(tmp_path / "out", task.record.codes_offset + 5, lambda data: data ^ 1, 1)
    (finding,) = errors(checked(tmp_path / "out", ready))
    assert finding.where == task.name and "1 of" in finding.message


def patch(bundle: Path, offset: int, change: Callable[[np.ndarray], np.ndarray], size: int) -> None:
    """Change bytes of the weight file in place."""
    with open(bundle / "llm.mnn.weight", "r+b") as file:
        file.seek(offset)
        data = np.frombuffer(file.read(size), dtype=np.uint8)
        file.seek(offset)
        file.write(change(data).astype(np.uint8).tobytes())


def swap_rows(bundle: Path, task: MatrixTask, first: int, second: int) -> None:
    """Exchange two rows of a matrix, codes and scales."""
    record = task.record
    for start, size in (
        (record.codes_offset, record.codes_row_bytes()),
        (record.scales_offset, record.scales_row_bytes()),
    ):
        data = (bundle / "llm.mnn.weight").read_bytes()
        one, two = (data[start + r * size : start + (r + 1) * size] for r in (first, second))
        patch(bundle, start + first * size, lambda _, two=two: np.frombuffer(two, np.uint8), size)
        patch(bundle, start + second * size, lambda _, one=one: np.frombuffer(one, np.uint8), size)


RECIPE = "w8g32"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with norms in the rope and a router, and its bundle."""
    folder = tmp_path_factory.mktemp("faults")
    make_checkpoint(MIXTURES["qwen3_moe"], folder / "source")
    convert(folder / "source", folder / "bundle", recipe=RECIPE)
    return folder / "source", folder / "bundle"


@pytest.fixture
def sound(made: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Prepared]:
    """A copy of the bundle, to be damaged."""
    source, bundle = made
    shutil.copytree(bundle, tmp_path / "bundle")
    return tmp_path / "bundle", prepare(source, recipe=RECIPE)


def task_of(ready: Prepared, name: str) -> MatrixTask:
    return next(task for task in ready.plan.matrices if task.name == name)


@pytest.mark.parametrize("name", ["layer1/attention/o", "layer2/mlp/expert3/down", "lm_head"])
def test_two_rows_swapped(sound: tuple[Path, Prepared], name: str) -> None:
    bundle, ready = sound
    swap_rows(bundle, task_of(ready, name), 5, 17)
    (finding,) = errors(checked(bundle, ready))
    assert finding.where == name
    assert task_of(ready, name).slot.tensor in finding.message
    assert "2 of" in finding.message and "row 5 holds row 17" in finding.message


def test_one_value_two_steps_off(sound: tuple[Path, Prepared]) -> None:
    bundle, ready = sound
    task = task_of(ready, "layer0/mlp/gate")
    offset = task.record.codes_offset + 7 * task.record.codes_row_bytes() + 11
    patch(bundle, offset, lambda data: np.where(data < 128, data + 2, data - 2), 1)
    (finding,) = errors(checked(bundle, ready))
    assert finding.where == "layer0/mlp/gate"
    assert "1 of 192 rows" in finding.message and "the first is row 7" in finding.message


@pytest.mark.parametrize("recipe", ["w4g32", "w4g32-sym", "w8g32-scale32"])
def test_a_scale_wider_than_the_row_needs(recipe: str, tmp_path: Path) -> None:
    """Every weight is within half of a step, but the steps are those of fewer bits."""
    make_checkpoint(CASES["llama"], tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "bundle", recipe=recipe)
    ready = prepare(tmp_path / "source", recipe=recipe)
    task = task_of(ready, "layer1/mlp/up")
    record, encoding = task.record, task.record.encoding
    assert isinstance(encoding, BlockEncoding)
    weights = matrix_rows(task.slot, task.tensor, 0, record.rows)
    # Weights five times as large as they are at the ends of each block give scales as much wider.
    stretched = 5 * weights
    wide = round_to_nearest(
        stretched.copy(), bits=encoding.bits, block=encoding.block, symmetric=encoding.symmetric,
        scale_bits=encoding.scale_bits,
    )  # fmt: skip
    half = 1 << (encoding.bits - 1)
    blocks = weights.reshape(record.rows, -1, encoding.block)
    zero = 0 if wide.zero is None else wide.zero[..., None]
    codes = np.rint((blocks - zero) / wide.scale[..., None]) + half
    codes = codes.clip(0, 2 * half - 1).astype(np.uint8).reshape(weights.shape)
    for offset, data in (
        (record.codes_offset, pack_codes(codes, encoding.bits)),
        (record.scales_offset, pack_scales(wide.scale, wide.zero, encoding.scale_bits)),
    ):
        raw = np.frombuffer(data.tobytes(), np.uint8)
        patch(tmp_path / "bundle", offset, lambda _, raw=raw: raw, raw.size)
    (finding,) = errors(checked(tmp_path / "bundle", ready))
    assert finding.where == "layer1/mlp/up" and "192 of 192 rows" in finding.message
    assert "times what the row needs" in finding.message
    times = float(finding.message.split(" is ")[-1].split()[0])
    assert 4.99 < times < 5.01


def test_a_scale_that_is_no_number(sound: tuple[Path, Prepared]) -> None:
    bundle, ready = sound
    patch(bundle, task_of(ready, "layer0/mlp/up").record.scales_offset, lambda d: d * 0 + 255, 4)
    outcome = checked(bundle, ready)
    (finding,) = errors(outcome)
    assert finding.where == "layer0/mlp/up" and "the first is row 0" in finding.message
    assert all(np.isfinite([m.error, m.steps]).all() for m in outcome.figures.matrices)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (("layer1/mlp_norm", "gain"), "gain (model.layers.1.post_attention_layernorm.weight)"),
        (("layer1/mlp/router/weight", "values"), "values (model.layers.1.mlp.gate.weight)"),
        (("rope/table/cos_low", "values"), "values (computed)"),
    ],
)
def test_a_vector_changed(sound: tuple[Path, Prepared], key: tuple[str, str], text: str) -> None:
    bundle, ready = sound
    record = ready.plan.records[key]
    assert isinstance(record, VectorRecord)
    patch(bundle, record.offset + 4 * 9, lambda data: data ^ 1, 1)
    (finding,) = errors(checked(bundle, ready))
    assert finding.where == key[0] and text in finding.message
    assert "1 of" in finding.message and "number 9" in finding.message


def test_a_gain_within_the_graph_changed(sound: tuple[Path, Prepared], tmp_path: Path) -> None:
    from mnnsmith.engine.converter import graph_json_to_mnn, mnn_to_graph_json

    bundle, ready = sound
    graph = mnn_to_graph_json(bundle / "llm.mnn")
    rope = next(op for op in graph["oplists"] if op["name"] == "layer1/attention/rope")
    rope["main"]["k_norm"]["gamma"][4] += 3e-6
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    graph_json_to_mnn(tmp_path / "graph.json", bundle / "llm.mnn")
    (finding,) = errors(checked(bundle, ready))
    assert finding.where == "layer1/attention/rope"
    assert "k_gain" in finding.message and "number 4" in finding.message


def test_an_operator_missing(sound: tuple[Path, Prepared], tmp_path: Path) -> None:
    from mnnsmith.engine.converter import graph_json_to_mnn, mnn_to_graph_json

    bundle, ready = sound
    graph = mnn_to_graph_json(bundle / "llm.mnn")
    operator = next(op for op in graph["oplists"] if op["name"] == "layer0/mlp/gate")
    operator["name"] = "other"
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    graph_json_to_mnn(tmp_path / "graph.json", bundle / "llm.mnn")
    assert {finding.where for finding in errors(checked(bundle, ready))} == {
        "layer0/mlp/gate", "other",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        # The engine would take the pairs for twice as many scales without zero points.
        ({"quant_block": 16}, "embedding"),
        ({"quant_block": 48}, "llm_config.json: tie_embeddings"),
        ({"alpha_size": 4000}, "llm_config.json: tie_embeddings"),
    ],
)
def test_an_embedding_recorded_wrongly(
    sound: tuple[Path, Prepared], fields: dict[str, int], where: str
) -> None:
    bundle, ready = sound
    config = json.loads((bundle / "llm_config.json").read_text())
    config["tie_embeddings"] |= fields
    (bundle / "llm_config.json").write_text(json.dumps(config))
    assert where in {finding.where for finding in errors(checked(bundle, ready))}


def test_an_embedding_of_a_tied_model_recorded_wrongly(tmp_path: Path) -> None:
    make_checkpoint(CASES["llama-tied"], tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "bundle", recipe=RECIPE)
    ready = prepare(tmp_path / "source", recipe=RECIPE)
    file = tmp_path / "bundle" / "llm_config.json"
    config = json.loads(file.read_text())
    # A row of codes, and one of scales, too early.
    config["tie_embeddings"]["weight_offset"] -= 128
    config["tie_embeddings"]["alpha_offset"] -= 16
    file.write_text(json.dumps(config))
    found = [f for f in errors(checked(tmp_path / "bundle", ready)) if f.where == "embedding"]
    assert len(found) == 1 and "model.embed_tokens.weight" in found[0].message
    assert "row 1 holds row 0, row 2 holds row 1" in found[0].message


def test_a_layer_at_too_few_bits(tmp_path: Path) -> None:
    make_checkpoint(CASES["llama"], tmp_path / "source")
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({
        "name": "few", "default": "w8g32", "rules": [{"layers": [1, 1], "scheme": "w4g32"}],
    }))  # fmt: skip
    convert(tmp_path / "source", tmp_path / "bundle", recipe=recipe)
    found = errors(checked(tmp_path / "bundle", prepare(tmp_path / "source", recipe="w8g32")))
    assert len(found) == 7 and all(finding.where.startswith("layer1/") for finding in found)
    assert "stored as w4g32; the recipe asks for w8g32" in found[0].message
    # More bits than asked for are worth a word, no more.
    outcome = checked(tmp_path / "bundle", prepare(tmp_path / "source", recipe="w4g32"))
    assert not errors(outcome)
    assert any(finding.severity == "warning" for finding in outcome.findings)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, 65504.0])
def test_scales_that_are_no_numbers(sound: tuple[Path, Prepared], scale: float) -> None:
    """They are found, and numpy has nothing to warn of (warnings are errors here)."""
    bundle, ready = sound
    task = ready.plan.matrices[1]
    value = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    patch(bundle, task.record.scales_offset + 2, lambda _: value, 2)
    (finding,) = errors(checked(bundle, ready))
    assert finding.where == task.name and "1 of" in finding.message


def test_the_reference_says_that_the_bundle_is_damaged(sound: tuple[Path, Prepared]) -> None:
    bundle, ready = sound
    value = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    patch(bundle, ready.plan.matrices[1].record.scales_offset + 2, lambda _: value, 2)
    stored = stored_checkpoint(open_bundle(bundle, whole=False), ready)
    for streamed in (False, True):
        with (
            pytest.raises(BundleError, match="the bundle holds values that are not finite"),
            open_transformers(stored, ready.model, streamed=streamed, threads=1) as reference,
        ):
            reference.run(np.array([[5, 6, 7]]))


@pytest.mark.parametrize("word", [b"\x00\x00\xc0\x7f", b"\x01\x00\x80\x7f", b"\x00\x00\x80\xff"])
def test_gains_that_are_no_numbers(sound: tuple[Path, Prepared], word: bytes) -> None:
    bundle, ready = sound
    task = next(task for task in ready.plan.vectors if isinstance(task.slot, VectorSlot))
    assert isinstance(task.slot, VectorSlot)
    patch(bundle, task.record.offset, lambda _: np.frombuffer(word, np.uint8), 4)
    (finding,) = errors(checked(bundle, ready))
    assert task.slot.tensor in finding.message and "1 of" in finding.message
    stored = stored_checkpoint(open_bundle(bundle, whole=False), ready)
    assert not np.isfinite(read_whole(stored.tensors[task.slot.tensor])).all()


def test_a_bias_that_the_model_does_not_have(
    sound: tuple[Path, Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, ready = sound
    graph = stored_weights.mnn_to_graph_json(bundle / "llm.mnn")
    task = ready.plan.matrices[1]
    (operator,) = (op for op in graph["oplists"] if op["name"] == task.name)
    operator["main"]["external"][3] = 4 * task.slot.rows
    monkeypatch.setattr(stored_weights, "mnn_to_graph_json", lambda path: graph)
    (finding,) = errors(checked(bundle, ready))
    assert finding.where == task.name and "one is stored where the bias is None" in finding.message
