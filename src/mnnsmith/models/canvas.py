"""A vision model that takes a whole picture: one canvas in, all embeddings of its text out.

A canvas holds the grid of a picture's tiles as it lies, and below it one more row whose first tile
shows the whole.  The embeddings are those of the tiles and of the tokens between them, so an app
needs to know nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Dim, DType, Value, multiple
from mnnsmith.graph.weights import MatrixSlot, StoredRows

CHANNELS = 3
# Names of what is known at run time only: rows of tiles with the last one, columns, tiles in use,
# and tiles at once (one).
BANDS, COLUMNS, USED, TILES = "bands", "columns", "used", "tiles"
# The part that encodes one tile, its result and its inputs.
ENCODE, FEATURES = "/encode", "tile/features"
NUMBER, GOING, GIVEN = "number", "going", "given"
# Not "pixel_values", of which the engine would cut tiles itself.
INPUT = "canvas"


@dataclass(frozen=True)
class CanvasLayout:
    """How the text of a picture goes, for each grid that the tokenizer has tokens for.

    rows, columns: of the largest grid.  tokens: ids that occur between tiles.
    places: by (rows, columns) of a grid, (0, 0) for a picture that is not split: what stands at
    each position, as index into `tokens`, or their number plus that of the tile's embedding.
    wrong: the same for a canvas of any other size.
    """

    rows: int
    columns: int
    tokens: tuple[int, ...]
    places: Mapping[tuple[int, int], tuple[int, ...]]
    wrong: tuple[int, ...]

    @property
    def lengths(self) -> list[list[int]]:
        """Embeddings of a canvas by rows and columns of its tiles, counted from one; 0 for none."""
        found = [[0] * max(self.columns, 1) for _ in range(self.rows + 1)]
        for (rows, columns), places in self.places.items():
            found[rows][max(columns, 1) - 1] = len(places)
        return found


def canvas_graph(
    encode: Callable[[Graph, Value], Value],
    tile: int,
    tile_tokens: int,
    embedding: MatrixSlot,
    layout: CanvasLayout,
) -> Graph:
    """[1, 3, (rows + 1) * tile, columns * tile], normalized, to [positions, 1, width].

    encode: [tiles, 3, tile, tile] -> packed [tiles * tile_tokens, width, 1, 1].
    """
    g = Graph()
    canvas = g.input(INPUT, [1, CHANNELS, multiple(tile, BANDS), multiple(tile, COLUMNS)])
    cut = _cut(g, canvas, tile)
    bands, columns = (g.size(cut, axis, name) for axis, name in ((0, BANDS), (1, COLUMNS)))
    grid = _grid_number(g, bands, columns, layout)
    indices, ends, tiles = _tables(layout)
    cells = g.reshape(cut, [f"{BANDS}*{COLUMNS}", CHANNELS, tile, tile], "cells")
    width = embedding.cols
    count = g.gather(g.integers(tiles), grid, "tiles")
    body = _one_tile(encode, cells, [multiple(tile_tokens, TILES), width])
    encoded = g.repeat(count, cells, body, USED, "encode")
    rows = multiple(tile_tokens, f"{USED}*{TILES}")
    features = g.reshape(encoded, [rows, width], "features")
    ids = tuple(embedding.first_row + token for token in layout.tokens)
    tokens = g.constant("tokens", StoredRows(embedding.tensor, ids, width))
    known = g.concat([tokens, features], 0, "known", size="known")
    begin = g.gather(g.integers([0, *ends[:-1]]), grid, "text/begin")
    end = g.gather(g.integers(ends), grid, "text/end")
    text = g.slice(g.integers(indices), begin, end, 0, "text", "positions")
    block = g.gather(known, text, "block")
    g.mark_output(g.reshape(block, ["positions", 1, width], "image_embeds"))
    return g


def _one_tile(encode: Callable[[Graph, Value], Value], cells: Value, shape: list[Dim]) -> Graph:
    """The features of tile `number` of all cells: activations are those of one, not of a batch."""
    g = Graph(ENCODE)
    number = g.input(NUMBER, [], DType.INT32)
    going = g.input(GOING, [1], DType.INT32)
    given = g.input(GIVEN, cells.shape)
    begin = g.reshape(number, [1], "begin")
    end = g.binary("add", begin, g.integers([1]), "end")
    tile = g.slice(given, begin, end, 0, "tile", TILES)
    features = g.from_channels(encode(g, tile), shape, FEATURES)
    for value in (going, given, features):
        g.mark_output(value)
    return g


def _cut(g: Graph, canvas: Value, tile: int) -> Value:
    """[bands, columns, 3, tile, tile]: one side after the other, which a reshape can tell."""
    turned = g.transpose(canvas, [1, 3, 2, 0], "canvas/turned")
    bands = g.reshape(turned, [CHANNELS, canvas.shape[3], BANDS, tile], "canvas/bands")
    upright = g.transpose(bands, [2, 0, 3, 1], "canvas/upright")
    cells = g.reshape(upright, [BANDS, CHANNELS, tile, COLUMNS, tile], "canvas/cells")
    return g.transpose(cells, [0, 3, 1, 2, 4], "canvas/cut")


def _grid_number(g: Graph, bands: Value, columns: Value, layout: CanvasLayout) -> Value:
    """Which entry of `_tables` is that of the canvas, int32 [1]; larger ones share the last."""
    most = _most(layout)
    band = g.binary("minimum", bands, g.integers([most[0]]), "grid/bands")
    column = g.binary("minimum", columns, g.integers([most[1]]), "grid/columns")
    row = g.binary("multiply", band, g.integers([most[1] + 1]), "grid/row")
    return g.binary("add", row, column, "grid")


def _most(layout: CanvasLayout) -> tuple[int, int]:
    """Bands and columns of the smallest canvas that is too large either way."""
    return layout.rows + 2, max(layout.columns, 1) + 1


def _tables(layout: CanvasLayout) -> tuple[list[int], list[int], list[int]]:
    """By number of the grid: rows of "known" in the order of the text, where they end; tiles."""
    indices: list[int] = []
    ends: list[int] = []
    tiles: list[int] = []
    most = _most(layout)
    for bands in range(most[0] + 1):
        for columns in range(most[1] + 1):
            grid = (0, 0) if (bands, columns) == (1, 1) else (bands - 1, columns)
            indices += layout.places.get(grid, layout.wrong)
            ends.append(len(indices))
            tiles.append(grid[0] * grid[1] + 1 if grid in layout.places else 1)
    return indices, ends, tiles
