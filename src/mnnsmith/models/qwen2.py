"""Qwen2 and Qwen2.5: llama with biases on q, k and v, and an optional window on later layers."""

from __future__ import annotations

from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import (
    FULL,
    SLIDING,
    ContextLimits,
    typed_windows,
    windows_switched_off,
)
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.llama import Variant, build_variant


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graph of `Qwen2ForCausalLM`."""
    variant = Variant(qkv_bias=True, o_bias=False, kv_heads=32, windows=qwen_windows)
    return build_variant(config, limits, variant)


def qwen_windows(config: ConfigReader, layers: int, context: int) -> list[int | None]:
    """Windows apply where `use_sliding_window` says so, from layer `max_window_layers` on."""
    first = config.integer("max_window_layers", 28, least=0)
    if not config.flag("use_sliding_window", False):
        return windows_switched_off(config, layers)
    if config.contains("sliding_window") and not config.has("sliding_window"):
        first = layers
    default = [SLIDING if i >= first else FULL for i in range(layers)]
    return typed_windows(config, layers, context, default, absent=4096)
