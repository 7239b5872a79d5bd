"""The text that stands for pictures and videos in a prompt, and which tile feeds which tokens.

A chat template writes one `<image>` or `<video>` for each; the model is trained on what
transformers' `Idefics3Processor` and `SmolVLMProcessor` put in its place.  The replacement is made
in the text, before it is encoded, so that the tokenizer joins line ends as it does there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from mnnsmith.errors import TokenizerError, UsageError
from mnnsmith.vision.number_words import number_words
from mnnsmith.vision.processor import Picture
from mnnsmith.vision.video import Video

IMAGE = "<image>"
VIDEO = "<video>"
PLACEHOLDERS = (IMAGE, VIDEO)
FAKE = "<fake_token_around_image>"
GLOBAL = "<global-img>"

# The templates of SmolVLM2 checkpoints know no videos; transformers takes one of its own, which
# writes the same, for any dialogue that has one.
VIDEO_CHAT_TEMPLATE = (
    "{{ '<|im_start|>' }}{% for message in messages %}{{ message.role | capitalize }}"
    "{{ ':' if message.content[0].type == 'image' else ': ' }}{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<' ~ part.type ~ '>' }}{% endfor %}"
    "{{ '<end_of_utterance>\n' }}{% endfor %}{{ 'Assistant:' if add_generation_prompt }}"
)

Range = tuple[int, int]


@dataclass(frozen=True)
class Feed:
    """Tile `tile` of the picture or video number `index` (each kind counted from 0)."""

    kind: Literal["picture", "video"]
    index: int
    tile: int


@dataclass(frozen=True)
class Expanded:
    """A prompt with the text of its pictures.

    as_text: ranges of it that are to be encoded as plain text.
    feeds: what feeds each run of `<image>` tokens, in the order of the text.
    """

    text: str
    as_text: tuple[Range, ...]
    feeds: tuple[Feed, ...]


@dataclass(frozen=True)
class ImageRun:
    """Positions start..stop of the ids take the features of one tile."""

    start: int
    stop: int
    feed: Feed


def expand(
    text: str,
    as_text: Sequence[Range],
    pictures: Sequence[Picture],
    videos: Sequence[Video],
    image_seq_len: int,
) -> Expanded:
    """Put the text of each picture and video where its placeholder stands, in order.

    as_text: ranges of `text` that came from users; a placeholder in them is plain text.

    Raises UsageError unless there are as many placeholders as pictures and videos.
    """
    found = [match for match in _PLACEHOLDER.finditer(text) if not _touches(match.span(), as_text)]
    for placeholder, given in ((IMAGE, pictures), (VIDEO, videos)):
        wanted = sum(match[0] == placeholder for match in found)
        if wanted != len(given):
            raise UsageError(
                f"The prompt has {wanted} {placeholder} but {len(given)} were given.",
                "The chat template must write one for each; does it belong to a model with vision?",
            )
    pieces: list[str] = []
    feeds: list[Feed] = []
    shifts: list[tuple[int, int]] = []
    done = next_picture = next_video = 0
    for match in found:
        if match[0] == IMAGE:
            picture = pictures[next_picture]
            put = picture_text(picture.rows, picture.cols, image_seq_len)
            feeds += [Feed("picture", next_picture, tile) for tile in range(len(picture.tiles))]
            next_picture += 1
        else:
            video = videos[next_video]
            put = video_text(video.times_s, video.duration_s, image_seq_len)
            feeds += [Feed("video", next_video, tile) for tile in range(len(video.tiles))]
            next_video += 1
        pieces += (text[done : match.start()], put)
        shifts.append((match.start(), len(put) - len(match[0])))
        done = match.end()
    pieces.append(text[done:])
    moved = tuple(
        (start + _shift(start, shifts), end + _shift(start, shifts)) for start, end in as_text
    )
    return Expanded("".join(pieces), moved, tuple(feeds))


def image_runs(
    ids: Sequence[int], image_id: int, feeds: Sequence[Feed], image_seq_len: int
) -> tuple[ImageRun, ...]:
    """Where each tile's features go.

    ids: the encoded prompt; image_id: the id of `<image>`.

    Raises TokenizerError where the ids do not hold the runs that the prompt was given.
    """
    positions = [position for position, id_ in enumerate(ids) if id_ == image_id]
    starts = positions[::image_seq_len]
    whole = len(positions) == len(feeds) * image_seq_len and all(
        positions[i * image_seq_len + image_seq_len - 1] == start + image_seq_len - 1
        for i, start in enumerate(starts)
    )
    if not whole:
        raise TokenizerError(
            f"The prompt has {len(positions)} {IMAGE} tokens (id {image_id}), expected "
            f"{len(feeds)} runs of {image_seq_len}.",
            f"Is {IMAGE} a special token of this tokenizer, with that id?",
        )
    return tuple(
        ImageRun(start, start + image_seq_len, feed)
        for start, feed in zip(starts, feeds, strict=True)
    )


def picture_text(rows: int, cols: int, image_seq_len: int) -> str:
    """What stands for a picture: its grid row by row, an empty line, the global tile."""
    one = f"{FAKE}{GLOBAL}{IMAGE * image_seq_len}{FAKE}"
    if rows == 0 and cols == 0:
        return one
    lines = [
        "".join(f"{FAKE}<row_{row}_col_{col}>{IMAGE * image_seq_len}" for col in range(1, cols + 1))
        for row in range(1, rows + 1)
    ]
    return "".join(line + "\n" for line in lines) + "\n" + one


def video_text(times_s: Sequence[float], duration_s: float, image_seq_len: int) -> str:
    """What stands for a video: a sentence, then each frame with its time (minutes:seconds)."""
    frames = "".join(
        f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:"
        + picture_text(0, 0, image_seq_len)
        for time in times_s
    )
    return (
        f"You are provided the following series of {number_words(len(times_s))} frames from a "
        f"{timedelta(seconds=int(duration_s))} [H:MM:SS] video.\n{frames}\n\n"
    )


_PLACEHOLDER = re.compile("|".join(map(re.escape, PLACEHOLDERS)))


def _touches(span: Range, ranges: Sequence[Range]) -> bool:
    return any(start < span[1] and span[0] < end for start, end in ranges)


def _shift(position: int, shifts: Sequence[tuple[int, int]]) -> int:
    return sum(by for start, by in shifts if start < position)
