"""Recipes and schemes: names can be decoded, the first match wins, what does not fit is said."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mnnsmith.errors import RecipeError
from mnnsmith.quant.recipe import Target, describe, parse_recipe, parse_recipe_name
from mnnsmith.quant.scheme import Scheme, parse_scheme


def target(role: str = "mlp", cols: int = 256, layer: int | None = 3, tensor: str = "") -> Target:
    return Target(tensor or f"model.layers.{layer}.{role}.weight", role, layer, 512, cols)


@pytest.mark.parametrize(
    ("name", "scheme", "bits_per_weight"),
    [
        ("fp16", Scheme(16), 16),
        ("fp32", Scheme(32), 32),
        ("w4g32", Scheme(4, 32), 5),
        ("w4g64", Scheme(4, 64), 4.5),
        ("w4g128-sym", Scheme(4, 128, symmetric=True), 4.125),
        ("w8g256", Scheme(8, 256), 8.125),
        ("w8", Scheme(8), 8.125),
        ("w8-sym", Scheme(8, 0, symmetric=True), 8.0625),
        ("w4g32-scale32", Scheme(4, 32, scale_bits=32), 6),
        ("w4g32-sym-scale32", Scheme(4, 32, True, 32), 5),
    ],
)
def test_scheme_names_read_back(name: str, scheme: Scheme, bits_per_weight: float) -> None:
    assert parse_scheme(name, "here") == scheme and scheme.name == name
    assert scheme.bits_per_weight(256) == bits_per_weight
    assert scheme.is_float == name.startswith("fp")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("w2g64", "asks for 2 bits; the engine runs 4 or 8"),
        ("w3", "3 bits"),
        ("w6g64", "asks for 6 bits"),
        ("w16", "asks for 16 bits"),
        ("w0", "asks for 0 bits"),
        ("w4g48", "asks for blocks of 48; they are 32, 64, 128 or 256 wide"),
        ("w4g0", "blocks of 0"),
        ("w4g512", "blocks of 512"),
        ("w" + "9" * 5000, "is not a scheme"),
        ("w４g64", "is not a scheme"),
        ("W4G64", "is not a scheme"),
        ("w4g64 ", "is not a scheme"),
        ("w4g64\n", "is not a scheme"),
        ("w4-scale32-sym", "is not a scheme"),
        ("fp8", "is not a scheme"),
        ("int4", "is not a scheme"),
        ("", "is not a scheme"),
        (None, "None is not a scheme"),
        (4, "4 is not a scheme"),
        (["w4"], "is not a scheme"),
    ],
)
def test_schemes_that_are_none(name: Any, part: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_scheme(name, "mine.json: rule 3")
    message = str(caught.value)
    assert message.startswith("mine.json: rule 3: ") and part in message and len(message) < 400


@pytest.mark.parametrize(
    ("name", "mlp", "head", "embedding"),
    [
        ("w4g64", "w4g64", "w4g64", "w4g64"),
        ("w4g64-head8", "w4g64", "w8g64", "w8g64"),
        ("w4g64-head8-embed16", "w4g64", "w8g64", "fp16"),
        ("w4g64-embed8", "w4g64", "w4g64", "w8g64"),
        ("w4g32-sym-head8", "w4g32-sym", "w8g32-sym", "w8g32-sym"),
        ("w4g64-scale32-head8", "w4g64-scale32", "w8g64-scale32", "w8g64-scale32"),
        ("w8g32-sym-scale32-embed16", "w8g32-sym-scale32", "w8g32-sym-scale32", "fp16"),
        ("w8g128-head16", "w8g128", "fp16", "fp16"),
        ("w8-head4", "w8", "w4", "w4"),
        ("fp16-head8", "fp16", "w8g64", "w8g64"),
        ("fp16", "fp16", "fp16", "fp16"),
        # The engine has no embeddings of fp32.
        ("fp32", "fp32", "fp32", "fp16"),
    ],
)
def test_recipe_names(name: str, mlp: str, head: str, embedding: str) -> None:
    recipe = parse_recipe_name(name)
    found = [
        recipe.choose(target(role, layer=None)).scheme.name for role in ("mlp", "head", "embedding")
    ]
    assert found == [mlp, head, embedding] and recipe.name == name
    assert parse_recipe(describe(recipe), "the manifest") == recipe


@pytest.mark.parametrize(
    "name",
    ["", "w4g64-", "w4g64-head", "w4g64-head8-head8", "w4g64-fit-sym", "w4g64-scale32-sym",
     "keep-fit", "w4g64_head8",
     "W4G64", "w4g64-head8\n", "w" + "4" * 9999, "w4g64-head٨", "best", "q4_0"],
)  # fmt: skip
def test_names_that_are_no_recipes(name: str) -> None:
    with pytest.raises(RecipeError, match="is not a recipe") as caught:
        parse_recipe_name(name)
    assert "w4g64-head8" in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("fp16-sym", "-sym means nothing for floats"),
        ("w4g64-head5", "recipe w4g64-head5: w5 asks for 5 bits"),
        ("w5g64", "asks for 5 bits"),
        ("w4g48-head8", "blocks of 48"),
        ("fp16-head3", "3 bits"),
    ],
)
def test_recipes_of_schemes_that_are_none(name: str, part: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(part)):
        parse_recipe_name(name)


def test_keep() -> None:
    recipe = parse_recipe_name("keep")
    assert recipe.keep and describe(recipe)["default"] == "keep"


RULES = {
    "default": "w4g64",
    "rules": [
        {"layers": [0, 1], "role": "mlp", "scheme": "w8g32"},
        {"tensor": "*.layers.1.*", "scheme": "fp16"},
        {"role": "mlp", "scheme": "w8g64"},
        {"tensor": "*.layers.[45].attention.weight", "scheme": "w4g32-sym"},
    ],
}


@pytest.mark.parametrize(
    ("role", "layer", "scheme"),
    [
        ("mlp", 0, "w8g32"),
        ("mlp", 1, "w8g32"),
        ("attention", 1, "fp16"),
        ("attention", 0, "w4g64"),
        ("mlp", 2, "w8g64"),
        ("attention", 5, "w4g32-sym"),
        ("attention", 6, "w4g64"),
        ("head", None, "w4g64"),
    ],
)
def test_the_first_rule_that_matches_wins(role: str, layer: int | None, scheme: str) -> None:
    recipe = parse_recipe(RULES, "mine.json")
    assert recipe.choose(target(role, layer=layer)).scheme.name == scheme
    assert parse_recipe(describe(recipe), "again") == recipe


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"default": None}, "mine.json: default: None is not a scheme"),
        ({"defualt": "w4"}, "unknown key 'defualt'"),
        ({"name": "a b"}, "name must be letters"),
        ({"name": ["x"]}, "name must be letters"),
        ({"misfit": "pad"}, "misfit must be one of"),
        ({"misfit": ["fit"]}, "misfit must be one of"),
        ({"rules": {}}, "rules must be a list"),
        ({"rules": [{"scheme": "w4"}] * 1001}, "at most 1000"),
        ({"rules": ["w4"]}, "rule 0: must be an object, not 'w4'"),
        ({"rules": [{"role": "mlp"}]}, "rule 0: scheme is missing"),
        ({"rules": [{"scheme": "w4"}, {"scheme": "w5"}]}, "rule 1: w5 asks for 5 bits"),
        ({"rules": [{"scheme": "w4", "bits": 4}]}, "rule 0: unknown key 'bits'"),
        ({"rules": [{"scheme": "w4", "role": "router"}]}, "role must be one of embedding, head"),
        ({"rules": [{"scheme": "w4", "role": {}}]}, "role must be one of"),
        ({"rules": [{"scheme": "w4", "tensor": 3}]}, "tensor must be a name or glob"),
        ({"rules": [{"scheme": "w4", "tensor": "*" * 501}]}, "tensor must be a name or glob"),
        ({"rules": [{"scheme": "w4", "layers": 3}]}, "layers must be [first, last]"),
        ({"rules": [{"scheme": "w4", "layers": [0]}]}, "layers must be [first, last]"),
        ({"rules": [{"scheme": "w4", "layers": [5, 2]}]}, "layers must be [first, last]"),
        ({"rules": [{"scheme": "w4", "layers": [-1, 2]}]}, "layers must be [first, last]"),
        ({"rules": [{"scheme": "w4", "layers": [0, True]}]}, "layers must be [first, last]"),
    ],
)
def test_recipe_files_that_are_refused(change: dict[str, Any], part: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"default": "w4g64", **change}, "mine.json")
    message = str(caught.value)
    assert part in message and message.startswith("mine.json: ") and len(message) < 400


def test_a_default_must_be_there() -> None:
    with pytest.raises(RecipeError, match="default is missing"):
        parse_recipe({}, "mine.json")


@pytest.mark.parametrize(
    ("name", "cols", "stored"),
    [
        ("w8g128-fit", 576, "w8g64"),
        ("w4g64-fit", 96, "w4g32"),
        ("w4g256-fit", 384, "w4g128"),
        ("w4g64-fit", 64, "w4g64"),
        # No narrower block divides; a wider one cannot where no narrower does.
        ("w4g128-fit", 128, "w4g128"),
    ],
)
def test_fit_takes_the_widest_block_that_divides(name: str, cols: int, stored: str) -> None:
    choice = parse_recipe_name(name).choose(target(cols=cols))
    assert choice.scheme.name == stored
    wished = name.removesuffix("-fit")
    expected = None if stored == wished else f"{stored} in place of {wished}: width {cols}"
    assert choice.note == expected


@pytest.mark.parametrize(
    ("name", "cols", "parts", "absent"),
    [
        ("w8g128", 576, ["w8g128 does not fit model.layers.3.mlp.weight [512, 576]",
                         "128 does not divide 576", "w8g32, w8g64", "w8g128-fit"], []),
        ("w4g32", 40, ["32 does not divide 40", "fp16"], ["-fit"]),
        ("w4g32-fit", 40, ["32 does not divide 40", "fp16"], ["-fit-fit"]),
        ("w4", 36, ["8 does not divide 36"], ["-fit"]),
    ],
)  # fmt: skip
def test_misfits(name: str, cols: int, parts: list[str], absent: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe_name(name).choose(target(cols=cols))
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert not any(part in message for part in absent), message


def test_a_misfit_of_a_recipe_file_names_its_own_remedy() -> None:
    with pytest.raises(RecipeError, match='"misfit": "fit" in its file'):
        parse_recipe({"name": "mine", "default": "w4g64"}, "mine.json").choose(target(cols=96))
    fitted = parse_recipe({"default": "w4g64", "misfit": "fit"}, "mine.json")
    assert fitted.choose(target(cols=96)).scheme.name == "w4g32"
