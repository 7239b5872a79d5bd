"""Qwen3: llama with normalized query and key heads."""

from __future__ import annotations

from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.llama import Variant, build_variant
from mnnsmith.models.qwen2 import qwen_windows


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graph of `Qwen3ForCausalLM`."""
    bias = config.flag("attention_bias", False)
    variant = Variant(
        bias, bias, qk_norm=True, head_dim=128, kv_heads=32, windows=qwen_windows
    )  # fmt: skip
    return build_variant(config, limits, variant)
