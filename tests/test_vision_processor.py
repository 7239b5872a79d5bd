"""Tiles, grids and numbers: those of transformers' Pillow backend, to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import picture_samples as samples
from mnnsmith.vision.canvas import make_canvas
from mnnsmith.vision.load import load_picture
from mnnsmith.vision.processor import cut, process_picture
from mnnsmith.vision.settings import PictureSettings, read_picture_settings

MODES = samples.modes()
# tile, longest edge: SmolVLM-256M and 500M, SmolVLM-2.2B, Idefics3-8B, and small ones that reach
# more shapes of grids.
SHAPES = {"512": (512, 2048), "384": (384, 1536), "364": (364, 1456), "64": (64, 256)}
KINDS = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")


def files(tile: int = 512, longest_edge: int = 2048, **more: Any) -> dict[str, dict[str, Any]]:
    return {
        "preprocessor_config.json": {
            "size": {"longest_edge": longest_edge}, "max_image_size": {"longest_edge": tile},
            "image_processor_type": "Idefics3ImageProcessor", **more,
        },
        "processor_config.json": {"image_seq_len": 64},
    }  # fmt: skip


@lru_cache(maxsize=16)
def original(kind: str, options: str) -> Any:
    import transformers.models.idefics3.image_processing_pil_idefics3 as idefics3
    import transformers.models.smolvlm.image_processing_pil_smolvlm as smolvlm

    classes = {
        "Idefics3ImageProcessor": idefics3.Idefics3ImageProcessorPil,
        "SmolVLMImageProcessor": smolvlm.SmolVLMImageProcessorPil,
    }
    return classes[kind](**json.loads(options))


def assert_equal(image: Image.Image, settings_files: dict[str, dict[str, Any]], kind: str) -> None:
    """Ours against the original on one picture: grid, and every number of every tile."""
    options = {
        k: v for k, v in settings_files["preprocessor_config.json"].items() if "type" not in k
    }
    theirs = original(kind, json.dumps(options))(
        [[image]], return_row_col_info=True, return_tensors="np"
    )
    settings = read_picture_settings(settings_files, "test")
    ours = cut(load_picture(image).image, settings)
    assert [[ours.rows]] == theirs["rows"] and [[ours.cols]] == theirs["cols"]
    np.testing.assert_array_equal(
        settings.levels.pixel_values(ours.tiles), theirs["pixel_values"][0]
    )


@pytest.mark.reference
@pytest.mark.parametrize("size", list(samples.SIZES))
def test_sizes_of_the_case_list(size: str) -> None:
    assert_equal(Image.fromarray(samples.photo(*samples.SIZES[size])), files(), KINDS[0])


@pytest.mark.reference
@pytest.mark.parametrize(
    "name", [n for n in MODES if not n.startswith(("exif", "gray16", "palette-alpha"))]
)
def test_modes_of_the_case_list(name: str) -> None:
    from io import BytesIO

    image = Image.open(BytesIO(MODES[name]))
    assert_equal(image, files(64, 256), KINDS[1])


def random_sizes(count: int, seed: int) -> list[tuple[int, int]]:
    """Widths and heights of all magnitudes, and close to where grids change."""
    rng = np.random.default_rng(seed)
    width = np.exp(rng.uniform(0, np.log(1500), count - count // 4))
    free = np.stack([width, width * np.exp(rng.uniform(-1.5, 1.5, len(width)))], 1).astype(int) + 1
    near = rng.choice([63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513], (count // 4, 2))
    return [(int(w), int(h)) for w, h in np.concatenate([free, near])]


def check_random(count: int, seed: int, shapes: tuple[str, ...]) -> None:
    grids = set()
    for number, (width, height) in enumerate(random_sizes(count, seed)):
        tile, longest_edge = SHAPES[shapes[number % len(shapes)]]
        chosen = files(
            tile, longest_edge,
            do_image_splitting=number % 5 != 0,
            resample=(1, 1, 1, 3, 2)[number % 5],
            image_mean=[0.48, 0.46, 0.41], image_std=[0.27, 0.26, 0.28],
        )  # fmt: skip
        image = Image.fromarray(samples.photo(width, height, number))
        assert_equal(image, chosen, KINDS[number % 2])
        picture = cut(image, read_picture_settings(chosen, "test"))
        grids.add((picture.rows, picture.cols))
    assert len(grids) >= 7


@pytest.mark.reference
def test_random_sizes() -> None:
    check_random(40, 0, ("64",))


@pytest.mark.reference
@pytest.mark.slow
def test_500_random_sizes() -> None:
    check_random(500, 1, ("512", "384", "364", "64", "64"))


@pytest.mark.reference
@pytest.mark.parametrize("shape", ["512", "384", "364"])
@pytest.mark.parametrize("split", [True, False])
def test_models(shape: str, split: bool) -> None:
    image = Image.fromarray(samples.photo(500, 333))
    assert_equal(image, files(*SHAPES[shape], do_image_splitting=split), KINDS[0])


@pytest.mark.reference
def test_steps_switched_off() -> None:
    image = Image.fromarray(samples.photo(100, 60))
    assert_equal(image, files(64, 256, do_normalize=False), KINDS[0])
    assert_equal(image, files(64, 256, do_rescale=False, image_mean=[9, 8, 7]), KINDS[0])
    assert_equal(image, files(64, 256, do_pad=False), KINDS[1])


@pytest.mark.reference
def test_defaults_are_those_of_the_classes() -> None:
    image = Image.fromarray(samples.photo(300, 200))
    assert_equal(image, {"preprocessor_config.json": {}}, KINDS[0])
    assert_equal(image, {"preprocessor_config.json": {}}, KINDS[1])
    assert read_picture_settings({"preprocessor_config.json": {}}, "test").image_seq_len == 169


@pytest.mark.parametrize(
    ("size", "grid"),
    # Counts of ids that SmolVLM gives: 16 + 1, 12 + 1, 8 + 1 and 4 + 1 tiles.
    [((700, 700), (4, 4)), ((640, 480), (3, 4)), ((300, 800), (4, 2)), ((2048, 100), (1, 4))],
)
def test_grids_of_smolvlm(size: tuple[int, int], grid: tuple[int, int]) -> None:
    picture = process_picture(samples.photo(*size), read_picture_settings(files(), "test"))
    assert (picture.rows, picture.cols) == grid
    assert picture.tiles.shape == (grid[0] * grid[1] + 1, 512, 512, 3)
    assert (picture.width, picture.height) == size


def small(**more: Any) -> PictureSettings:
    return read_picture_settings(files(64, 256, **more), "test")


def test_tiles_lie_row_by_row_and_the_whole_comes_last() -> None:
    marks = np.repeat(np.arange(12, dtype=np.uint8).reshape(3, 4), 64, axis=0)
    marks = np.repeat(marks, 64, axis=1)
    image = Image.fromarray(np.stack([marks, 100 + marks, 200 + marks], axis=2))
    picture = cut(image, small(resample=0))
    assert (picture.rows, picture.cols) == (3, 4)
    for number in range(12):
        assert (picture.tiles[number] == [number, 100 + number, 200 + number]).all()
    assert set(np.unique(picture.tiles[12, :, :, 0])) == set(range(12))
    assert picture.bgr(5)[0, 0].tolist() == [205, 105, 5]
    assert picture.bgr(5).flags.c_contiguous


def test_canvas_holds_grid_and_whole() -> None:
    picture = process_picture(samples.photo(200, 150), small())
    canvas = make_canvas(picture)
    assert canvas.shape == (4 * 64, 4 * 64, 3)
    np.testing.assert_array_equal(canvas[64:128, 128:192], picture.tiles[4 + 2])
    np.testing.assert_array_equal(canvas[192:, :64], picture.tiles[12])
    assert not canvas[192:, 64:].any()
    single = process_picture(samples.photo(200, 150), small(do_image_splitting=False))
    np.testing.assert_array_equal(make_canvas(single), single.tiles[0])


def test_digest_tells_pictures_apart() -> None:
    image = samples.photo(200, 150)
    changed = image.copy()
    changed[75, 100] ^= 255
    first, again = process_picture(image, small()), process_picture(Image.fromarray(image), small())
    assert first.digest == again.digest != process_picture(changed, small()).digest
    # The same tiles in another grid.
    turned = replace(first, rows=first.cols, cols=first.rows)
    assert turned.digest != first.digest


def test_engine_constants_give_the_same_numbers() -> None:
    settings = small(image_mean=[0.48, 0.46, 0.41], image_std=[0.27, 0.26, 0.28])
    tiles = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    levels = settings.levels
    engine = (tiles - np.array(levels.engine_mean)) * np.array(levels.engine_norm)
    exact = levels.pixel_values(tiles).transpose(0, 2, 3, 1)
    np.testing.assert_allclose(engine, exact, atol=5e-7, rtol=0)


def test_sizes_are_those_of_the_upright_picture(tmp_path: Path) -> None:
    for name, data in MODES.items():
        (tmp_path / name).write_bytes(data)
        picture = process_picture(tmp_path / name, small())
        on_its_side = name in {f"exif-{orientation}.jpeg" for orientation in (5, 6, 7, 8)}
        assert (picture.width, picture.height) == ((70, 90) if on_its_side else (90, 70)), name
