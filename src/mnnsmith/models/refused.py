"""Model types that people ask for and that we refuse, each with what stands in the way."""

from __future__ import annotations

_RECURRENT = (
    "its layers keep a recurrent state in place of keys and values, and no file here writes such "
    "layers yet"
)
_HYBRID = "some of " + _RECURRENT
_ENCODER = "it is an encoder and writes no text; mnnsmith converts decoders"
_ENCODER_DECODER = (
    "it has an encoder beside its decoder; the engine's runtime drives a decoder only"
)

REFUSED: dict[str, str] = {
    "bert": _ENCODER,
    "bamba": _HYBRID,
    "deepseek_v32": (
        "its sparse attention has an indexer that picks the keys of every token, and the engine's "
        "attention operator sees all keys; computed with all of them it would be another model"
    ),
    "deepseek_v4": (
        "its attention compresses keys and picks among them, and its residual is a set of mixed "
        "streams; the engine's attention operator does neither"
    ),
    "falcon_h1": _HYBRID,
    "falcon_mamba": _RECURRENT,
    "gemma3n": (
        "it has embeddings per layer, several residual streams (AltUp) and activations cut off by "
        "their statistics; no file here writes them yet"
    ),
    "glm_moe_dsa": (
        "its sparse attention has an indexer that picks the keys of every token, and the engine's "
        "attention operator sees all keys"
    ),
    "gpt_oss": (
        "its attention has learned sinks, its experts have biases and clipped gates, and its "
        "weights are MXFP4; no file here writes these yet"
    ),
    "granitemoehybrid": _HYBRID,
    "jamba": _HYBRID,
    "kimi_linear": _HYBRID,
    "lfm2": "some of its layers are gated short convolutions, whose state no file here writes yet",
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "nemotron_h": _HYBRID,
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": _HYBRID,
    "qwen3_next": _HYBRID,
    "recurrent_gemma": _HYBRID,
    "roberta": _ENCODER,
    "rwkv": _RECURRENT,
    "t5": _ENCODER_DECODER,
    "zamba2": _HYBRID,
}
