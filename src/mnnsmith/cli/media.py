"""Pictures and videos that a command is given: read before the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mnnsmith.cli.console import note

if TYPE_CHECKING:
    from mnnsmith.bundle import Bundle
    from mnnsmith.session_media import MediaReader
    from mnnsmith.vision.processor import Picture
    from mnnsmith.vision.video import Video

Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image", metavar="FILE",
        help="A picture, before the text or where it says <image>; may be given several times.",
    ),
]  # fmt: skip
Videos = Annotated[
    list[Path] | None,
    typer.Option("--video", metavar="FILE", help="The same for a video, and <video>."),
]


@dataclass
class Media:
    """What a message is to show, cut already, so that a later turn does not need the files."""

    images: list[Picture] = field(default_factory=list)
    videos: list[Video] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)

    def clear(self) -> None:
        self.images, self.videos = [], []

    def add_image(self, reader: MediaReader, path: str | Path) -> str:
        """Read and cut a picture; gives what it became."""
        picture = reader.picture(path)
        _show_notes(picture.notes)
        self.images.append(picture)
        size = f"{picture.width} x {picture.height} pixels"
        return f"{path}: {size}, {_count(len(picture.tiles), 'tile')}"

    def add_video(self, reader: MediaReader, path: str | Path) -> str:
        """Decode a video and choose its frames; gives what it became."""
        video = reader.video(path)
        _show_notes(video.notes)
        self.videos.append(video)
        return f"{path}: {video.duration_s:.1f} s, {_count(len(video.tiles), 'frame')}"


def read_media(bundle: Bundle, images: list[Path] | None, videos: list[Path] | None) -> Media:
    """The options --image and --video, each file read.

    Raises UsageError for a bundle that sees no pictures, and what `MediaReader` raises.
    """
    media = Media()
    if not images and not videos:
        return media
    from mnnsmith.session_media import read_media_of

    reader = require_reader(read_media_of(bundle))
    for path in images or ():
        media.add_image(reader, path)
    for path in videos or ():
        media.add_video(reader, path)
    return media


def require_reader(reader: MediaReader | None) -> MediaReader:
    """`reader`, or a UsageError where the model has none."""
    if reader is None:
        from mnnsmith.session_media import no_vision

        raise no_vision()
    return reader


def _show_notes(notes: tuple[str, ...]) -> None:
    for text in notes:
        note(f"({text})")


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
