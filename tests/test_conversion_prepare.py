"""What is decided before any work: tokenizer, recipe, names; and what a conversion then records."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_checkpoint as tiny
from gguf_samples import llama_tensors, write_llama
from mnnsmith.api import convert, prepare
from mnnsmith.cli.convert import _say_unproved
from mnnsmith.conversion import convert as conversion
from mnnsmith.conversion import prove
from mnnsmith.conversion.structure import check_structure
from mnnsmith.errors import BundleError, ConversionError, SourceError, TokenizerError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny.write_checkpoint(tmp_path / "model")
    return tmp_path / "model"


def change(path: Path, **changes: Any) -> None:
    tiny.write_json(path, {**json.loads(path.read_text()), **changes})


def test_a_stop_id_beyond_the_tokenizer(model: Path) -> None:
    change(model / "config.json", eos_token_id=tiny.VOCAB + 3)
    with pytest.raises(TokenizerError, match=f"The id {tiny.VOCAB + 3} ends or starts texts"):
        prepare(model)


def test_a_tokenizer_part_that_cannot_be_expressed(model: Path) -> None:
    spec = json.loads((model / "tokenizer.json").read_text())
    change(model / "tokenizer.json", model={**spec["model"], "type": "Frobnicate"})
    with pytest.raises(TokenizerError, match="Frobnicate"):
        prepare(model)


@pytest.mark.engine
def test_a_folder_named_by_its_place(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model)
    bundle = convert(".", "../out", recipe="w8g32")
    assert bundle.manifest.data["source"]["name"] == "model"
    (model / "config.json").unlink()
    with pytest.raises(SourceError, match=r"model: there is no config.json"):
        prepare(".")


@pytest.mark.engine
def test_a_source_that_cannot_be_hashed_is_to_blame_itself(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> str:
        if path.parent == model:
            raise OSError(5, "Input/output error")
        return "0" * 64

    monkeypatch.setattr(conversion, "sha256_of", fail)
    with pytest.raises(SourceError, match=r"model/.*: cannot be read: Input/output error"):
        convert(model, tmp_path / "out", recipe="w8g32")
    assert not (tmp_path / "out").exists()


@pytest.mark.engine
def test_a_large_bundle_is_proved_by_its_structure(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(prove, "LOAD_LIMIT_BYTES", 1000)
    bundle = convert(model, tmp_path / "out", recipe="w8g32")
    proof = bundle.manifest.data["proof"]
    assert proof["loaded"] is False and "of weights" in proof["reason"]
    assert proof["structure"] == check_structure(bundle.path, tiny.VOCAB)
    _say_unproved(bundle)
    assert f"run `mnnsmith check {bundle.path} --load`" in capsys.readouterr().out
    weights = bundle.path / "llm.mnn.weight"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(BundleError, match="beyond"):
        check_structure(bundle.path, tiny.VOCAB)


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    """To open it would wait for ever."""
    os.mkfifo(tmp_path / "x.gguf")
    with pytest.raises(SourceError, match=r"there is no config.json"):
        prepare(tmp_path)


def test_weights_too_small_for_fp16_scales_name_the_remedy(model: Path, tmp_path: Path) -> None:
    tensors = tiny.make_tensors(tiny.make_config())
    name = "model.layers.0.mlp.up_proj.weight"
    tiny.write_checkpoint(model, tensors={**tensors, name: tensors[name] * 1e-6}, dtype="F32")
    with pytest.raises(ConversionError, match=name) as caught:
        convert(model, tmp_path / "out", recipe="w4g32")
    assert "w4g32-scale32" in str(caught.value)
    ready = prepare(model, recipe="w4g32-scale32")
    assert ready.plan.schemes() == {"w4g32-scale32": 9}


def test_keep_tells_which_floats_become_fp16(tmp_path: Path) -> None:
    """A GGUF file of F32 matrices loses the bits that fp16 lacks."""
    half = llama_tensors()["blk.0.ffn_up.weight"].astype(np.float16)
    write_llama(tmp_path / "m.gguf", tensors={"blk.0.ffn_up.weight": half})
    assert "14 x F32 stored as fp16" in prepare(tmp_path / "m.gguf").notes
