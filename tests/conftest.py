"""Fixtures that several test files use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_bundle import TinyLlama, write_bundle


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TinyLlama]:
    """A bundle of a tiny llama, and the same model in numpy.  Copy it before you change it."""
    folder = tmp_path_factory.mktemp("tiny") / "bundle"
    return folder, write_bundle(folder)
