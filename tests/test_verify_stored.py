"""Weights of a bundle as verification reads them, against the independent decoder of the tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import weight_oracle
from mnnsmith.api import convert, open_bundle, prepare
from mnnsmith.errors import BundleError
from mnnsmith.graph.weights import MatrixSlot
from mnnsmith.sources.checkpoint import Checkpoint, read_whole
from mnnsmith.verify.stored.checkpoint import stored_checkpoint
from peaky import CASES, MIXTURES, make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.reference]

COMBINATIONS = (
    ("llama-tied", "w4g64-head8"),
    ("llama-bias", "fp16"),
    ("qwen3", "w8g32-sym"),
    ("gemma3_text", "w4g32-scale32"),
    ("phi3", "w4g64-sym"),
    ("mixtral", "w8"),
    ("deepseek_v3-yarn", "w8g32-sym-latent"),
    ("deepseek_v2-grouped", "w4g32-head8"),
)


def make(name: str, recipe: str, folder: Path) -> tuple[Path, Path]:
    """A checkpoint and its bundle."""
    make_checkpoint({**CASES, **MIXTURES}[name], folder / "source")
    convert(folder / "source", folder / "bundle", recipe=recipe)
    return folder / "source", folder / "bundle"


def read(source: Path, bundle: Path, recipe: str) -> Checkpoint:
    return stored_checkpoint(open_bundle(bundle), prepare(source, recipe=recipe))


@pytest.mark.parametrize(("name", "recipe"), COMBINATIONS)
def test_equals_the_independent_decoder(name: str, recipe: str, tmp_path: Path) -> None:
    source, bundle = make(name, recipe, tmp_path)
    ready = prepare(source, recipe=recipe)
    stored = read(source, bundle, recipe)
    expected = {n: read_whole(t) for n, t in ready.checkpoint.tensors.items()}
    for tensor in expected.values():
        if tensor.ndim == 2 and len(tensor) > 8:
            tensor[:] = np.nan
    decoded = weight_oracle.matrices(bundle)
    for node in ready.model.graph.all_nodes():
        slot = node.slots.get("weight")
        if isinstance(slot, MatrixSlot):
            values = decoded[node.name]
            expected[slot.tensor][slot.source_rows()] = values.T if slot.transposed else values
    expected[ready.model.embedding.tensor][:] = decoded["embedding"]
    for tensor_name, values in expected.items():
        if values.ndim == 2 and np.isnan(values).any():
            # A router: it is no matrix of the graph, but a constant in float32.
            values = read_whole(ready.checkpoint.tensors[tensor_name])
        found = read_whole(stored.tensors[tensor_name])
        # Gemma's gains are stored with one added, and rounded so.
        atol = 2**-23 if values.ndim == 1 and name.startswith("gemma") else 0
        np.testing.assert_allclose(found, values, rtol=0, atol=atol, err_msg=tensor_name)
        half = len(values) // 2
        np.testing.assert_array_equal(
            stored.tensors[tensor_name].rows(half, len(values)), found[half:]
        )


def test_a_tied_head_that_is_stored_apart_becomes_a_tensor(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({
        "name": "apart", "default": "w8g32",
        "rules": [{"role": "embedding", "scheme": "w4g32"}],
    }))  # fmt: skip
    make_checkpoint(CASES["llama-tied"], tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "bundle", recipe=recipe)
    stored = read(tmp_path / "source", tmp_path / "bundle", str(recipe))
    assert stored.config["tie_word_embeddings"] is False
    decoded = weight_oracle.matrices(tmp_path / "bundle")
    for tensor, part in (("model.embed_tokens.weight", "embedding"), ("lm_head.weight", "lm_head")):
        np.testing.assert_array_equal(read_whole(stored.tensors[tensor]), decoded[part])
    assert np.abs(decoded["embedding"] - decoded["lm_head"]).max() > 1e-3


def test_a_shared_head_stays_tied(tmp_path: Path) -> None:
    source, bundle = make("llama-tied", "w4g64-head8", tmp_path)
    assert "lm_head.weight" not in read(source, bundle, "w4g64-head8").tensors


def change_embedding(bundle: Path, **fields: int | str) -> None:
    file = bundle / "llm_config.json"
    config = json.loads(file.read_text())
    config["tie_embeddings"] |= fields
    file.write_text(json.dumps(config))


WRONG = (
    ({"quant_block": 48}, "do not divide"),
    ({"quant_block": 32}, "alpha_size"),
    ({"alpha_size": 1000}, "alpha_size"),
    ({"alpha_dtype": "fp32"}, "alpha_size"),
    ({"quant_bit": 4}, "rows between codes and scales"),
    ({"quant_bit": 5}, "5 bits"),
    ({"weight_offset": -1}, "weight_offset"),
    ({"alpha_offset": 1 << 40}, "rows between"),
    ({"alpha_dtype": 16}, "alpha_dtype"),
)


def test_an_embedding_recorded_wrongly_is_named(tmp_path: Path) -> None:
    source, bundle = make("qwen2", "w8g64-sym", tmp_path)
    ready = prepare(source, recipe="w8g64-sym")
    original = (bundle / "llm_config.json").read_text()
    for fields, message in WRONG:
        (bundle / "llm_config.json").write_text(original)
        change_embedding(bundle, **fields)
        with pytest.raises(BundleError, match="tie_embeddings") as caught:
            stored_checkpoint(open_bundle(bundle, whole=False), ready)
        assert message in caught.value.message, fields


def test_a_bundle_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    _, bundle = make("llama", "w8g32", tmp_path)
    make_checkpoint(CASES["llama-bias"], tmp_path / "other")
    with pytest.raises(BundleError, match=r"layer0/attention/q.*bias"):
        read(tmp_path / "other", bundle, "w8g32")
    shutil.rmtree(tmp_path / "other")
    make_checkpoint(CASES["llama-headdim"], tmp_path / "other")
    with pytest.raises(BundleError, match=r"layer0/attention/q: is a matrix of \[128, 128\]"):
        read(tmp_path / "other", bundle, "w8g32")
