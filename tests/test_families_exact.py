"""Every family equals transformers at `memory: high`, on checkpoints whose attention is peaky."""

from __future__ import annotations

from pathlib import Path

import pytest

from exact import Pair, check_all, check_long, check_peaky, dequantized
from mnnsmith.api import convert
from peaky import CASES, LONG, make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.reference]

PROMPTS = (1, 2, 17, 300, 1100)
SLOW = [pytest.mark.slow]
QUANTIZED = ("w8g64", "w8g32-sym", "w4g32", "w4g64-sym", "w4g64-head8", "w8")


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    return Pair(folder, make_checkpoint({**CASES, **LONG}[request.param], folder))


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_attention_is_peaky(pair: Pair) -> None:
    check_peaky(pair)


WEIGHTS = [(name, "fp16") for name in CASES] + [
    # float32 weights take another path through the engine, the same one for each family.
    pytest.param(name, "fp32", marks=[] if name in ("llama-bias", "gemma3_text") else SLOW)
    for name in CASES
]


@pytest.mark.parametrize(("pair", "recipe"), WEIGHTS, indirect=["pair"])
def test_float_weights_equal_transformers(pair: Pair, recipe: str, tmp_path: Path) -> None:
    convert(pair.folder, tmp_path / "bundle", recipe=recipe)
    check_all(tmp_path / "bundle", pair, PROMPTS)


FAMILIES = ("llama-bias", "mistral-window", "qwen2", "qwen3", "gemma3_text", "phi3")
COMBINATIONS = [("llama-tied", recipe) for recipe in QUANTIZED] + [
    pytest.param(family, recipe, marks=marks)
    for family in FAMILIES
    for recipe, marks in (("w8g32-sym", SLOW), ("w4g64-head8", []))
]


@pytest.mark.parametrize(("pair", "recipe"), COMBINATIONS, indirect=["pair"])
def test_quantized_weights_equal_dequantized_transformers(
    pair: Pair, recipe: str, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    convert(pair.folder, bundle, recipe=recipe)
    check_all(bundle, dequantized(pair, bundle, recipe, tmp_path / "reference"), PROMPTS)


@pytest.mark.parametrize("pair", LONG, indirect=True)
def test_positions_beyond_the_low_table_equal_transformers(pair: Pair, tmp_path: Path) -> None:
    convert(pair.folder, tmp_path / "bundle", recipe="fp16")
    check_long(tmp_path / "bundle", pair)
