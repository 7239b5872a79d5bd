"""The `normalizer` of a tokenizer.json as the engine's steps.

Neighbouring normalizers that work code point by code point are joined into one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from mnnsmith.mnn.mtok import form
from mnnsmith.mnn.mtok.code_points import composition_steps, table_steps
from mnnsmith.mnn.mtok.notes import Notes
from mnnsmith.mnn.mtok.spec import Node

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer as LibraryNormalizer

_BY_CODE_POINT = {
    "Lowercase",
    "StripAccents",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "BertNormalizer",
}
_COMPOSING = {"NFC", "NFKC"}
_DECOMPOSING = {"NFD", "NFKD"}
# A table may cost a second to make.
MAX_STEPS = 32
# Runs of white space in texts are shorter than two to this power.
_COLLAPSE_PASSES = 20


# White space at the end of a text: the engine's own stripping leaves it there.
_CUT_RIGHT = form.Split(r"\s+(?![\s\S])", False, form.Behavior.REMOVED)


def translate(
    node: Node | None, notes: Notes
) -> tuple[list[form.Normalizer], list[form.PreTokenizer]]:
    """The engine's steps, in order, and what its pre-tokenizer must do before all else."""
    steps: list[form.Normalizer] = []
    ahead: list[form.PreTokenizer] = []
    group: list[_ByCodePoint] = []
    leaves = _flatten(node)
    if node is not None and len(leaves) > MAX_STEPS:
        raise node.fail(f"{len(leaves)} normalizers; at most {MAX_STEPS} are expected.")
    for part in leaves:
        if part.type in _BY_CODE_POINT:
            single = _by_code_point(part)
            if single.pad_chinese:
                # The engine's step for these comes before the table.
                steps += _join(group, notes)
                group = []
            group.append(single)
            if part.type in _COMPOSING:
                steps += _join(group, notes)
                group = []
            continue
        steps += _join(group, notes)
        group = []
        if part.type == "Replace":
            steps += _replace(part)
        elif part.type == "Strip":
            steps += _strip(part, part is leaves[-1], ahead, notes)
        elif part.type == "Prepend":
            steps.append(_prepend(part, steps))
        else:
            raise part.refuse(f"the normalizer {part.type}")
    return steps + _join(group, notes), ahead


def _flatten(node: Node | None) -> list[Node]:
    if node is None:
        return []
    if node.type != "Sequence":
        return [node]
    return [leaf for child in node.children("normalizers") for leaf in _flatten(child)]


def _prepend(node: Node, before: Sequence[form.Normalizer]) -> form.Prepend:
    if any(_can_empty(step) for step in before):
        raise node.refuse("Prepend behind a normalizer that can leave an empty text")
    return form.Prepend(node.text("prepend"))


def _strip(
    node: Node, last: bool, ahead: list[form.PreTokenizer], notes: Notes
) -> list[form.Normalizer]:
    if node.flag("strip_right"):
        if not last:
            raise node.refuse("Strip at the right end before other normalizers")
        notes.rewrote("Strip at the right end: as a Split that removes")
        ahead.append(_CUT_RIGHT)
    return [form.StripSpace(True, False)] if node.flag("strip_left") else []


def _can_empty(step: form.Normalizer) -> bool:
    """The library puts nothing before a text that became empty; the engine does."""
    match step:
        case form.StripSpace() | form.Replace(_, ""):
            return True
        case form.CodePointTable(entries):
            return any(not text for _, text in entries)
    return False


def _replace(node: Node) -> list[form.Normalizer]:
    pattern = node.need_child("pattern")
    content = node.text("content")
    if pattern.has("String"):
        literal = pattern.text("String")
        if not literal:
            raise node.fail("the pattern of Replace is empty.")
        return [form.Replace(literal, content)]
    regex = pattern.text("Regex")
    if regex in (" {2,}", "  +") and content == " ":
        # One pass halves a run of spaces, rounded up.
        return [form.Replace("  ", " ")] * _COLLAPSE_PASSES
    if regex and not any(char in r"\.[]{}()*+?^$|" for char in regex):
        return [form.Replace(regex, content)]
    raise node.refuse(f"a Replace normalizer with the pattern {regex!r}")


@dataclass(frozen=True)
class _ByCodePoint:
    """A normalizer that looks at one code point at a time. clean, strip, lower: BERT's settings."""

    kind: str
    clean: bool = False
    pad_chinese: bool = False
    strip: bool = False
    lower: bool = False


def _by_code_point(node: Node) -> _ByCodePoint:
    if node.type != "BertNormalizer":
        return _ByCodePoint(node.type, strip=node.type == "StripAccents")
    lower = node.flag("lowercase")
    return _ByCodePoint(
        node.type,
        clean=node.flag("clean_text"),
        pad_chinese=node.flag("handle_chinese_chars"),
        # null means: where letters become small.
        strip=node.flag("strip_accents", lower),
        lower=lower,
    )


def _join(group: Sequence[_ByCodePoint], notes: Notes) -> list[form.Normalizer]:
    """One table for the whole group, then what a table cannot do."""
    if not group:
        return []
    steps: list[form.Normalizer] = []
    kinds = [part.kind for part in group]
    if group[0].pad_chinese:
        steps.append(form.BertNormalizer(False, True, False, False))
        notes.differs("U+2B820 to U+2B91F are set apart as Chinese characters")
    if any(part.clean for part in group):
        notes.differs("private and unassigned characters beyond U+FFFF are not removed")
    steps += _table(tuple(group))
    notes.rewrote(f"{', '.join(kinds)}: as a table of code points")
    if kinds[-1] in _COMPOSING:
        steps += composition_steps(kinds[-1])
        notes.differs(
            f"{kinds[-1]}: conjoining Hangul jamo are not joined, and unusual heaps of marks are "
            "not put in order"
        )
    elif _DECOMPOSING.intersection(kinds) and not any(part.strip for part in group):
        notes.differs(f"{kinds[0]}: several marks on one letter are not put in order")
    return steps


@lru_cache(maxsize=16)
def _table(group: tuple[_ByCodePoint, ...]) -> tuple[form.Normalizer, ...]:
    parts = [_library(part) for part in group]

    def mapping(char: str) -> str:
        for part in parts:
            char = part.normalize_str(char)
        return char

    return tuple(table_steps(mapping))


def _library(part: _ByCodePoint) -> LibraryNormalizer:
    """The library's own normalizer; Chinese characters are left to the engine's step."""
    from tokenizers import normalizers

    if part.kind != "BertNormalizer":
        plain: LibraryNormalizer = getattr(normalizers, part.kind)()
        return plain
    return normalizers.BertNormalizer(
        clean_text=part.clean,
        handle_chinese_chars=False,
        strip_accents=part.strip,
        lowercase=part.lower,
    )
