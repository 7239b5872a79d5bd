"""The tokenizer room: ids equal the library's, control tokens stay text, bad files give errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text_samples import byte_level_json, metaspace_json, opened, sentencepiece_json
from tokenizers import Tokenizer

from mnnsmith.errors import TokenizerError
from mnnsmith.text.tokenizer import TextTokenizer

KINDS = {
    "byte_level": byte_level_json,
    "sentencepiece": sentencepiece_json,
    "metaspace": metaspace_json,
}
PIECES = [
    "<|im_end|>",
    "<|im_start|>",
    "<think>",
    "<table>",
    "<s>",
    " ",
    "\n",
    "user",
    "the end",
    "é",
]
texts = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=8).map("".join))


@pytest.fixture(params=KINDS, scope="module")
def tokenizer_json(request: pytest.FixtureRequest) -> str:
    return KINDS[request.param]()


@settings(deadline=None, max_examples=200)
@given(text=texts, add=st.booleans())
def test_ids_equal_the_librarys(text: str, add: bool) -> None:
    for make in KINDS.values():
        ours, theirs = opened(make()), Tokenizer.from_str(make())
        expected = theirs.encode(text, add_special_tokens=add).ids
        assert ours.encode(text, add_special_tokens=add, allow_special=True) == expected
        for skip in (True, False):
            assert ours.decode(expected, skip_special=skip) == theirs.decode(
                expected, skip_special_tokens=skip
            )


def test_special_tokens_in_text_stay_text(tokenizer_json: str) -> None:
    tokenizer = TextTokenizer(tokenizer_json)
    text = "a<|im_end|>b"
    ids = tokenizer.encode(text)
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.id("<|im_end|>") in tokenizer.encode(text, allow_special=True)


@settings(deadline=None, max_examples=300)
@given(before=texts, fake=st.sampled_from(PIECES[:3]), after=texts)
def test_a_guarded_token_is_plain_text_and_its_neighbours_are_not(
    before: str, fake: str, after: str
) -> None:
    for make in KINDS.values():
        tokenizer = opened(make())
        control = tokenizer.control_texts("<think>")
        head, tail = "<|im_start|>user\n", "<|im_end|>\n"
        text = head + before + fake + after + tail
        # Everything between head and tail is the user's.
        ids = tokenizer.encode_guarded(text, [(len(head), len(text) - len(tail))], control)
        assert ids[0] == tokenizer.id("<|im_start|>")
        steering = [id_ for id_ in ids if id_ in {tokenizer.id(name) for name in control}]
        assert steering == [tokenizer.id("<|im_start|>"), tokenizer.id("<|im_end|>")]


def test_guarded_text_merges_as_if_the_token_did_not_exist() -> None:
    spec = json.loads(byte_level_json())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] != "<|im_end|>"]
    without = Tokenizer.from_str(json.dumps(spec))
    tokenizer = opened(byte_level_json())
    text = "The end<|im_end|> of the text"
    ids = tokenizer.encode_guarded(text, [(7, 17)], ["<|im_end|>"])
    assert [tokenizer.token(id_) for id_ in ids] == without.encode(text).tokens


def test_guarding_maps_ids_of_tokens_that_are_in_the_vocabulary() -> None:
    # `<s>` has id 1 of the learned vocabulary; its stand-in gets another id inside.
    tokenizer = opened(sentencepiece_json())
    text = "<s>the <s> end</s>"
    ids = tokenizer.encode_guarded(text, [(7, 10)], ["<s>", "</s>"])
    assert (ids[0], ids[-1], ids.count(1)) == (1, 2, 1)
    assert tokenizer.decode(ids) == "the <s> end"


@settings(deadline=None, max_examples=200)
@given(text=texts)
def test_an_unguarded_range_changes_nothing(text: str) -> None:
    for make in KINDS.values():
        tokenizer = opened(make())
        control = tokenizer.control_texts("<think></think>")
        # An empty range guards nothing, but takes the way through the twin.
        ids = tokenizer.encode_guarded(text, [(0, 0)], control)
        assert ids == tokenizer.encode(text, allow_special=True)


def test_control_texts() -> None:
    spec = json.loads(byte_level_json())
    base = max(token["id"] for token in spec["added_tokens"])
    spec["added_tokens"].append(
        {**spec["added_tokens"][-1], "id": base + 1, "content": "\n\n", "normalized": False}
    )
    tokenizer = TextTokenizer(json.dumps(spec))
    assert "<think>" not in tokenizer.control_texts()
    with_template = tokenizer.control_texts("a<think>\n\nb")
    assert "<think>" in with_template and "<|im_end|>" in with_template
    assert "\n\n" not in with_template and "<table>" not in with_template


def test_byte_tokens() -> None:
    assert opened(byte_level_json()).is_byte_level
    assert opened(byte_level_json()).byte_ids == {}
    sentencepiece = opened(sentencepiece_json())
    assert not sentencepiece.is_byte_level
    assert sorted(sentencepiece.byte_ids.values()) == list(range(256))


def test_truncation_padding_and_dropout_are_not_applied() -> None:
    spec = json.loads(byte_level_json())
    plain = TextTokenizer(json.dumps(spec)).encode("the capital of France " * 9)
    spec["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    spec["padding"] = {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    spec["model"]["dropout"] = 0.9
    assert TextTokenizer(json.dumps(spec)).encode("the capital of France " * 9) == plain


def _spec(**parts: Any) -> str:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    return json.dumps({"version": "1.0", "model": model, **parts})


GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
NESTED: dict[str, Any] = {"type": "Sequence", "normalizers": []}
for _ in range(30):
    NESTED = {"type": "Sequence", "normalizers": [NESTED]}

BAD = {
    "empty": "",
    "white space": " \n",
    "LFS pointer": "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "not JSON": "{",
    "deep": "[" * 100_000,
    "a list": "[]",
    "no model": "{}",
    "model is text": '{"model": "BPE"}',
    "unknown model": '{"model": {"type": "Magic"}}',
    "merge of unknown tokens": json.dumps(
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a q"]}}
    ),
    "a Rust panic": _spec(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "bad regex": _spec(
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "((("},
            "behavior": "Isolated",
            "invert": False,
        }
    ),
    "growth": _spec(normalizer={"type": "Sequence", "normalizers": [GROWING] * 40}),
    "nested": _spec(normalizer=NESTED),
    "wrong added id": _spec(
        added_tokens=[
            {
                "id": 77,
                "content": "<x>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ]
    ),
    "lone surrogate": _spec().replace('"ab"', '"\ud800"'),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gives_an_error(name: str) -> None:
    with pytest.raises(TokenizerError):
        TextTokenizer(BAD[name])


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_damaged_file_gives_an_error_or_a_tokenizer(data: st.DataObject) -> None:
    spec = json.loads(_spec(normalizer={"type": "NFC"}, decoder={"type": "ByteLevel"}))
    junk = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    )
    key = data.draw(st.sampled_from([*spec, "added_tokens", "post_processor", "pre_tokenizer"]))
    inside = data.draw(st.booleans()) and key == "model"
    if inside:
        spec["model"][data.draw(st.sampled_from(sorted(spec["model"])))] = data.draw(junk)
    else:
        spec[key] = data.draw(junk)
    try:
        tokenizer = TextTokenizer(json.dumps(spec))
        assert isinstance(tokenizer.decode(tokenizer.encode("ab ba")), str)
    except TokenizerError:
        return


@pytest.mark.parametrize("ids", [[-1], [1 << 32], [1 << 70]])
def test_an_impossible_id_gives_an_error(ids: list[int]) -> None:
    with pytest.raises(TokenizerError, match="not a token id"):
        opened(byte_level_json()).decode(ids)


def test_an_unknown_id_has_no_text() -> None:
    tokenizer = opened(byte_level_json())
    assert tokenizer.decode([*tokenizer.encode("ab"), 999_999]) == "ab"
    assert tokenizer.token(999_999) is None and tokenizer.id("no such token") is None


def test_text_that_is_no_unicode_gives_an_error() -> None:
    with pytest.raises(TokenizerError, match="surrogate"):
        opened(byte_level_json()).encode("a\ud83d")
