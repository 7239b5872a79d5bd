"""Proves on this machine that engine and conversion work: a tiny model that knows the alphabet.

First the engine computes alone (`mnnsmith.engine.selftest`), so that a broken installation is told
as such.  Then comes the model.  Its head holds the embeddings one row further, so that the best
next token is always the following byte, whatever the small random attention and MLP weights add.
It is written as a checkpoint, converted with the default recipe and asked to go on with "abc".
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.conversion.convert import convert
from mnnsmith.engine import Engine
from mnnsmith.engine.selftest import check_engine
from mnnsmith.errors import EngineError, MissingResourceError
from mnnsmith.text.stream import byte_alphabet
from mnnsmith.text.tokenizer import TextTokenizer

PROMPT, EXPECTED = "abc", "defghijkl"
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP, _VOCAB = 64, 2, 4, 2, 16, 128, 258


@dataclass(frozen=True)
class SelfTest:
    """seconds: for the whole test.  answer: what the model said."""

    seconds: float
    answer: str


def run_self_test() -> SelfTest:
    """Let the engine compute, then convert and run the tiny model in a temporary folder.

    Raises EngineError when the engine is broken or the answer is wrong, and what `convert` and
    `Engine` raise.
    """
    began = time.monotonic()
    check_engine()
    try:
        folder = Path(tempfile.mkdtemp(prefix="mnnsmith-selftest-"))
    except OSError as error:
        raise MissingResourceError(
            f"No temporary folder can be made: {error.strerror}.", "Free some disk space."
        ) from error
    try:
        write_tiny_checkpoint(folder / "model")
        bundle = convert(folder / "model", folder / "bundle")
        tokenizer = TextTokenizer(bundle.tokenizer_json())
        with Engine(bundle.path) as engine:
            ids = list(engine.generate(tokenizer.encode(PROMPT), max_new_tokens=len(EXPECTED)))
        answer = tokenizer.decode(ids)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if answer != EXPECTED:
        raise EngineError(
            f"the tiny model continued {PROMPT!r} with {answer!r}, expected {EXPECTED!r}.",
            "Please report it with the output of `mnnsmith doctor --json`.",
        )
    return SelfTest(time.monotonic() - began, answer)


def write_tiny_checkpoint(folder: Path) -> None:
    """A llama checkpoint of 0.2 MB as transformers would save it."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "eos_token_id": _VOCAB - 1,
        "bos_token_id": _VOCAB - 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()), encoding="utf-8")
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(specials), encoding="utf-8")
    _write_safetensors(folder / "model.safetensors", _weights())


def _weights() -> dict[str, npt.NDArray[np.float16]]:
    random = np.random.default_rng(7)

    def small(*shape: int) -> npt.NDArray[np.float16]:
        return (random.standard_normal(shape) * 0.02).astype(np.float16)

    embedding = random.standard_normal((_VOCAB, _HIDDEN))
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    ones = np.ones(_HIDDEN, np.float16)
    weights = {
        "model.embed_tokens.weight": embedding.astype(np.float16),
        "model.norm.weight": ones,
        "lm_head.weight": np.roll(embedding, 1, axis=0).astype(np.float16),
    }
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            f"{name}input_layernorm.weight": ones,
            f"{name}post_attention_layernorm.weight": ones,
            f"{name}self_attn.q_proj.weight": small(_HEADS * _HEAD_DIM, _HIDDEN),
            f"{name}self_attn.k_proj.weight": small(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{name}self_attn.v_proj.weight": small(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{name}self_attn.o_proj.weight": small(_HIDDEN, _HEADS * _HEAD_DIM),
            f"{name}mlp.gate_proj.weight": small(_MLP, _HIDDEN),
            f"{name}mlp.up_proj.weight": small(_MLP, _HIDDEN),
            f"{name}mlp.down_proj.weight": small(_HIDDEN, _MLP),
        }
    return weights


def _write_safetensors(path: Path, weights: dict[str, npt.NDArray[np.float16]]) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, array in weights.items():
        header[name] = {
            "dtype": "F16",
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in weights.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _tokenizer() -> dict[str, Any]:
    """A byte-level tokenizer whose ids are the bytes."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    specials = [
        {
            "id": _VOCAB - 2 + index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, text in enumerate(("<s>", "</s>"))
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": byte_alphabet(), "merges": []},
    }
