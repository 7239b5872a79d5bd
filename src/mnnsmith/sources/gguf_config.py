"""From GGUF metadata and tensor names to the `config.json` and names that Hugging Face has.

One `_Architecture` for each value of `general.architecture` that we know.  The facts are those of
llama.cpp's converter (conversion/*.py: which key a config field is written to, what is done to a
tensor on the way) and of its loader (src/llama-model.cpp: what a missing key means).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.sources.checkpoint import Tensor
from mnnsmith.sources.gguf_file import GgufFile, MetadataArray, TensorInfo
from mnnsmith.sources.gguf_metadata import Metadata
from mnnsmith.sources.gguf_rope import llama3_scaling, rope_scaling
from mnnsmith.sources.gguf_tensor import GgufTensor

_BLOCK = re.compile(r"^blk\.(?P<layer>\d{1,5})\.(?P<part>[a-z_]+)\.(?P<kind>weight|bias)$")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_SEPARATE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class Translation:
    """A GGUF model in Hugging Face's terms.

    config: as `config.json`; tensors: by Hugging Face's names; notes: what was changed.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]


def translate(file: GgufFile) -> Translation:
    """Config, names and order of a GGUF model as its original checkpoint had them.

    UnsupportedError for an architecture that is not known; SourceError for a missing key or a
    tensor that does not belong to the architecture.
    """
    architecture = _architecture(file)
    meta = Metadata(file, architecture.name)
    meta.refuse_others()
    config = _common_config(meta, file, architecture)
    notes: list[str] = []
    config.update(architecture.extra(meta, file, notes))
    tensors = _tensors(file, architecture, config)
    config.update(_rope(meta, file, architecture, config, notes))
    if config["tie_word_embeddings"]:
        notes.append("No output.weight: the head shares the token embedding.")
    if architecture.interleaved:
        notes.append("Rows of q_proj and k_proj were put back in Hugging Face's rope order.")
    if architecture.norm_shift:
        notes.append("Norm gains, stored with one added, were read with one subtracted.")
    return Translation(config, tensors, tuple(notes))


def _architecture(file: GgufFile) -> _Architecture:
    name = file.metadata.get("general.architecture")
    origin = file.paths[0]
    if not isinstance(name, str):
        raise SourceError(f"{origin}: the metadata lacks general.architecture.")
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedError(
            f"{origin}: holds no language model, general.type is {kind!r:.40}.",
            "Give the file of the language model itself.",
        )
    if name not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{origin}: GGUF architecture {name!r:.60} is not supported.",
            f"Supported are: {', '.join(sorted(_ARCHITECTURES))}.",
        )
    return _ARCHITECTURES[name]


def _common_config(meta: Metadata, file: GgufFile, architecture: _Architecture) -> dict[str, Any]:
    """The fields that all architectures have."""
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    layers = meta.integer("block_count")
    head_dim = meta.integer("attention.key_length", hidden // max(1, heads))
    if not (hidden and heads and layers and head_dim):
        raise SourceError(
            f"{meta.origin}: embedding_length {hidden}, attention.head_count {heads}, "
            f"block_count {layers} and a head of {head_dim} elements must all be above 0."
        )
    _check_layers(meta, file, layers)
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(
            f"{meta.origin}: keys of {head_dim} and values of "
            f"{meta.integer('attention.value_length')} elements are not supported."
        )
    rotated = meta.integer("rope.dimension_count", head_dim)
    if rotated != head_dim and not architecture.partial_rope:
        raise UnsupportedError(
            f"{meta.origin}: rope turns {rotated} of {head_dim} elements of a head; "
            f"{architecture.name} has no field for it."
        )
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": meta.integer("feed_forward_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocabulary(meta, file),
        "max_position_embeddings": meta.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if architecture.partial_rope:
        config["partial_rotary_factor"] = rotated / head_dim if head_dim else 1.0
    for part in ("bos", "eos", "padding"):
        value = file.metadata.get(f"tokenizer.ggml.{part}_token_id")
        if type(value) is int:
            config[f"{'pad' if part == 'padding' else part}_token_id"] = value
    return config


def _check_layers(meta: Metadata, file: GgufFile, layers: int) -> None:
    """The tensors must be of as many blocks; a wrong count must not become a huge list either."""
    matches = (_BLOCK.match(name) for name in file.tensors)
    found = 1 + max((int(match["layer"]) for match in matches if match is not None), default=-1)
    if found != layers:
        raise SourceError(
            f"{meta.origin}: block_count is {layers}; the tensors are of {found} blocks."
        )


def _vocabulary(meta: Metadata, file: GgufFile) -> int:
    """The rows of the embedding, which the other places that tell must not contradict."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise SourceError(f"{meta.origin}: has no tensor token_embd.weight.")
    rows = embedding.shape[0]
    stated = meta.get("vocab_size")
    if stated is not None and stated != rows:
        raise SourceError(
            f"{meta.origin}: vocab_size is {stated!r:.40}, token_embd.weight has {rows} rows."
        )
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, MetadataArray) and tokens.count > rows:
        raise SourceError(
            f"{meta.origin}: {tokens.count} tokens, but token_embd.weight has {rows} rows."
        )
    return rows


def _tensors(
    file: GgufFile, architecture: _Architecture, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for info in file.tensors.values():
        if info.name not in _ROPE_TENSORS:
            tensor = _tensor(info, architecture, config)
            out[tensor.name] = tensor
    return out


_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def _tensor(info: TensorInfo, architecture: _Architecture, config: Mapping[str, Any]) -> GgufTensor:
    name, heads = _TOP.get(info.name), 0
    match = _BLOCK.match(info.name)
    if match is not None and match["part"] in architecture.parts:
        part = match["part"]
        name = f"model.layers.{int(match['layer'])}.{architecture.parts[part]}.{match['kind']}"
        if architecture.interleaved and part in ("attn_q", "attn_k"):
            heads = config[f"num_{'attention' if part == 'attn_q' else 'key_value'}_heads"]
            if info.shape[0] != heads * config["head_dim"]:
                raise SourceError(
                    f"{info.path}: {info.name} has {info.shape[0]} rows; "
                    f"{heads} heads of {config['head_dim']} make {heads * config['head_dim']}."
                )
    if name is None:
        raise SourceError(
            f"{info.path}: tensor {info.name} does not belong to architecture {architecture.name}.",
            "The file may be of a variant that is not supported.",
        )
    shift = architecture.norm_shift if name.endswith("norm.weight") else 0.0
    return GgufTensor(info, name, heads, shift)


def _rope(
    meta: Metadata,
    file: GgufFile,
    architecture: _Architecture,
    config: Mapping[str, Any],
    notes: list[str],
) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, from the metadata and the tensors that hold factors."""
    theta = meta.number("rope.freq_base", 10000.0)
    extra = {
        name: GgufTensor(file.tensors[name], name) for name in _ROPE_TENSORS if name in file.tensors
    }
    long, short = extra.get(_ROPE_TENSORS[1]), extra.get(_ROPE_TENSORS[2])
    if architecture.name != "phi3" and (long is not None or short is not None):
        raise UnsupportedError(
            f"{meta.origin}: rope factors for long and short texts are known for phi3 only."
        )
    scaling = rope_scaling(meta, config, long, short)
    if "rope_freqs.weight" in extra:
        if architecture.name != "llama" or scaling is not None:
            raise UnsupportedError(
                f"{meta.origin}: rope_freqs.weight is known for the llama architecture without "
                "any other rope scaling only."
            )
        scaling = llama3_scaling(meta.origin, extra["rope_freqs.weight"], theta, config["head_dim"])
        notes.append(
            "rope_freqs.weight holds ones only: no rope scaling."
            if scaling is None
            else "rope_freqs.weight became llama3 rope scaling."
        )
    return {"rope_theta": theta, "rope_scaling": scaling}


# ------------------------------------------------------------------------------- architectures


def _has(file: GgufFile, *names: str) -> bool:
    return any(name in file.tensors for name in names)


def _refuse_window(meta: Metadata) -> None:
    """The file does not tell which layers a window is for; one as wide as the context is none."""
    window = meta.integer("attention.sliding_window", 0)
    if 0 < window < meta.integer("context_length"):
        raise UnsupportedError(
            f"{meta.origin}: attention.sliding_window is {window}, which is not supported for this "
            "architecture in GGUF.",
            "Convert the original checkpoint, whose config.json tells the layers it holds for.",
        )


def _llama(meta: Metadata, file: GgufFile, notes: list[str]) -> dict[str, Any]:
    _refuse_window(meta)
    return {
        "hidden_act": "silu",
        "attention_bias": _has(file, "blk.0.attn_q.bias", "blk.0.attn_output.bias"),
        "mlp_bias": _has(file, "blk.0.ffn_up.bias", "blk.0.ffn_down.bias"),
    }


def _qwen2(meta: Metadata, file: GgufFile, notes: list[str]) -> dict[str, Any]:
    _refuse_window(meta)
    return {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": meta.integer("block_count"),
    }


def _qwen3(meta: Metadata, file: GgufFile, notes: list[str]) -> dict[str, Any]:
    bias = _has(file, "blk.0.attn_q.bias", "blk.0.attn_output.bias")
    return {**_qwen2(meta, file, notes), "attention_bias": bias}


def _phi3(meta: Metadata, file: GgufFile, notes: list[str]) -> dict[str, Any]:
    original = meta.integer("rope.scaling.original_context_length", meta.integer("context_length"))
    window = meta.integer("attention.sliding_window", 0)
    if meta.get("attention.sliding_window") is None:
        notes.append("No phi3.attention.sliding_window: read as no window, as llama.cpp does.")
    return {
        "hidden_act": "silu",
        "original_max_position_embeddings": original,
        "sliding_window": window or None,
    }


def _gemma3(meta: Metadata, file: GgufFile, notes: list[str]) -> dict[str, Any]:
    layers, hidden = meta.integer("block_count"), meta.integer("embedding_length")
    heads = meta.integer("attention.head_count")
    window = meta.integer("attention.sliding_window", 0)
    # Without a window the converter was given a model in which every layer sees everything.
    pattern = meta.integer("attention.sliding_window_pattern", 6) if window else 1
    if not pattern:
        raise SourceError(f"{meta.origin}: gemma3.attention.sliding_window_pattern is 0.")
    head_dim = meta.integer("attention.key_length", 256)
    # The file does not tell the attention scale.  The 27B model, the one of 62 layers, has
    # hidden_size / heads here and all others the size of a head; llama.cpp decides likewise.
    scalar = hidden // heads if layers == 62 else head_dim
    notes.append(f"query_pre_attn_scalar = {scalar} was set from the number of layers, {layers}.")
    kinds = [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)
    ]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": _has(file, "blk.0.attn_q.bias", "blk.0.attn_output.bias"),
        "head_dim": head_dim,
        "query_pre_attn_scalar": scalar,
        "sliding_window": window or None,
        "sliding_window_pattern": pattern,
        "layer_types": kinds,
        "rope_local_base_freq": meta.number("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


@dataclass(frozen=True)
class _Architecture:
    """What differs between architectures.

    parts: tensor of a block -> Hugging Face's module; interleaved: q and k rows are reordered for
    interleaved rope; norm_shift: added to norm gains; partial_rope: rope may turn a part of a head;
    extra: the config fields beyond the common ones.
    """

    name: str
    model_type: str
    class_name: str
    parts: Mapping[str, str]
    extra: Callable[[Metadata, GgufFile, list[str]], dict[str, Any]]
    interleaved: bool = False
    norm_shift: float = 0.0
    partial_rope: bool = field(default=False)


_PHI3_PARTS = {
    **{part: name for part, name in _SEPARATE.items() if part[-2:] not in ("_q", "_k", "_v")},
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
_GEMMA3_PARTS = {
    **_SEPARATE,
    **_QK_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
del _PHI3_PARTS["ffn_gate"]

_ARCHITECTURES: dict[str, _Architecture] = {
    a.name: a
    for a in (
        _Architecture("llama", "llama", "LlamaForCausalLM", _SEPARATE, _llama, interleaved=True),
        _Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", _SEPARATE, _qwen2),
        _Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", {**_SEPARATE, **_QK_NORMS}, _qwen3),
        _Architecture("phi3", "phi3", "Phi3ForCausalLM", _PHI3_PARTS, _phi3, partial_rope=True),
        _Architecture(
            "gemma3", "gemma3_text", "Gemma3ForCausalLM", _GEMMA3_PARTS, _gemma3, norm_shift=-1.0
        ),
    )
}
