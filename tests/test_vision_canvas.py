"""The canvas profile: what a text-only app gets for a picture is what transformers gives."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

import weight_oracle
from mnnsmith.api import Bundle, Engine, convert, prepare
from mnnsmith.errors import EngineError, UsageError
from mnnsmith.graph.weights import MatrixSlot
from mnnsmith.session import Answer, AnswerOptions, open_session
from mnnsmith.session_media import Frames, read_media_of
from mnnsmith.vision.canvas import make_canvas
from mnnsmith.vision.processor import Picture, cut
from smolvlm_checkpoint import FAKE, IMAGE_ID, write_small
from smolvlm_reference import load_processor
from test_cli_vision import mnnsmith
from test_session_vision import SQUARE, TALL, TOKENS, WIDE, Original, write_model
from test_verify_vision import check
from test_vision_model import MAX_KL, kl
from text_only_app import run_app
from tiny_checkpoint import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.reference]
# Of checkpoints that are written small; their grids have up to 4 x 4 tiles.
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
        self, text: str, images: list[Image.Image] | None, longest_edge: int
    ) -> tuple[list[int], np.ndarray, dict[str, Any]]:
        """transformers' ids, logits [len(ids), vocab], and inputs."""
        import torch

        inputs = self.processor(
            text=text, images=images or None, return_tensors="pt",
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
    # The premise: their order matters.
    _, other, _ = case.reference(first, images[1::-1], longest_edge)
    assert kl(expected, other)[-1] > 1e-3
    second = " That.<end_of_utterance>\nUser: And<image>here?<end_of_utterance>\nAssistant:"
    turns = run_app(case.bundle.path, [_fill(first, shown[:2]), _fill(second, shown[2:])], tmp_path)
    ids, expected, inputs = case.reference(first + second, images, longest_edge)
    assert len(turns[0].ids) + len(turns[1].ids) == len(ids)
    actual = np.concatenate([turn.logits for turn in turns])
    assert kl(expected, actual).max() < MAX_KL
    assert turns[1].answer == case.answer(inputs, 1)


def _fill(text: str, shown: list[str]) -> str:
    for name in shown:
        text = text.replace("<image>", name, 1)
    return text


def test_embeddings_are_those_that_the_bundle_holds(tmp_path: Path) -> None:
    """Of a quantized embedding the quantized rows stand in the picture's block."""
    import torch
    from transformers import AutoModelForImageTextToText

    tensors = write_small(tmp_path / "model")
    bundle = convert(tmp_path / "model", tmp_path / "bundle", recipe="w4g32-head8", vision="canvas")
    model = prepare(tmp_path / "model", recipe="w4g32-head8").model
    decoded = weight_oracle.matrices(bundle.path)
    for node in model.graph.all_nodes():
        slot = node.slots.get("weight")
        if isinstance(slot, MatrixSlot):
            tensors[slot.tensor] = decoded[node.name].reshape(tensors[slot.tensor].shape)
    exact = tensors[model.embedding.tensor]
    tensors[model.embedding.tensor] = decoded["embedding"]
    assert np.abs(exact - decoded["embedding"]).max() > 1e-3
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    case = Case(bundle, reference.eval(), load_processor(tmp_path / "model", "smolvlm"))
    image, text = _image(120, 60), "User:<image>What?"
    _, expected, _ = case.reference(text, [image], 2 * TILE)
    shown = case.shown(image, 2 * TILE, tmp_path / "canvas.png")
    (turn,) = run_app(bundle.path, [text.replace("<image>", shown)], tmp_path)
    assert kl(expected, turn.logits).max() < MAX_KL


def test_a_canvas_of_another_size_says_so(case: Case, tmp_path: Path) -> None:
    """To the model, which can pass it on; mnnsmith's own run time refuses it."""
    said = "(This picture cannot be shown: its canvas is not of a size that the model takes.)"
    for number, (bands, columns) in enumerate(((6, 1), (2, 5), (7, 7), (1, 2), (2, 1))):
        path = tmp_path / f"{number}.png"
        height, width = bands * TILE, columns * TILE
        _image(width, height).save(path)
        text = f"User:<img><hw>{height},{width}</hw>{path}</img>What?"
        (turn,) = run_app(case.bundle.path, [text], tmp_path)
        _, expected, _ = case.reference(f"User:{FAKE}{said}{FAKE}What?", None, TILE)
        assert kl(expected, turn.logits).max() < MAX_KL
        with (
            Engine(case.bundle.path) as engine,
            pytest.raises(UsageError, match="no grid that the model has tokens for"),
        ):
            engine.forward([40, IMAGE_ID, 41], tiles=[np.zeros((height, width, 3), np.uint8)])


def test_answers_of_a_dialogue_are_those_of_transformers(tmp_path: Path) -> None:
    """mnnsmith itself shows pictures, and frames of a video, to such a bundle."""
    import torch
    from transformers import AutoModelForImageTextToText

    folder = write_model(tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    original = Original(load_processor(folder, "smolvlm"), model.eval())
    bundle = convert(folder, tmp_path / "bundle", recipe="fp16", vision="canvas")
    options = AnswerOptions(max_tokens=TOKENS)
    turns: list[tuple[str, list[np.ndarray], int]] = [
        ("What is this?", [WIDE], 1),
        ("And now?", [], 0),
        ("Compare <image><image>, please.", [TALL, SQUARE], 2),
    ]
    with open_session(bundle, options=options, memory="high", precision="high") as session:
        for text, images, fresh in turns:
            held = len(session.messages)
            *_, answer = session.ask(text, images=images)
            assert isinstance(answer, Answer)
            ids, best = original.answer(session.messages[: held + 1])
            made = session.prompt(session.messages[: held + 1])
            assert len(made.ids) == len(ids)
            assert list(answer.token_ids) == best
            assert answer.tiles - answer.reused_tiles == fresh
        frames = session.prompt([{"role": "user", "content": [
            {"type": "video", "video": Frames(np.stack([SQUARE] * 3), fps=1.0)},
        ]}])  # fmt: skip
        assert [run.tile.shape for run in frames.tiles] == [(TILE, TILE, 3)] * 3
        assert {run.stop - run.start for run in frames.tiles} == {1 + 4}
        assert session.media is not None
        session.media.reader.settings = replace(session.media.reader.settings, longest_edge=999)
        with pytest.raises(UsageError, match="of at most 4 x 4 tiles"):
            session.prompt(with_parts("What?", WIDE[::-1]))


def with_parts(text: str, image: np.ndarray) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def test_a_profile_is_one_of_two_and_for_models_that_see(tmp_path: Path) -> None:
    write_small(tmp_path / "model")
    with pytest.raises(UsageError, match="standard, canvas"):
        prepare(tmp_path / "model", vision="tiles")
    standard, canvas = (prepare(tmp_path / "model", vision=p) for p in ("standard", "canvas"))
    assert standard.plan.vision is not None and canvas.plan.vision is not None
    assert canvas.plan.vision.parameters == standard.plan.vision.parameters
    write_checkpoint(tmp_path / "text")
    with pytest.raises(UsageError, match="sees no pictures"):
        prepare(tmp_path / "text", vision="canvas")


def test_a_tokenizer_without_grids_takes_whole_pictures_only(tmp_path: Path) -> None:
    write_small(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace("<row_1_col_", "<line_1_col_"))
    bundle = convert(tmp_path / "model", tmp_path / "bundle", recipe="fp16", vision="canvas")
    layout = prepare(tmp_path / "model", vision="canvas").canvas
    assert layout is not None and layout.columns == 0
    assert layout.lengths[0] == [5] and set(layout.places) == {(0, 0)}
    _image(2 * TILE, TILE).save(tmp_path / "wide.png")
    shown = f"<img><hw>{TILE},{2 * TILE}</hw>{tmp_path / 'wide.png'}</img>"
    (turn,) = run_app(bundle.path, [f"User:{shown}?"], tmp_path)
    assert len(turn.ids) == len("User:?") + 2 + len(layout.wrong)


def test_verify_looks_into_the_part_that_encodes_a_tile(tmp_path: Path) -> None:
    write_small(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "bundle", recipe="w8g32-vision8", vision="canvas")
    _image(200, 40).save(tmp_path / "wide.png")
    _image(60, 120).save(tmp_path / "tall.png")
    images = (tmp_path / "wide.png", tmp_path / "tall.png")
    outcome = check(tmp_path / "bundle", tmp_path / "model", images, recipe="w8g32-vision8")
    figures = outcome.figures
    assert not [f for f in outcome.findings if f.severity != "warning"]
    assert figures.first is None and figures.max_kl < MAX_KL
    assert len(figures.exact) == 8
    assert all(value.error < (value.allowed or 0) for value in figures.exact)


def test_the_command_line_makes_both_bundle_and_canvas(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    Image.fromarray(WIDE).save(tmp_path / "wide.png")
    made = mnnsmith(
        "convert", tmp_path / "model", "-o", tmp_path / "bundle", "--vision", "canvas",
        "--recipe", "fp16",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    shown = ("canvas", tmp_path / "wide.png", "-o", tmp_path / "c.png", "--bundle")
    found = mnnsmith(*shown, tmp_path / "bundle")
    assert found.stdout == "<img><hw>256,256</hw>c.png</img>\n", found.stderr
    config = tmp_path / "bundle" / "llm_config.json"
    text = json.loads(config.read_text())
    config.write_text(json.dumps({**text, "canvas_tokens": [[5, 0], [0, 19]]}))
    refused = mnnsmith(*shown, tmp_path / "bundle")
    assert refused.returncode == 2 and "at most 1 x 2 tiles" in refused.stderr
    for wrong in ("x", [], [[]], [[5], [1, 2]], [[-1]]):
        config.write_text(json.dumps({**text, "canvas_tokens": wrong}))
        with pytest.raises(EngineError, match="canvas_tokens"):
            Engine(tmp_path / "bundle")
    refused = mnnsmith(*shown, tmp_path / "bundle")
    assert refused.returncode == 6 and "canvas_tokens" in refused.stderr
    del text["canvas_tokens"]
    config.write_text(json.dumps(text))
    refused = mnnsmith(*shown, tmp_path / "bundle")
    assert refused.returncode == 2 and "--vision canvas" in refused.stderr
