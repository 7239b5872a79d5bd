"""Which characters a set like `\\p{L}` holds, asked of the `tokenizers` library's own matcher."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

_CODE_POINTS = 0x110000
_SURROGATES = range(0xD800, 0xE000)
_BLOCK = 4096


@lru_cache(maxsize=256)
def members(source: str, among: str | None = None) -> tuple[tuple[int, int], ...]:
    """The code points (first, last) of a set, as the library's own matcher sees it.

    among: look at these characters only; None: at all.
    """
    from tokenizers import Regex
    from tokenizers.normalizers import Replace

    without = Replace(Regex(f"(?:{source})+"), "")
    points: list[int] = []
    for block in [among] if among is not None else _blocks():
        rest = without.normalize_str(block)
        if rest != block:
            left = set(rest)
            points += [ord(char) for char in block if char not in left]
    return _ranges(sorted(points))


@lru_cache(maxsize=1)
def _blocks() -> list[str]:
    """All characters, in parts: the library's cost per change grows with the length of a text."""
    points = [point for point in range(_CODE_POINTS) if point not in _SURROGATES]
    return ["".join(map(chr, points[at : at + _BLOCK])) for at in range(0, len(points), _BLOCK)]


def _ranges(points: Sequence[int]) -> tuple[tuple[int, int], ...]:
    if not points:
        return ()
    steps = [(a, b) for a, b in pairwise(points) if b != a + 1]
    starts = [points[0], *(b for _, b in steps)]
    ends = [*(a for a, _ in steps), points[-1]]
    return tuple(zip(starts, ends, strict=True))
