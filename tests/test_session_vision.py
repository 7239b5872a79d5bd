"""Dialogues with pictures through the session: transformers' answers, the cache, the errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import picture_samples as samples
import smolvlm_folder
from mnnsmith.api import Bundle, Engine, convert
from mnnsmith.errors import (
    BundleError,
    ContextLengthError,
    MissingResourceError,
    SourceError,
    UsageError,
)
from mnnsmith.reply import TileRun, keep_common
from mnnsmith.session import Answer, AnswerOptions, ChatSession, open_session
from mnnsmith.session_media import Frames, MediaReader, read_media_of, with_media
from smolvlm_checkpoint import write_small
from smolvlm_reference import load_processor

TEMPLATE = smolvlm_folder.TEMPLATE.replace("<|im_start|>", "<s>").replace(
    "<end_of_utterance>", "</s>"
)
TOKENS = 12
WIDE, TALL, SQUARE = samples.photo(64, 48), samples.photo(30, 80, 1), samples.photo(60, 60, 2)


def write_model(folder: Path, **vision: Any) -> Path:
    """A small SmolVLM whose template uses tokens that its vocabulary has."""
    write_small(folder, **vision)
    path = folder / "tokenizer_config.json"
    tokens = json.loads(path.read_text())
    tokens |= {"eos_token": "</s>", "pad_token": "</s>"}
    tokens["additional_special_tokens"].remove("<end_of_utterance>")
    path.write_text(json.dumps(tokens))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    processor["video_sampling"] = {
        "fps": 1, "max_frames": 4, "video_size": {"longest_edge": processor["max_image_size"]
                                                  ["longest_edge"]},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@dataclass
class Original:
    """transformers' processor and model."""

    processor: Any
    model: Any

    def answer(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """The ids of the prompt, and the best tokens after it, up to the end of the turn."""
        import torch

        inputs = self.processor.apply_chat_template(
            [_for_transformers(message) for message in messages], add_generation_prompt=True,
            tokenize=True, return_dict=True, processor_kwargs={"return_tensors": "pt"},
        )  # fmt: skip
        prompt = ids = inputs["input_ids"]
        pictures = {"pixel_values": inputs["pixel_values"]} if "pixel_values" in inputs else {}
        with torch.no_grad():
            for _ in range(TOKENS):
                best = self.model(input_ids=ids, **pictures).logits[0, -1].argmax()
                if best == self.processor.tokenizer.eos_token_id:
                    break
                ids = torch.cat([ids, best[None, None]], dim=1)
        return prompt[0].tolist(), ids[0, prompt.shape[1] :].tolist()


def _for_transformers(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    return {
        "role": message["role"],
        "content": [
            {"type": "image", "image": Image.fromarray(part["image"])} if "image" in part else part
            for part in content
        ],
    }


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def bundle(model_folder: Path) -> Bundle:
    return convert(model_folder, model_folder.parent / "bundle", recipe="fp16")


@pytest.fixture(scope="module")
def original(model_folder: Path) -> Original:
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32)
    return Original(load_processor(model_folder, "smolvlm"), model.eval())


@pytest.fixture
def session(bundle: Bundle) -> Iterator[ChatSession]:
    options = AnswerOptions(max_tokens=TOKENS)
    with open_session(bundle, options=options, memory="high", precision="high") as opened:
        yield opened


def last(events: Any) -> Answer:
    *_, answer = events
    assert isinstance(answer, Answer)
    return answer


def encoded_tiles(session: ChatSession) -> int:
    assert isinstance(session.engine, Engine)
    return session.engine.statistics.tiles


@pytest.mark.engine
@pytest.mark.reference
def test_answers_are_those_of_transformers(session: ChatSession, original: Original) -> None:
    """Pictures in every turn; what an earlier turn showed is not encoded again."""
    turns: list[tuple[str, list[np.ndarray], int]] = [
        ("What is this?", [WIDE], 13),
        ("And now?", [], 0),
        ("Compare <image> with <image>, please.", [TALL, SQUARE], 9 + 17),
    ]
    for text, images, fresh in turns:
        before, held = encoded_tiles(session), len(session.messages)
        answer = last(session.ask(text, images=images))
        ids, best = original.answer(session.messages[: held + 1])
        assert session.prompt(session.messages[: held + 1]).ids == ids
        assert list(answer.token_ids) == best
        assert encoded_tiles(session) - before == fresh
        assert answer.tiles - answer.reused_tiles == fresh
    assert answer.reused_tiles == 13
    # The premise: without the picture it would be another answer.
    other = original.answer([{"role": "user", "content": "What is this?"}])[1]
    assert other != original.answer(session.messages[:1])[1]


@pytest.mark.engine
@pytest.mark.reference
def test_a_changed_history_is_fed_again_with_its_pictures(
    session: ChatSession, original: Original
) -> None:
    last(session.ask("What is this?", images=[WIDE]))
    last(session.ask("And this?", images=[TALL]))

    def check(fresh: int) -> None:
        before = encoded_tiles(session)
        reply = session.reply(session.messages[:3])
        list(reply)
        assert list(reply.answer.token_ids) == original.answer(session.messages[:3])[1]
        assert encoded_tiles(session) - before == fresh

    check(0)
    # Another picture of the same size: the ids are equal, the tiles are not.
    session.messages[2]["content"][0] = {"type": "image", "image": TALL[::-1].copy()}
    check(9)
    session.messages[0]["content"][0] = {"type": "image", "image": WIDE[:, ::-1].copy()}
    check(13 + 9)
    # A text in place of the second picture; then the first one after its text.
    session.messages[2]["content"] = "What was it?"
    check(0)
    session.messages[0]["content"].reverse()
    check(13)


@pytest.mark.engine
def test_a_source_of_any_kind_is_one_picture(session: ChatSession, tmp_path: Path) -> None:
    path = tmp_path / "größe.png"
    Image.fromarray(WIDE).save(path)
    sources = [path, str(path), path.read_bytes(), Image.fromarray(WIDE), WIDE]
    answers = []
    for source in sources:
        session.reset()
        answers.append(last(session.ask("What?", images=[source])))
    assert len({answer.token_ids for answer in answers}) == 1
    assert encoded_tiles(session) == 13
    parts = [{"type": "image", "path": str(path)}, {"type": "text", "text": "What?"}]
    reply = session.reply([{"role": "user", "content": parts}])
    list(reply)
    assert reply.answer.token_ids == answers[0].token_ids


@pytest.mark.engine
def test_what_is_wrong_stops_before_the_model_runs(session: ChatSession, tmp_path: Path) -> None:
    session.ask("x").close()
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "cut.png").write_bytes(samples.encoded(Image.fromarray(WIDE))[:900])
    wrong: list[tuple[Any, type[Exception], str]] = [
        (tmp_path / "none.png", SourceError, r"none\.png"),
        (tmp_path / "text.png", SourceError, "not a picture"),
        (tmp_path / "cut.png", SourceError, "damaged or cut off"),
        (b"", SourceError, "picture 1: the file is empty"),
        (samples.png_header(40_000, 40_000), SourceError, "bomb"),
        (np.zeros((4, 4, 7)), UsageError, "no picture"),
        (12, UsageError, "int is no picture"),
        ("https://example.org/a.png", UsageError, "download it first"),
    ]
    for source, error, words in wrong:
        with pytest.raises(error, match=words):
            list(session.ask("What?", images=[source]))
        assert session.messages == []
    with pytest.raises(UsageError, match="has 2 <image>, but 1 were given"):
        list(session.ask("<image> and <image>", images=[WIDE]))
    with pytest.raises(ContextLengthError, match="tiles of pictures"):
        list(session.ask("What?", images=[samples.photo(60, 60, seed) for seed in range(12)]))
    with pytest.raises(UsageError, match="int is no video"):
        list(session.ask("What?", videos=[12]))
    with pytest.raises(SourceError, match=r"none\.mp4"):
        list(session.ask("What?", videos=[tmp_path / "none.mp4"]))
    session.allow_special = True
    with pytest.raises(UsageError, match="has 1 <image> but 0 were given"):
        list(session.ask("a <image>"))
    assert session.messages == [] and encoded_tiles(session) == 0
    assert session.engine.tokens == ()


@pytest.mark.engine
def test_a_video_is_its_frames(session: ChatSession) -> None:
    frames = np.stack([samples.photo(64, 48, seed) for seed in range(8)])
    answer = last(session.ask("What happens?", videos=[Frames(frames, 2.0)]))
    assert answer.tiles == 4
    prompt = session.prompt(session.messages[:1])
    assert "following series of four frames from a 0:00:04" in prompt.text
    assert prompt.ids.count(session.tokenizer.encode("<image>", allow_special=True)[0]) == 16
    again = last(session.ask("And then?"))
    assert (again.tiles, again.reused_tiles) == (4, 4)


@pytest.mark.engine
def test_a_model_of_text_alone_refuses_pictures(tiny_bundle: tuple[Path, Any]) -> None:
    from mnnsmith.text.template import ChatTemplate
    from mnnsmith.text.tokenizer import TextTokenizer
    from text_samples import byte_level_json, template_source

    with Engine(tiny_bundle[0]) as engine:
        session = ChatSession(
            engine, TextTokenizer(byte_level_json()), ChatTemplate(template_source("qwen3"))
        )
        for given in ({"images": [WIDE]}, {"videos": ["a.mp4"]}):
            with pytest.raises(UsageError, match="sees no pictures"):
                list(session.ask("What?", **given))
        assert session.messages == [] and engine.position == 0
        session.close()


# --- no engine -------------------------------------------------------------------------------


class Cache:
    """An engine's cache alone."""

    context_limit = 99

    def __init__(self, tokens: list[int], pictures: list[tuple[int, str]]) -> None:
        self.tokens, self.pictures = tuple(tokens), tuple(pictures)

    def generate(self, *_: Any, **__: Any) -> Any:
        raise AssertionError

    def rewind(self, position: int) -> None:
        self.tokens = self.tokens[:position]

    def reset(self) -> None:
        self.tokens = ()


def test_the_common_part_ends_between_pictures() -> None:
    from mnnsmith.engine.runner import tile_digest

    black, white = np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), 255, np.uint8)
    ids = [5, 6, 9, 9, 7, 9, 9, 8, 4]
    runs = [TileRun(2, 4, black), TileRun(5, 7, white)]
    held = [(2, tile_digest(black)), (5, tile_digest(white))]
    cases = [
        (ids, held, 8),
        ([*ids, 1, 2], held, 8),
        # The second picture is another one: fed from the token before it.
        (ids, [held[0], (5, tile_digest(black))], 4),
        (ids, [(2, tile_digest(white)), held[1]], 1),
        (ids, [], 1),
        # One image token that the model wrote, where the prompt has a picture.
        ([5, 6, 9, 1], [], 1),
        ([5, 6, 9, 9, 1], held[:1], 4),
        ([5, 1], [], 1),
        ([1], [], 0),
    ]
    for tokens, pictures, expected in cases:
        cache = Cache(tokens, pictures)
        assert keep_common(cache, ids, runs) == expected, (tokens, pictures)
        assert len(cache.tokens) == expected


def test_parts_of_a_message() -> None:
    def kinds(parts: list[Any]) -> list[Any]:
        return [part.get("text", part.get("image", part.get("video"))) for part in parts]

    assert kinds(with_media("Hi", [1, 2], ["v"])) == [1, 2, "v", "Hi"]
    assert kinds(with_media("a<image>b<video><image>", [1, 2], ["v"])) == ["a", 1, "b", "v", 2]
    # Only the kind that is named has places of its own; of the other kind it stays text.
    assert kinds(with_media("a<video>", [1])) == [1, "a<video>"]
    assert kinds(with_media("<image>", [1], ["v"])) == ["v", 1]
    assert kinds(with_media("", [1])) == [1]
    with pytest.raises(UsageError, match="has 1 <image>, but 2"):
        with_media("<image>", [1, 2])


def reader(tmp_path: Path, **options: Any) -> MediaReader:
    smolvlm_folder.write_processor(tmp_path, "{}", tile=32, longest_edge=128)
    names = ("preprocessor_config.json", "processor_config.json")
    files = {name: json.loads((tmp_path / name).read_text()) for name in names}
    return MediaReader(files, "test", **options)


def test_a_picture_is_cut_once_and_the_memory_is_bounded(tmp_path: Path) -> None:
    one = 13 * 32 * 32 * 3
    media = reader(tmp_path, cache_bytes=2 * one)
    first = media.picture(WIDE)
    assert media.picture(Image.fromarray(WIDE)) is first
    assert media.picture(WIDE.copy()) is first
    files = [samples.encoded(Image.fromarray(samples.photo(64, 48, seed))) for seed in (5, 6)]
    second = media.picture(files[0])
    assert media.picture(files[0]) is second and media.picture(WIDE) is first
    media.picture(files[1])
    assert media.picture(WIDE) is first
    assert media.picture(files[0]) is not second
    assert sum(picture.tiles.nbytes for picture in media._kept.values()) <= 2 * one
    assert media.picture(first) is first


def test_a_file_that_changed_is_another_picture(tmp_path: Path) -> None:
    media = reader(tmp_path)
    path = tmp_path / "a.png"
    Image.fromarray(WIDE).save(path)
    first = media.picture(path)
    assert media.picture(path) is first
    Image.fromarray(WIDE[::-1]).save(path)
    assert media.picture(path).digest != first.digest


def test_a_video_is_decoded_once(tmp_path: Path) -> None:
    from mnnsmith.vision.video import load_video
    from test_vision_video import clip, settings, write_video

    files = {
        "preprocessor_config.json": {
            "size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 32}},
        },
        "processor_config.json": {"image_seq_len": 64},
    }  # fmt: skip
    media = MediaReader(files, "test")
    path = tmp_path / "clip.mkv"
    write_video(path, clip(50), 10, "ffv1")
    first = media.video(path)
    assert first.digest == load_video(path, settings()).digest and len(first.tiles) > 1
    assert media.video(str(path)) is first
    write_video(path, clip(80), 10, "ffv1")
    assert media.video(path) is not first
    assert media.video(first) is first


def test_tiles_of_another_model_are_refused(tmp_path: Path) -> None:
    smolvlm_folder.write_processor(tmp_path, "{}", tile=16, longest_edge=128)
    picture = reader(tmp_path).picture(WIDE)
    names = ("preprocessor_config.json", "processor_config.json")
    files = {name: json.loads((tmp_path / name).read_text()) for name in names}
    files["preprocessor_config.json"]["max_image_size"]["longest_edge"] = 64
    with pytest.raises(UsageError, match="cut for another model"):
        MediaReader(files, "test").picture(picture)
    with pytest.raises(UsageError, match="no videos"):
        MediaReader(files, "test").video("a.mp4")


def test_a_manifest_that_makes_no_sense(model_folder: Path, tmp_path: Path) -> None:
    from types import SimpleNamespace

    def read(vision: Any) -> Any:
        return read_media_of(
            SimpleNamespace(path=tmp_path, manifest=SimpleNamespace(model={"vision": vision}))  # type: ignore[arg-type]
        )

    assert read(None) is None
    for vision in (12, {}, {"processor": 1}, {"processor": {"a": 1}}, {"processor": {}},
                   {"processor": {"preprocessor_config.json": {"do_resize": False}}}):  # fmt: skip
        with pytest.raises(BundleError):
            read(vision)


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(MissingResourceError, match=r"pip install .mnnsmith\[vision\]"):
        reader(tmp_path).picture(BytesIO(b"x").getvalue())
