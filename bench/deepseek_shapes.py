"""Checkpoints of DeepSeek's true shapes with random weights, made from the config alone.

The names and shapes of the tensors are those that mnnsmith's own model files ask for, so any config
of a supported model type can be made real.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import WORK
from make_synthetic import write_checkpoint

from mnnsmith.conversion.planned import planned_tensors
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.registry import build_language_model

CONFIGS: dict[str, dict[str, Any]] = {
    "coder-6.7b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 32256, "max_position_embeddings": 16384, "rms_norm_eps": 1e-6,
        "rope_theta": 100000.0, "rope_scaling": {"type": "linear", "factor": 4.0},
        "tie_word_embeddings": False,
    },
    "coder-1.3b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5504,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 32256, "max_position_embeddings": 16384, "rms_norm_eps": 1e-6,
        "rope_theta": 100000.0, "rope_scaling": {"type": "linear", "factor": 4.0},
        "tie_word_embeddings": False,
    },
    "coder-33b": {
        "model_type": "llama", "hidden_size": 7168, "intermediate_size": 19200,
        "num_hidden_layers": 62, "num_attention_heads": 56, "num_key_value_heads": 8,
        "vocab_size": 32256, "max_position_embeddings": 16384, "rms_norm_eps": 1e-6,
        "rope_theta": 100000.0, "rope_scaling": {"type": "linear", "factor": 4.0},
        "tie_word_embeddings": False,
    },
    "llm-7b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 30, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 102400, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    },
    "r1-distill-qwen-1.5b": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151936, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 21, "tie_word_embeddings": False,
    },
    "r1-distill-qwen-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28, "tie_word_embeddings": False,
    },
    "r1-distill-llama-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    "v2": {
        "model_type": "deepseek_v2", "hidden_size": 5120, "intermediate_size": 12288,
        "moe_intermediate_size": 1536, "num_hidden_layers": 60, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_shared_experts": 2, "n_routed_experts": 160,
        "routed_scaling_factor": 16.0, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": False,
        "vocab_size": 102400, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
    },
    "v2-lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
        "routed_scaling_factor": 1.0, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "norm_topk_prob": False, "vocab_size": 102400,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
    },
    "v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8,
        "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0, "vocab_size": 129280, "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """A config with some fields changed, such as fewer layers."""
    return {**CONFIGS[name], "hidden_act": "silu", "bos_token_id": 256, "eos_token_id": 256,
            "torch_dtype": "float16", **changes}  # fmt: skip


def tensors_of(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a model's tensors."""
    model, _ = build_language_model(config["model_type"], config, "bench", ContextLimits())
    return [(t.name, t.shape) for t in planned_tensors(model, "float16").values()]


def make(folder: Path, config: dict[str, Any]) -> None:
    """Write the checkpoint, unless it is there."""
    write_checkpoint(folder, tensors_of(config), config)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("name", choices=CONFIGS)
    options.add_argument("--layers", type=int, help="fewer layers than the real model has")
    options.add_argument("--work", type=Path, default=WORK)
    chosen = options.parse_args()
    changes = {} if chosen.layers is None else {"num_hidden_layers": chosen.layers}
    if chosen.layers is not None and chosen.name == "v3":
        changes["first_k_dense_replace"] = 1
    suffix = "" if chosen.layers is None else f"-{chosen.layers}-layers"
    make(chosen.work / f"{chosen.name}{suffix}", config_of(chosen.name, **changes))
