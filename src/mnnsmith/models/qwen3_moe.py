"""Qwen3-MoE: qwen3 attention, and experts chosen by softmax scores."""

from __future__ import annotations

from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits, no_windows, uniform_windows
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.llama import Variant, build_variant
from mnnsmith.models.sparse import sparse_feed_forward


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graph of `Qwen3MoeForCausalLM`."""
    bias = config.flag("attention_bias", False)
    variant = Variant(
        bias, bias, qk_norm=True, kv_heads=4, windows=_windows,
        feed_forward=sparse_feed_forward(config, default_experts=128, default_chosen=8),
    )  # fmt: skip
    return build_variant(config, limits, variant)


def _windows(config: ConfigReader, layers: int, context: int) -> list[int | None]:
    config.raw("max_window_layers")
    if config.flag("use_sliding_window", False):
        return uniform_windows(config, layers, context, absent=4096)
    config.raw("sliding_window")
    return no_windows(config, layers, context)
