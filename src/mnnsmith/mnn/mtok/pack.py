"""The parts of a tokenizer to the bytes of a `.mtok` file (layout: `docs/tokenizers.md`)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from mnnsmith.errors import TokenizerError
from mnnsmith.mnn.mtok import form

MAGIC = 430
PIPELINE = 4
MAX_STRING_BYTES = 0xFFFF


def pack(mtok: form.Mtok) -> bytes:
    """The whole file.  Raises TokenizerError where a string is longer than the format allows."""
    parts = [_header(mtok), normalizer(mtok.normalizer), pre_tokenizer(mtok.pre_tokenizer)]
    parts += [model(mtok.model), decoder(mtok.decoder), _added_tokens(mtok.added_tokens)]
    template = utf8(mtok.chat_template, "the chat template")
    parts += [struct.pack("<I", len(template)), template, string(mtok.eos_token)]
    parts += [struct.pack("<B", int(mtok.clean_up_spaces)), string(mtok.bos_token)]
    return b"".join(parts)


def utf8(text: str, what: str) -> bytes:
    """UTF-8 of a text; half a surrogate pair is no text."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"Tokenizer: {what} holds half a surrogate pair at character {error.start}: "
            f"{text[:40]!r}."
        ) from error


def sized(data: bytes) -> bytes:
    """Length as two bytes, then the bytes."""
    if len(data) > MAX_STRING_BYTES:
        raise TokenizerError(
            f"Tokenizer: the string {data[:40]!r}... has {len(data)} bytes; "
            f".mtok holds at most {MAX_STRING_BYTES}."
        )
    return struct.pack("<H", len(data)) + data


def string(text: str) -> bytes:
    return sized(utf8(text, "a string"))


def _header(mtok: form.Mtok) -> bytes:
    lists = (mtok.special_ids, mtok.stop_ids, mtok.prefix_ids)
    counts = " ".join(str(len(ids)) for ids in lists)
    numbers = " ".join(str(number) for ids in lists for number in ids)
    return f"{MAGIC} {PIPELINE}\n{counts}\n{numbers}\n".encode("ascii")


def normalizer(part: form.Normalizer | None) -> bytes:
    match part:
        case None:
            return b"\x00"
        case form.Prepend(text):
            return b"\x02" + string(text)
        case form.Replace(pattern, content):
            return b"\x03" + string(pattern) + string(content)
        case form.NormalizerSequence(steps):
            return _sequence(4, [normalizer(step) for step in steps])
        case form.CodePointTable(entries):
            return b"\x06" + _table(entries)
        case form.BertNormalizer(clean, chinese, accents, lower, table):
            flags = struct.pack("<BBBB", clean, chinese, accents, lower)
            if table is None:
                return b"\x05" + flags
            return b"\x07" + flags + (_table(table) if accents else b"")
        case form.StripSpace(left, right):
            return struct.pack("<BBB", 8, left, right)


def _table(entries: Sequence[tuple[int, str]]) -> bytes:
    rows = [struct.pack("<I", point) + string(text) for point, text in entries]
    return struct.pack("<I", len(rows)) + b"".join(rows)


def _sequence(kind: int, parts: Sequence[bytes]) -> bytes:
    return struct.pack("<BI", kind, len(parts)) + b"".join(parts)


def pre_tokenizer(part: form.PreTokenizer | None) -> bytes:
    match part:
        case None:
            return b"\x00"
        case form.ByteLevel(use_regex):
            return struct.pack("<BB", 1, use_regex)
        case form.Digits(individual):
            return struct.pack("<BB", 2, individual)
        case form.Metaspace(replacement, prefix):
            return b"\x03" + string(replacement) + struct.pack("<B", prefix)
        case form.Split(pattern, invert, behavior):
            return b"\x04" + string(pattern) + struct.pack("<BB", invert, behavior)
        case form.BertPreTokenizer():
            return b"\x05"
        case form.PreTokenizerSequence(steps):
            return _sequence(6, [pre_tokenizer(step) for step in steps])


def model(part: form.Model) -> bytes:
    match part:
        case form.Bpe(vocab, merges, byte_fallback, byte_level):
            head = struct.pack("<BIBBI", 0, len(vocab), byte_fallback, byte_level, len(merges))
            rows = struct.pack(f"<{3 * len(merges)}I", *(n for merge in merges for n in merge))
            return head + _vocab(vocab) + rows
        case form.WordPiece(vocab, unk_token, prefix, max_bytes):
            head = struct.pack("<BI", 1, len(vocab)) + string(unk_token) + string(prefix)
            return head + struct.pack("<I", max_bytes) + _vocab(vocab)
        case form.Unigram(pieces, unk_id, byte_fallback):
            head = struct.pack("<BIIB", 2, len(pieces), unk_id, byte_fallback)
            return head + b"".join(
                sized(text) + struct.pack("<Id", number, score) for text, number, score in pieces
            )


def _vocab(vocab: Iterable[tuple[bytes, int]]) -> bytes:
    return b"".join(sized(text) + struct.pack("<I", number) for text, number in vocab)


def decoder(part: form.Decoder) -> bytes:
    match part:
        case form.ByteLevelDecoder():
            return b"\x00"
        case form.ByteFallbackDecoder():
            return b"\x01"
        case form.MetaspaceDecoder(replacement, prefix):
            return b"\x02" + string(replacement) + struct.pack("<B", prefix)
        case form.WordPieceDecoder(prefix, cleanup):
            return b"\x03" + string(prefix) + struct.pack("<B", cleanup)
        case form.FuseDecoder():
            return b"\x04"
        case form.ReplaceDecoder(pattern, content):
            return b"\x05" + string(pattern) + string(content)
        case form.StripDecoder(content, start, stop):
            return b"\x06" + string(content) + struct.pack("<II", start, stop)
        case form.DecoderSequence(steps):
            return _sequence(7, [decoder(step) for step in steps])


def _added_tokens(tokens: Sequence[form.AddedToken]) -> bytes:
    rows = [
        struct.pack("<IBBB", token.id, token.special, token.lstrip, token.rstrip)
        + string(token.content)
        for token in tokens
    ]
    return struct.pack("<I", len(rows)) + b"".join(rows)
