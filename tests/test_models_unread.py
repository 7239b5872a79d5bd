"""Keys that nobody reads: those that change what is computed are refused, others are named."""

from __future__ import annotations

from typing import Any

import pytest

from mnnsmith.errors import UnsupportedError
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.registry import build_language_model

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip


def build(family: str, fields: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The notes, and the keys that nobody read."""
    config = {**SIZES, "model_type": family, **fields}
    model, unread = build_language_model(family, config, "here", ContextLimits())
    return model.notes, unread


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0), ("clip_qkv", 8.0),
        ("logit_scale", 0.0625), ("logits_scaling", 8.0), ("embedding_multiplier", 12),
        ("residual_multiplier", 0.22), ("attention_multiplier", 1.0), ("scale_emb", 12),
        ("scale_depth", 1.4), ("dim_model_base", 256), ("query_pre_attn_scalar", 224),
        ("alibi", True), ("no_rope_layers", [1, 0]), ("attention_sinks", True), ("rotary_pct", 0.5),
        ("attention_chunk_size", 8192), ("index_topk", 2048), ("use_qk_norm", True),
        ("norm_type", "layer_norm"), ("parallel_attn", True), ("is_causal", False),
        ("is_encoder_decoder", True), ("add_cross_attention", True), ("pruned_heads", {"0": [1]}),
        ("rope_local_base_freq", 1e4), ("use_bidirectional_attention", True),
        # Neither of these is the number 1 or the flag that would be neutral.
        ("logit_scale", True), ("alibi", 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_key_that_asks_for_another_computation_is_refused(
    family: str, key: str, value: Any
) -> None:
    with pytest.raises(UnsupportedError, match=rf"^here: {key} = .*model type '{family}'"):
        build(family, {key: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_logit_softcapping": None, "alibi": False, "no_rope_layers": [], "pruned_heads": {}},
        {"logit_scale": 1.0, "embedding_multiplier": 1, "rotary_pct": 1.0, "is_causal": True},
        {"norm_type": "rms_norm", "is_encoder_decoder": False, "add_cross_attention": False},
        {"layer_types": ["full_attention"] * 2, "use_sliding_window": False},
        # transformers reads neither of them for these classes.
        {"is_decoder": True, "pretraining_tp": 4},
    ],
)
def test_a_value_that_changes_nothing_passes_without_a_word(fields: dict[str, Any]) -> None:
    assert build("llama", fields) == ((), ())


def test_gemma3_reads_its_own_keys() -> None:
    build("gemma3_text", {"query_pre_attn_scalar": 24, "rope_local_base_freq": 1e4})


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_windows_that_transformers_ignores_are_named_so(family: str) -> None:
    sizes = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None,
             "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
             "first_k_dense_replace": 2, "moe_intermediate_size": 8}  # fmt: skip
    fields = {} if family == "llama" else sizes
    notes, unread = build(family, {**fields, "sliding_window": 128})
    assert "sliding_window" not in unread
    (note,) = notes
    assert note.startswith("sliding_window = 128 has no effect: transformers does not read it")
    assert build(family, {**fields, "sliding_window": None})[0] == ()


def test_a_key_that_nobody_knows_is_reported() -> None:
    assert build("llama", {"some_new_field": 3})[1] == ("some_new_field",)
