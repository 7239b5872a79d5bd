"""What is refused is refused by its name, with the reason, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mnnsmith.api import prepare
from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.refused import REFUSED
from mnnsmith.models.registry import (
    build_language_model,
    require_supported,
    supported_model_types,
)

# As the published config.json of each; sizes of V2-Lite and V3.
V2: dict[str, Any] = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": 102400, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
    "norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0, "attention_bias": False, "hidden_act": "silu",
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
V3 = {
    **V2, "model_type": "deepseek_v3", "q_lora_rank": 1536, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
}  # fmt: skip


def build(config: dict[str, Any]) -> tuple[str, ...]:
    return build_language_model(config["model_type"], config, "here", ContextLimits())[1]


@pytest.mark.parametrize("config", [V2, V3], ids=["v2", "v3"])
def test_the_published_configs_are_taken_and_read_in_full(config: dict[str, Any]) -> None:
    assert build(config) == ()


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (V2, {"norm_topk_prob": True}, "norm_topk_prob = True is not supported.*ignores it"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'.*no other"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'.*no other"),
        (V2, {"attention_bias": True}, "attention_bias = True.*No released model"),
        (V2, {"mlp_bias": True}, "mlp_bias = True.*No released model"),
        (V2, {"moe_layer_freq": 2}, "moe_layer_freq = 2.*every later block"),
        (V2, {"num_key_value_heads": 4}, "num_key_value_heads differs"),
        (V2, {"v_head_dim": 256}, "values of 256"),
        (V3, {"scoring_func": "sqrtsoftplus"}, "scoring_func = 'sqrtsoftplus'.*no other"),
        (V3, {"topk_method": "greedy"}, "topk_method = 'greedy'.*no other"),
        (V3, {"attention_bias": True}, "attention_bias = True.*No released model"),
    ],
)
def test_a_variant_is_refused_with_its_reason(
    config: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        build({**config, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"n_group": 7},
        {"topk_group": 9},
        # More experts than the kept groups hold, and groups too small for their two best.
        {"topk_group": 1, "num_experts_per_tok": 33},
        {"n_group": 256, "topk_group": 100},
    ],
)
def test_groups_that_cannot_be_are_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match=r"experts.*in [0-9]+ groups"):
        build({**V3, **change})


def test_refused_types_are_not_supported_ones() -> None:
    assert not set(REFUSED) & set(supported_model_types())
    assert {"deepseek_v32", "deepseek_v4", "gpt_oss", "qwen3_next", "mamba"} <= set(REFUSED)
    assert "refused" not in supported_model_types()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_type_is_named_with_its_reason(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        require_supported(name, "here")
    assert caught.value.message == f"here: model type {name!r} is not supported: {REFUSED[name]}."
    assert caught.value.hint is not None and "deepseek_v3" in caught.value.hint


def test_sparse_attention_is_refused_before_any_weight_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**V3, "model_type": "deepseek_v32"}))
    with pytest.raises(UnsupportedError, match=r"deepseek_v32.*indexer"):
        prepare(tmp_path)
