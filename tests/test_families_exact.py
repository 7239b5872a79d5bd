"""Every family equals transformers at `memory: high`, on checkpoints whose attention is peaky."""

from __future__ import annotations

from pathlib import Path

import pytest

from exact import Pair, check_all, check_peaky, dequantized
from mnnsmith.api import convert
from peaky import CASES, make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.reference]

PROMPTS = (1, 2, 17, 300, 1100)
QUANTIZED = ("w8g64", "w8g32-sym", "w4g32", "w4g64-sym", "w4g64-head8", "w8")


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    return Pair(folder, make_checkpoint(CASES[request.param], folder))


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_attention_is_peaky(pair: Pair) -> None:
    check_peaky(pair)


@pytest.mark.parametrize("recipe", ["fp16", "fp32"])
@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_float_weights_equal_transformers(pair: Pair, recipe: str, tmp_path: Path) -> None:
    convert(pair.folder, tmp_path / "bundle", recipe=recipe)
    check_all(tmp_path / "bundle", pair, PROMPTS)


FAMILIES = ("llama-bias", "mistral-window", "qwen2", "qwen3", "gemma3_text", "phi3")
COMBINATIONS = [("llama-tied", recipe) for recipe in QUANTIZED] + [
    (family, recipe) for family in FAMILIES for recipe in ("w8g32-sym", "w4g64-head8")
]


@pytest.mark.parametrize(("pair", "recipe"), COMBINATIONS, indirect=["pair"])
def test_quantized_weights_equal_dequantized_transformers(
    pair: Pair, recipe: str, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    convert(pair.folder, bundle, recipe=recipe)
    check_all(bundle, dequantized(pair, bundle, recipe, tmp_path / "reference"), PROMPTS)
