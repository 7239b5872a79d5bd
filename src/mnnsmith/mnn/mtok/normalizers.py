"""The `normalizer` of a tokenizer.json as the engine's steps.

Neighbouring normalizers that work code point by code point are joined into one table.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def translate(node: Node | None, notes: Notes) -> list[form.Normalizer]:
    """The engine's steps, in order; an empty list where nothing is to be done."""
    steps: list[form.Normalizer] = []
    group: list[Node] = []
    leaves = _flatten(node)
    if node is not None and len(leaves) > MAX_STEPS:
        raise node.fail(f"{len(leaves)} normalizers; at most {MAX_STEPS} are expected.")
    for part in leaves:
        if part.type in _BY_CODE_POINT:
            group.append(part)
            if part.type in _COMPOSING:
                steps += _join(group, notes)
                group = []
            continue
        steps += _join(group, notes)
        group = []
        if part.type == "Replace":
            steps += _replace(part)
        else:
            steps.append(_positional(part, steps, notes))
    return steps + _join(group, notes)


def _flatten(node: Node | None) -> list[Node]:
    if node is None:
        return []
    if node.type != "Sequence":
        return [node]
    return [leaf for child in node.children("normalizers") for leaf in _flatten(child)]


def _positional(
    node: Node, before: Sequence[form.Normalizer], notes: Notes
) -> form.Prepend | form.StripSpace:
    if node.type == "Prepend":
        if any(isinstance(step, form.StripSpace) for step in before):
            raise node.refuse("Prepend behind Strip (it must not touch a text that became empty)")
        return form.Prepend(node.text("prepend"))
    if node.type == "Strip":
        notes.differs("U+0085, U+2028 and U+2029 at the ends of a text are not stripped")
        return form.StripSpace(node.flag("strip_left"), node.flag("strip_right"))
    raise node.refuse(f"the normalizer {node.type}")


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


def _join(group: Sequence[Node], notes: Notes) -> list[form.Normalizer]:
    """One table for the whole group, then what a table cannot do."""
    if not group:
        return []
    steps: list[form.Normalizer] = []
    parts = [_library(node) for node in group]
    kinds = [node.type for node in group]
    pads_chinese = [
        node
        for node in group
        if node.type == "BertNormalizer" and node.flag("handle_chinese_chars")
    ]
    if pads_chinese:
        steps.append(form.BertNormalizer(False, True, False, False))
        notes.differs("U+2B820 to U+2B91F are set apart as Chinese characters")
    if "BertNormalizer" in kinds:
        notes.differs("private and unassigned characters beyond U+FFFF are not removed")

    def mapping(char: str) -> str:
        for part in parts:
            char = part.normalize_str(char)
        return char

    table = table_steps(mapping)
    if len(table) > 1 or kinds:
        notes.rewrote(f"{', '.join(kinds)}: as a table of code points")
    steps += table
    if kinds[-1] in _COMPOSING:
        steps += composition_steps(kinds[-1])
        notes.differs(
            f"{kinds[-1]}: conjoining Hangul jamo are not joined, and unusual heaps of marks are "
            "not put in order"
        )
    strips = "StripAccents" in kinds or any(
        node.type == "BertNormalizer" and _strips_accents(node) for node in group
    )
    if _DECOMPOSING.intersection(kinds) and not strips:
        notes.differs(f"{kinds[0]}: several marks on one letter are not put in order")
    return steps


def _library(node: Node) -> LibraryNormalizer:
    """The library's own normalizer; Chinese characters are left to the engine's step."""
    from tokenizers import normalizers

    if node.type != "BertNormalizer":
        plain: LibraryNormalizer = getattr(normalizers, node.type)()
        return plain
    return normalizers.BertNormalizer(
        clean_text=node.flag("clean_text"),
        handle_chinese_chars=False,
        strip_accents=_strips_accents(node),
        lowercase=node.flag("lowercase"),
    )


def _strips_accents(node: Node) -> bool:
    """null means: where letters become small."""
    return node.flag("strip_accents", node.flag("lowercase"))
