"""`config.json` and `llm_config.json`: the keys that the engine reads, and our defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mnnsmith.mnn.weight_records import MatrixRecord, embedding_entry

MODEL_FILE = "llm.mnn"
WEIGHT_FILE = "llm.mnn.weight"
TOKENIZER_FILE = "tokenizer.mtok"
VISION_MODEL_FILE = "visual.mnn"
VISION_WEIGHT_FILE = "visual.mnn.weight"

# Run-time quantization of activations per block of a row: the engine's own default (per row) loses
# most of what a good weight quantization keeps.
_DYNAMIC_PER_BLOCK = 2
# The big cores of a phone; mnnsmith's own run time takes what the machine has.
_THREADS = 4


@dataclass(frozen=True)
class ModelFacts:
    """What the engine must be told of a model.

    attention_scale: None leaves the engine at 1/sqrt(head_dim), whatever a graph's heads are: with
    a number, it would use that for the heads of the vision too.
    """

    model_type: str
    hidden_size: int
    layers: int
    max_context: int
    attention_scale: float | None
    sliding_window: int | None
    kv_heads: int
    head_dim: int


def llm_config(
    facts: ModelFacts,
    embedding: MatrixRecord,
    chat_template: str | None,
    bos_token: str | None,
    eos_token: str | None,
) -> dict[str, Any]:
    """The model's part of the configuration."""
    config: dict[str, Any] = {
        "model_type": facts.model_type,
        "hidden_size": facts.hidden_size,
        "layer_nums": facts.layers,
        "attention_mask": "float",
        # "mix": the engine makes a full and a sliding mask.
        "attention_type": "full" if facts.sliding_window is None else "mix",
        "is_mrope": False,
        "max_position_embeddings": facts.max_context,
        "key_value_shape": [2, 1, 0, facts.kv_heads, facts.head_dim],
        "tie_embeddings": embedding_entry(embedding),
    }
    if facts.attention_scale is not None:
        config["attn_scale"] = facts.attention_scale
    if facts.sliding_window is not None:
        config["sliding_window"] = facts.sliding_window
    if chat_template is not None:
        config["jinja"] = {
            "chat_template": chat_template,
            "bos": bos_token or "",
            "eos": eos_token or "",
        }
    return config


@dataclass(frozen=True)
class PictureFacts:
    """What the engine must be told of pictures.

    A value is (level - mean) * norm, red, green, blue.  tile: pixels a side; tile_tokens:
    embeddings of it.  The tokens: `image` stands for one embedding, `fake` before and after a
    tile, `whole` before the tile that shows the whole picture.
    """

    mean: tuple[float, ...]
    norm: tuple[float, ...]
    tile: int
    tile_tokens: int
    longest_edge: int
    image_token: int
    fake_token: int
    whole_token: int


def picture_config(
    facts: PictureFacts, canvas_tokens: list[list[int]] | None = None
) -> dict[str, Any]:
    """The keys of `llm_config.json` for pictures.

    `image_size` is the size that the engine itself brings a picture to where the prompt says none:
    one tile, not split.  `image_seq_len` and `canvas_tokens` are for mnnsmith's own run time.

    canvas_tokens: embeddings of a canvas by its rows and columns of tiles, where `visual.mnn` takes
    such; they leave out the first and the last token, which the engine puts around them.
    """
    config: dict[str, Any] = {
        "is_visual": True,
        "image_mean": list(facts.mean),
        "image_norm": list(facts.norm),
        "image_size": facts.tile,
        "image_size_unit": facts.tile,
        "image_max_size": facts.longest_edge,
        "image_seq_len": facts.tile_tokens,
        "vision_start": facts.fake_token,
        "vision_end": facts.fake_token,
        "image_pad": facts.image_token,
        "global_image": facts.whole_token,
    }
    return config if canvas_tokens is None else {**config, "canvas_tokens": canvas_tokens}


def run_config(
    generation: Mapping[str, Any], *, blockwise: bool, float16: bool, mapped: bool = False
) -> dict[str, Any]:
    """The device's part: files, threads, precision, sampling.

    generation: sampling defaults (`temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`)
    of the model's authors; greedy without a temperature.  blockwise: every integer weight has
    scales per block.  float16: ARM may compute in fp16, which is what precision "low" means there;
    not where activations leave its range, nor where routing must be in float32.
    mapped: weights are mapped from files, so that only those in use are resident; it takes effect
    where a `tmp_path` is set.  Only for models whose linear layers are all in integers: the engine
    crashes on float ones when it finds its files from an earlier load.
    """
    config: dict[str, Any] = {
        "llm_model": MODEL_FILE,
        "llm_weight": WEIGHT_FILE,
        "tokenizer_file": TOKENIZER_FILE,
        "backend_type": "cpu",
        "thread_num": _THREADS,
        "precision": "low" if float16 else "normal",
        "memory": "low",
        "dynamic_option": _DYNAMIC_PER_BLOCK if blockwise else 0,
        "reuse_kv": True,
    }
    if mapped:
        config["use_mmap"] = True
    sampling = {
        key: generation[key]
        for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if key in generation
    }
    if sampling:
        config |= {"sampler_type": "mixed", **sampling}
        config["mixed_samplers"] = _samplers(sampling)
    else:
        config["sampler_type"] = "greedy"
    return config


def _samplers(sampling: Mapping[str, Any]) -> list[str]:
    """The engine's sampling stages that the given values need, in its own spelling.

    The last one says how a token is taken of what is left.
    """
    stages = [("repetition_penalty", "penalty"), ("top_k", "topK"), ("top_p", "topP"),
              ("min_p", "min_p")]  # fmt: skip
    last = "temperature" if "temperature" in sampling else "greedy"
    return [stage for key, stage in stages if key in sampling] + [last]
