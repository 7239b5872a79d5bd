"""A tokenizer.json, its template and its stop ids, as the parts of a `.mtok` file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mnnsmith.errors import TokenizerError
from mnnsmith.mnn.mtok import decoders, form, normalizers, pretokenizers, vocabulary
from mnnsmith.mnn.mtok.notes import Notes
from mnnsmith.mnn.mtok.pack import utf8
from mnnsmith.mnn.mtok.prefix import plan_prefix, read_prefix
from mnnsmith.mnn.mtok.spaces import split_at_spaces
from mnnsmith.mnn.mtok.spec import Node, read_json
from mnnsmith.mnn.mtok.vocabulary import Added

if TYPE_CHECKING:
    from mnnsmith.sources.checkpoint import TokenizerFiles

_META = "▁"
# What the engine takes for a byte: it needs six characters, and reads up to two digits.
_BYTE = re.compile(rb"<0x[0-9A-Fa-f]{1,2}.{1,2}", re.DOTALL)


def build(tokenizer: TokenizerFiles, notes: Notes) -> form.Mtok:
    """Raises TokenizerError for damage, and by name for what the format cannot express."""
    root = read_json(tokenizer.tokenizer_json)
    model = root.need_child("model")
    decoder = decoders.translate(root.child("decoder"), root, notes)
    chat = bool(tokenizer.chat_template)
    steps, ahead = normalizers.translate(root.child("normalizer"), notes)
    pre_node = root.child("pre_tokenizer")
    parts = pretokenizers.translate(pre_node, chat, notes)
    leaves = pretokenizers.flatten(pre_node)
    if leaves and leaves[0].type == "Metaspace":
        # A typed U+2581 is the same as a space; the engine cuts and adds one at spaces only.
        steps.append(form.Replace(leaves[0].text("replacement"), " "))
    byte_level = any(isinstance(part, form.ByteLevel) for part in parts)
    model_form, added = _model(root, model, byte_level, decoder, notes)
    if isinstance(model_form, form.Bpe):
        steps, parts = split_at_spaces(steps, parts, _merged_texts(model_form), notes)
    parts = [*ahead, *parts]
    _check_decoder(model_form, decoder, root, notes)
    _note_added(root, added, notes)
    prefix = plan_prefix(
        read_prefix(root.child("post_processor")),
        tokenizer.chat_template or None,
        tokenizer.bos_token,
        notes,
    )
    for number in (*tokenizer.stop_ids, *prefix.ids):
        if not 0 <= number < len(model_form.vocab):
            raise TokenizerError(
                f"The id {number} ends or starts texts, but the tokenizer has only "
                f"{len(model_form.vocab)} ids.",
                "tokenizer.json and generation_config.json do not belong together.",
            )
    return form.Mtok(
        special_ids=(),
        stop_ids=tuple(dict.fromkeys(tokenizer.stop_ids)),
        prefix_ids=prefix.ids,
        normalizer=form.NormalizerSequence(tuple(steps)) if steps else None,
        pre_tokenizer=form.PreTokenizerSequence(tuple(parts)) if parts else None,
        model=model_form,
        decoder=decoder,
        added_tokens=tuple(entry.token for entry in added),
        chat_template=tokenizer.chat_template or "",
        eos_token=tokenizer.eos_token or "",
        bos_token=prefix.bos_token,
    )


def _model(
    root: Node, model: Node, byte_level: bool, decoder: form.Decoder, notes: Notes
) -> tuple[form.Model, list[Added]]:
    kind = vocabulary.model_kind(model)
    if kind == "Unigram":
        pieces = vocabulary.read_pieces(model)
        known = {piece: number for number, (piece, _) in enumerate(pieces)}
        added = vocabulary.read_added(root, known)
        texts = {n: utf8(piece, "a piece") for n, (piece, _) in enumerate(pieces)}
        texts |= {e.token.id: utf8(e.token.content, "an added token") for e in added}
        table = vocabulary.full_table(model, texts)
        return vocabulary.unigram_form(model, pieces, table, notes), added
    if kind == "WordPiece":
        known = vocabulary.read_vocab(model)
        added = vocabulary.read_added(root, known)
        table = vocabulary.full_table(model, _texts(known, added, {}))
        return vocabulary.word_piece_form(model, known, table, notes), added
    if kind != "BPE":
        raise model.refuse(f"the model {kind}")
    spec = vocabulary.read_bpe(model, byte_level, notes)
    added = vocabulary.read_added(root, spec.vocab)
    shown = {}
    if isinstance(decoder, form.ByteLevelDecoder):
        shown = _shown_bytes(added, spec, notes)
    if spec.ignore_merges:
        _note_unreachable(spec, added, notes)
    table = vocabulary.full_table(model, _texts(spec.vocab, added, shown))
    return vocabulary.bpe_form(spec, table), added


def _texts(
    known: Mapping[str, int], added: Sequence[Added], shown: Mapping[int, str]
) -> dict[int, bytes]:
    texts = {number: utf8(token, "a token of model.vocab") for token, number in known.items()}
    texts |= {e.token.id: utf8(e.token.content, "an added token") for e in added}
    return texts | {number: text.encode("utf-8") for number, text in shown.items()}


def _shown_bytes(added: Sequence[Added], spec: vocabulary.BpeSpec, notes: Notes) -> dict[int, str]:
    """Added tokens that a byte-level decoder would show wrongly, in byte-level characters.

    The library shows a text of byte-level characters as their bytes, any other as it is; the
    engine goes by the single character, and makes U+2581 a space before.
    """
    characters = vocabulary.byte_characters()
    values = {char: value for value, char in characters.items()}
    merged = {token for pair in spec.merges for token in (*pair, "".join(pair))}
    shown = {}
    for entry in added:
        text = entry.token.content
        data = utf8(text, "an added token")
        right = bytes(values[c] for c in text) if all(c in values for c in text) else data
        engine = b"".join(
            bytes([values[c]]) if c in values else c.encode() for c in text.replace(_META, " ")
        )
        spelled = "".join(characters[value] for value in right)
        if engine == right:
            continue
        if text in merged or len(text) == 1 or spelled in spec.vocab:
            notes.differs(f"the added token {text!r} is shown as other characters")
        else:
            shown[entry.token.id] = spelled
    return shown


def _note_unreachable(spec: vocabulary.BpeSpec, added: Sequence[Added], notes: Notes) -> None:
    matched = {entry.token.content for entry in added}
    lost = [token for token in vocabulary.unreachable(spec) if token not in matched]
    if lost:
        notes.differs(
            f"{len(lost)} tokens that merges do not reach are written as several, such as "
            f"{lost[0]!r} (ignore_merges)"
        )


def _merged_texts(model: form.Bpe) -> list[tuple[str, str]]:
    texts = {number: text.decode("utf-8") for text, number in model.vocab}
    return [(texts[left], texts[right]) for left, right, _ in model.merges]


def _check_decoder(model: form.Model, decoder: form.Decoder, root: Node, notes: Notes) -> None:
    """What the engine does to each shown token must be what the decoder does."""
    steps = decoder.steps if isinstance(decoder, form.DecoderSequence) else (decoder,)
    kinds = {type(step) for step in steps}
    shows_meta = kinds & {form.ReplaceDecoder, form.MetaspaceDecoder}
    texts = [row[0] for row in model.vocab]
    meta = sum(_META.encode() in text for text in texts)
    if meta and not shows_meta:
        if not kinds & {form.ByteLevelDecoder, form.WordPieceDecoder}:
            raise root.refuse("a decoder that leaves U+2581 as it is")
        notes.differs(f"{meta} tokens are shown with a space for their U+2581")
    odd = sum(_BYTE.search(text) is not None for text in texts)
    if form.ByteFallbackDecoder in kinds:
        odd -= sum(_BYTE.fullmatch(text) is not None for text in texts)
    if odd:
        notes.differs(f"{odd} tokens with <0x.. in their text are shown with a byte for it")


def _note_added(root: Node, added: Sequence[Added], notes: Notes) -> None:
    """Tokens that the library looks for in the normalized text, the engine in the text itself."""
    if any(entry.token.lstrip or entry.token.rstrip for entry in added):
        notes.differs("an added token that takes spaces with it takes ASCII white space only")
    if root.child("normalizer") is None:
        return
    late = [entry.token.content for entry in added if entry.normalized]
    if late:
        notes.differs(
            f"{len(late)} added tokens, such as {late[0]!r}, are looked for before normalization"
        )
