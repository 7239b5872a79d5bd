"""What a `.mtok` file can hold, as plain data: the vocabulary of the translation.

Each class names one part of the engine's tokenizer.  `docs/tokenizers.md` gives the bytes of each,
`pack` writes them, and `mnnsmith.mnn.mtok_reader` reads them back on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

# --- normalizers ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepend:
    """Put `text` before the text."""

    text: str


@dataclass(frozen=True)
class Replace:
    """Replace every occurrence of `pattern`, left to right, by `content`."""

    pattern: str
    content: str


@dataclass(frozen=True)
class CodePointTable:
    """Replace single code points; `entries` are (code point, text), ascending.

    The engine also turns many control and format characters into a space here; see `code_points`.
    """

    entries: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class BertNormalizer:
    """BERT's clean-up; only `pad_chinese` is used by our writer.  `accents`: the NFD table."""

    clean: bool
    pad_chinese: bool
    strip_accents: bool
    lowercase: bool
    accents: tuple[tuple[int, str], ...] | None = None


@dataclass(frozen=True)
class StripSpace:
    """Remove white space at the ends."""

    left: bool
    right: bool


@dataclass(frozen=True)
class NormalizerSequence:
    steps: tuple[Normalizer, ...]


Normalizer: TypeAlias = (
    Prepend | Replace | CodePointTable | BertNormalizer | StripSpace | NormalizerSequence
)

# --- pre-tokenizers ------------------------------------------------------------------------------


class Behavior(IntEnum):
    """What happens to the parts that a Split's pattern matches."""

    ISOLATED = 0
    REMOVED = 1
    MERGED_WITH_PREVIOUS = 2


@dataclass(frozen=True)
class ByteLevel:
    """Bytes become printable characters; `use_regex`: split by GPT-2's pattern first."""

    use_regex: bool


@dataclass(frozen=True)
class Digits:
    """Split off ASCII digits one by one (`individual`), or do nothing at all."""

    individual: bool


@dataclass(frozen=True)
class Metaspace:
    """Put a space before every part that has none (`prefix`), then spaces become `replacement`."""

    replacement: str
    prefix: bool


@dataclass(frozen=True)
class Split:
    pattern: str
    invert: bool
    behavior: Behavior


@dataclass(frozen=True)
class BertPreTokenizer:
    """Split at white space, which goes, and at punctuation, which stays."""


@dataclass(frozen=True)
class PreTokenizerSequence:
    steps: tuple[PreTokenizer, ...]


PreTokenizer: TypeAlias = (
    ByteLevel | Digits | Metaspace | Split | BertPreTokenizer | PreTokenizerSequence
)

# --- models --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bpe:
    """vocab: (UTF-8 bytes, id), sorted by bytes; merges: (left id, right id, rank), sorted."""

    vocab: tuple[tuple[bytes, int], ...]
    merges: tuple[tuple[int, int, int], ...]
    byte_fallback: bool
    byte_level: bool = False


@dataclass(frozen=True)
class WordPiece:
    vocab: tuple[tuple[bytes, int], ...]
    unk_token: str
    prefix: str
    max_bytes: int


@dataclass(frozen=True)
class Unigram:
    """vocab: (UTF-8 bytes, id, score), sorted by bytes."""

    vocab: tuple[tuple[bytes, int, float], ...]
    unk_id: int
    byte_fallback: bool


Model: TypeAlias = Bpe | WordPiece | Unigram

# --- decoders ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByteLevelDecoder:
    """Printable characters become bytes again."""


@dataclass(frozen=True)
class ByteFallbackDecoder:
    """`<0x41>` becomes the byte 0x41."""


@dataclass(frozen=True)
class MetaspaceDecoder:
    replacement: str
    prefix: bool


@dataclass(frozen=True)
class WordPieceDecoder:
    prefix: str
    cleanup: bool


@dataclass(frozen=True)
class FuseDecoder:
    """All tokens become one."""


@dataclass(frozen=True)
class ReplaceDecoder:
    pattern: str
    content: str


@dataclass(frozen=True)
class StripDecoder:
    content: str
    start: int
    stop: int


@dataclass(frozen=True)
class DecoderSequence:
    steps: tuple[Decoder, ...]


Decoder: TypeAlias = (
    ByteLevelDecoder
    | ByteFallbackDecoder
    | MetaspaceDecoder
    | WordPieceDecoder
    | FuseDecoder
    | ReplaceDecoder
    | StripDecoder
    | DecoderSequence
)

# --- the whole -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AddedToken:
    """A text that is one token wherever it stands; `lstrip`, `rstrip`: it takes spaces with it."""

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool


@dataclass(frozen=True)
class Mtok:
    """A whole file.

    special_ids: ids whose text the engine looks for before all else (left empty by our writer).
    stop_ids: ids that end an answer.  prefix_ids: put before the ids of every text.
    clean_up_spaces: BERT's clean-up of decoded text.
    """

    special_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    normalizer: Normalizer | None
    pre_tokenizer: PreTokenizer | None
    model: Model
    decoder: Decoder
    added_tokens: tuple[AddedToken, ...]
    chat_template: str
    eos_token: str
    bos_token: str
    clean_up_spaces: bool = False
