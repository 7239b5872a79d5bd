"""The processor's files: what is read, what is refused by name, and what a checkpoint keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import smolvlm_folder
import tiny_checkpoint
from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.sources.hub import _SMALL_FILES
from mnnsmith.sources.open import open_checkpoint
from mnnsmith.vision.settings import read_picture_settings, read_video_settings

PLAIN: dict[str, Any] = {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}}


def pictures(**changes: Any) -> dict[str, dict[str, Any]]:
    return {"preprocessor_config.json": {**PLAIN, **changes}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": {"height": 4, "width": 4}}, "longest_edge"),
        ({"size": 512}, "longest_edge"),
        ({"size": {"longest_edge": 0}}, "whole number from 1"),
        ({"size": {"longest_edge": 10**9}}, "whole number from 1"),
        ({"max_image_size": {"longest_edge": 64.0}}, "whole number"),
        ({"max_image_size": {"longest_edge": 5000}}, "from 1 to 4096"),
        ({"max_image_size": {"longest_edge": 1}}, "65536 tiles of 169 tokens"),
        ({"resample": 9}, "from 0 to 5"),
        ({"resample": True}, "from 0 to 5"),
        ({"do_image_splitting": "yes"}, "true or false"),
        ({"image_mean": [0.5, 0.5]}, "three channels"),
        ({"image_std": [0, 1, 1]}, "three channels"),
        ({"image_std": float("nan")}, "three channels"),
        ({"rescale_factor": 0}, "positive number"),
        ({"rescale_factor": "x" * 10**6}, "positive number"),
    ],
)
def test_values_that_make_no_sense(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SourceError, match=words) as caught:
        read_picture_settings(pictures(**changes), "org/model")
    assert str(caught.value).startswith("org/model: ") and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
        ({"do_resize": False}, "do_resize"),
        ({"do_convert_rgb": False}, "do_convert_rgb"),
    ],
)
def test_other_processors_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read_picture_settings(pictures(**changes), "org/model")


def test_files_that_are_missing_or_nested() -> None:
    with pytest.raises(SourceError, match=r"no preprocessor_config\.json"):
        read_picture_settings({}, "org/model")
    nested = {"image_processor": {"max_image_size": {"longest_edge": 32}}, "image_seq_len": 16}
    found = read_picture_settings({**pictures(), "processor_config.json": nested}, "org/model")
    assert (found.tile, found.longest_edge, found.image_seq_len) == (32, 4 * 364, 16)
    for name in ("Idefics3ImageProcessorFast", "SmolVLMImageProcessorPil"):
        assert read_picture_settings(pictures(image_processor_type=name), "org/model").tile == 64


def test_videos_only_where_the_files_speak_of_them() -> None:
    assert read_video_settings(pictures(), "org/model") is None
    assert read_video_settings({}, "org/model") is None
    sampling = {"fps": 2, "max_frames": 8, "video_size": {"longest_edge": 64}}
    found = read_video_settings(pictures(video_sampling=sampling), "org/model")
    # The size for pictures wins, as in transformers.
    assert found is not None and (found.fps, found.max_frames, found.longest_edge) == (2, 8, 256)
    nested = {"video_processor": {"fps": 1, "num_frames": 64, "size": {"longest_edge": 512}}}
    found = read_video_settings({**pictures(), "processor_config.json": nested}, "org/model")
    assert found is not None and (found.longest_edge, found.tile) == (512, 364)
    many = {
        **pictures(video_sampling={**sampling, "max_frames": 4096}),
        "processor_config.json": {},
    }
    many["processor_config.json"]["image_seq_len"] = 1000
    with pytest.raises(SourceError, match="4096 tiles of 1000 tokens"):
        read_video_settings(many, "org/model")
    with pytest.raises(SourceError, match="max_frames"):
        read_video_settings(pictures(video_sampling={**sampling, "max_frames": 0}), "org/model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_checkpoint.write_checkpoint(tmp_path)
    return tmp_path


def test_a_checkpoint_keeps_the_files(folder: Path) -> None:
    assert open_checkpoint(folder).processor == {}
    tokenizer = (folder / "tokenizer.json").read_text()
    smolvlm_folder.write_processor(folder, tokenizer, kind="smolvlm2", tile=64, longest_edge=256)
    found = open_checkpoint(folder)
    assert set(found.processor) == {"preprocessor_config.json", "processor_config.json"}
    assert read_picture_settings(found.processor, found.origin).image_seq_len == 64
    assert {"preprocessor_config.json", "processor_config.json"} <= {p.name for p in found.files}
    assert set(found.processor) <= set(_SMALL_FILES)
    (folder / "preprocessor_config.json").write_text("[1]")
    with pytest.raises(SourceError, match="JSON object"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (("config", "json", "jinja", "tokenizer"), "config"),
        (("json", "jinja", "tokenizer"), "json"),
        (("jinja", "tokenizer"), "jinja"),
        (("tokenizer",), "tokenizer"),
        ((), None),
    ],
)
def test_the_processors_template_wins(
    folder: Path, present: tuple[str, ...], expected: str | None
) -> None:
    paths = {
        "config": "processor_config.json",
        "json": "chat_template.json",
        "jinja": "chat_template.jinja",
        "tokenizer": "tokenizer_config.json",
    }
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(PLAIN))
    for name in present:
        text = name if name == "jinja" else json.dumps({"chat_template": name})
        (folder / paths[name]).write_text(text)
    assert open_checkpoint(folder).tokenizer.chat_template == expected
