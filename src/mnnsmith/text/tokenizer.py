"""Text to token ids and back, with the model's own `tokenizer.json` and the `tokenizers` library.

What the library does not give, and is here:

- A control token typed by a user stays text.  `encode` takes the texts of special tokens as plain
  text unless told otherwise, and `encode_guarded` does so for chosen ranges only.
- A damaged or hostile file gives TokenizerError.  The library reports problems as a bare Exception
  or as a Rust panic (a BaseException), and would allocate what a file's padding or replacement
  rules ask for.
- The same text always gives the same ids: truncation, padding and BPE dropout stored in the file
  are training settings, and are not applied.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnnsmith.errors import SourceError, TokenizerError
from mnnsmith.files import is_lfs_pointer, lfs_error, parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_JSON_CHARS = 512 << 20
_MAX_TWINS = 4
# Replacement rules may lengthen a text by this factor all together; real ones stay below 10.
_MAX_GROWTH = 256.0
_ENVELOPE_NOTE = "Is this the tokenizer.json of the model? Fetch it again if it is damaged."


@dataclass(frozen=True)
class AddedToken:
    """A token outside the learned vocabulary. special: left out of decoded text by default."""

    id: int
    text: str
    special: bool


class TextTokenizer:
    """A tokenizer out of the text of a `tokenizer.json`.  Safe to use from several threads.

    Raises TokenizerError when the text is not a tokenizer that can be used.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._spec = _parse(tokenizer_json)
        self._json = tokenizer_json
        self._tokenizer = _load(tokenizer_json)
        self._lock = threading.Lock()
        self._guarded: dict[frozenset[str], _Guarded] = {}
        self.added_tokens = self._read_added_tokens()
        self.special_ids = frozenset(token.id for token in self.added_tokens if token.special)

    def encode(
        self, text: str, *, add_special_tokens: bool = False, allow_special: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: let the tokenizer's post-processor add its own, such as a leading bos.
        allow_special: read the text of a special token as that token, not as plain text.
        """
        _check_text(text)
        special = [token.text for token in self.added_tokens if token.special]
        if not allow_special and any(token in text for token in special):
            return self._twin(special).encode(text, [(0, len(text))], add_special_tokens)
        with _library_errors("encode a text"):
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_guarded(
        self, text: str, as_text: Sequence[tuple[int, int]], control: Collection[str]
    ) -> list[int]:
        """Token ids of `text`, where some control tokens are only meant as text.

        as_text: ranges (start, end) of `text`; a control token that overlaps one is plain text.
        control: texts of the added tokens this holds for; others are tokens wherever they stand.

        Everything else is as in `encode(text, allow_special=True)`: the plain text around such a
        place is encoded in one piece, as if no such token existed.
        """
        if not as_text:
            return self.encode(text, allow_special=True)
        _check_text(text)
        return self._twin(control).encode(text, as_text)

    def _twin(self, control: Collection[str]) -> _Guarded:
        names = frozenset(token.text for token in self.added_tokens if token.text in control)
        with self._lock:
            if names not in self._guarded:
                if len(self._guarded) >= _MAX_TWINS:
                    self._guarded.clear()
                self._guarded[names] = _Guarded.build(self._json, self.added_tokens, names)
            return self._guarded[names]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; ids that the tokenizer does not know give no text.

        skip_special: leave special tokens out.
        """
        for id_ in ids:
            if not 0 <= id_ < 1 << 32:
                raise TokenizerError(f"{id_} is not a token id.")
        with _library_errors("decode token ids"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def token(self, id_: int) -> str | None:
        """The token as the vocabulary spells it, or None."""
        if not 0 <= id_ < 1 << 32:
            return None
        found = self._tokenizer.id_to_token(id_)
        return None if found is None else str(found)

    def id(self, token: str) -> int | None:
        """The id of a token spelled as in the vocabulary, or None."""
        _check_text(token)
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included.  A model may have more output rows."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def is_byte_level(self) -> bool:
        """Every token is a string of bytes, written in GPT-2's byte alphabet."""
        return [step.get("type") for step in self._decoder_steps] == ["ByteLevel"]

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """{token id: byte} for the byte tokens `<0x00>` ... of a byte-fallback tokenizer."""
        if not any(step.get("type") == "ByteFallback" for step in self._decoder_steps):
            return {}
        ids = {self.id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        return {id_: byte for id_, byte in ids.items() if id_ is not None}

    def control_texts(self, template_literals: str = "") -> tuple[str, ...]:
        """Texts of the tokens that steer the model: a user's text must not hold them as tokens.

        Special tokens, and the other added tokens that the chat template itself writes
        (`<think>`); a token of white space is ordinary text.
        template_literals: `ChatTemplate.literal_text`.
        """
        return tuple(
            token.text
            for token in self.added_tokens
            if token.special or (token.text in template_literals and not token.text.isspace())
        )

    @property
    def _decoder_steps(self) -> list[dict[str, Any]]:
        return list(_steps(self._spec.decoder, "decoders"))

    def _read_added_tokens(self) -> tuple[AddedToken, ...]:
        found = self._tokenizer.get_added_tokens_decoder()
        tokens = tuple(
            AddedToken(int(id_), str(token.content), bool(token.special))
            for id_, token in sorted(found.items())
        )
        real = {token.text: token.id for token in tokens}
        for text, id_ in self._spec.added_ids.items():
            if real.get(text, id_) != id_:
                raise TokenizerError(
                    f"tokenizer.json gives the added token {text!r} the id {id_}, but the "
                    f"tokenizers library gives it {real[text]}.",
                    "The ids of added tokens must follow those of the vocabulary without a gap.",
                )
        return tokens


@dataclass(frozen=True)
class _Spec:
    """What we read in the file ourselves."""

    decoder: Any
    added_ids: dict[str, int]


def _parse(tokenizer_json: str) -> _Spec:
    if is_lfs_pointer(tokenizer_json[:64].encode("utf-8", "replace")):
        error = lfs_error(Path("tokenizer.json"))
        raise TokenizerError(error.message, error.hint)
    if len(tokenizer_json) > MAX_JSON_CHARS:
        raise TokenizerError(f"tokenizer.json has {len(tokenizer_json)} characters, too many.")
    try:
        spec = parse_json(tokenizer_json, "tokenizer.json")
    except SourceError as error:
        raise TokenizerError(error.message, error.hint or _ENVELOPE_NOTE) from error
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise TokenizerError('tokenizer.json has no "model" object.', _ENVELOPE_NOTE)
    for part in ("normalizer", "decoder"):
        _check_growth(part, spec.get(part))
    ids: dict[str, int] = {}
    added = spec.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            ids[token["content"]] = token.get("id", -1)
    return _Spec(decoder=spec.get("decoder"), added_ids=ids)


def _steps(part: object, key: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or decoder, sequences within sequences flattened."""
    if depth > 16:
        raise TokenizerError(f'tokenizer.json nests its "{key}" too deeply.')
    if not isinstance(part, dict):
        return
    inner = part.get(key)
    if part.get("type") == "Sequence" and isinstance(inner, list):
        for step in inner:
            yield from _steps(step, key, depth + 1)
    else:
        yield part


def _check_growth(part: str, spec: object) -> None:
    """Refuse replacement rules that together lengthen a text without bound."""
    growth = 1.0
    for step in _steps(spec, f"{part}s"):
        content = step.get("content")
        if step.get("type") != "Replace" or not isinstance(content, str):
            continue
        pattern = step.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        # A regular expression may match the empty text between any two characters.
        matched = len(literal) if isinstance(literal, str) and literal else 0
        growth *= max(1.0, len(content) / matched if matched else len(content) + 1.0)
        if growth > _MAX_GROWTH:
            raise TokenizerError(
                f"The {part} of tokenizer.json makes a text more than {_MAX_GROWTH:g} times longer."
            )


def _load(tokenizer_json: str) -> Tokenizer:
    from tokenizers import Tokenizer

    with _library_errors("load tokenizer.json"):
        tokenizer = Tokenizer.from_str(tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
        return tokenizer


@contextmanager
def _library_errors(doing: str) -> Iterator[None]:
    """Turn whatever the Rust library raises into TokenizerError."""
    try:
        yield
    except BaseException as error:
        # The library's errors are plain `Exception`; a Rust panic is a BaseException whose class
        # cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(
                f"The tokenizer could not {doing}: {str(error)[:500]}.", _ENVELOPE_NOTE
            ) from error
        raise


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"The text has a lone surrogate at character {error.start}: it is not valid Unicode.",
            "It was probably read from bytes that are not UTF-8.",
        ) from error


def _stand_in() -> str:
    """A name for a control token that no one can type: 80 random bits as private-use characters."""
    return "".join(chr(0x100000 + secrets.randbelow(1 << 16) % 0xFFF0) for _ in range(5))


@dataclass(frozen=True)
class _Guarded:
    """A twin of the tokenizer in which control tokens have other, untypable names.

    Where a control token is meant, its stand-in is put into the text; its own text then means
    nothing.  The names change in the learned vocabulary, too: a Unigram model would find `<s>`
    there, and make it out of the three characters.  All ids stay as they are.
    """

    tokenizer: Tokenizer
    pattern: re.Pattern[str]
    stand_ins: dict[str, str]

    @classmethod
    def build(
        cls, tokenizer_json: str, added: Sequence[AddedToken], control: frozenset[str]
    ) -> _Guarded:
        spec = json.loads(tokenizer_json)
        stand_ins: dict[str, str] = {}
        for token in spec["added_tokens"]:
            # A token that must stand between non-word characters is left alone: its stand-in could
            # be put where the library would not see it.
            if token["content"] in control and not token["single_word"]:
                stand_ins[token["content"]] = token["content"] = _stand_in()
        _rename_learned(spec["model"], stand_ins)
        twin = _load(json.dumps(spec))
        for known in added:
            if twin.token_to_id(stand_ins.get(known.text, known.text)) != known.id:
                raise TokenizerError(
                    f"The tokenizer gives {known.text!r} another id once control tokens are "
                    "told from text.",
                    "Allow special tokens in the text, or take this token out of it.",
                )
        longest_first = sorted((token.text for token in added), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        return cls(twin, pattern, stand_ins)

    def encode(
        self, text: str, as_text: Sequence[tuple[int, int]], add_special_tokens: bool = False
    ) -> list[int]:
        guarded = sorted(as_text)
        pieces: list[str] = []
        done = scan = span = 0
        while match := self.pattern.search(text, scan):
            start, end = match.span()
            while span < len(guarded) and guarded[span][1] <= start:
                span += 1
            if span < len(guarded) and guarded[span][0] < end:
                scan = start + 1
                continue
            pieces += (text[done:start], self.stand_ins.get(match[0], match[0]))
            done = scan = end
        pieces.append(text[done:])
        with _library_errors("encode a text"):
            joined = "".join(pieces)
            return list(self.tokenizer.encode(joined, add_special_tokens=add_special_tokens).ids)


def _rename_learned(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens in a learned vocabulary, in place, so that no text gives them."""
    vocab = model.get("vocab")
    if isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    elif isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): id_ for piece, id_ in vocab.items()}
    for name in ("unk_token", "unk"):
        if model.get(name) in names:
            model[name] = names[model[name]]
    if model.get("merges"):
        # A merge that makes such a token, or takes it, cannot happen any more.
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [
            pair for pair in pairs if not names.keys() & {pair[0], pair[1], pair[0] + pair[1]}
        ]
