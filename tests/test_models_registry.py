"""What the registry takes for an architecture can be built."""

from __future__ import annotations

import importlib

import pytest

from mnnsmith.models.registry import supported_model_types


@pytest.mark.parametrize("name", supported_model_types())
def test_every_model_type_has_a_builder(name: str) -> None:
    assert callable(importlib.import_module(f"mnnsmith.models.{name}").build)
