"""SmolVLM-256M's true shape, with the real text weights of SmolLM2-135M (minutes)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnnsmith.api import Bundle, Engine, convert
from smolvlm_checkpoint import write_256m
from smolvlm_folder import FAKE_ID, GLOBAL_ID, IMAGE_ID
from test_vision_model import MAX_KL, kl, normalized

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.reference]

TILE, TOKENS, GRID_TILES = 512, 64, 17
MEMORY_LIMIT_BYTES = 1_200_000_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Path:
    folder = tmp_path_factory.mktemp("smolvlm") / "model"
    write_256m(folder, smollm2_gguf)
    return folder


def _bundle(source: Path, recipe: str) -> Bundle:
    return convert(source, source.parent / recipe, recipe=recipe)


def _tiles(count: int) -> np.ndarray:
    random = np.random.default_rng(count)
    blots = random.integers(0, 256, (count, 8, 8, 3)).repeat(64, 1).repeat(64, 2)
    return (0.7 * blots + random.integers(0, 77, blots.shape)).astype(np.uint8)


def _prompt(tiles: int) -> list[int]:
    """As the processor lays a grid of one row out, around words of SmolLM2."""
    ids = [1, 11126, 42, 198]
    for column in range(tiles):
        place = GLOBAL_ID if column == tiles - 1 else GLOBAL_ID + 1 + column
        ids += [FAKE_ID, place, *[IMAGE_ID] * TOKENS]
    return [*ids, FAKE_ID, 7306, 451, 6, 260, 3575, 47]


def test_logits_and_answer_are_those_of_transformers(source: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    bundle = _bundle(source, "fp16")
    assert bundle.manifest.model["parameters"] == 256_484_928
    model: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).eval()
    ids, tiles = _prompt(2), _tiles(2)
    pixels = torch.from_numpy(normalized(tiles))[None]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), pixel_values=pixels).logits[0]
        out = model.generate(
            input_ids=torch.tensor([ids]), pixel_values=pixels, max_new_tokens=16,
            do_sample=False, eos_token_id=None, pad_token_id=2,
        )[0, len(ids) :].tolist()  # fmt: skip
    with Engine(bundle.path, memory="high", precision="high") as engine:
        actual = engine.forward(ids, all_positions=True, tiles=tiles)
        assert kl(expected.double().numpy(), actual).max() < MAX_KL
        engine.reset()
        assert list(engine.generate(ids, max_new_tokens=16, tiles=tiles)) == out


def test_memory_is_that_of_one_tile(source: Path) -> None:
    """A grid of 4 x 4 tiles and the whole picture: 1141 tokens of a prompt."""
    bundle = _bundle(source, "w4g32-head8")
    ids, tiles = _prompt(GRID_TILES), _tiles(GRID_TILES)
    with Engine(bundle.path) as engine:
        engine.forward(_prompt(1), tiles=tiles[:1])
        one = engine.statistics.peak_rss_bytes
        engine.reset()
        assert np.isfinite(engine.forward(ids, tiles=tiles)).all()
        statistics = engine.statistics
    assert statistics.tiles == 1 + GRID_TILES
    assert statistics.peak_rss_bytes < min(MEMORY_LIMIT_BYTES, one + 150_000_000)
