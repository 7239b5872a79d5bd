"""Reads a `.mtok` file strictly, on its own: shares the plain data with the writer, no byte layout.

The engine itself checks nothing: a wrong length makes it read beyond the file.  So every length,
count, kind and id is checked here against what is left and what the rest of the file says.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from mnnsmith.errors import BundleError
from mnnsmith.mnn.mtok import form
from mnnsmith.mnn.mtok.form import Mtok

MAX_FILE_BYTES = 1 << 30
_MAX_DEPTH = 16
_T = TypeVar("_T")


def read_mtok(path: Path) -> Mtok:
    """The parts of the file.  Raises BundleError where it is missing, damaged or inconsistent."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BundleError(
            f"{path}: cannot read the tokenizer: {error.strerror or error}.",
            "Convert the model again.",
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise BundleError(f"{path}: a tokenizer of more than {MAX_FILE_BYTES} bytes is not read.")
    return parse_mtok(data, str(path))


def parse_mtok(data: bytes, name: str = "tokenizer.mtok") -> Mtok:
    """The parts of a file's bytes; `name` stands in error messages."""
    reader = _Reader(data, name)
    special, stops, prefix = _header(reader)
    normalizer = _normalizer(reader, 0)
    pre_tokenizer = _pre_tokenizer(reader, 0)
    model = _model(reader)
    decoder = _decoder(reader, 0)
    added = tuple(_added_token(reader, len(model.vocab)) for _ in range(reader.count(9)))
    template = reader.text(reader.u32())
    eos = reader.string()
    flags = reader.u8()
    bos = reader.string()
    if flags > 1:
        raise reader.damaged(f"unknown flags {flags:#x}")
    if reader.left:
        raise reader.damaged(f"{reader.left} bytes too many")
    for number in (*special, *stops, *prefix):
        if number >= len(model.vocab):
            raise reader.damaged(f"id {number} in the header; there are {len(model.vocab)} ids")
    return Mtok(
        special_ids=special,
        stop_ids=stops,
        prefix_ids=prefix,
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizer,
        model=model,
        decoder=decoder,
        added_tokens=added,
        chat_template=template,
        eos_token=eos,
        bos_token=bos,
        clean_up_spaces=bool(flags),
    )


class _Reader:
    """A position in the bytes; nothing is read beyond the end."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data = data
        self.name = name
        self.at = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def damaged(self, what: str) -> BundleError:
        return BundleError(
            f"{self.name}: the tokenizer is damaged at byte {self.at}: {what}.",
            "Convert the model again, or copy the bundle again.",
        )

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise self.damaged(f"{size} bytes expected, {self.left} left")
        self.at += size
        return self.data[self.at - size : self.at]

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.at, self.at + (1 << 20))
        if end < 0:
            raise self.damaged("a line without an end")
        line = self.take(end - self.at)
        self.at += 1
        return line

    def u8(self) -> int:
        return self.take(1)[0]

    def flag(self) -> bool:
        value = self.u8()
        if value > 1:
            raise self.damaged(f"a flag of {value}")
        return bool(value)

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def count(self, least_bytes: int) -> int:
        """A number of items, each of at least so many bytes."""
        count = self.u32()
        if count * least_bytes > self.left:
            raise self.damaged(f"{count} items cannot follow in {self.left} bytes")
        return count

    def raw_string(self) -> bytes:
        return self.take(int.from_bytes(self.take(2), "little"))

    def string(self) -> str:
        return self._decoded(self.raw_string())

    def text(self, size: int) -> str:
        return self._decoded(self.take(size))

    def _decoded(self, data: bytes) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"a string that is not UTF-8 ({error.reason})") from error


def _header(reader: _Reader) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    if reader.line() != b"430 4":
        raise reader.damaged("it does not start with '430 4'")
    counts = _numbers(reader, reader.line())
    ids = _numbers(reader, reader.line())
    if len(counts) != 3 or sum(counts) != len(ids):
        raise reader.damaged(f"the header counts {counts} ids and lists {len(ids)}")
    special, stops, _ = counts
    return ids[:special], ids[special : special + stops], ids[special + stops :]


def _numbers(reader: _Reader, line: bytes) -> tuple[int, ...]:
    words = line.split(b" ") if line else []
    if not all(word.isdigit() and len(word) < 11 for word in words):
        raise reader.damaged("a header line that is not plain numbers")
    return tuple(int(word) for word in words)


def _steps(reader: _Reader, depth: int, read: Callable[[_Reader, int], _T | None]) -> list[_T]:
    if depth >= _MAX_DEPTH:
        raise reader.damaged("components nested too deep")
    steps = []
    for _ in range(reader.count(1)):
        step = read(reader, depth + 1)
        if step is None:
            raise reader.damaged("an empty step in a sequence")
        steps.append(step)
    return steps


def _table(reader: _Reader) -> tuple[tuple[int, str], ...]:
    entries = tuple((reader.u32(), reader.string()) for _ in range(reader.count(6)))
    points = [point for point, _ in entries]
    if any(a >= b for a, b in pairwise(points)) or (points or [0])[-1] > 0x10FFFF:
        raise reader.damaged("a table whose code points do not ascend")
    return entries


def _normalizer(reader: _Reader, depth: int) -> form.Normalizer | None:
    kind = reader.u8()
    match kind:
        case 0:
            return None
        case 2:
            return form.Prepend(reader.string())
        case 3:
            return form.Replace(reader.string(), reader.string())
        case 4:
            return form.NormalizerSequence(tuple(_steps(reader, depth, _normalizer)))
        case 5 | 7:
            return _bert(reader, kind == 7)
        case 6:
            return form.CodePointTable(_table(reader))
        case 8:
            return form.StripSpace(reader.flag(), reader.flag())
    raise reader.damaged(f"unknown normalizer {kind}")


def _bert(reader: _Reader, with_table: bool) -> form.BertNormalizer:
    clean, chinese, accents, lower = (reader.flag() for _ in range(4))
    table = _table(reader) if with_table and accents else () if with_table else None
    return form.BertNormalizer(clean, chinese, accents, lower, table)


def _pre_tokenizer(reader: _Reader, depth: int) -> form.PreTokenizer | None:
    kind = reader.u8()
    match kind:
        case 0:
            return None
        case 1:
            return form.ByteLevel(reader.flag())
        case 2:
            return form.Digits(reader.flag())
        case 3:
            return form.Metaspace(reader.string(), reader.flag())
        case 4:
            pattern, invert, behavior = reader.string(), reader.flag(), reader.u8()
            if behavior > max(form.Behavior) or not pattern:
                raise reader.damaged(f"a Split of {pattern!r} with behavior {behavior}")
            return form.Split(pattern, invert, form.Behavior(behavior))
        case 5:
            return form.BertPreTokenizer()
        case 6:
            return form.PreTokenizerSequence(tuple(_steps(reader, depth, _pre_tokenizer)))
    raise reader.damaged(f"unknown pre-tokenizer {kind}")


def _model(reader: _Reader) -> form.Model:
    kind = reader.u8()
    size = reader.u32()
    if size * 6 > reader.left or size == 0:
        raise reader.damaged(f"{size} tokens cannot follow in {reader.left} bytes")
    match kind:
        case 0:
            return _bpe(reader, size)
        case 1:
            unk, prefix, longest = reader.string(), reader.string(), reader.u32()
            if longest > 0x7FFFFFFF:
                raise reader.damaged(f"a longest word of {longest} bytes")
            return form.WordPiece(_vocab(reader, size), unk, prefix, longest)
        case 2:
            return _unigram(reader, size)
    raise reader.damaged(f"unknown model {kind}")


def _bpe(reader: _Reader, size: int) -> form.Bpe:
    byte_fallback, byte_level = reader.flag(), reader.flag()
    merges = reader.u32()
    vocab = _vocab(reader, size)
    if merges * 12 > reader.left:
        raise reader.damaged(f"{merges} merges cannot follow in {reader.left} bytes")
    rows = tuple(struct.iter_unpack("<III", reader.take(merges * 12)))
    pairs = [row[:2] for row in rows]
    if any(a >= b for a, b in pairwise(pairs)):
        raise reader.damaged("merges that are not sorted")
    texts = {number: text for text, number in vocab}
    known = {text for text, _ in vocab}
    for left, right, _ in rows:
        if max(left, right) >= size or texts[left] + texts[right] not in known:
            raise reader.damaged(f"a merge of {left} and {right}, which gives no token")
    return form.Bpe(vocab, rows, byte_fallback, byte_level)


def _unigram(reader: _Reader, size: int) -> form.Unigram:
    unk, byte_fallback = reader.u32(), reader.flag()
    rows = []
    for _ in range(size):
        text, number = reader.raw_string(), reader.u32()
        (score,) = struct.unpack("<d", reader.take(8))
        if not math.isfinite(score):
            raise reader.damaged(f"a score of {score}")
        rows.append((text, number, score))
    _check_vocab(reader, [row[0] for row in rows], [row[1] for row in rows])
    if unk >= size:
        raise reader.damaged(f"the unknown token's id {unk} of {size}")
    return form.Unigram(tuple(rows), unk, byte_fallback)


def _vocab(reader: _Reader, size: int) -> tuple[tuple[bytes, int], ...]:
    rows = tuple((reader.raw_string(), reader.u32()) for _ in range(size))
    _check_vocab(reader, [text for text, _ in rows], [number for _, number in rows])
    return rows


def _check_vocab(reader: _Reader, texts: list[bytes], ids: list[int]) -> None:
    """Sorted by bytes, as the engine searches; every id once, as it writes them into a table."""
    if any(a > b for a, b in pairwise(texts)):
        raise reader.damaged("a vocabulary that is not sorted")
    if sorted(ids) != list(range(len(ids))):
        raise reader.damaged("a vocabulary whose ids have holes or repeat")
    try:
        # A line feed ends every character that was begun.
        b"\n".join(texts).decode("utf-8")
    except UnicodeDecodeError as error:
        raise reader.damaged(f"a token that is not UTF-8 ({error.reason})") from error


def _decoder(reader: _Reader, depth: int) -> form.Decoder:
    kind = reader.u8()
    match kind:
        case 0:
            return form.ByteLevelDecoder()
        case 1:
            return form.ByteFallbackDecoder()
        case 2:
            return form.MetaspaceDecoder(reader.string(), reader.flag())
        case 3:
            return form.WordPieceDecoder(reader.string(), reader.flag())
        case 4:
            return form.FuseDecoder()
        case 5:
            return form.ReplaceDecoder(reader.string(), reader.string())
        case 6:
            return form.StripDecoder(reader.string(), reader.u32(), reader.u32())
        case 7:
            return form.DecoderSequence(tuple(_steps(reader, depth, _decoder)))
    raise reader.damaged(f"unknown decoder {kind}")


def _added_token(reader: _Reader, size: int) -> form.AddedToken:
    number, special, lstrip, rstrip = reader.u32(), reader.flag(), reader.flag(), reader.flag()
    if number >= size:
        raise reader.damaged(f"an added token with id {number} of {size}")
    return form.AddedToken(number, reader.string(), special, lstrip, rstrip)
