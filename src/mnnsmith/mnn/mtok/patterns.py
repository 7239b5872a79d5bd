"""A pre-tokenizer's pattern in a form that the engine matches as the library does.

The engine has two matchers.  The narrow one is fast and bounded, and folds every character that is
not ASCII to one of seven classes.  The wide one is C++'s `std::wregex`, taken for a pattern with a
non-ASCII character and no `\\p{`: it sees every code point, but knows no Unicode properties, so
sets are spelled out, and its memory grows with the length of a match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mnnsmith.errors import TokenizerError
from mnnsmith.mnn.mtok.character_sets import members
from mnnsmith.mnn.mtok.pack import MAX_STRING_BYTES
from mnnsmith.mnn.mtok.pattern_tree import (
    ALL,
    CLASSES,
    PROPERTY_CELLS,
    Branch,
    Cells,
    Chars,
    Group,
    NotAhead,
    Pattern,
    Repeat,
)

# The byte by which the engine's matcher stands for a class of non-ASCII characters.
_MARKER = {"L": 1, "N": 2, "Z": 3, "O": 4, "M": 5, "P": 6, "S": 7}
_SHORT = {"L": r"\p{L}", "N": r"\p{N}", "M": r"\p{M}", "P": r"\p{P}", "S": r"\p{S}", "Z": r"\s"}
_CODE_POINTS = 0x110000
# Each costs a look at every character; GPT-4o's pattern has twelve.
_MAX_SETS = 24


def engine_pattern(pattern: Pattern) -> tuple[str, bool]:
    """The pattern for the engine, and whether it is wide.

    Raises TokenizerError where neither matcher would find what the library finds.
    """
    if _nullable(pattern.branches):
        raise _refuse(pattern, "it matches the empty text")
    wide = not _narrow(pattern.branches)
    branches = [_greedy(pattern, branch, wide) for branch in pattern.branches]
    if wide and len(set(_sources(branches))) > _MAX_SETS:
        raise _refuse(pattern, f"more than {_MAX_SETS} different sets of characters")
    if not wide:
        _check_groups(pattern, branches)
        text = pattern.source if pattern.plain else _spell(branches, wide=False)
    else:
        text = _spell(branches, wide=True)
        if text.isascii():
            raise _refuse(pattern, "its sets of characters")
    if len(text.encode("utf-8")) > MAX_STRING_BYTES:
        raise _refuse(pattern, "its length when spelled out")
    return text, wide


def _refuse(pattern: Pattern, why: str) -> TokenizerError:
    return TokenizerError(
        f"The pre-tokenizer pattern {pattern.source[:120]!r} cannot be expressed in the engine's "
        f"tokenizer format (.mtok): {why}.",
        "docs/tokenizers.md lists the syntax that can be.",
    )


def _sources(branches: Sequence[Branch]) -> Iterator[str]:
    for part in (part for branch in branches for part in branch):
        if isinstance(part.atom, Chars):
            yield part.atom.source
        else:
            yield from _sources(part.atom.branches)


def _narrow(branches: Sequence[Branch]) -> bool:
    """Whether the seven classes are enough."""
    for part in (part for branch in branches for part in branch):
        if isinstance(part.atom, Chars):
            if part.atom.cells is None:
                return False
        elif not _narrow(part.atom.branches):
            return False
    return True


def _nullable(branches: Sequence[Branch]) -> bool:
    return any(all(_can_be_empty(part) for part in branch) for branch in branches)


def _can_be_empty(part: Repeat) -> bool:
    if part.low == 0 or isinstance(part.atom, NotAhead):
        return True
    return isinstance(part.atom, Group) and _nullable(part.atom.branches)


def _greedy(pattern: Pattern, branch: Branch, wide: bool) -> Branch:
    """Possessive parts as greedy ones, where giving back could not have helped anyway."""
    parts = list(branch)
    for index, part in enumerate(parts):
        if isinstance(part.atom, Group):
            inner = tuple(_greedy(pattern, b, wide) for b in part.atom.branches)
            parts[index] = part = Repeat(Group(inner), part.low, part.high, part.possessive)
        if not part.possessive:
            continue
        rest = parts[index + 1 :]
        if rest and not all(_can_be_empty(p) and not isinstance(p.atom, NotAhead) for p in rest):
            follower = rest[0]
            if not (
                isinstance(part.atom, Chars)
                and isinstance(follower.atom, Chars)
                and follower.low > 0
                and _disjoint(part.atom, follower.atom)
            ):
                raise _refuse(pattern, "a possessive quantifier")
        parts[index] = Repeat(part.atom, part.low, part.high)
    return tuple(parts)


def _disjoint(first: Chars, second: Chars) -> bool:
    if first.cells is not None and second.cells is not None:
        return not first.cells & second.cells
    return not set(_points(members(first.source))) & set(_points(members(second.source)))


def _points(ranges: Sequence[tuple[int, int]]) -> list[int]:
    return [point for low, high in ranges for point in range(low, high + 1)]


def _check_groups(pattern: Pattern, branches: Sequence[Branch]) -> None:
    """The engine never tries another way through a group, so nothing may depend on it."""
    for branch in branches:
        for index, part in enumerate(branch):
            if isinstance(part.atom, Chars):
                continue
            if isinstance(part.atom, Group) and index + 1 < len(branch):
                raise _refuse(pattern, "a group that something follows")
            _check_groups(pattern, part.atom.branches)


def _spell(branches: Sequence[Branch], wide: bool) -> str:
    return "|".join("".join(_spell_part(part, wide) for part in branch) for branch in branches)


def _spell_part(part: Repeat, wide: bool) -> str:
    match part.atom:
        case Chars() as chars:
            text = _wide_set(chars) if wide else _narrow_set(chars)
        case NotAhead(branches):
            text = f"(?!{_spell(branches, wide)})"
        case Group(branches):
            text = f"(?:{_spell(branches, wide)})"
    return text + quantifier(part.low, part.high)


def quantifier(low: int, high: int | None) -> str:
    known = {(1, 1): "", (0, 1): "?", (0, None): "*", (1, None): "+"}
    if (low, high) in known:
        return known[low, high]
    return f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"


# --- narrow ----------------------------------------------------------------------------------


def _narrow_set(chars: Chars) -> str:
    cells = chars.cells
    if cells is None:
        raise AssertionError(chars.source)
    if len(cells) == 1 and all(isinstance(cell, int) for cell in cells):
        return _escaped(next(iter(cells)))
    negated = "O" in cells
    inside = _class_items(ALL - cells if negated else cells)
    return f"[{'^' if negated else ''}{inside}]"


def _class_items(cells: Cells) -> str:
    rest = set(cells)
    items = []
    for name in CLASSES:
        whole = PROPERTY_CELLS.get(name)
        if whole is not None and whole <= rest:
            items.append(_SHORT[name])
            rest -= whole
    items += [f"\\x{_MARKER[cell]:02X}" for cell in sorted(c for c in rest if isinstance(c, str))]
    items += [_escaped(cell) for cell in sorted(c for c in rest if isinstance(c, int))]
    return "".join(items)


def _escaped(cell: int | str) -> str:
    if isinstance(cell, str):
        return f"\\x{_MARKER[cell]:02X}"
    char = chr(cell)
    if char.isalnum():
        return char
    return f"\\x{cell:02X}" if cell < 0x20 or cell == 0x7F else char if char == " " else "\\" + char


# --- wide ------------------------------------------------------------------------------------


def _members_of(chars: Chars) -> tuple[tuple[int, int], ...]:
    """For a few ASCII characters, the only others can be those that fold to them."""
    if chars.cells is None or not all(isinstance(cell, int) for cell in chars.cells):
        return members(chars.source)
    few = "".join(chr(cell) for cell in chars.cells if isinstance(cell, int))
    return members(chars.source, few + "\u017f\u212a")


def _wide_set(chars: Chars) -> str:
    ranges = _members_of(chars)
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _wide_char(ranges[0][0])
    inverse = _complement(ranges)
    negated = len(inverse) < len(ranges) or not ranges
    return f"[{'^' if negated else ''}{''.join(map(_wide_range, inverse if negated else ranges))}]"


def _complement(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    edges = [-1, *(edge for low, high in ranges for edge in (low - 1, high + 1)), _CODE_POINTS]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    spans = [(low if low >= 0 else 0, high) for low, high in pairs]
    spans = [(low, high if high < _CODE_POINTS else _CODE_POINTS - 1) for low, high in spans]
    return [(low, high) for low, high in spans if low <= high and (low, high) != (0xD800, 0xDFFF)]


def _wide_range(span: tuple[int, int]) -> str:
    low, high = span
    if low < 128:
        ascii_part = "".join(_wide_char(c) for c in range(low, min(high, 127) + 1))
        return ascii_part + (_wide_range((128, high)) if high > 127 else "")
    pieces = [(low, min(high, 0xD7FF)), (max(low, 0xE000), high)]
    texts = [
        chr(a) if a == b else f"{chr(a)}-{chr(b)}"
        for a, b in (pieces if low < 0xD800 <= high else [span])
        if a <= b
    ]
    return "".join(texts)


def _wide_char(point: int) -> str:
    char = chr(point)
    if point < 0x20 or point == 0x7F:
        return f"\\x{point:02x}"
    return char if point > 127 or char.isalnum() or char == " " else "\\" + char
