"""Fused experts are those of a checkpoint with a tensor for each expert, byte for byte."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exact import MAX_ERROR, Pair, assert_same
from mnnsmith.api import Engine, convert, prepare
from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.sources.experts import split_experts
from mnnsmith.sources.safetensors import open_safetensors
from peaky import MIXTURES, make_checkpoint

FUSED = ("deepseek_v2-grouped", "deepseek_v3", "qwen2_moe", "qwen3_moe", "mixtral")


def write_experts(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)
    tensors = {
        "a.experts.gate_up_proj": random.normal(size=(3, 8, 5)).astype(np.float16),
        "a.experts.down_proj": random.normal(size=(3, 5, 4)).astype(np.float16),
        "a.gate.weight": random.normal(size=(3, 5)).astype(np.float32),
    }
    save_file(tensors, path)
    return tensors


def test_parts_are_the_rows_of_the_fused_tensor(tmp_path: Path) -> None:
    stored = write_experts(tmp_path / "x.safetensors")
    split = split_experts(open_safetensors(tmp_path / "x.safetensors"), "here")
    parts = ("gate_proj", "up_proj", "down_proj")
    names = {f"a.experts.{i}.{part}.weight" for i in range(3) for part in parts}
    assert set(split) == names | {"a.gate.weight"}
    for i in range(3):
        gate_up, down = (stored[f"a.experts.{part}"][i] for part in ("gate_up_proj", "down_proj"))
        for part, expected in zip(parts, (gate_up[:4], gate_up[4:], down), strict=True):
            tensor = split[f"a.experts.{i}.{part}.weight"]
            assert tensor.name == f"a.experts.{i}.{part}.weight"
            assert (tensor.shape, tensor.nbytes) == (expected.shape, expected.nbytes)
            for start, stop in ((0, len(expected)), (1, 3), (2, 2)):
                np.testing.assert_array_equal(tensor.rows(start, stop), expected[start:stop])
            with pytest.raises(SourceError, match="do not exist"):
                tensor.rows(0, len(expected) + 1)


def test_what_is_not_fused_stays(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    flat = {
        "a.experts.down_proj": np.zeros((4, 5), np.float16),
        "a.experts.0.down_proj.weight": np.zeros((4, 5), np.float16),
        "a.experts.down_proj_bias": np.zeros((3, 4, 5), np.float16),
    }
    save_file(flat, tmp_path / "x.safetensors")
    assert set(split_experts(open_safetensors(tmp_path / "x.safetensors"), "here")) == set(flat)


def test_odd_rows_cannot_be_gate_and_up(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a.experts.gate_up_proj": np.zeros((2, 7, 3), np.float16)}, tmp_path / "x")
    with pytest.raises(SourceError, match="cannot hold a gate and an up part"):
        split_experts(open_safetensors(tmp_path / "x"), "here")


def test_a_fused_tensor_beside_its_parts_is_an_error(tmp_path: Path) -> None:
    """Which of the two is meant nobody can know."""
    from safetensors.numpy import save_file

    both = {
        "a.experts.down_proj": np.zeros((2, 4, 3), np.float16),
        "a.experts.1.down_proj.weight": np.ones((4, 3), np.float16),
    }
    for names in (list(both), list(both)[::-1]):
        save_file({name: both[name] for name in names}, tmp_path / "x")
        with pytest.raises(SourceError, match=r"a\.experts\.1\.down_proj\.weight"):
            split_experts(open_safetensors(tmp_path / "x"), "here")


@pytest.fixture(scope="module")
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as `separate` and as `fused`."""
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(MIXTURES[request.param], root / "separate")
    shutil.copytree(root / "separate", root / "fused")
    tensors = {name: t.half().contiguous() for name, t in model.state_dict().items()}
    fused = [name for name, t in tensors.items() if t.ndim == 3]
    assert fused and all(name.endswith((".gate_up_proj", ".down_proj")) for name in fused)
    save_file(tensors, root / "fused" / "model.safetensors", metadata={"format": "pt"})
    return root


@pytest.mark.engine
@pytest.mark.reference
@pytest.mark.parametrize("recipe", ["fp16", "w4g32-head8"])
@pytest.mark.parametrize("checkpoints", FUSED, indirect=True)
def test_fused_and_separate_experts_give_the_same_bundle(
    checkpoints: Path, recipe: str, tmp_path: Path
) -> None:
    for form in ("separate", "fused"):
        convert(checkpoints / form, tmp_path / form, recipe=recipe)
    for file in ("llm.mnn", "llm.mnn.weight"):
        separate = (tmp_path / "separate" / file).read_bytes()
        assert separate == (tmp_path / "fused" / file).read_bytes(), file


@pytest.mark.engine
@pytest.mark.reference
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_norm_topk_prob_is_heeded_both_ways(name: str, tmp_path: Path) -> None:
    """The same weights with the field on and off are two models, and each is transformers'."""
    case = MIXTURES[name]
    logits = []
    for normalized in (True, False):
        folder = tmp_path / str(normalized)
        fields = {**case.fields, "norm_topk_prob": normalized}
        pair = Pair(folder, make_checkpoint(replace(case, fields=fields), folder))
        assert json.loads((folder / "config.json").read_text())["norm_topk_prob"] is normalized
        convert(folder, tmp_path / f"bundle-{normalized}", recipe="fp16")
        ids = pair.prompt(60)
        with Engine(tmp_path / f"bundle-{normalized}", memory="high", precision="high") as engine:
            logits.append(engine.forward(ids, all_positions=True))
        assert_same(logits[-1], pair.logits(ids), f"norm_topk_prob = {normalized}")
    weights = [(tmp_path / f"bundle-{n}" / "llm.mnn.weight").read_bytes() for n in (True, False)]
    # One constant of four bytes for each router that normalizes.
    assert abs(len(weights[0]) - len(weights[1])) < 64
    # The chosen ones have nearly all of the probability, so the difference is small, but no error.
    assert np.abs(logits[0] - logits[1]).max() > 50 * MAX_ERROR * logits[0].std()


@pytest.mark.reference
@pytest.mark.parametrize("checkpoints", ["qwen3_moe"], indirect=True)
def test_a_fused_tensor_of_the_wrong_shape_is_an_error(checkpoints: Path, tmp_path: Path) -> None:
    """Some families store the transpose."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoints / "fused", folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name, t in tensors.items() if t.ndim == 3]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((SourceError, UnsupportedError), match=r"experts\.0\.\w+_proj\.weight"):
        prepare(folder, recipe="fp16")
