"""Tiny llama checkpoints written with numpy alone, and their logits in numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
VOCAB = 256 + len(SPECIALS)
EPSILON, THETA = 1e-5, 10000.0
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_config(**changes: Any) -> dict[str, Any]:
    """A llama's config.json; a change to None takes the key out."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a llama."""
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads = config["num_attention_heads"]
    kv_rows = config["num_key_value_heads"] * (hidden // heads)
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        for part, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_rows, hidden),
            "self_attn.v_proj": (kv_rows, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            found[f"model.layers.{i}.{part}.weight"] = shape
    return found


def make_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 values that fp16 holds exactly; attention is peaky, so that a wrong mask shows."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        value = random.standard_normal(shape)
        if len(shape) == 1:
            value = 1 + 0.2 * value
        else:
            value /= np.sqrt(shape[1])
            value *= 4.0 if "q_proj" in name or "embed" in name or "head" in name else 1.5
        tensors[name] = value.astype(np.float16).astype(np.float32)
    return tensors


def write_checkpoint(
    folder: Path,
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    dtype: str = "F16",
    shards: int = 1,
    seed: int = 0,
    **changes: Any,
) -> dict[str, np.ndarray]:
    """A whole folder; `changes` go to config.json.  Returns its tensors as float32."""
    config = make_config(**changes)
    tensors = dict(make_tensors(config, seed) if tensors is None else tensors)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_tokenizer(folder)
    write_weights(folder, tensors, dtype, shards)
    return tensors


def write_weights(
    folder: Path, tensors: Mapping[str, np.ndarray], dtype: str = "F16", shards: int = 1
) -> None:
    """`model.safetensors`, or shards and their index."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        write_safetensors(folder / shard, {n: tensors[n] for n in part}, dtype)
        weight_map |= dict.fromkeys(part, shard)
    total = sum(t.size for t in tensors.values())
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtype: str = "F16") -> None:
    """uint8 arrays are stored as FP8 codes, float64 ones as float32, others as `dtype`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, value in tensors.items():
        kind = "F8_E4M3" if value.dtype == np.uint8 else "F32" if value.dtype == "f8" else dtype
        raw = _bytes(value, kind)
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": span}
        data += raw
    write_raw_safetensors(path, json.dumps(header).encode(), data)


def write_raw_safetensors(path: Path, header: bytes, data: bytes = b"") -> None:
    """The frame around a header that may be anything."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _bytes(value: np.ndarray, kind: str) -> bytes:
    if kind == "F8_E4M3":
        return value.tobytes()
    if kind == "BF16":
        bits = value.astype(np.float32).view(np.uint32)
        assert not (bits & 0xFFFF).any(), "not exactly bfloat16"
        return (bits >> 16).astype("<u2").tobytes()
    return value.astype("<f2" if kind == "F16" else "<f4").tobytes()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def make_tokenizer(specials: tuple[str, ...] = SPECIALS) -> dict[str, Any]:
    """A byte-level BPE without merges; the special tokens come first."""
    vocab = {token: i for i, token in enumerate((*specials, *byte_characters()))}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, "special": True, **flags}
            for i, token in enumerate(specials)
        ],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": vocab, "merges": [],
        },
    }  # fmt: skip


def write_tokenizer(folder: Path, specials: tuple[str, ...] = SPECIALS) -> None:
    write_json(folder / "tokenizer.json", make_tokenizer(specials))
    write_json(folder / "tokenizer_config.json", {
        "chat_template": TEMPLATE, "bos_token": specials[0], "eos_token": specials[1],
        "tokenizer_class": "PreTrainedTokenizerFast",
    })  # fmt: skip


def logits(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    ids: list[int],
    head: np.ndarray | None = None,
) -> np.ndarray:
    """float64 [len(ids), vocab] of a plain llama (default rope, no biases), without a cache.

    head: where a tied head is stored in another form than the embedding.
    """
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    n, dim = len(ids), config["hidden_size"] // heads
    angles = np.arange(n)[:, None] * config["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))
    mask = np.where(np.arange(n)[:, None] >= np.arange(n), 0.0, -np.inf)

    def norm(v: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((v * v).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return v / scale * w[f"{name}.weight"]

    def rotate(v: np.ndarray) -> np.ndarray:
        half = np.concatenate([-v[..., dim // 2 :], v[..., : dim // 2]], -1)
        return v * cos + half * sin

    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        block = f"model.layers.{i}"

        def linear(v: np.ndarray, part: str, block: str = block) -> np.ndarray:
            return v @ w[f"{block}.{part}.weight"].T

        h = norm(x, f"{block}.input_layernorm")
        q = rotate(linear(h, "self_attn.q_proj").reshape(n, heads, dim))
        k = rotate(linear(h, "self_attn.k_proj").reshape(n, kv_heads, dim))
        v = linear(h, "self_attn.v_proj").reshape(n, kv_heads, dim)
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        x = x + linear(np.einsum("hqk,khd->qhd", scores, v).reshape(n, -1), "self_attn.o_proj")
        h = norm(x, f"{block}.post_attention_layernorm")
        gate = linear(h, "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, "mlp.up_proj"), "mlp.down_proj")
    if head is None:
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T
