"""Make llama-shaped fp16 checkpoints of chosen sizes, with random weights, in seconds.

Values come from one seeded block of normal numbers that is written again and again at changing
places, so that making 6.7 billion parameters takes as long as the disk needs, and little memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from common import WORK, note
from make_smollm2 import safetensors_head

SHARD_BYTES = 2 << 30
BLOCK_VALUES = 16 << 20
VOCAB = 32000
SEED = 20240607


@dataclass(frozen=True)
class Shape:
    """A llama-shaped model; every head has `hidden / heads` values, no head is shared."""

    hidden: int
    layers: int
    inner: int
    heads: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in the order of the file."""
        h, inner = self.hidden, self.inner
        yield "model.embed_tokens.weight", (VOCAB, h)
        for i in range(self.layers):
            prefix = f"model.layers.{i}"
            yield f"{prefix}.input_layernorm.weight", (h,)
            for name in "qkvo":
                yield f"{prefix}.self_attn.{name}_proj.weight", (h, h)
            yield f"{prefix}.post_attention_layernorm.weight", (h,)
            yield f"{prefix}.mlp.gate_proj.weight", (inner, h)
            yield f"{prefix}.mlp.up_proj.weight", (inner, h)
            yield f"{prefix}.mlp.down_proj.weight", (h, inner)
        yield "model.norm.weight", (h,)
        yield "lm_head.weight", (VOCAB, h)

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(shape)) for _, shape in self.tensors())


SHAPES = {
    "0.1": Shape(hidden=768, layers=12, inner=2048, heads=12),
    "0.5": Shape(hidden=1536, layers=14, inner=4096, heads=12),
    "1.5": Shape(hidden=2048, layers=26, inner=5632, heads=16),
    "6.7": Shape(hidden=4096, layers=32, inner=11008, heads=32),
}


def make_synthetic(folder: Path, shape: Shape) -> None:
    """Write the checkpoint to `folder`, unless a whole one is there."""
    write_checkpoint(folder, list(shape.tensors()), _config(shape))


def write_checkpoint(
    folder: Path, tensors: list[tuple[str, tuple[int, ...]]], config: dict[str, object]
) -> None:
    """Random fp16 tensors of the given names and shapes, unless a whole checkpoint is there."""
    if (folder / "config.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    block = np.random.default_rng(SEED).standard_normal(BLOCK_VALUES, dtype=np.float32)
    data = memoryview((block * np.float32(0.02)).astype("<f2")).cast("B")
    shards = _shards(tensors)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(safetensors_head(_header(shard)))
            for index, (tensor, size) in enumerate(shard):
                if len(size) == 1:
                    file.write(np.ones(size, dtype="<f2").tobytes())
                else:
                    start = 2 * (7919 * (index + 131 * number) % BLOCK_VALUES)
                    _write_tiled(file, data, start, 2 * size[0] * size[1])
                places[tensor] = name
    total = 2 * sum(int(np.prod(size)) for _, size in tensors)
    index_data = {"metadata": {"total_size": total}, "weight_map": places}
    _write_json(folder / "model.safetensors.index.json", index_data)
    _write_json(folder / "tokenizer.json", _byte_tokenizer())
    # Last: a folder with a configuration is whole.
    _write_json(folder / "config.json", config)


def _shards(
    tensors: list[tuple[str, tuple[int, ...]]],
) -> list[list[tuple[str, tuple[int, ...]]]]:
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, size in tensors:
        nbytes = 2 * int(np.prod(size))
        if filled and filled + nbytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append((name, size))
        filled += nbytes
    return shards


def _header(shard: list[tuple[str, tuple[int, ...]]]) -> dict[str, object]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size in shard:
        end = offset + 2 * int(np.prod(size))
        header[name] = {"dtype": "F16", "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    return header


def _write_tiled(file: BinaryIO, data: memoryview, start: int, nbytes: int) -> None:
    while nbytes:
        piece = data[start : start + nbytes]
        file.write(piece)
        nbytes -= len(piece)
        start = 0


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float16",
        "hidden_size": shape.hidden, "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads, "vocab_size": VOCAB, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 256,
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def _byte_tokenizer() -> dict[str, object]:
    """A byte-level tokenizer of the 256 bytes and one end token."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        names.setdefault(byte, chr(256 + len(names) - len(printable)))
    end = {"id": 256, "content": "<|end|>", "single_word": False, "lstrip": False,
           "rstrip": False, "normalized": False, "special": True}  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False,
                  "vocab": {names[byte]: byte for byte in range(256)} | {"<|end|>": 256},
                  "merges": []},
    }  # fmt: skip


def _write_json(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")


def made_apart(work: Path, size: str) -> Path:
    """The checkpoint of `size`, made by a process of its own, whose memory is no floor of what is
    measured."""
    folder = work / f"synthetic-{size}b"
    note(f"making {folder.name}")
    subprocess.run(
        [sys.executable, Path(__file__), "--work", work, "--size", size],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--work", type=Path, default=WORK, help="folder to write to")
    options.add_argument("--size", choices=SHAPES, required=True, help="billions of parameters")
    chosen = options.parse_args()
    target = chosen.work / f"synthetic-{chosen.size}b"
    make_synthetic(target, SHAPES[chosen.size])
    print(f"{target}: {SHAPES[chosen.size].parameters / 1e9:.3f} billion parameters")
