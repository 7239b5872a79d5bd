"""A picture as the tiles that Idefics3 and SmolVLM take, pixel for pixel as transformers cuts them.

The rules are those of transformers' `Idefics3ImageProcessorPil` and `SmolVLMImageProcessorPil`,
which are one: the longer side is brought to `longest_edge`, small pictures too; both sides are
enlarged to multiples of a tile; the grid is cut row by row; the whole, squashed to one tile, is the
last.  Each resize rounds to 8 bits, so their order and number count.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.vision.load import PictureSource, load_picture
from mnnsmith.vision.settings import MAX_SIDE, U8, PictureSettings

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture, cut.

    tiles: uint8 [n, S, S, 3], red, green, blue: the grid row by row, then the global tile, so
    n = rows * cols + 1; a picture that is not split has rows = cols = 0, and the global tile alone.
    width, height: pixels of the upright original.
    notes: what the loader noted.
    """

    tiles: U8
    rows: int
    cols: int
    width: int
    height: int
    notes: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of grid and tiles: equal for pictures that the model cannot tell apart."""
        return digest_of(self.tiles, self.rows, self.cols)

    def bgr(self, tile: int) -> U8:
        """One tile, contiguous uint8 [S, S, 3] in blue, green, red, as the engine takes it."""
        return bgr(self.tiles[tile])


def digest_of(tiles: U8, *facts: int) -> str:
    """SHA-256 of tiles, their shape, and further facts."""
    digest = hashlib.sha256(repr((tiles.shape, facts)).encode())
    digest.update(np.ascontiguousarray(tiles).data)
    return digest.hexdigest()


def bgr(tile: U8) -> U8:
    """Red, green, blue [S, S, 3] turned around, contiguous."""
    return np.ascontiguousarray(tile[:, :, ::-1])


def process_picture(
    source: PictureSource, settings: PictureSettings, name: str | None = None
) -> Picture:
    """Load a picture and cut it.  Raises what `load_picture` raises."""
    loaded = load_picture(source, name)
    return cut(loaded.image, settings, loaded.notes)


def cut(image: Image.Image, settings: PictureSettings, notes: tuple[str, ...] = ()) -> Picture:
    """The tiles of an RGB image."""
    side = settings.tile
    resample = _filter(settings.resample)
    resized = image.resize(first_size(*image.size, settings.longest_edge), resample)
    if not settings.split:
        tiles = _array(resized.resize((side, side), resample))[None]
        return Picture(tiles, 0, 0, image.width, image.height, notes)
    grid = resized.resize(grid_size(*resized.size, side), resample)
    cols, rows = grid.width // side, grid.height // side
    if rows == cols == 1:
        return Picture(_array(grid)[None], 0, 0, image.width, image.height, notes)
    tiles = np.empty((rows * cols + 1, side, side, 3), np.uint8)
    pixels = _array(grid).reshape(rows, side, cols, side, 3)
    tiles[:-1] = pixels.transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)
    tiles[-1] = _array(grid.resize((side, side), resample))
    return Picture(tiles, rows, cols, image.width, image.height, notes)


def first_size(width: int, height: int, longest_edge: int) -> tuple[int, int]:
    """(width, height) with the longer side at `longest_edge`, the other even, none above 4096."""
    ratio = width / height
    if width >= height:
        width, height = longest_edge, int(longest_edge / ratio)
        height = max(height + height % 2, 1)
    else:
        width, height = int(longest_edge * ratio), longest_edge
        width = max(width + width % 2, 1)
    ratio = width / height
    if width >= height and width > MAX_SIDE:
        width, height = MAX_SIDE, int(MAX_SIDE / ratio)
    elif height > width and height > MAX_SIDE:
        width, height = int(MAX_SIDE * ratio), MAX_SIDE
    return max(width, 1), max(height, 1)


def grid_size(width: int, height: int, tile: int) -> tuple[int, int]:
    """(width, height) enlarged to multiples of a tile.

    The shorter side is rounded up from what the ratio gives for the longer one, already enlarged.
    """
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return width, math.ceil(int(width / ratio) / tile) * tile
    height = math.ceil(height / tile) * tile
    return math.ceil(int(height * ratio) / tile) * tile, height


def _filter(number: int) -> Image.Resampling:
    from PIL.Image import Resampling

    return Resampling(number)


def _array(image: Image.Image) -> U8:
    return np.asarray(image, np.uint8)
