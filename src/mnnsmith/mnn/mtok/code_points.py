"""Normalizers that work code point by code point, turned into the engine's table.

The mapping is asked of the `tokenizers` library, one code point at a time, so it is right by
construction and does not depend on Python's Unicode version.  Two things a table cannot do alone:

- The engine's table also turns 91 control and format characters (U+200D among them, which holds
  emoji sequences together) into a space, whatever the table says.  They are written in two
  characters before the table and restored behind it.
- NFC and NFKC put the marks on a letter in order and join neighbours: `e` and U+0301 become U+00E9.
  Each pair of marks to swap, and each pair that composes, is one replacement behind the table.
  This is right for the marks that languages put together; it is no sort of any number of marks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from mnnsmith.mnn.mtok.character_sets import members
from mnnsmith.mnn.mtok.form import CodePointTable, Normalizer, Replace

# What the engine turns into a space while a table is at work.
FORCED_TO_SPACE = (
    *(c for c in range(0x01, 0x20) if chr(c) not in "\t\n\r"),
    *range(0x7F, 0xA0),
    *range(0x200B, 0x2010),
    *range(0x202A, 0x202F),
    *range(0x2060, 0x206A),
    0xFEFF,
    *range(0xFFF0, 0xFFF9),
)
# Characters that stand for others for a moment; no normalizer changes them.
_SIGNS = [chr(c) for c in range(0x2500, 0x25A0)]
_HANGUL = range(0xAC00, 0xD7A4)
_SURROGATES = range(0xD800, 0xE000)

Mapping = Callable[[str], str]


def table_steps(mapping: Mapping) -> list[Normalizer]:
    """The engine's steps for a mapping of single code points to texts."""
    changed = {point: text for point, text in _changes(mapping).items() if text != chr(point)}
    if not changed:
        return []
    signs = iter([sign for sign in _SIGNS if ord(sign) not in changed])
    escape = next(signs)
    before: list[Normalizer] = []
    behind: list[Normalizer] = []

    def protect(text: str, result: str) -> None:
        code = escape + next(signs)
        before.append(Replace(text, code))
        behind.append(Replace(code, result))

    protect(escape, escape)
    for point in FORCED_TO_SPACE:
        result = changed.pop(point, chr(point))
        if result:
            protect(chr(point), result)
        else:
            before.append(Replace(chr(point), ""))
    table = CodePointTable(tuple(sorted(changed.items())))
    return [*before, table, *reversed(behind)]


def _changes(mapping: Mapping) -> dict[int, str]:
    """Every code point that is assigned, or lies in the first plane, and what it becomes."""
    found = {}
    for point in (*range(0x10000), *_assigned_beyond_first_plane()):
        if point not in _SURROGATES:
            text = mapping(chr(point))
            if text != chr(point):
                found[point] = text
    return found


def _assigned_beyond_first_plane() -> list[int]:
    spans = members(r"[^\p{Cn}\p{Co}]")
    return [point for low, high in spans for point in range(max(low, 0x10000), high + 1)]


# Marks that one letter often bears together in any order: Hebrew, Arabic, Tibetan, nuktas.
# Latin and Greek ones are put in order where they compose.
_MARKS_TOGETHER = (
    (*range(0x05B0, 0x05BE), 0x05BF, 0x05C1, 0x05C2, 0x05C7),
    (*range(0x064B, 0x0656), 0x0670),
    (0x0F71, 0x0F72, 0x0F74, 0x0F7A, 0x0F7B, 0x0F7C, 0x0F7D, 0x0F80),
    (0x093C, 0x094D),
    (0x09BC, 0x09CD),
)
# Each pass brings every mark one place further.
_SWAP_PASSES = 2
_DOT_BELOW = "\u0323"


@lru_cache(maxsize=4)
def composition_steps(name: str) -> tuple[Normalizer, ...]:
    """Replacements that order and join what `name` (NFC or NFKC) does, except conjoining Hangul.

    A character that decomposes to a base and marks is found from every pair (the rest composed,
    one of the marks), so that marks in another than the canonical order are joined, too.
    """
    from tokenizers import normalizers

    compose = getattr(normalizers, name)().normalize_str
    decompose = normalizers.NFD().normalize_str
    pairs: dict[str, tuple[int, str]] = {}
    for point in (*range(0xC0, 0x10000), *range(0x11000, 0x1D200)):
        char = chr(point)
        if point in _SURROGATES or point in _HANGUL:
            continue
        parts = decompose(char)
        if len(parts) < 2 or compose(char) != char:
            continue
        for index in range(1, len(parts)):
            rest = compose(parts[:index] + parts[index + 1 :])
            pair = rest + parts[index]
            if len(rest) == 1 and compose(pair) == char:
                pairs[pair] = (len(parts), char)
        # A dot below, typed behind a finished letter, changes places with the letter's own mark.
        dotted = char + _DOT_BELOW
        if compose(dotted) != dotted:
            pairs.setdefault(dotted, (len(parts) + 1, compose(dotted)))
    ordered = sorted(pairs.items(), key=lambda item: (item[1][0], item[0]))
    return (*_swaps(decompose), *(Replace(pair, char) for pair, (_, char) in ordered))


def _swaps(decompose: Mapping) -> list[Normalizer]:
    """Neighbouring marks in the wrong order change places."""
    pairs = [
        chr(first) + chr(second) for marks in _MARKS_TOGETHER for first in marks for second in marks
    ]
    wrong: list[Normalizer] = [
        Replace(pair, pair[::-1]) for pair in pairs if decompose(pair) == pair[::-1] != pair
    ]
    return wrong * _SWAP_PASSES
