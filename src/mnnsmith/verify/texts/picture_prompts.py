"""Prompts with pictures, as a bundle's own template, tokenizer and processor make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.bundle import Bundle
from mnnsmith.errors import BundleError, SourceError, UnsupportedError
from mnnsmith.text.prompt import Rendered, encode_rendered, render_chat
from mnnsmith.text.template import ChatTemplate
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.verify.texts.pictures import Sample
from mnnsmith.vision.canvas import make_canvas
from mnnsmith.vision.prompt import PLACEHOLDERS, expand, image_runs
from mnnsmith.vision.settings import U8, PictureSettings, read_picture_settings

I64 = npt.NDArray[np.int64]


def bundle_settings(bundle: Bundle) -> tuple[Mapping[str, Any], PictureSettings]:
    """The processor's files that a bundle keeps, and what they say.

    Raises `BundleError` where they make no sense.
    """
    vision = bundle.manifest.model.get("vision")
    files = vision.get("processor") if isinstance(vision, dict) else None
    if not isinstance(files, dict) or not all(isinstance(f, dict) for f in files.values()):
        raise BundleError(
            f"{bundle.path}: the manifest does not say how pictures are taken.",
            "Convert the model again.",
        )
    try:
        return files, read_picture_settings(files, str(bundle.path))
    except (SourceError, UnsupportedError) as error:
        raise BundleError(error.message, "Convert the model again.") from error


@dataclass(frozen=True, eq=False)
class PicturePrompt:
    """label: as findings name it.  text: as rendered, one placeholder a picture.

    ids: int64 [n], as the model was trained on them; tiles: uint8 [S, S, 3] for each run of image
    tokens.  fed, shown: the same as the bundle takes them, which may be whole pictures.
    """

    label: str
    text: str
    ids: I64
    tiles: tuple[U8, ...]
    fed: I64
    shown: tuple[U8, ...]

    def followed_by(self, ids: Sequence[int]) -> PicturePrompt:
        """The same with more text."""
        more = np.array(ids, dtype=np.int64)
        return PicturePrompt(
            self.label, self.text, np.concatenate([self.ids, more]), self.tiles,
            np.concatenate([self.fed, more]), self.shown,
        )  # fmt: skip


class PicturePrompts:
    """Makes prompts for one bundle; use it in a `with` block."""

    def __init__(
        self, bundle: Bundle, settings: PictureSettings, image_token: int, *, canvas: bool
    ) -> None:
        """canvas: whether the bundle takes whole pictures.

        Raises `BundleError` for a bundle without a chat template.
        """
        if bundle.chat_template is None:
            raise BundleError(
                f"{bundle.path}: has no chat template, so no prompt with a picture can be made."
            )
        self.tokenizer = TextTokenizer(bundle.tokenizer_json())
        self._settings = settings
        self._image_token = image_token
        self._canvas = canvas
        self._template = ChatTemplate(
            bundle.chat_template, bundle.bos_token, bundle.eos_token,
            special_tokens=bundle.special_tokens,
        )  # fmt: skip

    def make(self, samples: Sequence[Sample], question: str) -> PicturePrompt:
        """A question after some pictures, up to where the answer begins."""
        parts = [*({"type": "image"} for _ in samples), {"type": "text", "text": question}]
        rendered = render_chat(
            self._template, self.tokenizer, [{"role": "user", "content": parts}],
            placeholders=PLACEHOLDERS,
        )  # fmt: skip
        length = self._settings.image_seq_len
        pictures = [sample.picture for sample in samples]
        expanded = expand(rendered.text, rendered.as_text, pictures, [], length)
        whole = Rendered(expanded.text, expanded.as_text, rendered.control)
        ids = encode_rendered(self.tokenizer, whole).ids
        runs = image_runs(ids, self._image_token, expanded.feeds, length)
        tiles = tuple(pictures[run.feed.index].tiles[run.feed.tile] for run in runs)
        label = " and ".join(sample.name for sample in samples)
        own = np.array(ids, dtype=np.int64)
        if not self._canvas:
            return PicturePrompt(label, rendered.text, own, tiles, own, tiles)
        fed = own.copy()
        for index in range(len(pictures)):
            places = [run for run in runs if run.feed.index == index]
            # What stands between the tiles is part of the embeddings of a whole picture, and so is
            # the token before the first.
            fed[places[0].start - 1 : places[-1].stop] = self._image_token
        shown = tuple(make_canvas(picture) for picture in pictures)
        return PicturePrompt(label, rendered.text, own, tiles, fed, shown)

    def __enter__(self) -> PicturePrompts:
        return self

    def __exit__(self, *_: object) -> None:
        self._template.close()
