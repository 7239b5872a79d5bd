"""Single components of a tokenizer.json in the engine, against the library.

Each case puts one component into a trained byte-level tokenizer.  The texts leave out the few that
the engine cuts otherwise for reasons of its own, which `test_mtok_engine` counts.
"""

from __future__ import annotations

import json
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

import tokenizer_samples as samples
from engine_tokenizer import EngineTokens, run_engine, write_model
from mnnsmith.mnn.mtok import MtokReport, write_mtok
from mnnsmith.mnn.mtok.prefix import writes_bos_first
from mnnsmith.mnn.mtok.vocabulary import byte_characters
from mnnsmith.sources.checkpoint import TokenizerFiles
from test_mtok_engine import far_away, heap_of_marks, new_character, odd_space

pytestmark = pytest.mark.engine

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITS: dict[str, Any] = {
    "removed": pre_tokenizers.Split(Regex(r"\s+"), "removed"),
    "removed, inverted": pre_tokenizers.Split(Regex(r"\p{L}+"), "removed", invert=True),
    "isolated word": pre_tokenizers.Split("the", "isolated"),
    "contiguous": pre_tokenizers.Split(Regex(r"\p{N}"), "contiguous"),
    "merged with previous": pre_tokenizers.Split(" ", "merged_with_previous"),
    "merged with next": pre_tokenizers.Split(Regex("[.,;]"), "merged_with_next"),
    "merged runs": pre_tokenizers.Split(Regex(r"\s+"), "merged_with_next"),
    "end of line": pre_tokenizers.Split(Regex(r"\s+$"), "isolated"),
    "lookahead": pre_tokenizers.Split(Regex(r"\p{L}(?=\p{N})"), "isolated"),
    "case": pre_tokenizers.Split(Regex(r"\p{Lu}\p{Ll}*|\d+|\w"), "isolated"),
    "script": pre_tokenizers.Split(Regex(r"[\p{Han}\x{3040}-\u30ff]+"), "isolated"),
    "ignoring case": pre_tokenizers.Split(Regex(r"(?i)the|[k-s]+é?"), "isolated"),
    "class of all sorts": pre_tokenizers.Split(Regex(r"[\-\]a-f\^_!-/é\r\n]+"), "isolated"),
    "punctuation": pre_tokenizers.Punctuation("isolated"),
    "runs of punctuation": pre_tokenizers.Punctuation("contiguous"),
    "white space": pre_tokenizers.WhitespaceSplit(),
    "delimiter": pre_tokenizers.CharDelimiterSplit("_"),
    "digits": pre_tokenizers.Digits(individual_digits=False),
}
NORMALIZERS: dict[str, Any] = {
    "lowercase": normalizers.Lowercase(),
    "strip accents": normalizers.StripAccents(),
    "accents of anything": normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    ),
    "nfc": normalizers.NFC(),
    "nfd": normalizers.NFD(),
    "nfkc": normalizers.NFKC(),
    "nfkd": normalizers.NFKD(),
    "nmt": normalizers.Nmt(),
    "bert": normalizers.BertNormalizer(),
    "bert, cased": normalizers.BertNormalizer(strip_accents=False, lowercase=False),
    "strip": normalizers.Strip(),
    "replace": normalizers.Sequence(
        [normalizers.Replace("``", '"'), normalizers.Replace(Regex(" {2,}"), " ")]
    ),
    "prepend": normalizers.Prepend("_"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "model"
    write_model(folder)
    return folder


def _marker(text: str) -> bool:
    """Control characters by which the engine's matcher stands for a class of others."""
    return any("\x01" <= char <= "\x07" for char in text)


@lru_cache(maxsize=1)
def _texts() -> list[str]:
    kinds = (odd_space, new_character, heap_of_marks, far_away, _marker)
    return [t for t in samples.corpus()[::4] if t and not any(kind(t) for kind in kinds)]


def _engine(
    model: Path, folder: Path, tokenizer: Tokenizer, texts: list[str], **files: Any
) -> tuple[EngineTokens, MtokReport]:
    dialogues = files.pop("dialogues", None)
    path = folder / "tokenizer.mtok"
    report = write_mtok(TokenizerFiles(tokenizer.to_str(), **files), path)
    return run_engine(model, path, texts, dialogues), report


def _assert_equal(model: Path, folder: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    engine, _ = _engine(model, folder, tokenizer, texts)
    encodings = tokenizer.encode_batch(texts)
    wrong = [
        (text, right.tokens, [tokenizer.id_to_token(n) for n in ids])
        for text, right, ids in zip(texts, encodings, engine.ids, strict=True)
        if right.ids != ids
    ]
    assert not wrong, (len(wrong), wrong[:3])


def _copy(name: str) -> Tokenizer:
    return Tokenizer.from_str(samples.sample(name).to_str())


@pytest.mark.parametrize("name", list(SPLITS))
def test_pre_tokenizers_cut_as_the_library_does(name: str, model: Path, tmp_path: Path) -> None:
    tokenizer = _copy("gpt2")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([SPLITS[name], BYTES])
    _assert_equal(model, tmp_path, tokenizer, _texts())


@pytest.mark.parametrize("name", list(NORMALIZERS))
def test_normalizers_change_as_the_library_does(name: str, model: Path, tmp_path: Path) -> None:
    tokenizer = _copy("gpt2")
    tokenizer.normalizer = NORMALIZERS[name]
    _assert_equal(model, tmp_path, tokenizer, _texts())


def _shows_parts(texts: list[str]) -> Tokenizer:
    """A model that knows every part of the texts, so that each part it is given is one id."""
    characters = byte_characters()
    vocab = {"[UNK]": 0}
    for text in texts:
        data = "".join(characters[value] for value in text.encode())
        for start in range(len(data)):
            for end in range(start + 1, len(data) + 1):
                vocab.setdefault(data[start:end], len(vocab))
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_patterns_see_what_the_documentation_says(model: Path, tmp_path: Path) -> None:
    differ = ["a\u0085\u0085b", "a \u2028\u2029b", "x\U00010d50y", "a\x01b", "1\x022", "it'\u017fx"]
    same = ["a\u00a0\u3000b", "it's it'S", "été 12x", "a\x08b\x04c", "x\u0301y", "中文，字\u200d"]
    texts = [*differ, *same]
    tokenizer = _shows_parts(texts)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(samples.LLAMA3), "isolated"), BYTES]
    )
    engine, _ = _engine(model, tmp_path, tokenizer, texts)
    right = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    assert sum(len(ids) > 1 for ids in right) == len(texts) - 1
    assert [t for t, a, b in zip(texts, right, engine.ids, strict=True) if a != b] == differ


def test_added_tokens_take_spaces_and_are_shown(model: Path, tmp_path: Path) -> None:
    tokenizer = _copy("gpt2")
    tokenizer.add_special_tokens(
        [AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True), "<｜a▁b｜>", "<ab>"]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<a", "né ¡x", "日▁")])
    texts = [
        "a  <l>  b <r> \n c",
        "<l><r><l> <l>",
        "x<｜a▁b｜>y<｜a b｜>",
        "<a<ab><abc",
        " né ¡x日▁",
    ]
    engine, _ = _engine(model, tmp_path, tokenizer, texts)
    for text, ids in zip(texts, engine.ids, strict=True):
        right = tokenizer.encode(text).ids
        assert ids == right
        assert engine.decode(right) == tokenizer.decode(right, skip_special_tokens=False)


def test_holes_in_the_ids_are_filled(model: Path, tmp_path: Path) -> None:
    spec = json.loads(samples.sample("gpt2").to_str())
    vocab = spec["model"]["vocab"]
    size = len(vocab)
    moved = max(vocab, key=lambda token: vocab[token])
    vocab[moved] += 3
    spec["added_tokens"][0]["id"] = size
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    engine, report = _engine(model, tmp_path, tokenizer, _texts()[:500])
    assert report.vocab_size == size + 3
    assert engine.shown[size + 1] == b""
    assert engine.ids == [e.ids for e in tokenizer.encode_batch(_texts()[:500])]


def test_tokens_out_of_reach_of_the_merges_are_noted(model: Path, tmp_path: Path) -> None:
    spec = json.loads(samples.sample("llama3").to_str())
    merges = spec["model"]["merges"]
    lost = "".join(merges.pop())
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    _, report = _engine(model, tmp_path, tokenizer, ["a"])
    assert any(lost in note and note.startswith("1 ") for note in report.differences)
    intact = write_mtok(TokenizerFiles(samples.sample("llama3").to_str()), tmp_path / "other")
    assert not any("merges" in note for note in intact.differences)


def test_long_texts_of_sentencepiece_models_are_fast(model: Path, tmp_path: Path) -> None:
    """Uncut, 120,000 characters take the engine a minute."""
    text = "The quick brown fox jumps over the lazy dog.\n" * 2700
    started = time.monotonic()
    _assert_equal(model, tmp_path, samples.sample("llama2"), [text])
    assert time.monotonic() - started < 20


def test_dialogues_of_a_model_that_prefixes_only_the_first_text(
    model: Path, tmp_path: Path
) -> None:
    """With a template, what follows an added token is right; a bare text lacks the prefix."""
    tokenizer = samples.sample("mistral")
    texts = ["<s>[INST]Hello there[/INST]Well", "<s>[INST] Hello\n[/INST] a</s>", "Hello"]
    engine, report = _engine(model, tmp_path, tokenizer, texts, chat_template="{{ messages }}")
    right = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert engine.ids[:2] == right[:2] and engine.ids[2] != right[2]
    assert any("before the first added token" in note for note in report.differences)


DIALOGUES = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}],
]
PRINTS = (
    "{% set x = 1 %}\n{{- bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{{ eos_token }}{% endfor %}"
)
JOINS = (
    "{% for m in messages %}{% set c = m.role + m.content %}"
    "{% if loop.index0 == 0 %}{% set c = bos_token + c %}{% endif %}{{ c }}{% endfor %}"
)


@pytest.mark.parametrize("template", [PRINTS, JOINS, None])
def test_a_dialogue_starts_with_one_bos(template: str | None, model: Path, tmp_path: Path) -> None:
    tokenizer = samples.sample("llama3")
    bos, eos = "<|begin_of_text|>", "<|eot_id|>"
    engine, report = _engine(
        model, tmp_path, tokenizer, ["Hi"], dialogues=DIALOGUES,
        chat_template=template, bos_token=bos, eos_token=eos, stop_ids=(2001, 2001, 5),
    )  # fmt: skip
    assert report.stop_ids == (2001, 5)
    number = tokenizer.token_to_id(bos)
    if template is None:
        assert report.prefix_ids == (number,) and engine.ids == [tokenizer.encode("Hi").ids]
        return
    rendered = {
        PRINTS: [f"<user>Hi{eos}", f"<system>S{eos}<user>Hi{eos}"],
        JOINS: [f"{bos}userHi", f"{bos}systemSuserHi"],
    }[template]
    assert engine.rendered == rendered
    assert report.prefix_ids == ((number,) if template == PRINTS else ())
    again = run_engine(model, tmp_path / "tokenizer.mtok", engine.rendered)
    for ids, text in zip(again.ids, rendered, strict=True):
        whole = text if text.startswith(bos) else bos + text
        assert ids == tokenizer.encode(whole, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("template", "first"),
    [
        ("{{ bos_token }}x", True),
        ("{#- c #}{%- if a %}{% set b = 1 %}{% endif %}\n{{- bos_token -}}x", True),
        ("x{{ bos_token }}", False),
        ("{{ x }}{{ bos_token }}", False),
        ("{% if x %}{{ bos_token }}{% endif %}", False),
        ("{{ bos_token }}{{ bos_token }}", False),
        ("{{ bos_token + x }}", False),
        ("{% for x in y %}{% endfor %}\n\n{{ bos_token }}", False),
        ("{% macro m() %}{{ bos_token }}{% endmacro %}", False),
        ("{% if x", False),
        ("", False),
    ],
)
def test_templates_that_print_bos_first_are_told_apart(template: str, first: bool) -> None:
    assert writes_bos_first(template) is first
