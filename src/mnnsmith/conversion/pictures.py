"""How a model wants its pictures: processor, tokenizer and tower held against each other.

And for the canvas form of its vision: what the text of a picture holds, grid by grid.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

from mnnsmith.errors import SourceError
from mnnsmith.mnn.config_files import PictureFacts
from mnnsmith.models.canvas import CanvasLayout
from mnnsmith.models.language_model import VisionModel
from mnnsmith.sources.checkpoint import Checkpoint
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.vision.prompt import FAKE, GLOBAL, IMAGE, picture_text
from mnnsmith.vision.settings import read_picture_settings

# What a model reads where an app sends a canvas of another size; it can say so in its answer.
_WRONG = "(This picture cannot be shown: its canvas is not of a size that the model takes.)"
# Rows and columns of the largest grid that a canvas may have; models have tokens for six.
_MOST_SIDE = 8


def picture_facts(vision: VisionModel, checkpoint: Checkpoint) -> PictureFacts:
    """What the engine must be told; raises `SourceError` where the checkpoint's files disagree."""
    settings = read_picture_settings(checkpoint.processor, checkpoint.origin)
    for what, of_processor, of_tower in (
        ("pixels a side of a tile", settings.tile, vision.tile),
        ("image tokens a tile", settings.image_seq_len, vision.tile_tokens),
    ):
        if of_processor != of_tower:
            raise SourceError(
                f"{checkpoint.origin}: {of_processor} {what} by the picture processor's files, "
                f"{of_tower} by config.json.",
                "Are preprocessor_config.json and processor_config.json those of this model?",
            )
    ids = _added_tokens(checkpoint)
    if ids[IMAGE] != vision.image_token:
        raise SourceError(
            f"{checkpoint.origin}: {IMAGE} is token {ids[IMAGE]} of tokenizer.json, and "
            f"image_token_id {vision.image_token} of config.json."
        )
    return PictureFacts(
        settings.levels.engine_mean, settings.levels.engine_norm, vision.tile, vision.tile_tokens,
        settings.longest_edge, vision.image_token, ids[FAKE], ids[GLOBAL],
    )  # fmt: skip


def _added_tokens(checkpoint: Checkpoint) -> dict[str, int]:
    """Ids of all added tokens, those around a picture among them.

    The text was checked as the tokenizer was read.
    """
    added = json.loads(checkpoint.tokenizer.tokenizer_json)["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    missing = [name for name in (IMAGE, FAKE, GLOBAL) if name not in ids]
    if missing:
        raise SourceError(
            f"{checkpoint.origin}: tokenizer.json has no token {missing[0]}, which pictures need.",
            "Is it the tokenizer of this model?",
        )
    return ids


def canvas_layout(vision: VisionModel, checkpoint: Checkpoint) -> CanvasLayout:
    """What stands between the tiles of each grid, as the tokenizer makes it.

    The first and the last token are left out: those around a picture are the engine's to set.
    Raises `SourceError` for a tokenizer that reads a picture's text differently by what is around.
    """
    known = _added_tokens(checkpoint)
    tokenizer = TextTokenizer(checkpoint.tokenizer.tokenizer_json)
    rows = _side(f"<row_{i}_col_1>" in known for i in range(1, _MOST_SIDE + 1))
    columns = _side(f"<row_1_col_{i}>" in known for i in range(1, _MOST_SIDE + 1))
    grids = [(0, 0)] + [
        (row, column)
        for row in range(1, rows + 1)
        for column in range(1, columns + 1)
        if (row, column) != (1, 1)
    ]
    texts = {grid: picture_text(*grid, vision.tile_tokens) for grid in grids}
    ids = {grid: tokenizer.encode(text, allow_special=True) for grid, text in texts.items()}
    for grid, text in texts.items():
        _check_apart(tokenizer, text, ids[grid], checkpoint.origin)
        if not ids[grid][0] == ids[grid][-1] == known[FAKE]:
            raise SourceError(f"{checkpoint.origin}: the tokenizer does not read {FAKE} alone.")
    wrong = tokenizer.encode(_WRONG)
    tokens = sorted({i for found in (*ids.values(), wrong) for i in found} - {vision.image_token})
    places: dict[tuple[int, int], tuple[int, ...]] = {}
    for grid, found in ids.items():
        feature = iter(range(len(tokens), len(tokens) + len(found)))
        places[grid] = tuple(
            next(feature) if i == vision.image_token else tokens.index(i) for i in found[1:-1]
        )
    said = tuple(tokens.index(i) for i in wrong)
    return CanvasLayout(rows, columns, tuple(tokens), places, said)


def _side(known: Iterable[bool]) -> int:
    return sum(1 for _ in itertools.takewhile(bool, known))


def _check_apart(tokenizer: TextTokenizer, text: str, ids: list[int], origin: str) -> None:
    """Around a picture there may be anything, which the engine encodes by itself."""
    before, after = "User:\n", "\n What?"
    parts = [*tokenizer.encode(before), *ids, *tokenizer.encode(after)]
    if tokenizer.encode(before + text + after, allow_special=True) != parts:
        raise SourceError(
            f"{origin}: the tokenizer joins the text of a picture with what is around it.",
            "Convert with --vision standard.",
        )
