"""How a model wants its pictures: processor, tokenizer and tower held against each other."""

from __future__ import annotations

import json

from mnnsmith.errors import SourceError
from mnnsmith.mnn.config_files import PictureFacts
from mnnsmith.models.language_model import VisionModel
from mnnsmith.sources.checkpoint import Checkpoint
from mnnsmith.vision.settings import read_picture_settings

_IMAGE, _FAKE, _WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"


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
    if ids[_IMAGE] != vision.image_token:
        raise SourceError(
            f"{checkpoint.origin}: {_IMAGE} is token {ids[_IMAGE]} of tokenizer.json, and "
            f"image_token_id {vision.image_token} of config.json."
        )
    return PictureFacts(
        settings.levels.engine_mean, settings.levels.engine_norm, vision.tile, vision.tile_tokens,
        settings.longest_edge, vision.image_token, ids[_FAKE], ids[_WHOLE],
    )  # fmt: skip


def _added_tokens(checkpoint: Checkpoint) -> dict[str, int]:
    """Ids of the tokens around a picture; the text was checked as the tokenizer was read."""
    added = json.loads(checkpoint.tokenizer.tokenizer_json)["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    missing = [name for name in (_IMAGE, _FAKE, _WHOLE) if name not in ids]
    if missing:
        raise SourceError(
            f"{checkpoint.origin}: tokenizer.json has no token {missing[0]}, which pictures need.",
            "Is it the tokenizer of this model?",
        )
    return ids
