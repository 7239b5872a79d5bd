"""Small GGUF files for tests, written by the `gguf` package, which is independent of our reader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType

# Bytes of a block at which a fp16 scale lies.
SCALES_AT = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}

U32 = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.sliding_window", "rope.dimension_count",
    "rope.scaling.original_context_length",
}  # fmt: skip


def random_blocks(type_name: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes of a row]: arbitrary codes with finite scales of either sign."""
    rng = np.random.default_rng(seed)
    block, nbytes = gguf.GGML_QUANT_SIZES[Type[type_name]]
    raw = rng.integers(0, 256, (rows * cols // block, nbytes), dtype=np.uint8)
    for at in SCALES_AT[type_name]:
        scale = rng.normal(0, 0.02, (len(raw), 1)).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8)
    return raw.reshape(rows, -1)


def write_gguf(
    path: Path,
    architecture: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | tuple[str, np.ndarray]],
    tokenizer: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """fields: keys without their architecture prefix (or whole, if they begin with "general.");
    tensors: float arrays, or (type, packed bytes); tokenizer: keys under "tokenizer."."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in fields.items():
        whole = key if key.startswith("general.") else f"{architecture}.{key}"
        _add(writer, whole, value, key in U32)
    for key, value in (BYTE_TOKENIZER if tokenizer is None else tokenizer).items():
        _add(writer, f"tokenizer.{key}", value, key.endswith("_id"))
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[1], raw_dtype=Type[tensor[0]])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any, unsigned: bool) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value) if unsigned else writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bytes):
        writer.add_key_value(key, list(value), GGUFValueType.ARRAY, GGUFValueType.UINT8)
    else:
        writer.add_array(key, list(value))


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level vocabulary."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "he", "ll"]
BYTE_TOKENIZER: dict[str, Any] = {
    "ggml.model": "gpt2",
    "ggml.pre": "smollm",
    "ggml.tokens": _TOKENS,
    "ggml.token_type": [3, 3, 3] + [1] * (len(_TOKENS) - 3),
    "ggml.merges": ["h e", "l l"],
    "ggml.bos_token_id": 1,
    "ggml.eos_token_id": 2,
    "ggml.add_bos_token": False,
}
VOCABULARY = len(_TOKENS) + 3

LLAMA_FIELDS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 16,
    "vocab_size": VOCABULARY,
}


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of LLAMA_FIELDS, by their GGUF names, without a head of its own."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, 64),
        "output_norm.weight": (64,),
    }
    for i in range(2):
        for part, shape in {
            "attn_norm": (64,),
            "attn_q": (64, 64),
            "attn_k": (32, 64),
            "attn_v": (32, 64),
            "attn_output": (64, 64),
            "ffn_norm": (64,),
            "ffn_gate": (96, 64),
            "ffn_up": (96, 64),
            "ffn_down": (64, 96),
        }.items():
            shapes[f"blk.{i}.{part}.weight"] = shape
    return {name: rng.normal(0, 0.1, s).astype(np.float32) for name, s in shapes.items()}


def write_llama(path: Path, **options: Any) -> dict[str, np.ndarray]:
    """A tiny llama model; `fields`, `tensors`, `tokenizer` add to or replace its own."""
    tensors = {**llama_tensors(), **options.pop("tensors", {})}
    fields = {**LLAMA_FIELDS, **options.pop("fields", {})}
    fields = {key: value for key, value in fields.items() if value is not None}
    write_gguf(path, "llama", fields, tensors, options.pop("tokenizer", None), **options)
    return tensors
