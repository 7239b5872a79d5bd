"""The `decoder` of a tokenizer.json as the engine's.

Texts leave the engine token by token, and there only three things happen: U+2581 becomes a space,
`<0x41>` becomes a byte, and byte-level characters become bytes (or WordPiece's marks go).  So only
decoders that do just this are accepted, with what they do at the ends of a text noted.
"""

from __future__ import annotations

from mnnsmith.mnn.mtok import form
from mnnsmith.mnn.mtok.notes import Notes
from mnnsmith.mnn.mtok.spec import Node

META = "▁"
_LEADING = "decoded text keeps the space that the decoder takes from its start"


def translate(node: Node | None, root: Node, notes: Notes) -> form.Decoder:
    """Raises TokenizerError for a decoder that the engine has not."""
    if node is None:
        raise root.refuse("a tokenizer without a decoder (its tokens are joined by spaces)")
    steps = [_one(leaf, notes) for leaf in _flatten(node)]
    if not steps:
        raise node.refuse("an empty decoder")
    kinds = [type(step) for step in steps]
    alone = (form.ByteLevelDecoder, form.WordPieceDecoder, form.MetaspaceDecoder)
    rest = [kind for kind in kinds if kind not in (form.FuseDecoder, form.ByteFallbackDecoder)]
    if len(rest) > 1 and any(kind in alone for kind in rest):
        raise node.refuse("a decoder that joins " + ", ".join(k.__name__ for k in rest))
    return steps[0] if len(steps) == 1 else form.DecoderSequence(tuple(steps))


def _flatten(node: Node) -> list[Node]:
    if node.type != "Sequence":
        return [node]
    return [leaf for child in node.children("decoders") for leaf in _flatten(child)]


def _one(node: Node, notes: Notes) -> form.Decoder:
    match node.type:
        case "ByteLevel":
            return form.ByteLevelDecoder()
        case "ByteFallback":
            return form.ByteFallbackDecoder()
        case "Fuse":
            return form.FuseDecoder()
        case "Metaspace":
            return _metaspace(node, notes)
        case "WordPiece":
            notes.differs("decoded text starts with a space, and is not cleaned up (WordPiece)")
            return form.WordPieceDecoder(node.text("prefix"), node.flag("cleanup"))
        case "Replace":
            return _replace(node)
        case "Strip":
            return _strip(node, notes)
        case kind:
            raise node.refuse(f"the decoder {kind}")


def _metaspace(node: Node, notes: Notes) -> form.MetaspaceDecoder:
    replacement = node.text("replacement", META)
    if replacement != META:
        raise node.refuse(f"a Metaspace decoder with the replacement {replacement!r}")
    prefix = node.flag("add_prefix_space", True)
    if node.has("prepend_scheme"):
        prefix = node.text("prepend_scheme") != "never"
    if prefix:
        notes.differs(_LEADING)
    return form.MetaspaceDecoder(replacement, prefix)


def _replace(node: Node) -> form.ReplaceDecoder:
    pattern = node.need_child("pattern").text("String", "")
    content = node.text("content")
    if (pattern, content) != (META, " "):
        raise node.refuse(f"a Replace decoder of {pattern!r} by {content!r}")
    return form.ReplaceDecoder(pattern, content)


def _strip(node: Node, notes: Notes) -> form.StripDecoder:
    content = node.text("content")
    start = node.integer("start", 0, 1 << 16)
    stop = node.integer("stop", 0, 1 << 16)
    if content != " " or start > 1 or stop:
        raise node.refuse(
            f"a Strip decoder of {content!r}, {start} at the start, {stop} at the end"
        )
    if start:
        notes.differs(_LEADING)
    return form.StripDecoder(content, start, stop)
