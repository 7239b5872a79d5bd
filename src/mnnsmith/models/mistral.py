"""Mistral: llama without biases, with a sliding window over every layer."""

from __future__ import annotations

from functools import partial

from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits, uniform_windows
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.llama import Variant, build_variant


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graph of `MistralForCausalLM`."""
    config.absent("layer_types", "Mistral models with mixed layers have a model type of their own.")
    variant = Variant(
        qkv_bias=False, o_bias=False, kv_heads=8, windows=partial(uniform_windows, absent=4096)
    )
    return build_variant(config, limits, variant)
