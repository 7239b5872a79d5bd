"""Videos: the frames, times, words and ids of transformers; files decoded in bounded time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import picture_samples as samples
import smolvlm_folder
from mnnsmith.errors import SourceError, UsageError
from mnnsmith.sources.open import open_checkpoint
from mnnsmith.text.prompt import Rendered, encode_rendered, render_chat
from mnnsmith.text.template import ChatTemplate
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.vision.messages import collect_media
from mnnsmith.vision.number_words import number_words
from mnnsmith.vision.prompt import (
    PLACEHOLDERS,
    VIDEO_CHAT_TEMPLATE,
    expand,
    image_runs,
    video_text,
)
from mnnsmith.vision.settings import VideoSettings, read_video_settings
from mnnsmith.vision.video import choose_frames, load_video, process_frames


def settings(**changes: Any) -> VideoSettings:
    sampling = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 32}}
    files = {
        "preprocessor_config.json": {
            "size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32},
            "video_sampling": sampling,
        },
        "processor_config.json": {"image_seq_len": 64},
    }  # fmt: skip
    found = read_video_settings(files, "test")
    assert found is not None
    return replace(found, **changes)


def clip(frames: int, width: int = 48, height: int = 36) -> np.ndarray[Any, Any]:
    """uint8 [frames, height, width, 3]; a bar goes from left to right."""
    made = np.stack([samples.photo(width, height, 9)] * frames)
    for number in range(frames):
        left = number * (width - 8) // max(frames - 1, 1)
        made[number, :, left : left + 8] = [255, 2 * number % 256, 0]
    return made


@pytest.mark.reference
def test_chosen_frames_are_those_of_transformers() -> None:
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
    from transformers.video_utils import VideoMetadata

    lengths = set()
    for total, fps, rate, most in itertools.product(
        (1, 2, 5, 24, 100, 719, 720, 1584, 1585, 5000), (1.0, 23.976, 30.0), (0.5, 1, 2), (4, 64)
    ):
        metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
        stub = SimpleNamespace(fps=rate, num_frames=most)
        theirs = SmolVLMVideoProcessor.sample_frames(stub, metadata)
        ours = choose_frames(total, fps, total / fps, settings(fps=rate, max_frames=most))
        assert ours.tolist() == theirs.tolist(), (total, fps, rate, most)
        lengths.add(len(ours))
    assert {1, 2, 4, 64} <= lengths


@pytest.mark.reference
def test_number_words_are_those_of_num2words() -> None:
    from num2words import num2words

    for number in [*range(1200), 1999, 2000, 12_345, 100_000, 100_001, 999_999]:
        assert number_words(number) == num2words(number)


def test_number_words_have_a_range() -> None:
    for number in (-1, 1_000_000):
        with pytest.raises(ValueError, match="between"):
            number_words(number)


@pytest.mark.reference
def test_ids_and_pixels_are_those_of_transformers(smollm2_gguf: Path, tmp_path: Path) -> None:
    from smolvlm_reference import load_processor

    base = open_checkpoint(smollm2_gguf).tokenizer.tokenizer_json
    tokenizer_json = smolvlm_folder.add_special_tokens(base)
    smolvlm_folder.write_processor(
        tmp_path, tokenizer_json, kind="smolvlm2", tile=32, longest_edge=128
    )
    original = load_processor(tmp_path, "smolvlm2")
    tokenizer, chosen = TextTokenizer(tokenizer_json), settings()
    parts = [{"type": "video", "video": "v"}, {"type": "text", "text": "What?"}]
    messages = [{"role": "user", "content": parts}]
    text = original.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    with ChatTemplate(VIDEO_CHAT_TEMPLATE) as template:
        media = collect_media(messages)
        rendered = render_chat(template, tokenizer, media.messages, placeholders=PLACEHOLDERS)
    for frames, fps in ((40, 10.0), (7, 2.0), (90, 1.0), (1, 30.0)):
        video = clip(frames)
        metadata = {"fps": fps, "total_num_frames": frames, "duration": frames / fps}
        theirs = original(text=[text], videos=[video], video_metadata=[metadata])
        ours = process_frames(video, chosen, fps)
        expanded = expand(rendered.text, rendered.as_text, [], [ours], 64)
        prompt = encode_rendered(
            tokenizer, Rendered(expanded.text, expanded.as_text, rendered.control)
        )
        assert prompt.ids == list(theirs["input_ids"][0])
        numbers = chosen.levels.pixel_values(ours.tiles)
        np.testing.assert_array_equal(numbers, theirs["pixel_values"][0])
        runs = image_runs(prompt.ids, smolvlm_folder.IMAGE_ID, expanded.feeds, 64)
        assert [run.feed.tile for run in runs] == list(range(len(ours.tiles)))


def test_text_of_a_video() -> None:
    picture = "<fake_token_around_image><global-img><image><fake_token_around_image>"
    assert video_text((0.0, 61.9), 3723.5, 1) == (
        "You are provided the following series of two frames from a 1:02:03 [H:MM:SS] video.\n"
        f"\nFrame from 00:00:{picture}\nFrame from 01:01:{picture}\n\n"
    )


def test_frames_that_are_no_video() -> None:
    with pytest.raises(UsageError, match="0 frames"):
        process_frames([], settings(), 1.0)
    for fps in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="no rate"):
            process_frames(clip(2), settings(), fps)
    with pytest.raises(UsageError, match="channels come last"):
        process_frames(np.zeros((2, 3, 8, 9), np.uint8), settings(), 1.0)
    all_of_them = process_frames(list(clip(5)), settings(), 10.0, choose=False)
    assert all_of_them.times_s == (0.0, 0.1, 0.2, 0.3, 0.4) and all_of_them.duration_s == 0.5


def write_video(
    path: Path, frames: np.ndarray[Any, Any], fps: int, codec: str, form: str | None = None
) -> None:
    import av

    with av.open(str(path), "w", format=form) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = frames.shape[2], frames.shape[1]
        stream.pix_fmt = {"ffv1": "bgr0", "png": "rgb24"}.get(codec, "yuv420p")
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def test_a_file_without_loss_gives_the_frames(tmp_path: Path) -> None:
    """Matroska does not tell the number of frames: its packets are counted."""
    frames = clip(50)
    write_video(tmp_path / "clip.mkv", frames, 10, "ffv1")
    found = load_video(tmp_path / "clip.mkv", settings())
    expected = process_frames(frames, settings(), 10.0)
    assert found.times_s == expected.times_s and len(found.times_s) == 5
    assert found.duration_s == expected.duration_s == 5.0
    np.testing.assert_array_equal(found.tiles, expected.tiles)
    assert found.digest == expected.digest and found.notes == ()


@pytest.mark.reference
def test_a_file_gives_the_frames_that_transformers_reads(tmp_path: Path) -> None:
    from transformers.video_utils import load_video as original

    write_video(tmp_path / "clip.mp4", clip(75), 25, "mpeg4")
    chosen = settings()

    def choose(metadata: Any, **_: Any) -> Any:
        return choose_frames(metadata.total_num_frames, metadata.fps, metadata.duration, chosen)

    frames, metadata = original(
        str(tmp_path / "clip.mp4"), backend="pyav", sample_indices_fn=choose
    )
    found = load_video(tmp_path / "clip.mp4", chosen)
    assert list(found.times_s) == list(metadata.timestamps)
    np.testing.assert_array_equal(
        found.tiles, process_frames(frames, chosen, 1.0, choose=False).tiles
    )


def test_rotation_is_applied(tmp_path: Path) -> None:
    """A phone held upright writes frames on their side, and the turn for players."""
    frames = clip(10, 64, 32)
    write_video(tmp_path / "clip.mov", frames, 10, "png", "mov")
    data = bytearray((tmp_path / "clip.mov").read_bytes())
    # ISO 14496-12, 8.3.2: the matrix of a track header, 16.16 numbers; here a quarter clockwise.
    matrix = data.index(b"tkhd") + 4 + 40
    one = 1 << 16
    for place, value in enumerate((0, one, 0, -one, 0, 0, 32 * one, 0)):
        data[matrix + 4 * place : matrix + 4 * place + 4] = value.to_bytes(4, "big", signed=True)
    (tmp_path / "turned.mov").write_bytes(data)
    upright = load_video(tmp_path / "turned.mov", settings())
    expected = process_frames(np.rot90(frames, -1, (1, 2)), settings(), 10.0)
    np.testing.assert_array_equal(upright.tiles, expected.tiles)


def test_files_that_are_no_videos(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mp4", clip(30), 10, "mpeg4")
    write_video(tmp_path / "clip.avi", clip(30), 10, "mpeg4")
    whole = (tmp_path / "clip.mp4").read_bytes()
    cases = {
        "empty.mp4": b"",
        "text.mp4": b"hello " * 99,
        "cut.mp4": whole[: len(whole) // 2],
        "unknown.avi": (tmp_path / "clip.avi").read_bytes().replace(b"FMP4", b"zzzz"),
        "picture.mp4": samples.encoded(Image.fromarray(clip(1)[0])),
        "playlist.m3u8": (
            b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nclip.mp4\n#EXT-X-ENDLIST\n"
        ),
        "list.txt": b"ffconcat version 1.0\nfile clip.mp4\n",
    }
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SourceError, match=name):
            load_video(tmp_path / name, settings())
    for path in (tmp_path / "absent.mp4", tmp_path):
        with pytest.raises(SourceError, match="no such video file"):
            load_video(path, settings())


def test_a_file_that_ends_early_is_noted(tmp_path: Path) -> None:
    write_video(tmp_path / "clip.mkv", clip(50), 10, "ffv1")
    data = (tmp_path / "clip.mkv").read_bytes()
    (tmp_path / "cut.mkv").write_bytes(data[: len(data) * 2 // 3])
    found = load_video(tmp_path / "cut.mkv", settings())
    assert 1 <= len(found.tiles) == len(found.times_s) < 5


def test_mutated_files_give_our_error_or_a_video(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", clip(12), 4, "mpeg4")
    write_video(tmp_path / "b.mkv", clip(12), 4, "ffv1")
    write_video(tmp_path / "c.avi", clip(12), 4, "mpeg4")
    originals = [(tmp_path / name).read_bytes() for name in ("a.mp4", "b.mkv", "c.avi")]
    rng = np.random.default_rng(0)
    outcomes = {"error": 0, "video": 0}
    for _ in range(300):
        data = np.frombuffer(originals[rng.integers(3)], np.uint8).copy()
        # Headers lie at the start, and in MP4 at the end.
        places = rng.integers(0, 700, 3)
        data[places if rng.random() < 0.6 else -1 - places] = rng.integers(0, 256, 3)
        (tmp_path / "x").write_bytes(data[: len(data) - int(rng.integers(2)) * 100].tobytes())
        try:
            found = load_video(tmp_path / "x", settings())
        except SourceError:
            outcomes["error"] += 1
        else:
            assert 1 <= len(found.tiles) == len(found.times_s)
            outcomes["video"] += 1
    assert min(outcomes.values()) > 30
