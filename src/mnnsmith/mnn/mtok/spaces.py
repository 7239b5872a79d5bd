"""Sentencepiece BPE without a pre-tokenizer, cut at spaces before the model sees it.

Such a model takes a whole text as one word, and the engine's merging is quadratic in a word: ten
thousand characters take seconds.  If no merge joins a token that does not end in U+2581 with one
that starts with it, cutting before each run of U+2581 changes no result.  The same holds for line
feeds.  The cut is made at spaces, before they become U+2581, as the engine's fast matcher can only
tell ASCII characters apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from mnnsmith.mnn.mtok import form
from mnnsmith.mnn.mtok.notes import Notes

META = "▁"
_TO_META = form.Replace(" ", META)


def split_at_spaces(
    steps: Sequence[form.Normalizer],
    parts: Sequence[form.PreTokenizer],
    merges: Sequence[tuple[str, str]],
    notes: Notes,
) -> tuple[list[form.Normalizer], list[form.PreTokenizer]]:
    """The normalizer's and the pre-tokenizer's steps, with the cut where it is safe."""
    unchanged = list(steps), list(parts)
    if steps and steps[-1] == _TO_META:
        # No space is left for a Split at spaces to find.
        if not all(_only_sees_spaces(part) for part in parts):
            return unchanged
        # A typed U+2581 is the same as a space from here on.
        front = [*steps[:-1], form.Replace(META, " ")]
        prefix = False
    elif len(parts) == 1 and isinstance(parts[0], form.Metaspace) and parts[0].replacement == META:
        front = list(steps)
        prefix = parts[0].prefix
    else:
        return unchanged
    if any(right.startswith(META) and not left.endswith(META) for left, right in merges):
        notes.differs("long texts take the engine time that grows with the square of their length")
        return unchanged
    front = [form.Prepend(" ") if step == form.Prepend(META) else step for step in front]
    lines = all(
        (left[-1] == "\n") == (right[0] == "\n") and "<0x0A>" not in (left, right)
        for left, right in merges
    )
    pattern = r"\n+| +[^ \n]*|[^ \n]+" if lines else " +[^ ]*|[^ ]+"
    notes.rewrote("spaces become U+2581 behind a cut at spaces, which keeps the engine fast")
    cut = form.Split(pattern, False, form.Behavior.ISOLATED)
    # The space in front belongs to the text, not to each part, so it comes before the cut.
    ahead: list[form.PreTokenizer] = [form.Metaspace(" ", True)] if prefix else []
    return front, [*ahead, cut, form.Metaspace(META, False)]


def _only_sees_spaces(part: form.PreTokenizer) -> bool:
    return isinstance(part, form.Split) and part.pattern in (
        r"\ ",
        " ",
        r"[^\ ]*\ |[^\ ]+",
        "[^ ]* |[^ ]+",
    )
