"""Rules of a recipe against a whole model: each must decide about something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mnnsmith.api import prepare
from mnnsmith.errors import RecipeError
from tiny_checkpoint import write_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    return tmp_path / "model"


def recipe(folder: Path, *rules: dict[str, object]) -> Path:
    path = folder / "recipe.json"
    path.write_text(json.dumps({"name": "mine", "default": "w4g32", "rules": list(rules)}))
    return path


@pytest.mark.parametrize(
    "rules",
    [
        [{"tensor": "*.nothing", "scheme": "w8g32"}],
        [{"layers": [40, 41], "scheme": "w8g32"}],
        [{"role": "mlp", "scheme": "w8g32"}, {"role": "mlp", "layers": [0, 0], "scheme": "fp16"}],
    ],
)
def test_a_rule_that_decides_nothing_is_an_error(
    model: Path, rules: list[dict[str, object]]
) -> None:
    with pytest.raises(RecipeError, match=f"rule {len(rules) - 1} .* no weight"):
        prepare(model, recipe=recipe(model, *rules))


def test_a_tied_embedding_in_two_forms_is_noted(model: Path) -> None:
    ready = prepare(model, recipe=recipe(model, {"role": "head", "scheme": "w8g32"}))
    assert any("stored a second time, as w4g32" in note for note in ready.notes)
    ready = prepare(model, recipe="w4g32-head8")
    assert not any("second time" in note for note in ready.notes)
