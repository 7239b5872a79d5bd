"""Pictures on the command line: run, chat, canvas, and what is said of wrong ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import picture_samples as samples
import smolvlm_folder
from mnnsmith.conversion.convert import convert
from mnnsmith.session import Answer, AnswerOptions, open_session
from mnnsmith.vision.canvas import make_canvas
from mnnsmith.vision.processor import process_picture
from mnnsmith.vision.settings import read_picture_settings
from test_session_vision import SQUARE, TALL, WIDE, write_model

PROGRAM = [sys.executable, "-m", "mnnsmith.cli"]


def mnnsmith(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)], input=stdin, capture_output=True, text=True,
        timeout=120, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, and three pictures: one turned by its EXIF data, one animated."""
    folder = tmp_path_factory.mktemp("cli-vision")
    convert(write_model(folder / "model"), folder / "bundle", recipe="fp16")
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.fromarray(WIDE[::-1, ::-1]).save(folder / "wide.png", exif=exif)
    Image.fromarray(TALL).save(folder / "tall one.png", save_all=True,
                               append_images=[Image.fromarray(TALL[::-1])])  # fmt: skip
    Image.fromarray(SQUARE).save(folder / "square.png")
    return folder


@pytest.fixture(scope="module")
def answers(home: Path) -> dict[str, str]:
    """What the session says, as standard output shows it."""
    options = AnswerOptions(max_tokens=8)
    with open_session(home / "bundle", options=options, memory="high") as session:
        found = {}
        for name, turns in {
            "one": [("What?", [WIDE])],
            "placed": [("a <image> b <image>", [TALL, SQUARE])],
            "later": [("Hello", []), ("What?", [WIDE, TALL]), ("And?", [])],
        }.items():
            session.reset()
            texts = []
            for text, images in turns:
                *_, answer = session.ask(text, images=images)
                assert isinstance(answer, Answer)
                texts.append(answer.text + ("" if answer.text.endswith("\n") else "\n"))
            found[name] = "".join(texts)
    assert len(set(found.values())) == 3
    return found


@pytest.mark.engine
def test_run_shows_pictures(home: Path, answers: dict[str, str]) -> None:
    options = ("--memory", "high", "--max-tokens", "8")
    found = mnnsmith("run", home / "bundle", "--image", home / "wide.png", "-p", "What?", *options)
    assert (found.returncode, found.stdout) == (0, answers["one"])
    assert "wide.png: turned upright" in found.stderr
    found = mnnsmith(
        *("run", home / "bundle", "--image", home / "tall one.png"),
        *("--image", home / "square.png", "-p", "a <image> b <image>", "--json", *options),
    )
    data = json.loads(found.stdout)
    assert data["text"] == answers["placed"].removesuffix("\n")
    assert data["tiles"] == {"prompt": 26, "prompt_reused": 0}
    assert "tall one.png: several pictures or frames in one file; the first" in found.stderr


@pytest.mark.engine
def test_chat_shows_pictures_in_any_turn(home: Path, answers: dict[str, str]) -> None:
    lines = [
        *("Hello", f"/image {home / 'square.png'}", "/image -", f"/image {home / 'wide.png'}"),
        *(f"/image '{home / 'tall one.png'}'", "/image", "What?", "/image", "And?"),
    ]
    found = mnnsmith(
        *("chat", home / "bundle", "--memory", "high", "--max-tokens", "8"), stdin="\n".join(lines)
    )
    assert (found.returncode, found.stdout) == (0, answers["later"])
    assert "wide.png: 64 x 48 pixels, 13 tiles: goes with the next message" in found.stderr
    assert "(2 pictures and 0 videos go with" in found.stderr
    assert "(0 pictures and 0 videos go with" in found.stderr


@pytest.mark.engine
def test_wrong_pictures_end_before_the_model_is_loaded(
    home: Path, tmp_path: Path, tiny_bundle: tuple[Path, object]
) -> None:
    # Weights that cannot be loaded: whatever is refused was refused before.
    broken = tmp_path / "bundle"
    broken.mkdir()
    for file in (home / "bundle").iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(bytes(len(data)) if file.name == "llm.mnn" else data)
    (tmp_path / "cut.png").write_bytes((home / "wide.png").read_bytes()[:700])
    cases: list[tuple[tuple[str | Path, ...], int, str]] = [
        (("--image", tmp_path / "none.png"), 3, "none.png"),
        (("--image", tmp_path / "cut.png"), 3, "damaged or cut off"),
        (("--image", home / "model" / "config.json"), 3, "not a picture"),
        (("--video", home / "wide.png", "--image", home / "wide.png"), 3, "not a video"),
        (("--image", home / "wide.png", "--raw"), 2, "no chat template"),
        (("--image", home / "wide.png", "-p", "<image><image>"), 2, "has 2 <image>, but 1"),
        (("--image", home / "wide.png"), 7, "does not load"),
    ]
    for arguments, code, words in cases:
        found = mnnsmith("run", broken, "-p", "x", *arguments)
        assert found.returncode == code, found.stderr
        assert words in found.stderr and found.stdout == ""
    found = mnnsmith("chat", broken.parent / "nothing", stdin="/image x")
    assert found.returncode == 6
    for line in ("/image none.png", "/video none.mp4"):
        found = mnnsmith("chat", home / "bundle", stdin=f"{line}\nHello")
        assert (found.returncode, found.stdout) == (3, ""), found.stderr


@pytest.mark.engine
def test_a_bundle_of_text_alone(home: Path, tmp_path: Path) -> None:
    from mnnsmith.selftest import write_tiny_checkpoint

    write_tiny_checkpoint(tmp_path / "text")
    (tmp_path / "text" / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    bundle = convert(tmp_path / "text", tmp_path / "bundle").path
    picture = home / "wide.png"
    for found in (
        mnnsmith("run", bundle, "-p", "abc", "--image", picture),
        mnnsmith("chat", bundle, stdin=f"/image {picture}\nabc"),
        mnnsmith("canvas", picture, "-o", tmp_path / "c.png", "--bundle", bundle),
    ):
        assert (found.returncode, found.stdout) == (2, "")
        assert "sees no pictures" in found.stderr
    assert not (tmp_path / "c.png").exists()


# --- no engine -------------------------------------------------------------------------------


def test_canvas_holds_the_tiles(tmp_path: Path) -> None:
    folder = smolvlm_folder.write_processor(tmp_path / "model", "{}", tile=32, longest_edge=128)
    names = ("preprocessor_config.json", "processor_config.json")
    files = {name: json.loads((folder / name).read_text()) for name in names}
    picture = process_picture(WIDE, read_picture_settings(files, "test"))
    Image.fromarray(WIDE).save(tmp_path / "wide.png")
    arguments = ("canvas", tmp_path / "wide.png", "-o", tmp_path / "c.png", "--bundle", folder)
    found = mnnsmith(*arguments)
    assert (found.returncode, found.stderr) == (0, "")
    # Three rows of four tiles, and one more row.
    assert found.stdout == "<img><hw>128,128</hw>c.png</img>\n"
    pixels = np.asarray(Image.open(tmp_path / "c.png"))
    np.testing.assert_array_equal(pixels, make_canvas(picture))
    np.testing.assert_array_equal(pixels[96:, :32], picture.tiles[-1])
    np.testing.assert_array_equal(pixels[32:64, 64:96], picture.tiles[4 + 2])
    assert not pixels[96:, 32:].any()
    data = json.loads(mnnsmith(*arguments, "--json").stdout)
    assert (data["rows"], data["cols"], data["prompt"]) == (3, 4, found.stdout.strip())


def test_canvas_says_what_is_wrong(tmp_path: Path) -> None:
    folder = smolvlm_folder.write_processor(tmp_path / "model", "{}", tile=32, longest_edge=128)
    (tmp_path / "a.png").write_bytes(samples.encoded(Image.fromarray(WIDE)))
    cases = [
        ((tmp_path / "none.png", "-o", tmp_path / "c.png", "--bundle", folder), 3, "none.png"),
        ((tmp_path / "a.png", "-o", tmp_path / "x" / "c.png", "--bundle", folder), 8, "written"),
        ((tmp_path / "a.png", "-o", tmp_path / "c.png", "--bundle", tmp_path), 3, "neither a"),
        ((tmp_path / "a.png", "-o", tmp_path / "c.png"), 2, "--bundle"),
    ]
    for arguments, code, words in cases:
        found = mnnsmith("canvas", *arguments)
        assert found.returncode == code, found.stderr
        assert words in found.stderr and found.stdout == ""


def test_doctor_says_what_each_extra_is_for() -> None:
    from mnnsmith.cli.doctor import _DEVELOPER_EXTRAS, _PURPOSES

    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    section = project.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    extras = {line.split(" = ")[0] for line in section.splitlines() if " = [" in line}
    assert extras - set(_DEVELOPER_EXTRAS) == set(_PURPOSES)
