"""Keys that change what a model computes: an error where a family does not read them.

Other keys that nobody reads become a note.  These are known, from other families or from other
programs, to mean another computation, and weights that were trained with them need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mnnsmith.errors import UnsupportedError
from mnnsmith.models.context import FULL

# What says "not in use" for any key.
_OFF: tuple[Any, ...] = (None, False, [], {})
_SHOWN_CHARS = 60

# Soft caps and clipping; scores and factors without a neutral value; positions and the reach of
# attention; norms and the order of a block; other architectures.
_REFUSED = """
    attn_logit_softcapping final_logit_softcapping attn_logit_softcap final_logit_softcap
    attention_logit_softcapping router_logit_softcapping logits_soft_cap clip_qkv swiglu_limit
    swiglu_alpha
    attention_multiplier scale_depth dim_model_base query_pre_attn_scalar attn_temperature_tuning
    floor_scale attn_scale scale_attn_by_inverse_layer_idx use_mup
    alibi use_alibi no_rope_layers no_rope_layer_interval nope_layer_interval rotary_dim
    rope_local_base_freq rotary_emb_base attention_chunk_size attention_sinks use_attention_sinks
    index_topk use_bidirectional_attention sparse_attention_config attn_output_gate pruned_heads
    use_qk_norm qk_norm qk_layernorm qk_layernorms use_post_norm sandwich_norm post_norm
    layernorm_1p parallel_attn use_parallel_residual parallel_block
    apply_residual_connection_post_layernorm add_cross_attention is_encoder_decoder hc_mult
""".split()  # noqa: SIM905 (a list of 50 lines says no more)
# Factors on embeddings, residuals, scores and logits.
_FACTORS = """
    logit_scale logits_scaling embedding_multiplier embedding_scale scale_emb residual_multiplier
    residual_scale lm_head_multiplier key_multiplier value_multiplier attention_in_multiplier
    attention_out_multiplier attention_value_scale mup_width_multiplier rotary_pct rope_percent
""".split()  # noqa: SIM905
_NORM_KINDS = ("norm_type", "layer_norm_type", "normalization_type")
# Each with the values that change nothing.
_CHANGES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_REFUSED, _OFF),
    **dict.fromkeys(_FACTORS, (*_OFF, 1)),
    **dict.fromkeys(_NORM_KINDS, (None, "rms_norm", "rmsnorm", "RMSNorm", "rms")),
    "is_causal": (None, True),
}
_WINDOWS = ("sliding_window", "layer_types", "use_sliding_window", "sliding_window_pattern")


def judge_unread(
    config: Mapping[str, Any], keys: tuple[str, ...], model_type: str, origin: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The keys to report as without effect, and notes on those that one might expect to have one.

    keys: those that the model file did not look at.  Raises `UnsupportedError` for a key that asks
    for another computation.
    """
    rest, notes = [], []
    for key in keys:
        value = config[key]
        if key in _CHANGES:
            if not _is_among(value, _CHANGES[key]):
                raise UnsupportedError(
                    f"{origin}: {key} = {repr(value)[:_SHOWN_CHARS]} is not supported for model "
                    f"type {model_type!r}: it asks for another computation than this family's.",
                    "The weights need it if they were trained with it; "
                    "is model_type the one that belongs to them?",
                )
        elif key in _WINDOWS:
            if _asks_for_none(value):
                continue
            notes.append(
                f"{key} = {repr(value)[:_SHOWN_CHARS]} has no effect: transformers does not read "
                f"it for model type {model_type}, and this bundle computes what transformers does"
            )
        else:
            rest.append(key)
    return tuple(rest), tuple(notes)


def _asks_for_none(value: Any) -> bool:
    """Whether a key about windows says that there are none."""
    everywhere_full = isinstance(value, list) and all(kind == FULL for kind in value)
    return everywhere_full or _is_among(value, _OFF)


def _is_among(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equal, and both or neither a truth value: 1 == True in Python, not in a config."""
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)
