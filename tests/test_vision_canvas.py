"""The canvas profile: what a text-only app gets for a picture is what transformers gives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mnnsmith.api import Bundle, convert
from mnnsmith.session_media import read_media_of
from mnnsmith.vision.canvas import make_canvas
from mnnsmith.vision.processor import Picture, cut
from smolvlm_checkpoint import write_small
from smolvlm_reference import load_processor
from test_vision_model import MAX_KL, kl
from text_only_app import run_app

pytestmark = [pytest.mark.engine, pytest.mark.reference]
TILE = 64


@dataclass
class Case:
    """A checkpoint, its bundle at fp16 (which holds every weight exactly), and transformers'."""

    bundle: Bundle
    model: Any
    processor: Any

    def picture(self, image: Image.Image, longest_edge: int) -> Picture:
        reader = read_media_of(self.bundle)
        assert reader is not None
        return cut(image, replace(reader.settings, longest_edge=longest_edge))

    def shown(self, image: Image.Image, longest_edge: int, path: Path) -> str:
        """Write a picture's canvas; what names it in a text."""
        canvas = make_canvas(self.picture(image, longest_edge))
        Image.fromarray(canvas).save(path)
        height, width = canvas.shape[:2]
        return f"<img><hw>{height},{width}</hw>{path}</img>"

    def reference(
        self, text: str, images: list[Image.Image], longest_edge: int
    ) -> tuple[list[int], np.ndarray, dict[str, Any]]:
        """transformers' ids, logits [len(ids), vocab], and inputs."""
        import torch

        inputs = self.processor(
            text=text, images=images, return_tensors="pt",
            images_kwargs={"size": {"longest_edge": longest_edge}},
        )  # fmt: skip
        with torch.no_grad():
            logits = self.model(**inputs).logits[0].double().numpy()
        return inputs["input_ids"][0].tolist(), logits, dict(inputs)

    def answer(self, inputs: dict[str, Any], tokens: int) -> list[int]:
        found = self.model.generate(
            **inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=2
        )
        return found[0, inputs["input_ids"].shape[1] :].tolist()


def _load(folder: Path, kind: str, recipe: str = "fp16") -> Case:
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    bundle = convert(folder / "model", folder / "bundle", recipe=recipe, vision="canvas")
    return Case(bundle, model.eval(), load_processor(folder / "model", kind))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("canvas")
    write_small(folder / "model")
    return _load(folder, "smolvlm")


def _image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Blots of color, and grain."""
    random = np.random.default_rng([width, height, seed])
    blots = Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8)).resize((width, height))
    grain = random.integers(-30, 31, (height, width, 3))
    return Image.fromarray((np.asarray(blots) + grain).clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize(
    ("size", "longest_edge", "grid"),
    [
        ((64, 60), TILE, (0, 0)),
        ((128, 60), 2 * TILE, (1, 2)),
        ((50, 200), 2 * TILE, (2, 1)),
        ((120, 192), 3 * TILE, (3, 2)),
        ((300, 80), 4 * TILE, (2, 4)),
        ((200, 200), 4 * TILE, (4, 4)),
    ],
)
def test_a_picture_of_each_grid(
    case: Case, size: tuple[int, int], longest_edge: int, grid: tuple[int, int], tmp_path: Path
) -> None:
    image = _image(*size)
    picture = case.picture(image, longest_edge)
    assert (picture.rows, picture.cols) == grid
    text = "User:<image>What is it?<end_of_utterance>\nAssistant:"
    ids, expected, inputs = case.reference(text, [image], longest_edge)
    shown = case.shown(image, longest_edge, tmp_path / "canvas.png")
    (turn,) = run_app(case.bundle.path, [text.replace("<image>", shown)], tmp_path, tokens=16)
    assert len(turn.ids) == len(ids)
    assert kl(expected, turn.logits).max() < MAX_KL
    assert turn.answer == case.answer(inputs, 16)


def test_pictures_side_by_side_and_in_a_later_turn(case: Case, tmp_path: Path) -> None:
    sizes = ((130, 60), (60, 130), (100, 100))
    images = [_image(*size, seed=i) for i, size in enumerate(sizes)]
    longest_edge = 2 * TILE
    shown = [
        case.shown(image, longest_edge, tmp_path / f"{i}.png") for i, image in enumerate(images)
    ]
    first = "User:<image><image>Which?<end_of_utterance>\nAssistant:"
    (alone,) = run_app(case.bundle.path, [_fill(first, shown[:2])], tmp_path, tokens=16)
    ids, expected, inputs = case.reference(first, images[:2], longest_edge)
    assert kl(expected, alone.logits).max() < MAX_KL
    assert alone.answer == case.answer(inputs, 16)
    second = " That.<end_of_utterance>\nUser: And<image>here?<end_of_utterance>\nAssistant:"
    turns = run_app(case.bundle.path, [_fill(first, shown[:2]), _fill(second, shown[2:])], tmp_path)
    ids, expected, inputs = case.reference(first + second, images, longest_edge)
    assert len(turns[0].ids) + len(turns[1].ids) == len(ids)
    actual = np.concatenate([turn.logits for turn in turns])
    assert kl(expected, actual).max() < MAX_KL
    assert turns[1].answer == case.answer(inputs, 1)
    # The premise: the order of the pictures matters.
    _, other, _ = case.reference(first, images[1::-1], longest_edge)
    assert kl(expected, other)[-1] > 1e-3


def _fill(text: str, shown: list[str]) -> str:
    for name in shown:
        text = text.replace("<image>", name, 1)
    return text
