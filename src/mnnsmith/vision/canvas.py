"""A picture as one image that holds its tiles: what the canvas form of a vision model takes."""

from __future__ import annotations

import numpy as np

from mnnsmith.vision.processor import Picture
from mnnsmith.vision.settings import U8


def make_canvas(picture: Picture) -> U8:
    """The grid as it lies, and below it one more row of tiles whose first is the global tile.

    uint8 [(rows + 1) * S, cols * S, 3], red, green, blue; what is right of the global tile is
    black.  A picture that is not split is its one tile [S, S, 3].
    """
    side = picture.tiles.shape[1]
    if picture.rows == 0:
        return np.array(picture.tiles[0])
    rows, cols = picture.rows, picture.cols
    canvas = np.zeros(((rows + 1) * side, cols * side, 3), np.uint8)
    grid = picture.tiles[:-1].reshape(rows, cols, side, side, 3).transpose(0, 2, 1, 3, 4)
    canvas[: rows * side] = grid.reshape(rows * side, cols * side, 3)
    canvas[rows * side :, :side] = picture.tiles[-1]
    return canvas
