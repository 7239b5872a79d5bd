"""Texts that the engine's own tokenizer takes otherwise, whatever a bundle holds.

docs/tokenizers.md lists these limits of the engine.  Some hold for every tokenizer; others only
where the conversion declared them (`MtokReport.differences`).  What they do not explain is a fault.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Characters that Unicode got after version 15.0, whose table the engine has; Python's own may know
# some of them by now.
_YOUNG = ((0x2FFC, 0x2FFF), (0x31EF, 0x31EF), (0x2EBF0, 0x2EE5D))


@dataclass(frozen=True)
class Difference:
    """One text that the engine took otherwise.

    added: texts of the tokenizer's added tokens.  same_pieces: whether it gave the same ids in
    another order; same_text: whether they are shown as the same text.
    """

    text: str
    added: tuple[str, ...]
    same_pieces: bool
    same_text: bool


Explains = Callable[[Difference], bool]


def _has(characters: str) -> Explains:
    return lambda case: any(char in case.text for char in characters)


def _young(case: Difference) -> bool:
    return any(
        unicodedata.category(char) == "Cn"
        or any(first <= ord(char) <= last for first, last in _YOUNG)
        for char in case.text
    )


def _added(case: Difference) -> bool:
    folded = case.text.casefold()
    return any(token.casefold() in folded for token in case.added if token)


def _marks(case: Difference) -> bool:
    """Two marks in a row, or Hangul in parts."""
    classes = "".join("m" if unicodedata.category(c)[0] == "M" else "-" for c in case.text)
    composed = unicodedata.normalize("NFD", case.text)
    heaps = "".join("m" if unicodedata.combining(char) else "-" for char in composed)
    return "mm" in classes or "mm" in heaps or any(0x1100 <= ord(c) <= 0x11FF for c in case.text)


def _far(case: Difference) -> bool:
    return any(ord(c) > 0xFFFF and unicodedata.category(c) in ("Co", "Cn") for c in case.text)


def _late_chinese(case: Difference) -> bool:
    return any(0x2B820 <= ord(char) <= 0x2B91F for char in case.text)


def _long_word(case: Difference) -> bool:
    # Bytes against characters: a quarter of the limit may pass it.
    return any(len(word) > 25 for word in case.text.split())


def _young_punctuation(case: Difference) -> bool:
    return any(unicodedata.category(char)[0] == "P" for char in case.text if ord(char) > 0x7F)


def _beyond_ascii(case: Difference) -> bool:
    return not case.text.isascii()


_ALWAYS: tuple[tuple[str, Explains], ...] = (
    ("U+0085, U+2028 and U+2029 are no white space to the engine", _has("\u0085\u2028\u2029")),
    ("characters younger than Unicode 15.0", _young),
    ("control characters U+0001 to U+0007", _has("\x01\x02\x03\x04\x05\x06\x07")),
    ("only ASCII letters have two cases to the engine", _has("ſ")),
)
# By words of the declared difference.
_DECLARED: tuple[tuple[str, Explains], ...] = (
    ("ASCII white space only", lambda case: _added(case) and _beyond_ascii(case)),
    ("before normalization", _added),
    ("not put in order", _marks),
    ("marks are not", _marks),
    ("set apart as Chinese characters", _late_chinese),
    ("beyond U+FFFF are not removed", _far),
    ("(prepend_scheme first)", _added),
    ("a typed <0x41>", lambda case: "<0x" in case.text),
    ("another order of the same pieces", lambda case: case.same_pieces or case.same_text),
    ("another order of the same pieces", lambda case: "<unk>" in case.text.casefold()),
    ("only inside of longer pieces", _beyond_ascii),
    ("(ignore_merges)", lambda case: case.same_text),
    ("are cut into pieces, not unknown (WordPiece)", _long_word),
    ("(WordPiece)", _young_punctuation),
)


def _joined(text: str) -> str:
    return text.replace(" ", "").replace("▁", "")


# The same for shown text: how the engine's words stand to the library's.
_SHOWN: tuple[tuple[str, Callable[[str, str], bool]], ...] = (
    ("takes from its start", lambda found, expected: found == " " + expected),
    ("(WordPiece)", lambda found, expected: _joined(found) == _joined(expected)),
    ("in their text are shown with a byte", lambda found, expected: True),
    ("a typed <0x41>", lambda found, expected: "\ufffd" in found + expected),
    ("with a space for their U+2581", lambda found, expected: found == expected.replace("▁", " ")),
    ("is shown as other characters", lambda found, expected: True),
)


def explanation(case: Difference, declared: Sequence[str]) -> str | None:
    """Which known limit explains that the ids of a text differ; None where none does."""
    for fragment, explains in _DECLARED:
        stated = next((text for text in declared if fragment in text), None)
        if stated is not None and explains(case):
            return stated
    return next((words for words, explains in _ALWAYS if explains(case)), None)


def shown_explanation(found: str, expected: str, declared: Sequence[str]) -> str | None:
    """Which known limit explains that ids are shown as another text; None where none does."""
    for fragment, explains in _SHOWN:
        stated = next((text for text in declared if fragment in text), None)
        if stated is not None and explains(found, expected):
            return stated
    return None
