"""Checkpoints of SmolVLM and Idefics3 with seeded random weights that make pictures matter.

The tower's attention is peaky and its features differ from tile to tile, so that a wrong patch
order, position, scale or shuffle shows in the logits.  `write_small` takes a second; `write_256m`
has the shapes of SmolVLM-256M around the text weights of SmolLM2-135M.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mnnsmith.sources.checkpoint import read_whole
from mnnsmith.sources.open import open_checkpoint
from smolvlm_folder import IMAGE_ID as FULL_IMAGE_ID
from smolvlm_folder import VOCAB_SIZE, add_special_tokens, write_processor
from tiny_checkpoint import (
    SPECIALS,
    byte_characters,
    make_tensors,
    make_tokenizer,
    write_json,
    write_safetensors,
)

FAKE, IMAGE, GLOBAL = "<fake_token_around_image>", "<image>", "<global-img>"
ROWS = tuple(f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5))
SMALL_SPECIALS = (*SPECIALS, FAKE, IMAGE, GLOBAL, *ROWS, "<end_of_utterance>")
IMAGE_ID = SMALL_SPECIALS.index(IMAGE)
SMALL_VOCAB = len(SMALL_SPECIALS) + len(byte_characters())


def small_config(model_type: str = "smolvlm", **vision: Any) -> dict[str, Any]:
    """A config.json; `vision` changes the tower, and `scale_factor` the connector."""
    scale = vision.pop("scale_factor", 2)
    architecture = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[model_type]
    return {
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "model_type": model_type,
        "image_token_id": IMAGE_ID,
        "scale_factor": scale,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "llama", "architectures": ["VLlama3ForCausalLM"],
            "vocab_size": SMALL_VOCAB, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "hidden_act": "silu", "tie_word_embeddings": False, "pad_token_id": 1,
            "bos_token_id": 0, "eos_token_id": 1,
        },
        "vision_config": {
            "model_type": f"{model_type}_vision", "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64, "patch_size": 16,
            "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "num_channels": 3, **vision,
        },
    }  # fmt: skip


def vision_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 values of the tower and the connector, which fp16 holds exactly."""
    random = np.random.default_rng([seed, 77])
    vision = config["vision_config"]
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    patch, side = vision["patch_size"], vision["image_size"] // vision["patch_size"]
    found: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, factor: float = 1.0, mean: float = 0.0) -> None:
        fan_in = int(np.prod(shape[1:])) or 1
        value = mean + factor * random.standard_normal(shape) / np.sqrt(fan_in)
        found[name] = value.astype(np.float16).astype(np.float32)

    def norm(name: str) -> None:
        add(f"{name}.weight", width, factor=0.2, mean=1.0)
        add(f"{name}.bias", width, factor=0.2)

    def linear(name: str, rows: int, cols: int, factor: float) -> None:
        add(f"{name}.weight", rows, cols, factor=factor)
        add(f"{name}.bias", rows, factor=0.2)

    tower = "model.vision_model"
    add(f"{tower}.embeddings.patch_embedding.weight", width, 3, patch, patch, factor=2.0)
    add(f"{tower}.embeddings.patch_embedding.bias", width, factor=0.2)
    add(f"{tower}.embeddings.position_embedding.weight", side**2, width, factor=0.5 * width**0.5)
    for i in range(vision["num_hidden_layers"]):
        block = f"{tower}.encoder.layers.{i}"
        norm(f"{block}.layer_norm1")
        norm(f"{block}.layer_norm2")
        for part, factor in (("q", 2.5), ("k", 2.5), ("v", 1.0), ("out", 1.0)):
            linear(f"{block}.self_attn.{part}_proj", width, width, factor)
        linear(f"{block}.mlp.fc1", inner, width, 1.0)
        linear(f"{block}.mlp.fc2", width, inner, 1.0)
    norm(f"{tower}.post_layernorm")
    text, wide = config["text_config"]["hidden_size"], width * config["scale_factor"] ** 2
    add("model.connector.modality_projection.proj.weight", text, wide)
    return found


def text_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A llama's tensors under the names that they have in a vision-language model."""
    return {
        "model.text_model." + name.removeprefix("model.") if name != "lm_head.weight" else name: v
        for name, v in tensors.items()
    }


def write_small(folder: Path, model_type: str = "smolvlm", **vision: Any) -> dict[str, np.ndarray]:
    """A whole folder; returns its tensors."""
    config = small_config(model_type, **vision)
    tensors = {**text_tensors(make_tensors(config["text_config"])), **vision_tensors(config)}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    sizes = config["vision_config"]
    side = sizes["image_size"] // sizes["patch_size"] // config["scale_factor"]
    write_processor(
        folder, json.dumps(make_tokenizer(SMALL_SPECIALS)), kind=model_type,
        tile=sizes["image_size"], longest_edge=4 * sizes["image_size"], image_seq_len=side**2,
        bos=SPECIALS[0],
    )  # fmt: skip
    write_safetensors(folder / "model.safetensors", tensors)
    return tensors


def write_256m(folder: Path, smollm2: Path) -> None:
    """The shapes of SmolVLM-256M: text weights of SmolLM2-135M, rows for the new tokens, a tower.

    smollm2: a checkpoint of SmolLM2-135M.  471 tensors of 256,484,928 parameters, 513 MB.
    """
    source = open_checkpoint(smollm2)
    text = {
        key: source.config[key]
        for key in (
            "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps",
            "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
            "rope_parameters",
        )
        if key in source.config
    }  # fmt: skip
    text |= {"vocab_size": VOCAB_SIZE, "pad_token_id": 2, "tie_word_embeddings": False}
    config = small_config(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        image_size=512, patch_size=16, scale_factor=4,
    )  # fmt: skip
    config |= {"image_token_id": FULL_IMAGE_ID, "text_config": text}
    tensors = {name: read_whole(tensor) for name, tensor in source.tensors.items()}
    known = tensors["model.embed_tokens.weight"]
    spread, random = float(known.std()), np.random.default_rng(5)
    new = spread * random.standard_normal((VOCAB_SIZE - len(known), known.shape[1]))
    tensors["model.embed_tokens.weight"] = np.concatenate([known, new.astype(np.float32)])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    vision = vision_tensors(config)
    # Features as large as embeddings: a picture then counts as much as text does.
    vision["model.connector.modality_projection.proj.weight"] *= spread
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_processor(folder, add_special_tokens(source.tokenizer.tokenizer_json))
    halves = {n: t.astype(np.float16) for n, t in {**text_tensors(tensors), **vision}.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
