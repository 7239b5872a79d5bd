"""The `model` and the `added_tokens` of a tokenizer.json as the engine's tables.

The engine looks tokens up by their text and shows them by their id, in one table without holes.
So added tokens outside the model's vocabulary are put into it, or they would be shown as nothing;
holes are filled with empty texts, which no text can match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mnnsmith.mnn.mtok import form
from mnnsmith.mnn.mtok.notes import Notes
from mnnsmith.mnn.mtok.spec import Node, finite, token_id

# Holes cost memory in the engine.
_MAX_HOLES = 1 << 20
# The library sets unknown characters this far below the worst piece.
_UNKNOWN_PENALTY = 10.0
# A piece of this score is never chosen, as the engine takes it for unreachable.
_NEVER = -1e18
_BYTE_TOKENS = tuple(f"<0x{value:02X}>" for value in range(256))


@dataclass(frozen=True)
class Added:
    """One entry of `added_tokens`. normalized: it is looked for in the normalized text."""

    token: form.AddedToken
    normalized: bool


def byte_characters() -> dict[int, str]:
    """{byte: character} of GPT-2's byte alphabet.

    Printable Latin-1 bytes stand for themselves; the others take the code points from 256 on, in
    order.  Source: the byte encoder published with GPT-2.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in plain]
    return {value: chr(value) for value in plain} | {
        value: chr(256 + index) for index, value in enumerate(others)
    }


def model_kind(model: Node) -> str:
    """BPE, Unigram or WordPiece; older files do not say."""
    if model.has("type"):
        return model.type
    if model.has("merges"):
        return "BPE"
    return "Unigram" if isinstance(model.raw("vocab"), list) else "WordPiece"


def read_vocab(model: Node) -> dict[str, int]:
    """token -> id of BPE and WordPiece; every id is used once."""
    vocab = model.mapping("vocab")
    seen: dict[int, str] = {}
    for token, value in vocab.items():
        number = token_id(value, f"the id of {token[:40]!r} in model.vocab")
        if number in seen:
            raise model.fail(f"vocab gives id {number} to {seen[number]!r} and to {token!r}.")
        seen[number] = token
    if not vocab:
        raise model.fail("vocab is empty.")
    return vocab


def read_pieces(model: Node) -> list[tuple[str, float]]:
    """(piece, score) of Unigram, by id."""
    pieces = []
    for number, item in enumerate(model.items("vocab")):
        where = f"model.vocab[{number}]"
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str):
            raise model.fail(f"{where} must be a piece and its score.")
        pieces.append((item[0], finite(item[1], f"the score of {where}")))
    if not pieces:
        raise model.fail("vocab is empty.")
    return pieces


def read_added(root: Node, known: Mapping[str, int]) -> list[Added]:
    """The added tokens, with the ids that the library gives them.

    The library takes the id of the model's vocabulary, and numbers all others on from its size,
    whatever the file says; a file that says otherwise is refused.
    """
    ids = dict(known)
    used = set(known.values())
    top = -1
    found = []
    for node in root.children("added_tokens", ()):
        content = node.text("content")
        number = token_id(node.raw("id"), f"{node.path}.id")
        if node.flag("single_word", False):
            raise node.refuse(f"the added token {content!r} that must stand alone (single_word)")
        if not content:
            raise node.fail("content is empty.")
        following = top + 1 if top >= len(known) else len(known)
        expected = ids.get(content, following)
        if number != expected:
            raise node.fail(
                f"{content!r} has id {number}, but the tokenizers library gives it {expected}.",
                "The vocabulary and the added tokens contradict each other.",
            )
        if content not in known and number in used:
            raise node.fail(
                f"{content!r} and another token have the same id {number}.",
                "The model's vocabulary has holes where added tokens are numbered on.",
            )
        if content in ids and content not in known:
            raise node.fail(f"{content!r} stands in added_tokens twice.")
        ids[content] = number
        top = max(top, number)
        flags = (
            node.flag("special", False),
            node.flag("lstrip", False),
            node.flag("rstrip", False),
        )
        token = form.AddedToken(number, content, *flags)
        found.append(Added(token, node.flag("normalized", not flags[0])))
    return found


def full_table(model: Node, texts: Mapping[int, bytes]) -> list[tuple[bytes, int]]:
    """(text, id) without holes, sorted by text."""
    size = max(texts) + 1
    if size - len(texts) > _MAX_HOLES:
        raise model.fail(f"the highest id is {size - 1}, but there are only {len(texts)} tokens.")
    holes = [(b"", number) for number in range(size) if number not in texts]
    return sorted([*holes, *((text, number) for number, text in texts.items())])


# --- BPE -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BpeSpec:
    """A BPE model as the file has it; merges: (left, right) -> rank."""

    vocab: Mapping[str, int]
    merges: Mapping[tuple[str, str], int]
    byte_fallback: bool
    ignore_merges: bool


def read_bpe(model: Node, byte_level: bool, notes: Notes) -> BpeSpec:
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.text(key, ""):
            raise model.refuse(f"a BPE model with {key}")
    vocab = read_vocab(model)
    merges: dict[tuple[str, str], int] = {}
    for rank, item in enumerate(model.items("merges")):
        pair = _merge_pair(model, item, rank)
        for token in (*pair, pair[0] + pair[1]):
            if token not in vocab:
                raise model.fail(f"merges[{rank}] names {token[:40]!r}, which is not in vocab.")
        merges[pair] = rank
    if model.has("dropout") and finite(model.raw("dropout"), "model.dropout") > 0:
        notes.differs("BPE dropout, a setting of training, is not applied")
    byte_fallback = model.flag("byte_fallback", False)
    _check_unknown(model, vocab, byte_level, byte_fallback)
    return BpeSpec(vocab, merges, byte_fallback, model.flag("ignore_merges", False))


def _merge_pair(model: Node, item: Any, rank: int) -> tuple[str, str]:
    parts = item.split(" ") if isinstance(item, str) else item
    if (
        not isinstance(parts, list)
        or len(parts) != 2
        or not all(isinstance(part, str) and part for part in parts)
    ):
        raise model.fail(f"merges[{rank}] must be two tokens, not {str(item)[:60]!r}.")
    return parts[0], parts[1]


def _check_unknown(
    model: Node, vocab: Mapping[str, int], byte_level: bool, byte_fallback: bool
) -> None:
    """The engine leaves unknown characters out, or writes them as bytes."""
    if byte_level and all(char in vocab for char in byte_characters().values()):
        return
    if byte_fallback and all(token in vocab for token in _BYTE_TOKENS):
        return
    if byte_fallback:
        missing = next(token for token in _BYTE_TOKENS if token not in vocab)
        raise model.refuse(f"byte_fallback without the token {missing}")
    if any(token in vocab for token in _BYTE_TOKENS):
        raise model.refuse("a vocabulary with <0x..> tokens but without byte_fallback")
    unk = model.text("unk_token", "")
    if unk and unk in vocab:
        raise model.refuse("an unk_token for unknown characters in BPE")


def bpe_form(spec: BpeSpec, table: Sequence[tuple[bytes, int]]) -> form.Bpe:
    merges = sorted((spec.vocab[a], spec.vocab[b], rank) for (a, b), rank in spec.merges.items())
    return form.Bpe(tuple(table), tuple(merges), spec.byte_fallback)


def unreachable(spec: BpeSpec) -> list[str]:
    """Tokens that the merges do not reach from their own text, asked of the library."""
    from tokenizers import Tokenizer, models

    merges = [pair for pair, _ in sorted(spec.merges.items(), key=lambda item: item[1])]
    plain = Tokenizer(models.BPE(vocab=dict(spec.vocab), merges=merges))
    tokens = list(spec.vocab)
    encodings = plain.encode_batch(tokens, add_special_tokens=False)
    return [token for token, code in zip(tokens, encodings, strict=True) if len(code.ids) > 1]


# --- Unigram and WordPiece -------------------------------------------------------------------


def unigram_form(
    model: Node,
    pieces: Sequence[tuple[str, float]],
    table: Sequence[tuple[bytes, int]],
    notes: Notes,
) -> form.Unigram:
    """The file's score of the unknown token, and of bytes, is what the library uses instead."""
    if not model.has("unk_id"):
        raise model.refuse("a Unigram model without unk_id")
    unk_id = model.integer("unk_id", 0, len(pieces) - 1)
    byte_fallback = model.flag("byte_fallback", False)
    names = {piece for piece, _ in pieces}
    if byte_fallback and not names.issuperset(_BYTE_TOKENS):
        raise model.refuse("byte_fallback without all 256 <0x..> pieces")
    lowest = min(score for _, score in pieces) - _UNKNOWN_PENALTY
    scores = {number: score for number, (_, score) in enumerate(pieces)}
    scores[unk_id] = lowest
    if byte_fallback:
        scores |= {n: lowest for n, (piece, _) in enumerate(pieces) if piece in _BYTE_TOKENS}
        notes.differs("a typed <0x41> is not read as the byte's token (Unigram)")
    notes.differs("runs of one character may be cut in another order of the same pieces (Unigram)")
    if any(char not in names for char in {char for piece, _ in pieces for char in piece}):
        _note_rare_characters(pieces, names, unk_id, notes)
    ordered = sorted(table, key=lambda row: (row[0], -row[1]))
    rows = tuple((text, number, scores.get(number, _NEVER)) for text, number in ordered)
    return form.Unigram(rows, unk_id, byte_fallback)


def _note_rare_characters(
    pieces: Sequence[tuple[str, float]], names: set[str], unk_id: int, notes: Notes
) -> None:
    """Characters that only occur inside of longer pieces; special pieces do not count."""
    inside = {
        char
        for number, (piece, score) in enumerate(pieces)
        if number != unk_id and score < 0 and piece not in _BYTE_TOKENS
        for char in piece
    }
    rare = inside - names
    if rare:
        notes.differs(f"{len(rare)} characters are known only inside of longer pieces (Unigram)")


def word_piece_form(
    model: Node, vocab: Mapping[str, int], table: Sequence[tuple[bytes, int]], notes: Notes
) -> form.WordPiece:
    unk = model.text("unk_token")
    if unk not in vocab:
        raise model.fail(f"unk_token {unk!r} is not in vocab.")
    longest = model.integer("max_input_chars_per_word", 0, 1 << 28, 100)
    notes.differs(
        f"words of more than {longest} characters are cut into pieces, not unknown (WordPiece)"
    )
    prefix = model.text("continuing_subword_prefix", "##")
    return form.WordPiece(tuple(table), unk, prefix, 4 * longest)
