"""Tokenizers rebuilt from GGUF metadata encode and decode as the ones that they were made from."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from gguf_samples import BYTE_TOKENIZER, write_gguf, write_llama
from mnnsmith.errors import TokenizerError, UnsupportedError
from mnnsmith.sources.checkpoint import TokenizerFiles
from mnnsmith.sources.gguf import open_gguf
from mnnsmith.sources.gguf_file import MetadataArray, open_gguf_file
from mnnsmith.sources.gguf_merges import listed_merges, merges_from_scores
from mnnsmith.sources.gguf_pretokenizers import PRE_TOKENIZERS
from mnnsmith.sources.gguf_tokenizer import read_tokenizer

TOKENS = BYTE_TOKENIZER["ggml.tokens"]
TEXT = (
    "The capital of France is Paris. What is the capital of Italy? It's Rome, isn't it?\n",
    "def add(first, second):\n    return first + second  # 12345 67\n\n",
    "Größe, naïve café, 東京に行く, привет мир, γειά σου, مرحبا, नमस्ते, 안녕하세요, สวัสดี.\n",
    "WE'VE seen HTTPServer2 and camelCase; 3.14159 e=2.71, 1,000,000 and 2024-01-01.\n",
    "  the end of   the end of the text\t\ttabs \r\n lines \u00a0 wide\u3000space\n",
)


@cache
def strings() -> tuple[str, ...]:
    """Scripts, emoji, code, white space, control characters, accents apart, noise."""
    rng = random.Random(5)
    fixed = [
        "", " ", "  ", "a", " a", "a ", "\n", "\n\n", " \n ", "\t", "\r\n", "hello world",
        "Hello, World! It's 1234567 o'clock; WE'LL 'see'", "x" * 200, " " * 33, "0" * 17,
        "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7",
        "e\u0301 vs \u00e9, \ufb01 ligature, \u212b", "\u0000\u0001\u007f\ufffd", "<s>", "</s>",
        "<|im_start|>user\nhi<|im_end|>", "<|im_start", "<0x0A>", "[UNK] [CLS]", "\u2581 \u2581x",
        "a\u2028b\u0085c", "\u3042\u30a2\u6f22\u5b57123\u4e00", "don't DON'T dOn'T",
    ]  # fmt: skip
    out = [*fixed, *TEXT]
    joined = "".join(TEXT)
    for _ in range(400):
        start = rng.randrange(len(joined))
        out.append(joined[start : start + rng.randrange(1, 40)])
        out.append(bytes(rng.randrange(256) for _ in range(rng.randrange(1, 20))).decode("latin-1"))
        code = [rng.choice((rng.randrange(32, 0x3000), rng.randrange(0x4E00, 0xD7FF)))] * 2
        out.append(" ".join(map(chr, [*code, rng.randrange(0x1F300, 0x1F6FF)])))
    return tuple(out)


def rebuilt(
    tmp_path: Path, keys: dict[str, Any], **fields: Any
) -> tuple[Tokenizer, TokenizerFiles]:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", fields, {"a": np.ones(4, np.float32)}, keys)
    files, _ = read_tokenizer(open_gguf_file(path))
    return Tokenizer.from_str(files.tokenizer_json), files


def assert_same(found: Tokenizer, expected: Tokenizer) -> None:
    for text in strings():
        a, b = found.encode(text), expected.encode(text)
        assert a.ids == b.ids, (text, a.tokens, b.tokens)
        for skip in (False, True):
            assert found.decode(a.ids, skip_special_tokens=skip) == expected.decode(
                a.ids, skip_special_tokens=skip
            ), text


# -------------------------------------------------------------------------------------- byte level


def trained_bytes(
    patterns: list[pre_tokenizers.PreTokenizer], nfc: bool, ignore_merges: bool
) -> Tokenizer:
    model = models.BPE(ignore_merges=ignore_merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(patterns)
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("   ")])
    return tokenizer


def exported(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """What llama.cpp's converter writes for a byte-level tokenizer."""
    document = json.loads(tokenizer.to_str())
    size = tokenizer.get_vocab_size()
    added = {token["id"]: token for token in document["added_tokens"]}
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": [tokenizer.id_to_token(i) for i in range(size)],
        "ggml.token_type": [
            (3 if added[i]["special"] else 4) if i in added else 1 for i in range(size)
        ],
        "ggml.merges": [" ".join(merge) for merge in document["model"]["merges"]],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The originals, written apart from the table under test: name -> (steps, NFC, ignore_merges).
ORIGINALS: dict[str, tuple[list[pre_tokenizers.PreTokenizer], bool, bool]] = {
    "gpt-2": ([GPT2], False, False),
    "smollm": ([DIGITS, GPT2], False, False),
    "llama-bpe": ([split(LLAMA3), BYTES], False, True),
    "dbrx": ([split(LLAMA3), BYTES], False, False),
    "qwen2": ([split(LLAMA3.replace("{1,3}", "")), BYTES], True, False),
    "deepseek-llm": (
        [
            split("[\r\n]"),
            split(
                "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷ"
                "ᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
                "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
                "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
            ),
            split("\\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            split("\\s+$"),
            split("[一-龥ࠀ-一가-퟿]+"),
            DIGITS,
            BYTES,
        ],
        False,
        False,
    ),
    "deepseek-coder": (
        [
            split("[\r\n]"),
            split("\\s?\\p{L}+"),
            split("\\s?\\p{P}+"),
            split("[一-龥ࠀ-一가-퟿]+"),
            DIGITS,
            BYTES,
        ],
        False,
        False,
    ),
    "deepseek-v3": (
        [
            split("\\p{N}{1,3}"),
            split("[一-龥぀-ゟ゠-ヿ]+"),
            split(
                "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
                "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
                "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
            ),
            BYTES,
        ],
        False,
        False,
    ),
}


@pytest.mark.parametrize("pre", sorted(ORIGINALS))
def test_byte_level(tmp_path: Path, pre: str) -> None:
    steps, nfc, ignore_merges = ORIGINALS[pre]
    original = trained_bytes(steps, nfc, ignore_merges)
    keys = exported(original, pre) | {"ggml.add_bos_token": False}
    found, files = rebuilt(tmp_path, keys)
    assert_same(found, original)
    assert found.get_vocab() == original.get_vocab()
    assert (files.bos_token, files.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert files.stop_ids == (2, 0)
    assert files.chat_template is None
    assert found.encode("<think> hi").tokens[0] == "<think>"


def test_the_sample_tells_the_rules_apart(tmp_path: Path) -> None:
    """Names whose rules differ give different ids on the sample; else it would prove nothing."""
    vocabulary = exported(trained_bytes([split(LLAMA3), BYTES], False, False), "")
    ids = {}
    for pre in PRE_TOKENIZERS:
        tokenizer, _ = rebuilt(
            tmp_path, vocabulary | {"ggml.pre": pre, "ggml.add_bos_token": False}
        )
        ids[pre] = tuple(tuple(tokenizer.encode(text).ids) for text in strings())
    for a, rules in PRE_TOKENIZERS.items():
        for b, others in PRE_TOKENIZERS.items():
            if (rules.patterns, rules.nfc) != (others.patterns, others.nfc):
                assert ids[a] != ids[b], (a, b)


@pytest.mark.reference
def test_the_patterns_are_those_of_transformers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    compared = set(PRE_TOKENIZERS) & set(GGUF_PRE_TOKENIZER_SPLITS)
    assert {"llama-bpe", "tekken", "qwen2", "qwen35", "gpt-4o", "dbrx"} <= compared
    for name in compared:
        assert PRE_TOKENIZERS[name].patterns == (GGUF_PRE_TOKENIZER_SPLITS[name],), name


@pytest.mark.parametrize(
    ("pre", "keys", "around"),
    [
        ("gpt-2", {}, (None, None)),
        ("gpt-2", {"ggml.add_bos_token": True}, (1, None)),
        ("gpt-2", {"ggml.add_eos_token": True}, (None, 2)),
        ("gpt-2", {"ggml.add_bos_token": True, "ggml.add_eos_token": True}, (1, 2)),
        ("llama-bpe", {}, (1, None)),
        ("llama-bpe", {"ggml.add_bos_token": False}, (None, None)),
        ("tekken", {}, (1, None)),
    ],
)
def test_tokens_around_a_text(
    tmp_path: Path, pre: str, keys: dict[str, bool], around: tuple[int | None, int | None]
) -> None:
    base = {k: v for k, v in BYTE_TOKENIZER.items() if k != "ggml.add_bos_token"}
    tokenizer, _ = rebuilt(tmp_path, base | {"ggml.pre": pre} | keys)
    plain = tokenizer.encode("hello", add_special_tokens=False).ids
    first, last = ([] if i is None else [i] for i in around)
    assert tokenizer.encode("hello").ids == [*first, *plain, *last]


def test_template_and_stop_ids(tmp_path: Path) -> None:
    tokens = [
        "</s>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        *BYTE_TOKENIZER["ggml.tokens"],
    ]
    keys = BYTE_TOKENIZER | {
        "ggml.tokens": tokens,
        "ggml.token_type": [3, 3, 3, 1, 3] + [3] * 3 + [1] * (len(tokens) - 8),
        "ggml.eos_token_id": 7,
        "ggml.eot_token_id": 1,
        "chat_template": "{{ messages }}",
    }
    _, files = rebuilt(tmp_path, keys)
    assert files.chat_template == "{{ messages }}"
    # <|end|> is an ordinary token here; 5 and 7 are <|endoftext|> and <|im_end|>.
    assert files.stop_ids == (7, 1, 0, 2, 4, 5)


def test_without_types_the_named_ids_are_special(tmp_path: Path) -> None:
    keys = {k: v for k, v in BYTE_TOKENIZER.items() if k != "ggml.token_type"}
    tokenizer, _ = rebuilt(tmp_path, keys)
    special = json.loads(tokenizer.to_str())["added_tokens"]
    assert [token["content"] for token in special] == ["<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        ({"ggml.pre": "nobody"}, "tokenizer.ggml.pre is 'nobody'"),
        ({"ggml.pre": None}, "no tokenizer.ggml.pre"),
    ],
)
def test_what_is_unknown_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    keys = {k: v for k, v in (BYTE_TOKENIZER | change).items() if v is not None}
    with pytest.raises(UnsupportedError, match=message):
        rebuilt(tmp_path, keys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.model": None}, "holds no tokenizer"),
        ({"ggml.tokens": None}, "holds no tokens"),
        ({"ggml.tokens": [1, 2, 3]}, "should hold strings"),
        ({"ggml.tokens": [*TOKENS[:-1], TOKENS[0]]}, "'<|endoftext|>' is in the vocabulary twice"),
        ({"ggml.merges": None}, "holds no merges"),
        ({"ggml.merges": ["h e", "he llo"]}, "merge 1, 'he llo'"),
        ({"ggml.merges": ["he"]}, "merge 0, 'he'"),
        ({"ggml.token_type": [1, 1]}, "but 2 types"),
        ({"ggml.token_type": 3}, "is no array"),
        ({"ggml.eos_token_id": 9999}, "eos_token_id is 9999; there are"),
        ({"ggml.add_bos_token": 1}, "must be true or false"),
        ({"ggml.bos_token_id": None, "ggml.add_bos_token": True}, "does not say which"),
    ],
)
def test_damage_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    from mnnsmith.errors import SourceError

    keys = {k: v for k, v in (BYTE_TOKENIZER | change).items() if v is not None}
    with pytest.raises(SourceError, match=message.replace("|", r"\|")):
        rebuilt(tmp_path, keys)


# ----------------------------------------------------------------------------------- sentencepiece


def piece_type(model: Any, i: int) -> int:
    """The type as llama.cpp's converter writes it."""
    if model.is_unknown(i):
        return 2
    if model.is_control(i):
        return 3
    if model.is_unused(i):
        return 5
    return 6 if model.is_byte(i) else 1


def trained_pieces(tmp_path: Path, **options: Any) -> Any:
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(TEXT) * 4, encoding="utf-8")
    settings: dict[str, Any] = {
        "input": str(corpus),
        "model_prefix": str(tmp_path / "m"),
        "vocab_size": 600,
        "byte_fallback": True,
        "minloglevel": 2,
        "hard_vocab_limit": False,
    }
    sentencepiece.SentencePieceTrainer.train(**settings | options)
    return sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))


def exported_pieces(model: Any, users: tuple[str, ...] = ()) -> dict[str, Any]:
    size = model.get_piece_size()
    pieces = [model.id_to_piece(i) for i in range(size)]
    types = [4 if piece in users else piece_type(model, i) for i, piece in enumerate(pieces)]
    return {
        # The converter writes the spaces of user-defined pieces as they are.
        "ggml.tokens": [
            piece.replace("\u2581", " ") if kind == 4 else piece
            for piece, kind in zip(pieces, types, strict=True)
        ],
        "ggml.scores": [float(model.get_score(i)) for i in range(size)],
        "ggml.token_type": types,
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe(tmp_path: Path, prefix: bool) -> None:
    """Against the sentencepiece library itself, whose scores are all that the file has.

    Pieces of many spaces are user-defined in Gemma's vocabulary, which adds no prefix.
    """
    spaces = () if prefix else ("\u2581\u2581", "\u2581\u2581\u2581\u2581")
    users = ("<think>", *spaces)
    model = trained_pieces(
        tmp_path,
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=users,
    )
    keys = exported_pieces(model, users) | {
        "ggml.model": "llama",
        "ggml.add_space_prefix": prefix,
    }
    found, files = rebuilt(tmp_path, keys)
    assert files.stop_ids == (2,)
    for text in strings():
        if "<s>" in text or "</s>" in text or "\u2581" in text or "\0" in text:
            continue  # special tokens in the text, marks that look like spaces, C strings
        ids = found.encode(text).ids
        assert ids[0] == 1, text
        assert ids[1:] == model.encode(text), (text, found.encode(text).tokens)
        assert found.decode(ids) == text, text


def test_merges_follow_scores_and_avoid_special_pieces() -> None:
    tokens = ["<s>", "<", "s", ">", "s>", "a", "b", "ab", "aba", "ba", "\u2581"]
    normal = [False] + [True] * 10
    scores = [0.0, -9, -9, -9, -2, -9, -9, -1, -3, -3.5, -9]
    assert merges_from_scores("x", tokens, normal, scores) == [
        ["a", "b"],
        ["s", ">"],
        ["ab", "a"],
        ["a", "ba"],
        ["b", "a"],
    ]


def test_hostile_vocabularies_imply_too_many_merges() -> None:
    """Every a..ab..b can be cut in as many ways as it has letters: millions of merges in 8 MB."""
    tokens = [f"{'a' * i}{'b' * j}" for i in range(200) for j in range(200) if i + j]
    with pytest.raises(TokenizerError, match="in more than 1000000 ways"):
        merges_from_scores("x", tokens, [True] * len(tokens), [0.0] * len(tokens))
    long = [f"{i:06}" + "x" * 500 for i in range(32_000)]
    with pytest.raises(TokenizerError, match="more than 16000000 characters"):
        merges_from_scores("x", long, [True] * len(long), [0.0] * len(long))
    with pytest.raises(TokenizerError, match="holds 1000001 merges"):
        listed_merges("x", MetadataArray("x", 8, 1_000_001, b""), {})


def test_special_tokens_have_their_names(tmp_path: Path) -> None:
    keys = {**BYTE_TOKENIZER, "ggml.unknown_token_id": 0, "ggml.padding_token_id": 2}
    write_llama(tmp_path / "m.gguf", tokenizer=keys)
    assert open_gguf(tmp_path / "m.gguf").tokenizer.special_tokens == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }  # fmt: skip


@pytest.mark.reference
def test_merges_are_those_of_transformers() -> None:
    from transformers.tokenization_utils_base import generate_merges

    rng = random.Random(1)
    words = sorted({"".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(300)})
    rng.shuffle(words)
    scores = [float(rng.choice([-1, -2, -3, -4, -5])) for _ in words]
    expected = generate_merges(
        {word: i for i, word in enumerate(words)}, dict(zip(words, scores, strict=True))
    )
    found = merges_from_scores("x", words, [True] * len(words), scores)
    assert [tuple(merge) for merge in found] == expected
    assert len(found) > 200


def test_phi3_control_tokens_take_the_space_behind_them(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "<|user|>", "\u2581"]
    keys = {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.scores": [0.0] * len(tokens),
        "ggml.token_type": [2, 3, 3] + [6] * 256 + [3, 1],
    }
    for name, count in (("Phi-3 Mini", 1), ("Other", 2)):
        tokenizer, _ = rebuilt(tmp_path, keys, **{"general.name": name})
        user = tokenizer.token_to_id("<|user|>")
        ids = tokenizer.encode("<|user|>\n", add_special_tokens=False).ids
        assert ids[0] == user
        assert len(ids) == (1 if count == 1 else 3)  # else a prefix and a line end


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.scores": None}, "holds no scores"),
        ({"ggml.scores": [0.0]}, "need as many finite scores"),
        ({"ggml.scores": [float("nan")] * 4}, "need as many finite scores"),
        ({"ggml.tokens": ["<unk>", "a", "b", "c" * 600]}, "600 characters"),
        ({"ggml.remove_extra_whitespaces": True}, "removes extra white space"),
        ({"ggml.precompiled_charsmap": b"abc"}, "character map"),
    ],
)
def test_sentencepiece_damage_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    keys = {
        "ggml.model": "llama",
        "ggml.tokens": ["<unk>", "a", "b", "ab"],
        "ggml.scores": [0.0] * 4,
        "ggml.token_type": [2, 1, 1, 1],
    } | change
    with pytest.raises((TokenizerError, UnsupportedError), match=message):
        rebuilt(tmp_path, {k: v for k, v in keys.items() if v is not None})


def fields_of(message: bytes) -> dict[int, bytes]:
    """The last length-delimited value of each field of a protocol buffer."""
    out, at = {}, 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 2:
            size = varint()
            out[key >> 3] = message[at : at + size]
            at += size
        elif key & 7 == 0:
            varint()
        else:
            at += {5: 4, 1: 8}[key & 7]
    return out


def test_unigram(tmp_path: Path) -> None:
    """Against the sentencepiece library, NFKC map and white space removal included."""
    model = trained_pieces(tmp_path, model_type="unigram", byte_fallback=False, vocab_size=300)
    normalizer = fields_of(fields_of((tmp_path / "m.model").read_bytes())[3])
    assert len(normalizer[2]) > 1000
    keys = exported_pieces(model) | {
        "ggml.model": "t5",
        "ggml.add_space_prefix": True,
        "ggml.remove_extra_whitespaces": True,
        "ggml.precompiled_charsmap": normalizer[2],
        "ggml.unknown_token_id": 0,
        "ggml.eos_token_id": 2,
    }
    found, files = rebuilt(tmp_path, keys)
    assert files.stop_ids == (2,)
    for text in strings():
        if "<s>" in text or "</s>" in text or not text.strip() or "\0" in text:
            continue
        assert found.encode(text).ids == [*model.encode(text), 2], (text, found.encode(text).tokens)


def test_wordpiece(tmp_path: Path) -> None:
    original = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    original.normalizer = normalizers.BertNormalizer(strip_accents=True)
    original.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    original.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=names, show_progress=False)
    original.train_from_iterator(TEXT * 4, trainer)
    original.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokens = [original.id_to_token(i) for i in range(original.get_vocab_size())]
    phantom = [t if t in names else t[2:] if t.startswith("##") else f"\u2581{t}" for t in tokens]
    keys = {
        "ggml.model": "bert",
        "ggml.tokens": phantom,
        "ggml.token_type": [3 if t in names else 1 for t in tokens],
        "ggml.bos_token_id": 2,
        "ggml.seperator_token_id": 3,
        "ggml.unknown_token_id": 1,
        "ggml.padding_token_id": 0,
        "ggml.mask_token_id": 4,
    }
    found, _ = rebuilt(tmp_path, keys)
    assert_same(found, original)
