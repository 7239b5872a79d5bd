"""Prompts with pictures: the ids of transformers' processors, and which tile feeds which."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import picture_samples as samples
import smolvlm_folder
import tokenizer_samples
from mnnsmith.errors import TokenizerError, UsageError
from mnnsmith.sources.open import open_checkpoint
from mnnsmith.text.prompt import Prompt, Rendered, encode_rendered, render_chat
from mnnsmith.text.template import ChatTemplate
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.vision.messages import collect_media
from mnnsmith.vision.processor import Picture, process_picture
from mnnsmith.vision.prompt import (
    PLACEHOLDERS,
    VIDEO_CHAT_TEMPLATE,
    Expanded,
    Feed,
    expand,
    image_runs,
    picture_text,
)
from mnnsmith.vision.settings import PictureSettings, read_picture_settings

LLAMA3_TEMPLATE = smolvlm_folder.TEMPLATE.replace("<|im_start|>", "<|begin_of_text|>")


# Most models here share one, which takes a second to read.
tokenizer_of = lru_cache(maxsize=4)(TextTokenizer)


@dataclass
class Model:
    """A folder's processor, read by us."""

    folder: Path
    kind: str
    settings: PictureSettings
    tokenizer: TextTokenizer
    template: ChatTemplate

    @classmethod
    def read(cls, folder: Path, kind: str) -> Model:
        files = {
            name: json.loads((folder / name).read_text())
            for name in ("preprocessor_config.json", "processor_config.json")
        }
        source = json.loads((folder / "chat_template.json").read_text())["chat_template"]
        return cls(
            folder, kind, read_picture_settings(files, "test"),
            tokenizer_of((folder / "tokenizer.json").read_text()), ChatTemplate(source),
        )  # fmt: skip

    def ask(self, messages: list[dict[str, Any]]) -> tuple[Prompt, Expanded, list[Picture]]:
        media = collect_media(messages)
        pictures = [process_picture(image, self.settings) for image in media.images]
        rendered = render_chat(
            self.template, self.tokenizer, media.messages, placeholders=PLACEHOLDERS
        )
        length = self.settings.image_seq_len
        expanded = expand(rendered.text, rendered.as_text, pictures, [], length)
        as_text = Rendered(expanded.text, expanded.as_text, rendered.control)
        return encode_rendered(self.tokenizer, as_text), expanded, pictures


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> str:
    """SmolVLM's tokenizer.json."""
    base = open_checkpoint(smollm2_gguf).tokenizer.tokenizer_json
    return smolvlm_folder.add_special_tokens(base)


@pytest.fixture(scope="module")
def models(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    """Variants, with tiles of 32 pixels where nothing depends on the size."""
    home = tmp_path_factory.mktemp("models")
    llama3 = smolvlm_folder.add_special_tokens(tokenizer_samples.llama3().to_str())
    variants: dict[str, tuple[str, str, dict[str, Any]]] = {
        "smolvlm": ("smolvlm", smollm2, {"tile": 32, "longest_edge": 128}),
        "smolvlm-2.2b": (
            "smolvlm", smollm2, {"tile": 384, "longest_edge": 1536, "image_seq_len": 81},
        ),
        "whole": ("smolvlm", smollm2, {"tile": 32, "longest_edge": 128, "split": False}),
        "smolvlm2": ("smolvlm2", smollm2, {"tile": 32, "longest_edge": 128}),
        "idefics3": (
            "idefics3", llama3,
            {"tile": 364, "longest_edge": 1456, "image_seq_len": 169,
             "bos": "<|begin_of_text|>", "template": LLAMA3_TEMPLATE},
        ),
        # More rows than there are tokens for: `<row_7_col_1>` is spelled out.
        "many-rows": ("smolvlm", smollm2, {"tile": 32, "longest_edge": 256, "image_seq_len": 3}),
    }  # fmt: skip
    made = {}
    for name, (kind, tokenizer, options) in variants.items():
        folder = smolvlm_folder.write_processor(home / name, tokenizer, kind=kind, **options)
        made[name] = Model.read(folder, kind)
    yield made
    for model in made.values():
        model.template.close()


def user(*parts: Any) -> dict[str, Any]:
    """A turn: texts, and arrays as pictures."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


SQUARE, WIDE, TALL = samples.photo(60, 60), samples.photo(64, 48), samples.photo(30, 80)
DIALOGUES: dict[str, list[dict[str, Any]]] = {
    "picture first": [user(WIDE, "What is this?")],
    "picture last": [user("What is this?\n", TALL)],
    "two pictures": [user(SQUARE, "and", WIDE, "\n\nCompare them.")],
    "two at once": [user(SQUARE, TALL, "Compare.")],
    "in the second turn": [user("Hello"), answer("Hi."), user(WIDE, "\nAnd now?")],
    "in both turns": [user(SQUARE, "What?"), answer("A disk."), user("And", TALL, "?")],
    "with a system prompt": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        user(" ", WIDE, " 数字 🎉"),
    ],
    "a typed placeholder": [user(WIDE, "a <video>\n\nb")],
    "text alone": [user("Hello.\n\n\nWorld")],
}


@pytest.mark.reference
@pytest.mark.parametrize(
    "variant", ["smolvlm", "smolvlm-2.2b", "whole", "smolvlm2", "idefics3", "many-rows"]
)
def test_ids_are_those_of_transformers(models: dict[str, Model], variant: str) -> None:
    from PIL import Image

    from smolvlm_reference import load_processor

    model = models[variant]
    original = load_processor(model.folder, model.kind)
    heavy = model.settings.tile > 32
    for name, dialogue in DIALOGUES.items():
        if heavy and name != "in both turns":
            continue
        if variant == "smolvlm2" and name == "a typed placeholder":
            # There it is an error: for what the original knows, a video is missing.
            continue
        theirs_dialogue = [
            {
                **turn,
                "content": [
                    {**part, "image": Image.fromarray(part["image"])} if "image" in part else part
                    for part in turn["content"]
                ],
            }
            for turn in dialogue
        ]
        theirs = original.apply_chat_template(
            theirs_dialogue, add_generation_prompt=True, tokenize=True, return_dict=True,
            processor_kwargs={"return_tensors": "np"},
        )  # fmt: skip
        prompt, expanded, pictures = model.ask(dialogue)
        assert prompt.ids == list(theirs["input_ids"][0]), name
        runs = image_runs(
            prompt.ids, int(original.image_token_id), expanded.feeds, model.settings.image_seq_len
        )
        if pictures:
            # The model fills the runs with the features of `pixel_values` in their order.
            fed = np.stack([pictures[run.feed.index].tiles[run.feed.tile] for run in runs])
            numbers = model.settings.levels.pixel_values(fed)
            np.testing.assert_array_equal(numbers, theirs["pixel_values"][0])


def test_counts_of_ids_are_those_of_smolvlm(models: dict[str, Model]) -> None:
    """A square, 4:3, a tall one and a strip: known numbers of the 256M model."""
    counts = {}
    for size, text in (((64, 64), 1), ((64, 48), 1), ((30, 80), 1), ((2048, 100), 1)):
        prompt, _, _ = models["smolvlm"].ask([user(samples.photo(*size), "x" * text)])
        counts[size] = len(prompt.ids)
    bare = len(models["smolvlm"].ask([user("x")])[0].ids)
    # Per tile 64 and two more, a line end a row, and the fake token at the end; the template writes
    # no space before a picture.
    found = {size: count - bare for size, count in counts.items()}
    assert found[(64, 64)] - found[(64, 48)] == 4 * 66 + 1
    assert found[(64, 48)] - found[(30, 80)] == 4 * 66 - 1
    assert found[(30, 80)] - found[(2048, 100)] == 4 * 66 + 3


def test_the_tokenizer_joins_line_ends(models: dict[str, Model]) -> None:
    """The end of the last row and the empty line are one token."""
    model = models["smolvlm"]
    prompt, _, _ = model.ask([user(WIDE, "x")])
    both = model.tokenizer.encode("\n\n")
    assert len(both) == 1
    position = prompt.ids.index(smolvlm_folder.GLOBAL_ID)
    assert prompt.ids[position - 2 : position] == [both[0], smolvlm_folder.FAKE_ID]


def test_text_of_a_picture() -> None:
    assert picture_text(0, 0, 2) == (
        "<fake_token_around_image><global-img><image><image><fake_token_around_image>"
    )
    assert picture_text(2, 1, 1) == (
        "<fake_token_around_image><row_1_col_1><image>\n"
        "<fake_token_around_image><row_2_col_1><image>\n"
        "\n<fake_token_around_image><global-img><image><fake_token_around_image>"
    )


def test_typed_tokens_stay_text(models: dict[str, Model]) -> None:
    model = models["smolvlm"]
    typed = "Type <image> or <video>, <row_1_col_1>.<end_of_utterance>\n"
    prompt, expanded, _ = model.ask([user(typed, WIDE, "<image>")])
    runs = image_runs(prompt.ids, smolvlm_folder.IMAGE_ID, expanded.feeds, 64)
    assert [run.feed for run in runs] == [Feed("picture", 0, tile) for tile in range(13)]
    assert prompt.ids.count(smolvlm_folder.END_OF_UTTERANCE_ID) == 1
    assert prompt.guarded == 5
    # Around it nothing changes: what stands for the picture is what it is without such a text.
    plain, _, _ = model.ask([user("x", WIDE, "y")])
    first, last = runs[0].start - 2, runs[-1].stop
    start = plain.ids.index(smolvlm_folder.FAKE_ID)
    assert prompt.ids[first:last] == plain.ids[start : start + last - first]
    decoded = model.tokenizer.decode(prompt.ids)
    assert typed in decoded and decoded.count("<image>") == 2


def test_runs_know_their_tiles(models: dict[str, Model]) -> None:
    model = models["smolvlm"]
    prompt, expanded, _ = model.ask([user(SQUARE, "and", TALL)])
    runs = image_runs(prompt.ids, smolvlm_folder.IMAGE_ID, expanded.feeds, 64)
    assert [(run.feed.index, run.feed.tile) for run in runs] == [
        *((0, tile) for tile in range(17)), *((1, tile) for tile in range(9)),
    ]  # fmt: skip
    for run in runs:
        assert run.stop - run.start == 64
        assert set(prompt.ids[run.start : run.stop]) == {smolvlm_folder.IMAGE_ID}
    before = [prompt.ids[run.start - 1] for run in runs]
    row_2_col_3 = smolvlm_folder.GLOBAL_ID + 1 + 6 + 2
    assert before[4 + 2] == row_2_col_3
    assert before[16] == before[25] == smolvlm_folder.GLOBAL_ID


def test_a_picture_is_never_dropped(models: dict[str, Model]) -> None:
    model = models["smolvlm"]
    picture = process_picture(WIDE, model.settings)
    for text, pictures in (("no place", [picture]), ("<image><image>", [picture]), ("<image>", [])):
        with pytest.raises(UsageError, match=f"has {text.count('<image>')} <image>"):
            expand(text, (), pictures, [], 64)
    with pytest.raises(UsageError, match="has 1 <video> but 0"):
        expand("<video>", (), [], [], 64)
    # A template that leaves pictures out.
    deaf = ChatTemplate("{% for m in messages %}{{ m.content[-1].text }}{% endfor %}")
    rendered = render_chat(deaf, model.tokenizer, [user(WIDE, "What?")])
    with pytest.raises(UsageError, match="has 0 <image> but 1 were given"):
        expand(rendered.text, rendered.as_text, [picture], [], 64)
    deaf.close()


def test_ids_without_whole_runs_are_refused() -> None:
    feeds = [Feed("picture", 0, 0), Feed("picture", 0, 1)]
    for ids in ([7, 7, 1, 7], [7, 1, 7, 7, 7, 1], [1, 2], [7] * 5):
        with pytest.raises(TokenizerError, match="2 runs of 2"):
            image_runs(ids, 7, feeds, 2)
    assert [(r.start, r.stop) for r in image_runs([7, 7, 7, 7], 7, feeds, 2)] == [(0, 2), (2, 4)]


def test_ranges_move_with_the_text() -> None:
    settings = read_picture_settings({"preprocessor_config.json": {}}, "test")
    picture = process_picture(np.zeros((4, 4), np.uint8), settings)
    text = "a <image> b <image> c <image>"
    typed = text.index("<image>", 5)
    found = expand(text, ((0, 1), (typed, typed + 7), (20, 21)), [picture, picture], [], 1)
    assert [found.text[start:end] for start, end in found.as_text] == ["a", "<image>", "c"]
    assert found.text.startswith("a <fake") and " b <image> c <fake" in found.text


def test_content_as_text_and_as_parts() -> None:
    media = collect_media(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [
                {"type": "image", "path": "a.png"}, {"type": "text", "text": "Hi"},
                {"type": "video", "video": "b.mp4"}, {"type": "image", "image": b"..."},
            ]},
        ]
    )  # fmt: skip
    assert media.images == ("a.png", b"...") and media.videos == ("b.mp4",)
    assert media.messages[0]["content"] == [{"type": "text", "text": "Be brief."}]
    assert [part["type"] for part in media.messages[1]["content"]] == [
        "image", "text", "video", "image",
    ]  # fmt: skip
    assert "path" not in media.messages[1]["content"][0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "image"}], "0 sources"),
        ([{"type": "image", "image": "a", "path": "b"}], "2 sources"),
        ([{"type": "image", "path": "https://example.org/a.png"}], "download it first"),
        ([{"type": "audio", "audio": "a.wav"}], "no part"),
        ([{"type": "text"}], "no part"),
        (["Hello"], "no part"),
        (12, "expected a text"),
    ],
)
def test_parts_that_are_none(content: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        collect_media([{"role": "user", "content": content}])


@pytest.mark.reference
def test_video_template_writes_what_transformers_writes() -> None:
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    video, picture = {"type": "video"}, {"type": "image"}
    text = {"type": "text", "text": "What happens?"}
    dialogues = [
        [{"role": "user", "content": [video, text]}],
        [{"role": "user", "content": [picture, text, video]}],
        [
            {"role": "system", "content": [text]},
            {"role": "user", "content": [text, video]},
            {"role": "assistant", "content": [text]},
        ],
    ]
    with ChatTemplate(DEFAULT_CHAT_TEMPLATE) as theirs, ChatTemplate(VIDEO_CHAT_TEMPLATE) as ours:
        for dialogue in dialogues:
            for last in (True, False):
                assert ours.render(dialogue, last) == theirs.render(dialogue, last)
