"""Qwen1.5-MoE and Qwen2-MoE: qwen2 attention, chosen experts, and a shared one with a gate."""

from __future__ import annotations

from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits, windows_switched_off
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.llama import Variant, build_variant
from mnnsmith.models.sparse import sparse_feed_forward


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graph of `Qwen2MoeForCausalLM`."""
    variant = Variant(
        config.flag("qkv_bias", True), False, kv_heads=16, windows=_windows,
        feed_forward=sparse_feed_forward(
            config, default_experts=60, default_chosen=4, shared_expert=True
        ),
    )  # fmt: skip
    return build_variant(config, limits, variant)


def _windows(config: ConfigReader, layers: int, context: int) -> list[int | None]:
    config.only("use_sliding_window", (False,), False, "No released model of this type has one.")
    config.raw("max_window_layers")
    del context
    return windows_switched_off(config, layers)
