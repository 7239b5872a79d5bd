"""The one place that looks a model file up by its Hugging Face `model_type`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mnnsmith import models
from mnnsmith.errors import UnsupportedError
from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.refused import REFUSED
from mnnsmith.models.unread import judge_unread

# Modules of the room that are no architecture.
_SHARED = {
    "canvas", "config", "context", "decoder", "deepseek", "language_model", "layers", "mla", "moe",
    "refused", "registry", "rope", "siglip", "sparse", "unread", "vision_language",
}  # fmt: skip


def supported_model_types() -> tuple[str, ...]:
    """Every `model_type` that has a file here, sorted."""
    names = {module.name for module in pkgutil.iter_modules(models.__path__)}
    return tuple(sorted(names - _SHARED))


def require_supported(model_type: object, origin: str) -> str:
    """The model type itself; raises `UnsupportedError` naming it, the reason, and what we know."""
    if model_type not in supported_model_types():
        known = ", ".join(supported_model_types())
        if isinstance(model_type, str) and model_type in REFUSED:
            raise UnsupportedError(
                f"{origin}: model type {model_type!r} is not supported: {REFUSED[model_type]}.",
                f"Supported are: {known}.",
            )
        raise UnsupportedError(
            f"{origin}: model type {model_type!r:.80} is not supported.",
            f"Supported are: {known}. CONTRIBUTING.md tells how to add one.",
        )
    return str(model_type)


def build_language_model(
    model_type: str, config: Mapping[str, Any], origin: str, limits: ContextLimits
) -> tuple[LanguageModel, tuple[str, ...]]:
    """The graph for a config, and the config keys that it did not look at.

    Raises `UnsupportedError` for an unknown architecture, and for a key that nobody looked at
    although it changes what is computed.
    """
    name = require_supported(model_type, origin)
    reader = ConfigReader(config, origin)
    module = importlib.import_module(f"mnnsmith.models.{name}")
    model: LanguageModel = module.build(reader, limits)
    unread, notes = judge_unread(config, reader.unused(), name, origin)
    return replace(model, notes=(*model.notes, *notes)), unread
