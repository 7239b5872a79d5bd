"""Pictures and videos of a dialogue: cut once, put into its prompt, each tile at its place."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mnnsmith.bundle.bundle import Bundle
from mnnsmith.errors import BundleError, SourceError, UnsupportedError, UsageError
from mnnsmith.files import read_bytes, user_path
from mnnsmith.reply import TileRun
from mnnsmith.text.prompt import Prompt, Rendered, encode_rendered, render_chat
from mnnsmith.text.template import ChatTemplate, Message
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.vision.canvas import make_canvas
from mnnsmith.vision.load import MAX_FILE_BYTES, PictureSource, load_picture
from mnnsmith.vision.messages import collect_media
from mnnsmith.vision.processor import Picture, cut
from mnnsmith.vision.prompt import (
    IMAGE,
    PLACEHOLDERS,
    VIDEO,
    VIDEO_CHAT_TEMPLATE,
    Feed,
    ImageRun,
    expand,
    image_runs,
)
from mnnsmith.vision.settings import U8, PictureSettings, read_picture_settings, read_video_settings
from mnnsmith.vision.video import Video, load_video, process_frames

# Some twenty pictures of 4 x 4 tiles: more than a context holds.
CACHE_BYTES = 256 << 20
_Cut = TypeVar("_Cut", Picture, Video)


@dataclass(frozen=True, eq=False)
class Frames:
    """Frames of a video that are at hand, for a part {"type": "video", "video": Frames(...)}.

    frames: an array [n, H, W, 3], or a sequence of pictures; fps: how many make a second.
    """

    frames: Sequence[PictureSource] | npt.NDArray[Any]
    fps: float


VideoSource = str | Path | Frames | Video


def with_media(text: str, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> list[Message]:
    """The parts of a message: pictures, videos, then the text, which is what models are used to.

    If the text holds `<image>` or `<video>`, those of that kind take these places, in order.

    Raises UsageError where there are such places, but not as many as pictures or videos.
    """
    given = {IMAGE: list(images), VIDEO: list(videos)}
    kinds = {IMAGE: "image", VIDEO: "video"}
    places = [mark for mark, sources in given.items() if sources and mark in text]
    for mark in places:
        if text.count(mark) != len(given[mark]):
            raise UsageError(
                f"The text has {text.count(mark)} {mark}, but {len(given[mark])} were given.",
                "Write one for each, in order; or none, and they stand before the text.",
            )
    parts: list[Message] = [
        {"type": kinds[mark], kinds[mark]: source}
        for mark, sources in given.items()
        if mark not in places
        for source in sources
    ]
    while text:
        found = [(text.index(mark), mark) for mark in places if mark in text]
        position, mark = min(found, default=(len(text), ""))
        if position:
            parts.append({"type": "text", "text": text[:position]})
        if mark:
            parts.append({"type": kinds[mark], kinds[mark]: given[mark].pop(0)})
        text = text[position + len(mark) :]
    return parts


class MediaReader:
    """Pictures and videos as one model takes them; what was cut before is kept, up to a bound."""

    def __init__(
        self, files: Mapping[str, Any], origin: str, cache_bytes: int = CACHE_BYTES
    ) -> None:
        """files: the processor's files, parsed, by name; origin: where they are from, for messages.

        Raises SourceError for values that make no sense, UnsupportedError for another processor.
        """
        self.settings: PictureSettings = read_picture_settings(files, origin)
        self.video_settings = read_video_settings(files, origin)
        self._limit_bytes = cache_bytes
        self._kept: OrderedDict[tuple[str, ...], Picture | Video] = OrderedDict()

    def picture(self, source: PictureSource | Picture, name: str | None = None) -> Picture:
        """A path, a file's bytes, a Pillow image or an array, cut.  Raises as `load_picture`.

        A file that changed is read anew: what counts is its content.
        """
        if isinstance(source, Picture):
            self._check_tile(source)
            return source
        if isinstance(source, (str, Path)):
            path = user_path(source)
            source, name = read_bytes(path, MAX_FILE_BYTES), name or str(path)
        if isinstance(source, bytes):
            data = source
            key = ("file", hashlib.sha256(data).hexdigest())
            return self._once(key, Picture, lambda: self._cut(data, name))
        loaded = load_picture(source, name)
        pixels = np.asarray(loaded.image)
        digest = hashlib.sha256(repr(pixels.shape).encode())
        digest.update(np.ascontiguousarray(pixels).data)
        return self._once(
            ("pixels", digest.hexdigest()),
            Picture,
            lambda: cut(loaded.image, self.settings, loaded.notes),
        )

    def _cut(self, data: bytes, name: str | None) -> Picture:
        loaded = load_picture(data, name)
        return cut(loaded.image, self.settings, loaded.notes)

    def video(self, source: VideoSource) -> Video:
        """A video file, or `Frames`.  Raises as `load_video`, and UsageError for another model."""
        settings = self.video_settings
        if settings is None:
            raise UsageError(
                "This model takes pictures, but no videos.", "Give frames of it as pictures."
            )
        if isinstance(source, Video):
            self._check_tile(source)
            return source
        if isinstance(source, Frames):
            return process_frames(source.frames, settings, source.fps)
        if not isinstance(source, (str, Path)):
            raise UsageError(
                f"A {type(source).__name__} is no video.", "Give a path, or Frames(frames, fps)."
            )
        path = user_path(source)
        try:
            state = path.stat()
        except OSError as error:
            raise SourceError(f"{path}: cannot be read: {error.strerror}.") from error
        key = ("video", str(path), str(state.st_size), str(state.st_mtime_ns))
        return self._once(key, Video, lambda: load_video(path, settings))

    def _check_tile(self, media: Picture | Video) -> None:
        if media.tiles.shape[1] != self.settings.tile:
            raise UsageError(
                f"Tiles of {media.tiles.shape[1]} pixels were cut for another model; this one "
                f"takes {self.settings.tile}."
            )

    def _once(self, key: tuple[str, ...], kind: type[_Cut], make: Callable[[], _Cut]) -> _Cut:
        kept = self._kept.get(key)
        if isinstance(kept, kind):
            self._kept.move_to_end(key)
            return kept
        made = make()
        self._kept[key] = made
        total = sum(media.tiles.nbytes for media in self._kept.values())
        while total > self._limit_bytes:
            _, oldest = self._kept.popitem(last=False)
            total -= oldest.tiles.nbytes
        return made


def read_media_of(bundle: Bundle) -> MediaReader | None:
    """How a bundle takes pictures, or None for a model of text alone.

    Raises BundleError where its manifest says what makes no sense.
    """
    vision = bundle.manifest.model.get("vision")
    if vision is None:
        return None
    processor = vision.get("processor") if isinstance(vision, Mapping) else None
    if not isinstance(processor, Mapping) or not all(
        isinstance(file, Mapping) for file in processor.values()
    ):
        raise BundleError(
            f"{bundle.path}: model.vision.processor of the manifest must hold the processor's "
            "files.",
            "Convert the model again.",
        )
    try:
        return MediaReader(processor, str(bundle.path))
    except (SourceError, UnsupportedError) as error:
        raise BundleError(error.message, "Convert the model again.") from error


@dataclass(frozen=True, eq=False)
class MediaPrompt:
    """text: the rendered prompt, with what stands for pictures; ids: its tokens; tiles: what feeds
    its image tokens, or canvases for a bundle that takes whole pictures."""

    text: str
    ids: list[int]
    tiles: tuple[TileRun, ...] = ()


def no_vision() -> UsageError:
    """For pictures that are given to a model of text alone."""
    return UsageError(
        "This model sees no pictures or videos: it is one of text alone.",
        "Use a bundle of a model with vision, such as SmolVLM.",
    )


def has_media(messages: Sequence[Message]) -> bool:
    """Whether a dialogue has a picture or a video."""
    contents = (message.get("content") for message in messages)
    return any(
        isinstance(part, Mapping) and part.get("type") in ("image", "video")
        for content in contents
        if isinstance(content, (list, tuple))
        for part in content
    )


def check_grid(picture: Picture, canvas_tokens: Sequence[Sequence[int]]) -> None:
    """Raises UsageError for a picture whose grid a bundle for whole pictures has no tokens for.

    canvas_tokens: see `engine.VisionFacts`.
    """
    rows, columns = picture.rows, max(picture.cols, 1)
    known = rows < len(canvas_tokens) and columns <= len(canvas_tokens[rows])
    if not known or not canvas_tokens[rows][columns - 1]:
        raise UsageError(
            f"A picture of {rows} x {columns} tiles has no place in this bundle, which takes whole "
            f"pictures of at most {len(canvas_tokens) - 1} x {len(canvas_tokens[0])} tiles.",
            "Convert the model with --vision standard.",
        )


class MediaPrompts:
    """Makes prompts of dialogues with pictures, for one model."""

    def __init__(
        self,
        reader: MediaReader,
        tokenizer: TextTokenizer,
        template: ChatTemplate,
        image_token: int,
        canvas_tokens: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """canvas_tokens: of a bundle that takes whole pictures, see `engine.VisionFacts`."""
        self.reader = reader
        self._tokenizer = tokenizer
        self._template = template
        self._video_template: ChatTemplate | None = None
        self._image_token = image_token
        self._canvas_tokens = canvas_tokens

    def close(self) -> None:
        """End the process of the template for videos; the other one is the caller's."""
        if self._video_template is not None:
            self._video_template.close()

    def make(
        self,
        messages: Sequence[Message],
        *,
        allow_special: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> MediaPrompt:
        """Render and encode a dialogue; contents are texts or lists of parts.

        Raises what `collect_media`, `MediaReader`, `render_chat`, `expand` and `image_runs` raise.
        """
        media = collect_media(messages)
        pictures = [
            self.reader.picture(source, None if isinstance(source, (str, Path)) else f"picture {i}")
            for i, source in enumerate(media.images, 1)
        ]
        videos = [self.reader.video(source) for source in media.videos]
        rendered = render_chat(
            self._template_for(videos),
            self._tokenizer,
            media.messages,
            allow_special=allow_special,
            variables=variables,
            placeholders=PLACEHOLDERS,
        )
        length = self.reader.settings.image_seq_len
        expanded = expand(rendered.text, rendered.as_text, pictures, videos, length)
        prompt = encode_rendered(
            self._tokenizer, Rendered(expanded.text, expanded.as_text, rendered.control)
        )
        runs = image_runs(prompt.ids, self._image_token, expanded.feeds, length)

        def tile_of(feed: Feed) -> U8:
            shown: Sequence[Picture | Video] = pictures if feed.kind == "picture" else videos
            tile: U8 = shown[feed.index].tiles[feed.tile]
            return tile

        if self._canvas_tokens is not None:
            return self._with_canvases(prompt, runs, pictures, tile_of)
        tiles = tuple(TileRun(run.start, run.stop, tile_of(run.feed)) for run in runs)
        return MediaPrompt(prompt.text, prompt.ids, tiles)

    def _with_canvases(
        self,
        prompt: Prompt,
        runs: Sequence[ImageRun],
        pictures: Sequence[Picture],
        tile_of: Callable[[Feed], U8],
    ) -> MediaPrompt:
        """The same prompt for a bundle that takes whole pictures.

        What stands between the tiles of one is then part of its embeddings, so image tokens stand
        for it too.  A frame of a video is a picture that is not split.
        """
        ids = list(prompt.ids)
        tiles = []
        place = 0
        while place < len(runs):
            feed = runs[place].feed
            count, canvas = 1, tile_of(feed)
            if feed.kind == "picture":
                picture = pictures[feed.index]
                check_grid(picture, self._canvas_tokens or ())
                count, canvas = len(picture.tiles), make_canvas(picture)
            # Before the first tile stands the token of its place in the grid.
            start, stop = runs[place].start - 1, runs[place + count - 1].stop
            ids[start:stop] = [self._image_token] * (stop - start)
            tiles.append(TileRun(start, stop, canvas))
            place += count
        return MediaPrompt(prompt.text, ids, tuple(tiles))

    def _template_for(self, videos: Sequence[Video]) -> ChatTemplate:
        if not videos:
            return self._template
        if self._video_template is None:
            self._video_template = ChatTemplate(VIDEO_CHAT_TEMPLATE)
        return self._video_template
