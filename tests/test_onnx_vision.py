"""What a model sees with, exported: equal to transformers, alone and with the text around it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mnnsmith.api import export_onnx
from mnnsmith.errors import UsageError
from mnnsmith.onnx_runtime import onnx_runtime
from onnx_runs import OnnxModel
from smolvlm_checkpoint import IMAGE_ID, SMALL_VOCAB, write_small
from tiny_checkpoint import write_checkpoint

SHAPES = {
    "smolvlm": {"image_size": 64, "patch_size": 16, "scale_factor": 2},
    # No multiple of its patch, and heads as wide as SmolVLM-2.2B's.
    "idefics3": {
        "image_size": 90, "patch_size": 14, "scale_factor": 3, "hidden_size": 144,
        "num_attention_heads": 2,
    },
}  # fmt: skip
# Of the spread.
MAX_ERROR = 1e-4


def run(path: Path, **feeds: np.ndarray) -> np.ndarray:
    runtime = onnx_runtime()

    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, feeds)
    return np.asarray(found)


def near(found: np.ndarray, expected: np.ndarray, most: float = MAX_ERROR) -> None:
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert np.abs(found - expected).max() < most * expected.std()


@pytest.mark.reference
@pytest.mark.parametrize("family", SHAPES)
def test_the_parts_together_are_the_model_of_transformers(family: str, tmp_path: Path) -> None:
    import onnx
    import torch
    from transformers import AutoModelForImageTextToText

    folder = tmp_path / "model"
    write_small(folder, family, **SHAPES[family])
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    random = np.random.default_rng(3)
    side = SHAPES[family]["image_size"]
    pixels = random.standard_normal((3, 3, side, side)).astype(np.float32)
    with torch.no_grad():
        expected = model.model.get_image_features(torch.from_numpy(pixels)[None]).pooler_output
        expected = torch.stack(list(expected)).numpy().reshape(3, -1, 64)
    paths = {}
    for part in ("vision", "embeddings", "decoder", "text"):
        exported = export_onnx(folder, tmp_path / f"{part}.onnx", part=part, kv_cache=False)
        paths[part] = exported.path
        onnx.checker.check_model(str(exported.path), full_check=True)
    seen = run(paths["vision"], pixel_values=pixels)
    near(seen, expected)
    for one in range(3):
        near(run(paths["vision"], pixel_values=pixels[one : one + 1]), expected[one : one + 1])
    for dtype, most in (("fp16-weights", MAX_ERROR), ("fp16", 0.1)):
        half = export_onnx(folder, tmp_path / f"{dtype}.onnx", part="vision", dtype=dtype)
        near(run(half.path, pixel_values=pixels), expected, most)

    count = seen.shape[1]
    ids = [30, 31, *[IMAGE_ID] * count, 40, *[IMAGE_ID] * count, 50, *[IMAGE_ID] * count, 60]
    given = np.array([ids])
    embeds = run(paths["embeddings"], input_ids=given)
    embeds[given == IMAGE_ID] = seen.reshape(-1, seen.shape[-1])
    feeds = {"attention_mask": np.ones_like(given), "position_ids": np.arange(len(ids))[None]}
    logits = run(paths["decoder"], inputs_embeds=embeds, **feeds)
    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(given), pixel_values=torch.from_numpy(pixels)[None])
        text = model(input_ids=torch.from_numpy(given[:, :2]))
    near(logits, out.logits.numpy())
    plain = {name: value[:, :2] for name, value in {**feeds, "input_ids": given}.items()}
    near(run(paths["text"], **plain), text.logits.numpy())
    assert np.abs(OnnxModel(export_onnx(folder, tmp_path / "cached.onnx").path).start([ids[:2]])
                  - text.logits.numpy()).max() < MAX_ERROR * text.logits.std()  # fmt: skip


def test_parts_that_there_are_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "text")
    with pytest.raises(UsageError, match="sees no pictures"):
        export_onnx(tmp_path / "text", tmp_path / "model.onnx", part="vision")
    with pytest.raises(UsageError, match="text, decoder, embeddings, vision"):
        export_onnx(tmp_path / "text", tmp_path / "model.onnx", part="sound")
    assert not (tmp_path / "model.onnx").exists()


def test_the_command_writes_a_part(tmp_path: Path) -> None:
    import onnx

    write_small(tmp_path / "model")
    output = tmp_path / "vision.onnx"
    done = subprocess.run(
        [sys.executable, "-m", "mnnsmith.cli", "export", tmp_path / "model", "-o", output,
         "--part", "vision"], capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    model = onnx.load(str(output), load_external_data=False)
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert facts["part"] == "vision" and facts["image_token_id"] == str(IMAGE_ID)
    assert facts["image_size"] == "64" and facts["image_seq_len"] == "4"
    assert [i.name for i in model.graph.input] == ["pixel_values"]
    assert SMALL_VOCAB > IMAGE_ID
