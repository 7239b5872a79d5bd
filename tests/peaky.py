"""Tiny checkpoints that test something: peaky attention, biases and gains that are not trivial.

The tiny random models of a library have near-uniform attention: a wrong mask, rope or scale hardly
shows in their logits.  Here q and k are scaled until attention picks single tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 384
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


@dataclass(frozen=True)
class Case:
    """One configuration; `factor` scales q and k (in the gain where a model normalizes them).

    hub: keys that replace those of the saved config.json; None takes one away.  transformers saves
    its newest spelling, and the checkpoints that people have were saved by older versions.
    """

    name: str
    config_class: str
    fields: dict[str, Any] = field(default_factory=dict)
    factor: float = 6.5
    hub: dict[str, Any] = field(default_factory=dict)


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


_LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
_LONGROPE = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 2048,
    **_rope(
        "longrope", short_factor=[1.0 + 0.05 * i for i in range(12)],
        long_factor=[2.0 + i for i in range(12)], original_max_position_embeddings=2048,
        partial_rotary_factor=0.75,
    ),
}  # fmt: skip
# Older spellings, as in published checkpoints.
_LLAMA3_HUB = {
    "rope_parameters": None, "rope_theta": 500000.0, "pretraining_tp": 1,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64, "rope_type": "llama3"},
}  # fmt: skip
_LINEAR_HUB = {
    "rope_parameters": None, "rope_theta": 20000.0,
    "rope_scaling": {"type": "linear", "factor": 4.0},
}  # fmt: skip
_YARN_HUB = {
    "rope_parameters": None, "rope_theta": 1000000.0, "use_sliding_window": False,
    "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256,
                     "attention_factor": 1.3, "truncate": False},
}  # fmt: skip
_DEEPSEEK_YARN_HUB = {
    "rope_parameters": None, "rope_theta": 10000,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                     "mscale_all_dim": 0.8, "original_max_position_embeddings": 64,
                     "type": "yarn"},
}  # fmt: skip
_LONGROPE_HUB = {
    "rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 2048,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0 + 0.05 * i for i in range(12)],
                     "long_factor": [2.0 + i for i in range(12)]},
}  # fmt: skip
_GEMMA_HUB = {
    "rope_parameters": None, "layer_types": None, "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0, "sliding_window_pattern": 3,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
_GEMMA_LINEAR = {"rope_parameters": {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}}  # fmt: skip
_SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 2, "max_position_embeddings": 8192,
}  # fmt: skip
_GEMMA_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]

_YARN = _rope(
    "yarn", factor=40.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1,
    mscale=1.0, mscale_all_dim=0.8,
)  # fmt: skip
_MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "first_k_dense_replace": 1, "moe_intermediate_size": 64,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
}  # fmt: skip
_V2 = {**_MLA, "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.5}
_V2_GROUPED = {
    **_MLA, "q_lora_rank": 96, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 4.0,
}  # fmt: skip
_V3 = {**_MLA, "q_lora_rank": 96, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
_V3_GROUPED = {**_V3, "n_group": 4, "topk_group": 2}

_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3}

MIXTURES = {
    case.name: case
    for case in (
        Case("deepseek_v2", "DeepseekV2Config", _V2, 10.0),
        Case("deepseek_v2-grouped", "DeepseekV2Config", _V2_GROUPED, 10.0),
        Case("deepseek_v2-yarn", "DeepseekV2Config", {**_V2, **_YARN}, 7.0),
        Case("deepseek_v3", "DeepseekV3Config", _V3, 10.0),
        Case("deepseek_v3-yarn", "DeepseekV3Config", {**_V3_GROUPED, **_YARN}, 7.0),
        Case(
            "qwen3_moe",
            "Qwen3MoeConfig",
            {"head_dim": 32, **_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]},
            2.8,
        ),
        Case(
            "qwen3_moe-unnormalized",
            "Qwen3MoeConfig",
            {"head_dim": 32, **_EXPERTS, "norm_topk_prob": False},
            2.8,
        ),
        Case(
            "qwen2_moe",
            "Qwen2MoeConfig",
            {**_EXPERTS, "shared_expert_intermediate_size": 96, "decoder_sparse_step": 2},
        ),
        Case("mixtral", "MixtralConfig", {"num_local_experts": 6, "num_experts_per_tok": 2}),
        Case(
            "mixtral-hub",
            "MixtralConfig",
            {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 40},
            # Without a base: it is the family's own.
            hub={"rope_parameters": None, "num_experts": None, "num_local_experts": 6},
        ),
        Case(
            "qwen3_moe-hub",
            "Qwen3MoeConfig",
            {"head_dim": 32, **_EXPERTS, "norm_topk_prob": True},
            2.8,
            {
                "rope_parameters": None,
                "rope_theta": 1000000.0,
                "rope_scaling": None,
                "num_local_experts": None,
                "num_experts": 8,
                "max_window_layers": 3,
                "use_sliding_window": False,
                "sliding_window": 24,
            },
        ),
        Case("deepseek_v3-hub", "DeepseekV3Config", _V3_GROUPED, 7.0, _DEEPSEEK_YARN_HUB),
    )
}

CASES = {
    case.name: case
    for case in (
        Case("llama", "LlamaConfig"),
        Case("llama-tied", "LlamaConfig", {"tie_word_embeddings": True}),
        Case("llama-bias", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
        Case("llama-linear", "LlamaConfig", _rope("linear", factor=4.0)),
        Case("llama-llama3", "LlamaConfig", _LLAMA3),
        Case("llama-yarn", "LlamaConfig", _rope(
            "yarn", factor=16.0, original_max_position_embeddings=128)),
        Case("llama-headdim", "LlamaConfig", {"head_dim": 48}, 5.5),
        Case("mistral", "MistralConfig", {"sliding_window": None}),
        Case("mistral-window", "MistralConfig", {"sliding_window": 40}),
        Case("qwen2", "Qwen2Config", {"tie_word_embeddings": True}),
        Case("qwen2-window", "Qwen2Config", {
            "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
        Case("qwen3", "Qwen3Config", {"head_dim": 32}, 2.8),
        Case("phi3", "Phi3Config", {"sliding_window": 100}),
        Case("phi3-longrope", "Phi3Config", _LONGROPE),
        Case("gemma3_text", "Gemma3TextConfig", {
            "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 32,
            "layer_types": _GEMMA_LAYERS}, 2.8),
        Case("gemma3_text-linear", "Gemma3TextConfig", {
            "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 32,
            "layer_types": _GEMMA_LAYERS, **_GEMMA_LINEAR}, 2.8),
        Case("qwen3-bias", "Qwen3Config", {"head_dim": 32, "attention_bias": True}, 2.8),
        Case("qwen3-window", "Qwen3Config", {
            "head_dim": 32, "use_sliding_window": True, "sliding_window": 24,
            "max_window_layers": 1}, 2.8),
        Case("llama-linear-hub", "LlamaConfig", hub=_LINEAR_HUB),
        Case("llama-llama3-hub", "LlamaConfig", hub=_LLAMA3_HUB),
        Case("qwen2-yarn-hub", "Qwen2Config", hub=_YARN_HUB),
        Case("phi3-longrope-hub", "Phi3Config", {"max_position_embeddings": 4096},
             hub=_LONGROPE_HUB),
        Case("gemma3_text-hub", "Gemma3TextConfig", {
            "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 32,
            "layer_types": _GEMMA_LAYERS}, 2.8, _GEMMA_HUB),
    )
}  # fmt: skip


# Few and narrow blocks, for texts longer than the low table of rope.
LONG = {
    case.name: case
    for case in (
        Case("llama-long", "LlamaConfig", _SMALL),
        # Without the key, the class has a window of 4096.
        Case("mistral-long", "MistralConfig", _SMALL, hub={"sliding_window": None}),
    )
}


def make_checkpoint(case: Case, folder: Path, *, dtype: str = "float16", seed: int = 0) -> Any:
    """Write the checkpoint to `folder`; returns the transformers model in float32 (eval mode).

    The weights are rounded to `dtype` first, so the model and the files agree exactly.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, case.config_class)(**{**_BASE, **case.fields})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _shape_up(name, parameter, case.factor)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(0.3 * torch.randn_like(buffer))
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _respell(folder / "config.json", case.hub)
    write_tokenizer(folder)
    # Loaded anew: the cast above also rounded buffers such as rope's frequencies.
    return load_reference(folder)


def _respell(file: Path, hub: dict[str, Any]) -> None:
    """Replace keys of a config.json, or take those that are None away."""
    config = {**json.loads(file.read_text()), **hub}
    kept = {key: value for key, value in config.items() if key not in hub or value is not None}
    file.write_text(json.dumps(kept))


def load_reference(folder: Path) -> Any:
    """The transformers model of a folder, in float32 (eval mode)."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _shape_up(name: str, parameter: Any, factor: float) -> None:
    import torch

    if "q_norm" in name or "k_norm" in name:
        # Gemma stores the gain minus one; a spread of gains either way.
        parameter.copy_(factor * (1 + 0.2 * torch.randn_like(parameter)))
    elif "norm" in name:
        parameter.add_(0.2 * torch.randn_like(parameter))
    elif name.endswith(".bias"):
        parameter.copy_(0.3 * torch.randn_like(parameter))
    elif (
        "q_proj" in name
        or "k_proj" in name
        or "qkv_proj" in name
        or "q_b_proj" in name
        or "kv_b_proj" in name
    ):
        parameter.mul_(factor)
    elif name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
        # A decisive router: no two experts are near a tie.
        parameter.copy_(0.5 * torch.randn_like(parameter))
    elif "embed" in name or "lm_head" in name:
        parameter.mul_(6.0)
    else:
        parameter.mul_(3.0)


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of the right size, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    merges = []
    letters = "abcdefghijklmnopqrstuvwxyz"
    for a in letters:
        for b in letters:
            if len(vocab) < VOCAB:
                vocab[a + b] = len(vocab)
                merges.append((a, b))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "bos_token": "<s>", "eos_token": "</s>",
                    "tokenizer_class": "PreTrainedTokenizerFast"})
    )  # fmt: skip
