"""Streaming: the pieces joined are the whole text, and no piece breaks a character or a stop."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text_samples import byte_level_json, metaspace_json, opened, sentencepiece_json
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece

from mnnsmith.text.stream import Detokenizer, StopStrings
from mnnsmith.text.tokenizer import TextTokenizer

KINDS = {
    "byte_level": byte_level_json,
    "sentencepiece": sentencepiece_json,
    "metaspace": metaspace_json,
}


def stream(tokenizer: TextTokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.flush()]


@settings(deadline=None, max_examples=200)
@given(text=st.text(), more=st.text(), skip=st.booleans())
def test_pieces_joined_are_the_text(text: str, more: str, skip: bool) -> None:
    for make in KINDS.values():
        tokenizer = opened(make())
        end = tokenizer.id("<|im_end|>")
        assert end is not None
        ids = [*tokenizer.encode(text), end, *tokenizer.encode(more)]
        pieces = stream(tokenizer, ids, skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip)
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text + more


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_ids_of_a_byte_level_tokenizer(data: st.DataObject) -> None:
    tokenizer = opened(byte_level_json())
    any_id = st.integers(0, tokenizer.vocab_size + 3)
    ids = data.draw(st.lists(any_id, max_size=30))
    # Bytes that are no UTF-8 become U+FFFD at the same places as in the library.
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_ids_of_a_byte_fallback_tokenizer(data: st.DataObject) -> None:
    tokenizer = opened(sentencepiece_json())
    byte_of = tokenizer.byte_ids
    others = [id_ for id_ in range(tokenizer.vocab_size) if id_ not in byte_of]
    ids = data.draw(st.lists(st.sampled_from(others) | st.sampled_from([*byte_of]), max_size=30))
    found = "".join(stream(tokenizer, ids))
    expected = tokenizer.decode(ids)
    if "\ufffd" not in expected:
        assert found == expected
    else:
        # The library gives up a whole run for one bad byte; the text outside the runs is the same.
        assert "\ufffd" in found
        assert len(found) <= len(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_emoji_of_several_tokens_comes_whole(kind: str) -> None:
    tokenizer = opened(KINDS[kind]())
    text = "Hi 🤷🏽 👩‍👩‍👧 東"
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert len(ids) > len(text), "the sample tokenizer must split the emoji"
    assert "".join(pieces) == text
    assert "🤷" in pieces and "東" in pieces


def test_a_character_cut_short_becomes_the_replacement() -> None:
    for make in KINDS.values():
        tokenizer = opened(make())
        ids = tokenizer.encode("a東")[:-1]
        assert stream(tokenizer, ids)[-1] == "\ufffd"
        assert "".join(stream(tokenizer, ids)).rstrip("\ufffd") == "a"


def test_a_valid_character_before_a_cut_one_is_kept() -> None:
    tokenizer = opened(sentencepiece_json())
    ids = tokenizer.encode("a東東")[:-1]
    assert "".join(stream(tokenizer, ids)) == "a東\ufffd"


def test_kept_special_tokens() -> None:
    tokenizer = opened(byte_level_json())
    start, end = tokenizer.id("<|im_start|>"), tokenizer.id("<|im_end|>")
    assert start is not None and end is not None
    detokenizer = Detokenizer(tokenizer, keep=[start])
    assert detokenizer.push(start) + detokenizer.push(end) == "<|im_start|>"


def test_a_decoder_that_joins_words() -> None:
    vocab = {"[UNK]": 0, "the": 1, "cap": 2, "##ital": 3, ".": 4}
    raw = Tokenizer(WordPiece(vocab, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    tokenizer = TextTokenizer(raw.to_str())
    ids = [1, 2, 3, 1, 4, 1]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "the capital the. the"


def _reference(text: str, stops: list[str]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


alphabet = st.text(alphabet="ab\n", max_size=12)


@settings(deadline=None, max_examples=500)
@given(
    pieces=st.lists(alphabet, max_size=8), stops=st.lists(st.text("ab\n", min_size=1), max_size=3)
)
def test_stop_strings(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        # What is shown early never has to be taken back.
        assert _reference("".join(pieces), stops).startswith(shown)
    assert (matcher.found is not None) == any(stop in "".join(pieces) for stop in stops)
    assert shown + matcher.flush() == _reference("".join(pieces), stops)


def test_text_that_cannot_be_a_stop_is_shown_at_once() -> None:
    matcher = StopStrings(["\nUser:"])
    assert matcher.push("Hello\nUs") == "Hello"
    assert matcher.push("A") == "\nUsA"
    assert matcher.push("\nUser: hi") == ""
    assert matcher.found == "\nUser:"
    assert matcher.push("more") == matcher.flush() == ""
