"""The `post_processor` of a tokenizer.json: the ids that it puts around a text.

The engine knows ids before a text only, and puts them before a rendered dialogue, too, where the
template itself may have written the same token.  `plan_prefix` decides who writes it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mnnsmith.mnn.mtok.notes import Notes
from mnnsmith.mnn.mtok.spec import Node, token_id

# A tag; before it, only what trim_blocks and lstrip_blocks remove.
_TAG = re.compile(r"\n?[ \t]*(?:\{\{(?P<print>.*?)\}\}|\{%(?P<block>.*?)%\}|\{#.*?#\})", re.DOTALL)


@dataclass(frozen=True)
class Prefix:
    """ids before every text, and the text that `bos_token` has in the chat template."""

    ids: tuple[int, ...]
    bos_token: str


def read_prefix(node: Node | None) -> tuple[int, ...]:
    """The ids that the library puts before a text.  Raises TokenizerError if any go behind it."""
    if node is None:
        return ()
    match node.type:
        case "ByteLevel":
            return ()
        case "Sequence":
            ids: tuple[int, ...] = ()
            for child in node.children("processors"):
                ids = read_prefix(child) + ids
            return ids
        case "TemplateProcessing":
            return _template(node)
        case "BertProcessing" | "RobertaProcessing":
            raise node.refuse(f"{node.type}, which puts a token behind the text,")
        case kind:
            raise node.refuse(f"the post-processor {kind}")


def _template(node: Node) -> tuple[int, ...]:
    tokens = node.mapping("special_tokens")
    before: list[int] = []
    seen_text = False
    for piece in node.children("single"):
        if piece.has("Sequence"):
            if seen_text or piece.need_child("Sequence").text("id") != "A":
                raise node.refuse("a TemplateProcessing that repeats the text")
            seen_text = True
            continue
        name = piece.need_child("SpecialToken").text("id")
        if seen_text:
            raise node.refuse(f"a TemplateProcessing with {name!r} behind the text")
        entry = tokens.get(name)
        if not isinstance(entry, dict) or not isinstance(entry.get("ids"), list):
            raise node.fail(f"special_tokens has no ids for {name!r}.")
        before += [token_id(value, f"an id of {name!r}") for value in entry["ids"]]
    if not seen_text:
        raise node.fail("single must hold the text (Sequence A).")
    return tuple(before)


def plan_prefix(
    ids: tuple[int, ...], template: str | None, bos_token: str | None, notes: Notes
) -> Prefix:
    """Let the engine put `ids` before every text, or leave them to the chat template.

    Rendered dialogues are encoded without added ids by transformers.  If the template writes
    `bos_token` first of all and nowhere else, the engine may write it instead: an empty
    `bos_token` is undefined in the engine's templates, and printed as nothing.  (Joined to a text
    it would garble the text, so it must be printed alone.)  Else a dialogue is made right, and
    bare texts go without.
    """
    bos = bos_token or ""
    if not ids or template is None:
        return Prefix(ids, bos)
    if len(ids) == 1 and bos and bos not in template and writes_bos_first(template):
        notes.rewrote("bos_token is empty in the chat template; the engine puts its id in front")
        return Prefix(ids, "")
    notes.differs(
        f"texts that are no dialogues go without the ids {list(ids)} in front: the chat template "
        "writes what a dialogue needs"
    )
    return Prefix((), bos)


def writes_bos_first(template: str) -> bool:
    """Whether every rendering starts with `bos_token`, printed alone, which occurs nowhere else.

    Only blocks that are closed again and print nothing may come before.
    """
    if template.count("bos_token") != 1:
        return False
    at = depth = 0
    while (tag := _TAG.match(template, at)) is not None:
        at = tag.end()
        if tag["print"] is not None:
            return depth == 0 and tag["print"].strip("- \n\t") == "bos_token"
        word = tag["block"].strip("-+ \n\t").split(" ")[0] if tag["block"] else ""
        depth += (word in ("if", "for")) - (word in ("endif", "endfor"))
        if word in ("macro", "call", "filter"):
            return False
    return False
