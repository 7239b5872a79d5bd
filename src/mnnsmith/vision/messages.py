"""Pictures and videos out of a dialogue's messages, and the messages as a chat template wants them.

Content is a text, or a list of parts: `{"type": "text", "text": ...}`,
`{"type": "image", "image": picture}` and `{"type": "video", "video": video}`; a path may also stand
under `path`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mnnsmith.errors import UsageError

Message = Mapping[str, Any]
_MEDIA = ("image", "video")


@dataclass(frozen=True)
class Media:
    """A dialogue, taken apart.

    messages: every content a list of parts, without what the pictures are; images, videos: what
    was given for each, in the order of the dialogue.
    """

    messages: tuple[Message, ...]
    images: tuple[Any, ...]
    videos: tuple[Any, ...]


def collect_media(messages: Sequence[Message]) -> Media:
    """Take the pictures and videos out of a dialogue.

    A text becomes a list of one part: templates of vision models lose a plain text.

    Raises UsageError for a part of another type, or one that lacks what its type says.
    """
    found: dict[str, list[Any]] = {kind: [] for kind in _MEDIA}
    plain: list[Message] = []
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        if content is None:
            plain.append(message)
            continue
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, (list, tuple)):
            raise UsageError(
                f"Message {number}: its content is a {type(content).__name__}, expected a text or "
                "a list of parts."
            )
        parts = [_plain_part(part, number, found) for part in content]
        plain.append({**message, "content": parts})
    return Media(tuple(plain), tuple(found["image"]), tuple(found["video"]))


def _plain_part(part: Any, number: int, found: Mapping[str, list[Any]]) -> Mapping[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in _MEDIA:
        raise UsageError(
            f"Message {number}: {part!r:.80} is no part of a message.",
            'Give {"type": "text", "text": ...} or {"type": "image", "image": ...}.',
        )
    given = [part[key] for key in (kind, "path") if part.get(key) is not None]
    if len(given) != 1:
        raise UsageError(
            f"Message {number}: a part of type {kind} with {len(given)} sources, expected one.",
            f"Give it under {kind!r}: a path, bytes or an array.",
        )
    if isinstance(given[0], str) and given[0].startswith(("http://", "https://", "data:")):
        raise UsageError(
            f"Message {number}: {given[0]:.80} is an address, not a file.",
            "Nothing is fetched unasked: download it first, and give the path.",
        )
    found[kind].append(given[0])
    return {"type": kind}
