"""Mistral: llama without biases, with a sliding window over every layer."""

from __future__ import annotations

from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits, uniform_windows
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.llama import Variant, build_variant

# transformers' default where a config has no such key at all (null means no window).
_WINDOW_WHERE_ABSENT = 4096


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graph of `MistralForCausalLM`."""
    config.absent("layer_types", "Mistral models with mixed layers have a model type of their own.")
    variant = Variant(qkv_bias=False, o_bias=False, kv_heads=8, windows=_windows)
    return build_variant(config, limits, variant)


def _windows(config: ConfigReader, layers: int, context: int) -> list[int | None]:
    if config.contains("sliding_window"):
        return uniform_windows(config, layers, context)
    return [_WINDOW_WHERE_ABSENT if context > _WINDOW_WHERE_ABSENT else None] * layers
