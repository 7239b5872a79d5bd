"""Tokens to text while they arrive: never half a character, never the start of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from mnnsmith.mnn.mtok.vocabulary import byte_characters
from mnnsmith.text.tokenizer import TextTokenizer


class Detokenizer:
    """Turns token ids into text, one at a time.

    The pieces joined, with `flush()` last, are the text of all ids: what `TextTokenizer.decode`
    gives, but for one case.  In a byte-fallback tokenizer a run of byte tokens that is not valid
    UTF-8 is decoded by the library to nothing but U+FFFD; here its valid characters are kept, since
    they are on the screen already.

    skip_special: leave special tokens out; keep: ids of special tokens that stay nevertheless.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        skip_special: bool = True,
        keep: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids.difference(keep) if skip_special else frozenset()
        self._byte_level = tokenizer.is_byte_level
        self._added = {token.id: token.text for token in tokenizer.added_tokens}
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._shown: list[int] = []
        self._fresh: list[int] = []
        self._in_run = False
        self._at_start = True

    def push(self, id_: int) -> str:
        """The text that `id_` completes; "" when it ends inside a character."""
        if id_ in self._skipped:
            return ""
        if self._byte_level:
            return self._bytes.decode(self._token_bytes(id_))
        at_start, self._at_start = self._at_start, False
        byte = self._tokenizer.byte_ids.get(id_)
        if byte is None:
            return self._push_text(id_)
        if not self._in_run and self._fresh:
            self._shown, self._fresh = self._fresh, []
        self._in_run = True
        self._fresh.append(id_)
        if at_start and not self._decode([id_]):
            # A decoder that strips the leading space of a text takes one written as a byte, too.
            return ""
        return self._bytes.decode(bytes((byte,)))

    def flush(self) -> str:
        """The end: a character that is still incomplete becomes U+FFFD."""
        return self._bytes.decode(b"", final=True)

    def _push_text(self, id_: int) -> str:
        """Decode the token behind those before it.

        A decoder treats the start of a text specially (it strips a leading space), so the token is
        decoded together with the ones before it, and their text is cut off.
        """
        ended = self.flush() if self._in_run else ""
        self._in_run = False
        before = self._shown + self._fresh
        text = self._decode([*before, id_])
        known = self._decode(before) if before else ""
        self._shown, self._fresh = self._fresh, [id_]
        return ended + text[len(known) :]

    def _decode(self, ids: Sequence[int]) -> str:
        # What is to be skipped has been left out already.
        return self._tokenizer.decode(ids, skip_special=False)

    def _token_bytes(self, id_: int) -> bytes:
        token = self._added.get(id_)
        if token is None:
            token = self._tokenizer.token(id_)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:
            # The library takes a token with a character outside the alphabet as it is.
            return token.encode("utf-8")


def byte_alphabet() -> dict[str, int]:
    """{character: byte} of GPT-2's byte alphabet."""
    return {character: byte for byte, character in byte_characters().items()}


_BYTE_OF = byte_alphabet()


class StopStrings:
    """Ends a text at the first of several stop strings, which themselves are not shown.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that can be shown; after `found` is set there is no more."""
        if self.found is not None:
            return ""
        self._held += text
        places = [(self._held.find(stop), -len(stop), stop) for stop in self._stops]
        hits = [place for place in places if place[0] >= 0]
        if hits:
            # The earliest; of two at the same place, the longer.
            at, _, self.found = min(hits)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """The text that was held back, at the end of the answer."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, all of it excepted."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
