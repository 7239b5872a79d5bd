"""Writing `.mtok`: what is written, what is refused by name, what is damage.  No engine needed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokenizer_samples as samples
from mnnsmith.errors import BundleError, MissingResourceError, TokenizerError
from mnnsmith.mnn.mtok import MtokReport, form, write_mtok
from mnnsmith.mnn.mtok.code_points import FORCED_TO_SPACE, table_steps
from mnnsmith.mnn.mtok.pattern_tree import parse
from mnnsmith.mnn.mtok.patterns import engine_pattern
from mnnsmith.mnn.mtok.vocabulary import byte_characters
from mnnsmith.mnn.mtok_reader import parse_mtok, read_mtok
from mnnsmith.sources.checkpoint import TokenizerFiles

Spec = dict[str, Any]


def byte_level_spec() -> Spec:
    """A whole tokenizer.json: bytes, two merges, two added tokens."""
    vocab = {char: index for index, char in enumerate(byte_characters().values())}
    vocab |= {"th": 256, "the": 257, "<end>": 258}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": 258, "content": "<end>", "special": True, **flags},
            {"id": 259, "content": "<tool>", "special": False, **flags},
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["t h", ["th", "e"]]},
    }


def write(spec: Spec, path: Path, **files: Any) -> MtokReport:
    return write_mtok(TokenizerFiles(json.dumps(spec), **files), path)


def changed(change: Callable[[Spec], Any]) -> Spec:
    spec = byte_level_spec()
    change(spec)
    return spec


# --- what is written --------------------------------------------------------------------------


def test_the_file_holds_what_was_given(tmp_path: Path) -> None:
    path = tmp_path / "t.mtok"
    report = write(
        byte_level_spec(), path, chat_template="{{ x }}é", bos_token="<b>", eos_token="<end>",
        stop_ids=(258, 3),
    )  # fmt: skip
    mtok = read_mtok(path)
    assert (mtok.stop_ids, mtok.prefix_ids, mtok.special_ids) == ((258, 3), (), ())
    assert (mtok.chat_template, mtok.bos_token, mtok.eos_token) == ("{{ x }}é", "<b>", "<end>")
    assert mtok.normalizer is None
    assert mtok.pre_tokenizer == form.PreTokenizerSequence((form.ByteLevel(True),))
    assert isinstance(mtok.model, form.Bpe)
    vocab = dict(mtok.model.vocab)
    assert (vocab[b"the"], vocab[b"<tool>"], vocab["Ġ".encode()]) == (257, 259, 220)
    t, h, e = vocab[b"t"], vocab[b"h"], vocab[b"e"]
    assert mtok.model.merges == ((t, h, 0), (256, e, 1))
    assert mtok.added_tokens == (
        form.AddedToken(258, "<end>", True, False, False),
        form.AddedToken(259, "<tool>", False, False, False),
    )
    assert report == MtokReport(260, 2, (), (258, 3), (), (), path.stat().st_size)


def test_the_bytes_are_those_of_the_documentation(tmp_path: Path) -> None:
    """The head and the tail by hand; the reader shares no byte layout with the writer either."""
    path = tmp_path / "t.mtok"
    write(byte_level_spec(), path, stop_ids=(258,), eos_token="<end>")
    data = path.read_bytes()
    head = b"430 4\n0 1 0\n258\n" + b"\x00" + struct.pack("<BI", 6, 1) + b"\x01\x01"
    assert data.startswith(head + struct.pack("<BIBBI", 0, 260, 0, 0, 2))
    tail = struct.pack("<IBBBH", 259, 0, 0, 0, 6) + b"<tool>"
    assert data.endswith(tail + struct.pack("<IH", 0, 5) + b"<end>" + b"\x00" + b"\x00\x00")
    first = struct.pack("<H", 1) + b"!" + struct.pack("<I", 0)
    assert data[len(head) + 11 :].startswith(first)


@pytest.mark.parametrize("name", list(samples.MAKERS))
def test_every_sample_is_read_back_and_the_same_each_time(name: str, tmp_path: Path) -> None:
    text = samples.sample(name).to_str()
    report = write_mtok(TokenizerFiles(text), tmp_path / "a")
    write_mtok(TokenizerFiles(text), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    mtok = read_mtok(tmp_path / "a")
    assert len(mtok.model.vocab) == report.vocab_size == samples.sample(name).get_vocab_size()
    assert len(mtok.added_tokens) == report.added_tokens


def test_a_merge_given_twice_has_its_last_rank(tmp_path: Path) -> None:
    spec = changed(lambda s: s["model"].update(merges=["t h", "th e", "t h"]))
    write(spec, tmp_path / "t")
    model = read_mtok(tmp_path / "t").model
    assert isinstance(model, form.Bpe) and sorted(r for _, _, r in model.merges) == [1, 2]


def test_added_tokens_are_spelled_so_that_they_are_shown_right(tmp_path: Path) -> None:
    """The engine shows U+2581 as a space, and é as a byte; what is part of a merge must stay."""
    spec = byte_level_spec()
    spec["model"]["vocab"]["<｜a▁b｜>"] = 259
    spec["added_tokens"][1] |= {"id": 259, "content": "<｜a▁b｜>"}
    for number, content in ((260, "x é"), (261, "日本"), (262, "the")):
        spec["added_tokens"].append({**spec["added_tokens"][1], "id": number, "content": content})
    spec["added_tokens"][-1]["id"] = 257
    report = write(spec, tmp_path / "t")
    texts = {row[1]: row[0].decode() for row in read_mtok(tmp_path / "t").model.vocab}
    characters = byte_characters()
    assert texts[259] == "".join(characters[b] for b in "<｜a▁b｜>".encode())
    assert texts[260] == "".join(characters[b] for b in "x é".encode())
    assert (texts[261], texts[257]) == ("日本", "the")
    assert report.differences == ()


def test_control_characters_live_through_a_table() -> None:
    """What the engine does with the steps, in a few lines, against the mapping itself."""
    mapping = {"é": "e", "\u200d": "", "\x05": "V"}
    steps = table_steps(lambda char: mapping.get(char, char))
    text = "aéb\u200dc\x05d\x06e─━└╬f\u2066\ufeffg\u00adh\n"
    assert engine_normalize(steps, text) == "aebcVd\x06e─━└╬f\u2066\ufeffg\u00adh\n"
    assert engine_normalize(steps[-1:], "a") == "a"
    assert table_steps(lambda char: char) == []


def engine_normalize(steps: list[form.Normalizer], text: str) -> str:
    for step in steps:
        if isinstance(step, form.Replace):
            text = text.replace(step.pattern, step.content)
        elif isinstance(step, form.CodePointTable):
            table = dict(step.entries)
            text = "".join(" " if ord(c) in FORCED_TO_SPACE else table.get(ord(c), c) for c in text)
        else:
            raise TypeError(step)
    return text


# --- patterns -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [samples.GPT2, samples.LLAMA3, samples.QWEN2])
def test_patterns_that_the_engine_reads_right_are_kept(pattern: str) -> None:
    assert engine_pattern(parse(pattern)) == (pattern, False)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\s+$", r"[\s]+(?![^\x0A])"),
        (r"a(?=b)", r"a(?!(?!b))"),
        (r"[^\s\p{L}]++a?", r"[^\p{L}\s]+a?"),
        (r"[^\p{L}]?+\p{L}+", r"[^\p{L}]?[\p{L}]+"),
        (r"(?i)it's", r"[Ii][Tt]\'[Ss]"),
        (r"[!-#\x41\t]", r"[\x09\!\"\#A]"),
        (r"\P{^L}{2,}", r"[\p{L}]{2,}"),
        (r"[a-c]|.{2}$", r"[abc]|[^\x0A]{2}(?![^\x0A])"),
    ],
)
def test_patterns_are_rewritten_for_the_narrow_matcher(pattern: str, expected: str) -> None:
    assert engine_pattern(parse(pattern)) == (expected, False)


def test_patterns_beyond_ascii_are_spelled_out() -> None:
    assert engine_pattern(parse("[一-龥]+")) == ("[一-龥]+", True)
    text, wide = engine_pattern(parse(r"\d"))
    assert wide and text.startswith("[0123456789٠-٩")
    assert engine_pattern(parse("(?i)ſ")) == ("[Ssſ]", True)
    text, wide = engine_pattern(parse(r"[^é\x{10000}]"))
    assert (text, wide) == ("[^é𐀀]", True)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"a*", "empty text"),
        (r"(?<=a)b", r"the group \(\?<="),
        (r"a+?b", "lazy"),
        (r"a++a", "possessive"),
        (r"(a)\1", r"the escape \\1"),
        (r"\bword", r"the escape \\b"),
        (r"^a", r"'\^'"),
        (r"[a[b]]", "a class within"),
        (r"[a&&b]", "a class within"),
        (r"\p{Nope}", "the property 'Nope'"),
        (r"(a|ab)c", "a group that something follows"),
        (r"(a", "unclosed"),
        (r"a)", r"unopened"),
        (r"a{3}{4}", "repeated quantifier"),
        (r"a{5000}", "repetition outside"),
        (r"[b-a]", "odd range"),
        (r"[a", "unfinished"),
        ("(" * 40 + "a" + ")" * 40, "deep"),
        (r"\x{110000}", "hexadecimal"),
        (r"\xff", "hexadecimal"),
        ("a" * 20001, "too long"),
        ("|".join(rf"[\x{{{0x3041 + n:x}}}-ゟ]" for n in range(30)), "more than 24"),
    ],
)
def test_patterns_that_would_be_read_otherwise_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(TokenizerError, match=reason):
        engine_pattern(parse(pattern))


# --- refused by name ------------------------------------------------------------------------------


def _component(key: str, **value: Any) -> Callable[[Spec], None]:
    return lambda spec: spec.update({key: value})


def _template(*single: str) -> Callable[[Spec], None]:
    parts: list[Spec] = [
        {"Sequence": {"id": "A"}} if part == "$A" else {"SpecialToken": {"id": part}}
        for part in single
    ]
    tokens = {"<end>": {"id": "<end>", "ids": [258], "tokens": ["<end>"]}}
    return _component(
        "post_processor", type="TemplateProcessing", single=parts, special_tokens=tokens
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_component("normalizer", type="Precompiled"), "the normalizer Precompiled"),
        (_component("normalizer", type="ByteLevel"), "the normalizer ByteLevel"),
        (_component("normalizer", type="Replace", pattern={"Regex": "a+"}, content=""), "'a\\+'"),
        (_component("pre_tokenizer", type="UnicodeScripts"), "UnicodeScripts"),
        (_component("pre_tokenizer", type="Whitespace"), "Whitespace"),
        (_component("decoder", type="CTC"), "the decoder CTC"),
        (_component("decoder", type="BPEDecoder"), "the decoder BPEDecoder"),
        (lambda s: s.update(decoder=None), "without a decoder"),
        (_component("model", type="WordLevel", vocab={"a": 0}), "the model WordLevel"),
        (_component("post_processor", type="BertProcessing"), "BertProcessing"),
        (_template("$A", "<end>"), "behind the text"),
        (lambda s: s["added_tokens"][0].update(single_word=True), "single_word"),
        (lambda s: s["model"].update(continuing_subword_prefix="##"), "continuing_subword_prefix"),
        (lambda s: s["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix"),
        (
            lambda s: s["pre_tokenizer"].update(type="Punctuation", behavior="MergedWithPrevious")
            or s["model"].update(unk_token="t"),
            "an unk_token",
        ),
        (
            lambda s: s.update(
                pre_tokenizer={"type": "Digits"}, decoder={"type": "Fuse"}
            ) or s["model"].update(byte_fallback=True),
            "without the token <0x00>",
        ),
    ],
)  # fmt: skip
def test_what_the_format_cannot_express_is_refused_by_name(
    change: Callable[[Spec], Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerError, match=name) as caught:
        write(changed(change), tmp_path / "t")
    assert "tokenizer.json" in str(caught.value)
    assert not (tmp_path / "t").exists()


# --- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model"), "model is missing"),
        (lambda s: s.update(model=[]), "model must be an object, not a list"),
        (lambda s: s["model"].update(vocab={}), "vocab is empty"),
        (lambda s: s["model"]["vocab"].update(x=-1), "must be a token id"),
        (lambda s: s["model"]["vocab"].update(x=True), "must be a token id"),
        (lambda s: s["model"]["vocab"].update(x=1 << 40), "must be a token id"),
        (lambda s: s["model"]["vocab"].update(x=3), "gives id 3 to"),
        (lambda s: s["model"]["vocab"].update(x=1 << 30), "the highest id is"),
        (lambda s: s["model"]["merges"].append("t zz"), "names 'zz'"),
        (lambda s: s["model"]["merges"].append("t t"), "names 'tt'"),
        (lambda s: s["model"]["merges"].append("t"), "must be two tokens"),
        (lambda s: s["model"]["merges"].append([1, 2]), "must be two tokens"),
        (lambda s: s["model"].update(merges="t h"), "merges must be a list"),
        (lambda s: s["added_tokens"][1].update(id=300), "has id 300, but .* gives it 259"),
        (lambda s: s["added_tokens"][0].update(id="258"), "must be a token id"),
        (
            lambda s: s["model"]["vocab"].update(the=259) or s["model"].update(merges=[]),
            "have the same id 259",
        ),
        (lambda s: s["added_tokens"][0].update(content=""), "content is empty"),
        (lambda s: s["added_tokens"].append(s["added_tokens"][1]), "twice|gives it"),
        (lambda s: s["added_tokens"].append("x"), r"added_tokens\[2\] must be an object"),
        (lambda s: s.update(pre_tokenizer={"type": 5}), "type must be a string"),
        (lambda s: s["pre_tokenizer"].update(use_regex="yes"), "must be true or false"),
        (lambda s: s["model"]["vocab"].update({"\ud800": 300}), "surrogate"),
        (lambda s: s["added_tokens"][1].update(content="x" * 70000), "70000 bytes"),
        (_template("<end>"), "must hold the text"),
        (_template("<no>", "$A"), "no ids for '<no>'"),
    ],
)
def test_damage_is_told(change: Callable[[Spec], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=message):
        write(changed(change), tmp_path / "t")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("{", "not valid JSON"),
        ("[]", "must be an object"),
        ("version https://git-lfs.github.com/spec/v1", "not valid JSON"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 100 + "1" + "}" * 100, "levels deep"),
        ('{"model":{"type":"BPE","vocab":{"a":1e999},"merges":[]}}', "without a decoder"),
    ],
)
def test_files_that_are_no_tokenizer(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=message):
        write_mtok(TokenizerFiles(text), tmp_path / "t")


def test_ids_outside_the_vocabulary_are_told(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="The id 260"):
        write(byte_level_spec(), tmp_path / "t", stop_ids=(260,))
    with pytest.raises(TokenizerError, match="surrogate"):
        write(byte_level_spec(), tmp_path / "t", chat_template="\udfff")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingResourceError, match="cannot write"):
        write(byte_level_spec(), tmp_path / "no" / "t")


# --- the reader -------------------------------------------------------------------------------


def _bytes(tmp_path: Path) -> bytes:
    write(byte_level_spec(), tmp_path / "t", stop_ids=(258,), chat_template="é")
    return (tmp_path / "t").read_bytes()


def test_every_cut_file_is_damaged(tmp_path: Path) -> None:
    data = _bytes(tmp_path)
    for size in (*range(60), *range(60, len(data), 7), len(data) - 1):
        with pytest.raises(BundleError):
            parse_mtok(data[:size])
    with pytest.raises(BundleError, match="1 bytes too many"):
        parse_mtok(data + b"x")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"430 4\n", b"430 3\n", "does not start"),
        (b"0 1 0\n258", b"0 1 0\n260", "id 260 in the header"),
        (b"0 1 0\n258", b"0 2 0\n258", "counts"),
        (b"0 1 0\n258", b"0 1 0\n-58", "plain numbers"),
        (b"\x00\x06\x01\x00\x00\x00\x01\x01", b"\x09\x06\x01\x00\x00\x00\x01\x01", "normalizer 9"),
        (b"\x00\x06\x01\x00\x00\x00\x01", b"\x00\x06\xff\xff\xff\xff\x01", "cannot follow"),
        (b"\x00\x06\x01\x00\x00\x00\x01\x01", b"\x00\x06\x01\x00\x00\x00\x01\x02", "flag of 2"),
        (b"\x03\x00the\x01\x01", b"\x03\x00thz\x01\x01", "a merge of"),
        (b"\x03\x00the\x01\x01", b"\x03\x00aaa\x01\x01", "not sorted"),
        (b"\x03\x00the\x01\x01", b"\x03\x00the\x02\x01", "holes or repeat"),
        (b"\x06\x00<tool>\x02", b"\x06\x00<too\xff>\x02", "not UTF-8"),
    ],
)
def test_damaged_bytes_are_told(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    data = _bytes(tmp_path)
    assert data.count(old) == 1 or old == b"430 4\n"
    with pytest.raises(BundleError, match=message):
        parse_mtok(data.replace(old, new, 1))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot read"):
        read_mtok(tmp_path / "none")
