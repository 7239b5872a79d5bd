"""What is told of mixtures of experts: counts by hand, and sizes that the engine really takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mnnsmith.api import Engine, convert, inspect, open_bundle
from mnnsmith.conversion.activity import Experts
from mnnsmith.engine import mapped
from tiny_checkpoint import write_checkpoint
from tiny_mixture import CHOSEN, EXPERTS, LAYERS, write_mixture


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("mixture") / "model"
    return folder, write_mixture(folder)


def used(tensors: dict[str, np.ndarray], weight: float, vector: float) -> float:
    """Of one token: elements of matrices times `weight`, of vectors and routers times `vector`."""
    total = 0.0
    for name, value in tensors.items():
        if "embed" in name:
            total += weight * value.shape[1]
        elif ".experts." in name:
            total += weight * value.size * CHOSEN / EXPERTS
        else:
            total += (weight if value.ndim == 2 and "gate" not in name else vector) * value.size
    return total


def test_counts(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, tensors = model
    found = inspect(folder)
    assert found.experts == Experts(tuple(range(LAYERS)), EXPERTS, CHOSEN)
    assert found.parameters == sum(value.size for value in tensors.values())
    assert found.active_parameters == round(used(tensors, 1, 1))
    assert found.roles is not None
    experts = [value for name, value in tensors.items() if ".experts." in name]
    assert found.roles["expert"].tensors == len(experts)
    assert found.roles["expert"].parameters == sum(value.size for value in experts)
    assert found.roles["routers"].tensors == LAYERS


def test_bytes_of_a_token(model: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, tensors = model
    recipes = {recipe.name: recipe for recipe in inspect(folder).recipes}
    # Norms are stored with as many zeros.
    norms = 4 * sum(value.size for value in tensors.values() if value.ndim == 1)
    assert recipes["fp16"].token_bytes == round(used(tensors, 2, 4)) + norms
    assert recipes["fp16"].mapped is None
    # 4 bits and two fp16 numbers for 32 elements.
    assert recipes["w4g32"].token_bytes == round(used(tensors, 20 / 32, 4)) + norms


def test_dense_models_have_none(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path)
    found = inspect(tmp_path)
    assert found.experts is None and all(recipe.mapped is None for recipe in found.recipes)
    embedding = tensors["model.embed_tokens.weight"]
    assert found.active_parameters == found.parameters - embedding.size + embedding.shape[1]


def test_tied_embeddings_are_used_as_the_head(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tie_word_embeddings=True)
    found = inspect(tmp_path)
    assert found.active_parameters == found.parameters


def test_share_in_use() -> None:
    experts = Experts((1, 2), 64, 6)
    assert experts.share_in_use(0) == 0.0
    assert experts.share_in_use(1) == pytest.approx(6 / 64)
    assert experts.share_in_use(1000) == pytest.approx(1.0)


@pytest.mark.engine
def test_the_bundle_tells_it_and_the_copy_has_the_size_told(
    model: tuple[Path, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    folder, tensors = model
    mapped.clear_cache()
    bundle = convert(folder, tmp_path / "bundle", recipe="w4g32").path
    told = open_bundle(bundle).manifest.model
    assert told["active_parameters"] == round(used(tensors, 1, 1))
    assert told["experts"] == {
        "layers": list(range(LAYERS)), "per_layer": EXPERTS, "chosen": CHOSEN,
    }  # fmt: skip
    recipes = {recipe.name: recipe for recipe in inspect(folder).recipes}
    assert told["token_bytes"] == recipes["w4g32"].token_bytes
    json.dumps(dict(told))
    with Engine(bundle):
        memory = recipes["w4g32"].mapped
        assert memory is not None
        assert mapped.cache_bytes() == pytest.approx(memory.disk_bytes, rel=0.1)
    assert memory.least_bytes < memory.typical_bytes < memory.most_bytes
