"""Verification of a real model: SmolLM2 as its GGUF has it, quantized anew, and on a phone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mnnsmith import api
from mnnsmith.conversion.convert import convert
from mnnsmith.engine import parse_device
from mnnsmith.errors import MnnsmithError
from mnnsmith.verify.results import CHECKS

CACHE = os.environ.get("XDG_CACHE_HOME", "")
pytestmark = [pytest.mark.engine, pytest.mark.reference, pytest.mark.slow]


@pytest.fixture(scope="module", params=["keep", "w4g32-head8"])
def bundle(
    request: pytest.FixtureRequest, smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "bundle"
    return convert(smollm2_gguf, folder, recipe=request.param).path


@pytest.mark.parametrize("level", ["quick", "full"])
def test_every_check_passes(bundle: Path, smollm2_gguf: Path, level: str) -> None:
    found = api.verify(bundle, smollm2_gguf, level=level, threads=2)
    expected = [(name, "passed") for name in CHECKS if name != "vision"]
    assert [(c.name, c.status) for c in found.checks] == expected
    assert found.passed, found.gates
    layers = found.figures.layers
    assert layers is not None and len(layers.exact) == 90
    for value in layers.exact:
        assert value.allowed is not None and value.error < value.allowed / 4, value


@pytest.mark.parametrize("bundle", ["w4g32-head8"], indirect=True)
def test_it_passes_on_an_emulated_phone(
    bundle: Path, smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The user's cache, where the device lies.
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE)
    device = "arm64:cortex-a76"
    try:
        parse_device(device).launch()
    except MnnsmithError as error:
        pytest.skip(f"{device}: {error.message}")
    text = tmp_path / "short.txt"
    text.write_text("The river rose in the night, and by morning the lower fields were gone. " * 10)
    found = api.verify(
        bundle, smollm2_gguf, checks=("statistical",), texts=[text], device=device, threads=2
    )
    assert found.passed, found.checks
    assert found.subject.device == device
