"""Idefics3: a llama that reads pictures through a SigLIP tower."""

from __future__ import annotations

from mnnsmith.models import vision_language
from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.language_model import LanguageModel


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graphs of `Idefics3ForConditionalGeneration`."""
    return vision_language.build(config, limits)
