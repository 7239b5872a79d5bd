"""What DeepSeek's checkpoints hold beside plain weights: FP8 with scales, and extra layers."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exact import Pair, assert_same, check_all
from mnnsmith.api import Engine, convert, prepare
from mnnsmith.errors import SourceError
from peaky import MIXTURES, VOCAB, Case, load_reference, make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.reference]

BLOCK = 128
# The published configs' own words.
FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip
LAYERS = 3
# Widths around the block of 128, none a multiple of it: 96, 112, 160, 192, 224, 352.
ODD = Case(
    "deepseek_v3-fp8", "DeepseekV3Config",
    {**MIXTURES["deepseek_v3"].fields, "hidden_size": 160, "intermediate_size": 352,
     "kv_lora_rank": 96, "moe_intermediate_size": 224, "qk_nope_head_dim": 32},
    10.0,
)  # fmt: skip


def is_fp8(name: str) -> bool:
    """As in the published files: linear layers of the blocks, but no router."""
    return name.startswith("model.layers.") and name.endswith(("_proj.weight", "_mqa.weight"))


def to_fp8(weight: Any) -> tuple[Any, Any, Any]:
    """Stored E4M3, scale per block, and what they stand for in float32."""
    import torch

    rows, cols = weight.shape
    scale = torch.empty(-(-rows // BLOCK), -(-cols // BLOCK))
    stored = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    value = torch.empty(rows, cols)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            # Blocks of very different size: a scale that is dropped or misplaced shows.
            scale[i, j] = weight[at].abs().max() / 448 * (1 + 0.5 * ((i + 2 * j) % 3))
            stored[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
            value[at] = stored[at].float() * scale[i, j]
    return stored, scale, value


def write(folder: Path, tensors: dict[str, Any], **config: Any) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pair]:
    """A checkpoint in FP8, and the same weights in float32 with their transformers model."""
    from safetensors.torch import load_file

    root = tmp_path_factory.mktemp("fp8")
    make_checkpoint(ODD, root / "stored", dtype="bfloat16")
    shutil.copytree(root / "stored", root / "plain")
    tensors = load_file(root / "stored" / "model.safetensors")
    plain = {name: t.float() for name, t in tensors.items()}
    for name in [name for name in tensors if is_fp8(name)]:
        tensors[name], tensors[f"{name}_scale_inv"], plain[name] = to_fp8(plain[name])
    write(root / "stored", tensors, quantization_config=FP8)
    write(root / "plain", plain)
    return root / "stored", Pair(root / "plain", load_reference(root / "plain"))


def test_fp8_widths_are_no_multiple_of_the_block(fp8: tuple[Path, Pair]) -> None:
    ready = prepare(fp8[0], recipe="fp32")
    stored = [t for t in ready.checkpoint.tensors.values() if t.dtype == "F8_E4M3"]
    sizes = {size for tensor in stored for size in tensor.shape}
    assert len(stored) > 60 and sum(size % BLOCK != 0 for size in sizes) >= 5
    assert any(min(t.shape) > BLOCK and t.shape[1] % BLOCK for t in stored)


@pytest.mark.parametrize("form", ["", "-latent"])
def test_fp8_equals_transformers(fp8: tuple[Path, Pair], tmp_path: Path, form: str) -> None:
    convert(fp8[0], tmp_path / "bundle", recipe=f"fp32{form}")
    check_all(tmp_path / "bundle", fp8[1], (1, 300))


@pytest.mark.parametrize("recipe", ["fp16", "fp16-latent", "w8g32", "w4g32-head8"])
def test_fp8_gives_the_bytes_of_its_float_form(
    fp8: tuple[Path, Pair], tmp_path: Path, recipe: str
) -> None:
    """Other recipes are held against transformers elsewhere, from float checkpoints."""
    for name, folder in (("fp8", fp8[0]), ("float", fp8[1].folder)):
        convert(folder, tmp_path / name, recipe=recipe)
    for file in ("llm.mnn", "llm.mnn.weight"):
        assert (tmp_path / "fp8" / file).read_bytes() == (tmp_path / "float" / file).read_bytes()


def extra_layer(tensors: dict[str, Any]) -> dict[str, Any]:
    """A block that predicts one more token, named as DeepSeek-V3 names it."""
    import torch

    hidden = ODD.fields["hidden_size"]
    source, target = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    block = {
        name.replace(source, target): t.clone()
        for name, t in tensors.items()
        if name.startswith(source)
    }
    own = {
        "embed_tokens.weight": (VOCAB, hidden), "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,), "shared_head.head.weight": (VOCAB, hidden),
    }  # fmt: skip
    return block | {target + name: torch.ones(shape) for name, shape in own.items()}


def test_layers_that_predict_further_tokens_are_left_out(
    fp8: tuple[Path, Pair], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    folder = tmp_path / "checkpoint"
    shutil.copytree(fp8[0], folder)
    tensors = load_file(folder / "model.safetensors")
    extra = extra_layer(tensors)
    count = sum(not name.endswith("_scale_inv") for name in extra)
    write(folder, tensors | extra, num_nextn_predict_layers=1)
    note = f"{count} tensors model.layers.{LAYERS}.* left out: multi-token prediction"
    assert any(n.startswith(note) for n in prepare(folder, recipe="w8g32").notes)
    convert(folder, tmp_path / "with", recipe="w8g32")
    convert(fp8[0], tmp_path / "without", recipe="w8g32")
    for file in ("llm.mnn", "llm.mnn.weight"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()
    # What is not of such a layer is not left out.
    import torch

    for name in ("model.layers.2.mlp.extra.weight", f"model.layers.{LAYERS + 1}.enorm.weight"):
        write(folder, tensors | extra | {name: torch.ones(2, 2)}, num_nextn_predict_layers=1)
        with pytest.raises(SourceError, match=re.escape(f"{name} is not used")):
            prepare(folder, recipe="w8g32")
    write(folder, tensors | extra, num_nextn_predict_layers=0)
    with pytest.raises(SourceError, match=rf"layers\.{LAYERS}\.[a-z_.]+ is not used"):
        prepare(folder, recipe="w8g32")


@pytest.mark.parametrize("form", ["", "-latent"])
def test_a_wide_model_equals_transformers(tmp_path: Path, form: str) -> None:
    """As many layers and experts as V2-Lite, 27 and 64, six of them chosen; small widths."""
    wide = replace(
        MIXTURES["deepseek_v2"],
        fields={
            **MIXTURES["deepseek_v2"].fields, "hidden_size": 64, "num_hidden_layers": 27,
            "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 32,
            "intermediate_size": 96, "routed_scaling_factor": 1.0,
        },
    )  # fmt: skip
    model = make_checkpoint(wide, tmp_path / "checkpoint")
    bundle = convert(tmp_path / "checkpoint", tmp_path / "bundle", recipe=f"fp16{form}")
    pair = Pair(tmp_path / "checkpoint", model)
    ids = pair.prompt(40)
    expected = pair.logits(ids)
    with Engine(bundle.path, memory="high", precision="high") as engine:
        assert_same(engine.forward(ids, all_positions=True), expected, "prompt of 40")
        engine.reset()
        engine.forward(ids[:30])
        for i in range(30, 40):
            assert_same(engine.forward([ids[i]]), expected[i], f"decode step {i}")
    assert np.ptp(expected) > 1
