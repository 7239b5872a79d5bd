"""SmolVLM-256M's true shape, with the real text weights of SmolLM2-135M (minutes)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mnnsmith.api import Bundle, Engine, convert
from smolvlm_checkpoint import write_256m
from smolvlm_folder import FAKE_ID, GLOBAL_ID, IMAGE_ID
from smolvlm_reference import load_processor
from test_vision_canvas import Case
from test_vision_model import MAX_KL, kl, normalized
from text_only_app import run_app

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.reference]

TILE, TOKENS, GRID_TILES = 512, 64, 17
MEMORY_LIMIT_BYTES = 1_200_000_000
# The tiles in floats are 63 MB, which the engine holds several times.
CANVAS_LIMIT_BYTES = 1_500_000_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Path:
    folder = tmp_path_factory.mktemp("smolvlm") / "model"
    write_256m(folder, smollm2_gguf)
    return folder


def _bundle(source: Path, recipe: str, vision: str = "standard") -> Bundle:
    return convert(source, source.parent / f"{recipe}-{vision}", recipe=recipe, vision=vision)


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


def test_a_canvas_is_what_transformers_sees(source: Path, tmp_path: Path) -> None:
    """An app that sends text alone: a picture of 1 x 2 tiles, and the whole of it."""
    import torch
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    bundle = _bundle(source, "fp16", "canvas")
    case = Case(bundle, model.eval(), load_processor(source, "smolvlm"))
    image = Image.fromarray(_tiles(1)[0][:240])
    assert len(case.picture(image, 2 * TILE).tiles) == 3
    text = "<|im_start|>User:<image>What is this?<end_of_utterance>\nAssistant:"
    ids, expected, inputs = case.reference(text, [image], 2 * TILE)
    shown = case.shown(image, 2 * TILE, tmp_path / "canvas.png")
    (turn,) = run_app(bundle.path, [text.replace("<image>", shown)], tmp_path, tokens=16)
    assert len(turn.ids) == len(ids)
    assert kl(expected, turn.logits).max() < MAX_KL
    assert turn.answer == case.answer(inputs, 16)


def test_memory_of_a_canvas_is_not_that_of_a_batch(source: Path) -> None:
    """The largest canvas: 4 x 4 tiles and the whole picture, 1127 tokens that are fed at once."""
    bundle = _bundle(source, "w4g32-head8", "canvas")
    random = np.random.default_rng(1)
    canvas = random.integers(0, 256, (5 * TILE, 4 * TILE, 3), np.uint8)
    with Engine(bundle.path) as engine:
        assert engine.vision is not None and engine.vision.canvas_tokens is not None
        image = [engine.vision.image_token]
        for pixels in (canvas[:TILE, :TILE], canvas):
            rows, columns = (side // TILE for side in pixels.shape[:2])
            run = engine.vision.canvas_tokens[rows - 1][columns - 1] * image
            engine.reset()
            logits = engine.forward([1, FAKE_ID, *run, FAKE_ID, 42], tiles=[pixels])
            assert np.isfinite(logits).all()
        statistics = engine.statistics
    assert statistics.peak_rss_bytes < CANVAS_LIMIT_BYTES
