"""A video as the frames that SmolVLM2 takes: chosen by the model's rule, each squashed to one tile.

The rules are those of transformers' `SmolVLMVideoProcessor`.  Frames are resized with Pillow, as
its image processors do; that class itself resizes with torchvision, whose LANCZOS rounds otherwise
(by at most 2 of 255 levels).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import MissingResourceError, SourceError, UsageError
from mnnsmith.files import user_path
from mnnsmith.vision.load import MAX_PIXELS, PictureSource, load_picture
from mnnsmith.vision.processor import bgr, cut, digest_of
from mnnsmith.vision.settings import U8, PictureSettings, VideoSettings

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

# An hour at 30 frames a second; every frame up to the last one chosen has to be decoded.
MAX_FRAMES = 108_000
# Formats that cannot name other files: a playlist could make the library open any of them.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,ogg,flv,gif"
_SKIPPED_S = 1
_MIN_FPS, _MAX_FPS = 1e-3, 1e5


@dataclass(frozen=True, eq=False)
class Video:
    """The chosen frames.

    tiles: uint8 [n, S, S, 3], red, green, blue; times_s: when each is shown, in seconds;
    duration_s: of the whole video; notes: what a person may want to know.
    """

    tiles: U8
    times_s: tuple[float, ...]
    duration_s: float
    notes: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tiles: features of a frame do not depend on its time."""
        return digest_of(self.tiles)

    def bgr(self, tile: int) -> U8:
        """One frame, contiguous uint8 [S, S, 3] in blue, green, red, as the engine takes it."""
        return bgr(self.tiles[tile])


def choose_frames(
    total: int, fps: float, duration_s: float, settings: VideoSettings
) -> npt.NDArray[np.int64]:
    """Increasing indices of the frames to take, out of `total` at `fps` a second."""
    wanted = max(1, min(round(settings.fps * duration_s), settings.max_frames))
    first, last = 0, total - 1
    # The product compares frames with seconds, as the original does.
    if duration_s - 2 * _SKIPPED_S > settings.max_frames * settings.fps:
        first = int(_SKIPPED_S * fps)
        last = min(int(total - _SKIPPED_S * fps), total - 1)
        if first >= last:
            first, last = 0, total - 1
    return np.unique(np.linspace(first, last, wanted, dtype=np.int64))


def process_frames(
    frames: Sequence[PictureSource] | npt.NDArray[Any],
    settings: VideoSettings,
    fps: float,
    *,
    choose: bool = True,
) -> Video:
    """Frames that are at hand: an array [n, H, W, 3], or a sequence of pictures.

    fps: how many of `frames` make a second; choose: take some by the model's rule, or all.

    Raises UsageError for no frames or a bad `fps`, and what `load_picture` raises.
    """
    total = len(frames)
    if total < 1 or total > MAX_FRAMES:
        raise UsageError(f"A video of {total} frames; from 1 to {MAX_FRAMES} are accepted.")
    if not _MIN_FPS <= fps <= _MAX_FPS:
        raise UsageError(f"{fps:g} frames a second is no rate of a video.")
    indices = (
        choose_frames(total, fps, total / fps, settings) if choose else np.arange(total)
    ).tolist()
    tiles = [_frame_tile(frames[i], settings, f"frame {i}") for i in indices]
    return Video(np.concatenate(tiles), tuple(i / fps for i in indices), total / fps)


def load_video(path: str | Path, settings: VideoSettings) -> Video:
    """Decode a video file and take frames by the model's rule.

    A rotation that the file asks players for is applied.

    Raises SourceError for a file that is missing, damaged, too long or no video, and
    MissingResourceError without PyAV.
    """
    found = user_path(path)
    if not found.is_file():
        raise SourceError(f"{found}: there is no such video file.")
    with _container(found) as container:
        stream = _stream(container, found)
        fps = float(stream.average_rate or 0)
        total = stream.frames or _count(container, stream, found)
        if total < 1 or not _MIN_FPS <= fps <= _MAX_FPS:
            raise SourceError(f"{found}: a video of {total} frames at {fps:g} a second is none.")
        if total > MAX_FRAMES:
            raise SourceError(
                f"{found}: {total} frames are more than the {MAX_FRAMES} we accept.",
                "Cut it, or give the frames that matter as pictures.",
            )
        indices = choose_frames(total, fps, total / fps, settings).tolist()
        tiles = [
            _frame_tile(pixels, settings, f"{found}: frame {index}")
            for index, pixels in _decoded(container, stream, indices)
        ]
    if not tiles:
        raise SourceError(f"{found}: no frame of the video can be decoded.")
    notes: tuple[str, ...] = ()
    if len(tiles) < len(indices):
        notes = (f"{found}: ends early; {len(tiles)} of {len(indices)} chosen frames are there",)
    times_s = tuple(index / fps for index in indices[: len(tiles)])
    return Video(np.concatenate(tiles), times_s, total / fps, notes)


def _frame_tile(frame: PictureSource, settings: VideoSettings, name: str) -> U8:
    """uint8 [1, S, S, 3]."""
    one_tile = PictureSettings(
        longest_edge=settings.longest_edge,
        tile=settings.tile,
        resample=settings.resample,
        split=False,
        levels=settings.levels,
        image_seq_len=settings.image_seq_len,
    )
    return cut(load_picture(frame, name).image, one_tile).tiles


@contextmanager
def _container(path: Path) -> Iterator[InputContainer]:
    """The file, opened by PyAV; what it raises becomes a SourceError."""
    try:
        import av
    except ImportError as error:
        raise MissingResourceError(
            "Video files need PyAV, which is not installed.",
            "Install it with `pip install 'mnnsmith[video]'`, or give the frames as arrays.",
        ) from error
    try:
        # Given a file object, the library opens nothing by name.
        with (
            path.open("rb") as file,
            av.open(file, mode="r", options={"format_whitelist": _CONTAINERS}) as container,
        ):
            yield container
    except (av.FFmpegError, OSError, ValueError) as error:
        shown = " ".join(str(error).split())
        raise SourceError(f"{path}: not a video that can be decoded: {shown:.200}.") from error


def _stream(container: InputContainer, path: Path) -> VideoStream:
    if not container.streams.video:
        raise SourceError(f"{path}: there is no video in the file.")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise SourceError(f"{path}: the video is in a coding that is not known here.")
    if stream.width * stream.height > MAX_PIXELS:
        raise SourceError(
            f"{path}: frames of {stream.width} x {stream.height} pixels are more than the "
            f"{MAX_PIXELS} we accept."
        )
    stream.thread_type = "AUTO"
    return stream


def _count(container: InputContainer, stream: VideoStream, path: Path) -> int:
    """Frames in a file whose header does not tell: its packets."""
    count = 0
    for packet in container.demux(stream):
        count += packet.size > 0
        if count > MAX_FRAMES:
            break
    container.seek(0)
    return count


def _decoded(
    container: InputContainer, stream: VideoStream, indices: Iterable[int]
) -> Iterator[tuple[int, U8]]:
    """The frames with these increasing indices, upright; fewer where the file ends early."""
    wanted = iter(indices)
    index = next(wanted)
    for number, frame in enumerate(container.decode(stream)):
        if number < index:
            continue
        pixels = frame.to_ndarray(format="rgb24")
        # Counterclockwise, as numpy turns.
        yield index, np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
        following = next(wanted, None)
        if following is None:
            return
        index = following
