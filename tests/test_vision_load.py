"""Pictures of every kind and of every kind of damage: the right colors, or one clear error."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import picture_samples as samples
from mnnsmith.errors import MnnsmithError, SourceError, UsageError
from mnnsmith.vision.load import MAX_PIXELS, load_picture

MODES = samples.modes()


def pixels(source: Any) -> np.ndarray[Any, Any]:
    return np.asarray(load_picture(source).image)


@pytest.mark.reference
@pytest.mark.parametrize("name", [name for name in MODES if "16" not in name])
def test_colors_are_those_of_transformers(name: str) -> None:
    import transformers.image_transforms as transforms
    from transformers.image_utils import load_image

    ours, loaded = pixels(MODES[name]), Image.open(BytesIO(MODES[name]))
    if name.startswith("exif"):
        theirs = np.asarray(load_image(loaded))
    else:
        if name == "palette-alpha.png":
            loaded = loaded.convert("RGBA")
        theirs = transforms.convert_to_rgb(loaded, return_numpy=True)
    np.testing.assert_array_equal(ours, theirs)


def test_transparent_pixels_are_white() -> None:
    rgba = np.zeros((2, 3, 4), np.uint8)
    rgba[..., 0], rgba[0, :, 3], rgba[1, 0, 3] = 200, 255, 51
    expected = np.full((2, 3, 3), 255, np.uint8)
    expected[0] = [200, 0, 0]
    # 51/255 is a fifth: 200 -> 255 - 55/5, 0 -> 255 * 4/5.
    expected[1, 0] = [244, 204, 204]
    for source in (rgba, Image.fromarray(rgba), samples.encoded(Image.fromarray(rgba))):
        np.testing.assert_array_equal(pixels(source), expected)


def test_transparency_is_the_same_in_every_band() -> None:
    rng = np.random.default_rng(1)
    rgba = rng.integers(0, 256, (1500, 900, 4), dtype=np.uint8)
    white = Image.new("RGBA", (900, 1500), (255, 255, 255, 255))
    whole = Image.alpha_composite(white, Image.fromarray(rgba)).convert("RGB")
    np.testing.assert_array_equal(pixels(rgba), np.asarray(whole))


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_gray_of_16_bits_is_scaled(form: str) -> None:
    levels = np.array([[0, 128, 129, 257, 32768, 65406, 65407, 65535]], np.uint16)
    data = samples.encoded(Image.fromarray(levels), form)
    expected = [0, 0, 1, 1, 128, 254, 255, 255]
    for source in (data, levels, levels.astype(np.int32), Image.fromarray(levels)):
        assert pixels(source)[0, :, 0].tolist() == expected
        assert (pixels(source) == pixels(source)[..., :1]).all()


def test_transparent_level_of_16_bits_is_white() -> None:
    levels = np.array([[0, 5000, 65535]], np.uint16)
    data = samples.encoded(Image.fromarray(levels), transparency=5000)
    assert pixels(data)[0, :, 0].tolist() == [0, 255, 255]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0.0, 0.5, 1.0]]), [0, 128, 255]),
        (np.array([[0.0, 0.25, 1.0]], np.float16), [0, 64, 255]),
        (np.array([[0.0, 7.0, 255.0]], np.float32), [0, 7, 255]),
        (np.array([[False, True, True]]), [0, 255, 255]),
        (np.array([[0, 7, 255]], np.int64), [0, 7, 255]),
        (np.array([[0, 257, 65535]], np.uint32), [0, 1, 255]),
    ],
)
def test_arrays_of_other_types(values: np.ndarray[Any, Any], expected: list[int]) -> None:
    assert pixels(values)[0, :, 0].tolist() == expected
    assert pixels(values[:, :, None])[0, :, 2].tolist() == expected


def test_floating_point_tiff() -> None:
    data = samples.encoded(Image.fromarray(np.array([[0.0, 0.2, 1.0]], np.float32)), "TIFF")
    assert pixels(data)[0, :, 0].tolist() == [0, 51, 255]


def test_orientation_however_it_comes_in(tmp_path: Path) -> None:
    corner = np.zeros((30, 40, 3), np.uint8)
    corner[:10, :10] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    data = samples.encoded(Image.fromarray(corner), exif=exif)
    (tmp_path / "turned.png").write_bytes(data)
    # 6: the top left corner belongs at the top right.
    expected = np.rot90(corner, -1)
    for source in (data, tmp_path / "turned.png", Image.open(BytesIO(data))):
        np.testing.assert_array_equal(pixels(source), expected)
        assert "turned upright" in load_picture(source).notes[0]


def test_the_first_of_several_frames_is_noted() -> None:
    for name in ("animated.gif", "animated.webp", "animated.png"):
        assert "first" in load_picture(MODES[name]).notes[0]
    for name in ("rgb.png", "palette.gif", "rgb.webp", "rgb.tiff"):
        assert load_picture(MODES[name]).notes == ()


def test_second_picture_of_a_phone_jpeg_is_no_frame() -> None:
    first, second = (Image.fromarray(samples.photo(40, 30, seed)) for seed in (1, 2))
    data = samples.encoded(first, "MPO", save_all=True, append_images=[second])
    loaded = load_picture(data)
    assert loaded.notes == ()
    np.testing.assert_array_equal(
        np.asarray(loaded.image), np.asarray(Image.open(BytesIO(data)).convert("RGB"))
    )


def test_damaged_exif_is_noted_not_fatal() -> None:
    clean = Image.fromarray(samples.photo(20, 10))
    data = samples.encoded(clean, exif=b"Exif\x00\x00II*\x00" + b"\xff" * 4)
    loaded = load_picture(data)
    np.testing.assert_array_equal(np.asarray(loaded.image), np.asarray(clean))


def many_scans() -> bytes:
    """A progressive JPEG whose last scan stands 500 times."""
    data = MODES["progressive.jpeg"]
    start = data.rindex(b"\xff\xda")
    return data[:start] + data[start:-2] * 500 + data[-2:]


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "empty"),
    "text": (lambda: b"hello, this is no picture\n" * 40, "not a picture in a format"),
    "html": (lambda: b"<!DOCTYPE html><html><body>404</body></html>", "not a picture"),
    "svg": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "not a picture"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
    "lfs": (lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "LFS"),
    "cut png": (lambda: MODES["rgb.png"][:-400], "damaged or cut off"),
    "cut jpeg": (lambda: MODES["rgb.jpeg"][:-400], "damaged or cut off"),
    "cut webp": (lambda: MODES["rgb.webp"][:-400], "damaged|not a picture"),
    "cut gif": (lambda: MODES["palette.gif"][:-400], "damaged or cut off"),
    "cut tiff": (lambda: MODES["rgb.tiff"][:4000], "damaged|not a picture"),
    "head only": (lambda: MODES["rgb.png"][:20], "damaged|not a picture"),
    "bomb": (lambda: samples.png_header(60_000, 60_000), "bomb"),
    "small bomb": (lambda: samples.png_header(10_000, 10_000), "bomb"),
    "lines": (lambda: samples.png_header(2**31 - 1, 1), "bomb"),
    "no width": (lambda: samples.png_header(0, 10), "damaged|not a picture|no pixels"),
    "little data": (lambda: samples.png_header(9_000, 9_000), "damaged or cut off"),
    "scans": (many_scans, "scans"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_files_give_one_clear_error(tmp_path: Path, name: str) -> None:
    make, words = BAD[name]
    path = tmp_path / "picture.png"
    path.write_bytes(make())
    began = time.perf_counter()
    with pytest.raises(SourceError, match=words) as caught:
        load_picture(path)
    assert time.perf_counter() - began < 5
    assert "picture.png" in str(caught.value)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        (tmp_path / "absent.jpg", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
    ):
        with pytest.raises(SourceError, match=words):
            load_picture(path)
    with pytest.raises(UsageError, match="cannot be used as a path"):
        load_picture("bad\0name.png")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (np.zeros((3, 20, 30), np.uint8), "channels come last"),
        (np.zeros((20, 30, 2), np.uint8), "shape"),
        (np.zeros((20,), np.uint8), "shape"),
        (np.zeros((2, 2), np.complex64), "complex64"),
        (np.full((2, 2), -0.5), "no known meaning"),
        (np.full((2, 2), 1.5), "no known meaning"),
        (np.full((2, 2), np.nan), "no known meaning"),
        (np.full((2, 2), 70000), "no known meaning"),
        (12, "is no picture"),
        (None, "is no picture"),
    ],
)
def test_objects_that_are_no_pictures(source: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_picture(source, "picture 2")


def test_sizes_that_are_refused() -> None:
    for shape in ((0, 5), (5, 0, 3)):
        with pytest.raises(SourceError, match="no pixels"):
            load_picture(np.zeros(shape, np.uint8))
    wide = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (1, MAX_PIXELS + 1), (0, 0))
    with pytest.raises(SourceError, match="more than"):
        load_picture(wide)
    with pytest.raises(SourceError, match="more than"):
        load_picture(Image.new("1", (MAX_PIXELS + 1, 1)))


def test_nothing_is_printed_and_memory_stays_bounded(tmp_path: Path) -> None:
    """Warnings of Pillow (bombs, palettes, damaged EXIF) and libtiff stay off the terminal."""
    damaged_fax = bytearray(MODES["one-bit.tiff"])
    damaged_fax[48] ^= 0x55
    good = {**MODES, "damaged-fax.tiff": bytes(damaged_fax)}
    for name, data in {**good, **{n: make() for n, (make, _) in BAD.items()}}.items():
        (tmp_path / name).write_bytes(data)
    script = (
        "import resource, sys\nfrom pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1200 << 20, 1200 << 20))\n"
        "from mnnsmith.errors import MnnsmithError\n"
        "from mnnsmith.vision.load import load_picture\n"
        "good = bad = 0\n"
        "for path in sorted(Path(sys.argv[1]).iterdir()):\n"
        "    try:\n        load_picture(path); good += 1\n"
        "    except MnnsmithError:\n        bad += 1\n"
        "print(good, bad)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", script, str(tmp_path)],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.stdout.split(), done.stderr) == ([str(len(good)), str(len(BAD))], "")


@pytest.mark.parametrize("seed", range(3))
def test_mutated_files_give_our_error_or_a_picture(seed: int) -> None:
    rng = np.random.default_rng(seed)
    small = list(samples.modes(24, 18).items())
    outcomes = set()
    for _ in range(400):
        name, data = small[rng.integers(len(small))]
        if rng.random() < 0.25:
            changed = data[: rng.integers(len(data))]
        else:
            array = np.frombuffer(data, np.uint8).copy()
            where = rng.integers(0, min(len(array), rng.choice([40, 200, 1 << 30])), 3)
            array[where] = rng.integers(0, 256, 3)
            changed = array.tobytes()
        try:
            image = load_picture(changed, name).image
        except MnnsmithError as error:
            assert name in error.message
            outcomes.add("error")
        else:
            assert image.mode == "RGB" and image.width * image.height <= MAX_PIXELS
            outcomes.add("picture")
    assert outcomes == {"error", "picture"}


def test_without_pillow_or_pyav_the_extra_is_named(tmp_path: Path) -> None:
    script = (
        "import sys\nsys.modules['PIL'] = sys.modules['av'] = None\n"
        "from mnnsmith.errors import MissingResourceError\n"
        "from mnnsmith.vision import canvas, load, messages, processor, prompt, settings, video\n"
        "for call in (load.load_picture, lambda path: video.load_video(path, None)):\n"
        "    try:\n        call(sys.argv[1])\n"
        "    except MissingResourceError as error:\n        print(error.hint)\n"
    )
    path = tmp_path / "a.png"
    path.write_bytes(MODES["rgb.png"])
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60
    )
    hints = done.stdout.splitlines()
    assert len(hints) == 2 and "mnnsmith[vision]" in hints[0] and "mnnsmith[video]" in hints[1]
