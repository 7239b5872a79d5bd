"""Pictures that a bundle is judged on: made by code, or a user's, cut as the model takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mnnsmith.vision.load import load_picture
from mnnsmith.vision.processor import Picture, cut
from mnnsmith.vision.settings import U8, PictureSettings

# Name, width and height.  Long ones have few tiles, whatever the model; the others are each a shape
# in which sizes round another way.
_SHAPES = (
    ("wide", 1024, 256), ("tall", 250, 1000), ("strip", 2048, 100), ("photo", 640, 480),
    ("square", 512, 512), ("tiny", 20, 20), ("odd", 333, 517),
)  # fmt: skip
_SHAPES_DRAWN = 7


@dataclass(frozen=True, eq=False)
class Sample:
    """A picture: upright pixels uint8 [height, width, 3], and how it is cut."""

    name: str
    pixels: U8
    picture: Picture


def sample_pictures(files: Sequence[Path], settings: PictureSettings) -> list[Sample]:
    """The user's pictures, or those that ship, which are made anew each time.

    Raises what `load_picture` raises.
    """
    if files:
        given = [(str(path), load_picture(path).image) for path in files]
    else:
        given = [
            (name, load_picture(_drawn(width, height, seed)).image)
            for seed, (name, width, height) in enumerate(_SHAPES)
        ]
    return [Sample(name, np.asarray(image), cut(image, settings)) for name, image in given]


def _drawn(width: int, height: int, seed: int) -> U8:
    """Waves of color, rectangles with hard edges, a disk, and grain: uint8 [height, width, 3]."""
    random = np.random.default_rng([seed, 11])
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j].astype(np.float32)
    waves = random.uniform(2, 12, (3, 3))
    level = np.stack([127 + 90 * np.sin(a * x + b * y + c) for a, b, c in waves], -1)
    for _ in range(_SHAPES_DRAWN):
        (left, right), (top, bottom) = np.sort(random.uniform(0, 1, (2, 2)), 1)
        level[(x > left) & (x < right) & (y > top) & (y < bottom)] = random.uniform(0, 255, 3)
    level[(x - 0.7) ** 2 + (y - 0.3) ** 2 < 0.03] = random.uniform(0, 255, 3)
    level += random.normal(0, 9, level.shape)
    drawn: U8 = np.clip(level, 0, 255).astype(np.uint8)
    return drawn
