"""Tokenizers of every kind, small, trained at test time with the `tokenizers` library.

Each has the components of a real family.  The texts they learn from are the corpus, so that its
strings give long tokens too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from mnnsmith.sources.gguf_pretokenizers import PRE_TOKENIZERS
from mnnsmith.verify.texts.corpus import corpus_strings

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
# DeepSeek-LLM and V2; tests of GGUF hold this pattern against another writing of it.
DEEPSEEK_LLM = PRE_TOKENIZERS["deepseek-llm"].patterns[:-1]
META = "▁"
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@lru_cache(maxsize=1)
def corpus() -> tuple[str, ...]:
    return tuple(corpus_strings())


def _train(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    """Long words overflow the Unigram trainer; typed `<0x41>` would become tokens of their own."""
    texts = [text for text in corpus()[::3] if "0x" not in text]
    words = [" ".join(word[:16] for word in text.split(" ")) for text in texts if len(text) < 200]
    tokenizer.train_from_iterator(words, trainer)
    return tokenizer


def _byte_level(
    pre_tokenizer: Any, special: tuple[str, ...] = CHATML, normalizer: Any = None, **model: Any
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, show_progress=False, min_frequency=3
    )
    _train(tokenizer, trainer)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _split(*patterns: str) -> Any:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, last])


def gpt2() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ("<|endoftext|>",))


def gpt2_prefix_space() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True), ("<|endoftext|>",))


def llama3() -> Tokenizer:
    special = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
    tokenizer = _byte_level(_split(LLAMA3), special, ignore_merges=True)
    return _with_template(tokenizer, "<|begin_of_text|>")


def qwen2() -> Tokenizer:
    tokenizer = _byte_level(_split(QWEN2), CHATML, normalizers.NFC())
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<tool_call>", "<think>", "</think>")]
    )
    return tokenizer


def cl100k() -> Tokenizer:
    return _byte_level(_split(CL100K), ("<|endoftext|>", "<|fim_prefix|>"))


def o200k() -> Tokenizer:
    return _byte_level(_split(O200K), ("<|endoftext|>", "<|user|>"))


def deepseek() -> Tokenizer:
    special = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
    return _byte_level(_split(*DEEPSEEK), special, normalizers.Sequence([]))


def _deepseek_digits(patterns: tuple[str, ...]) -> Tokenizer:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    steps += [pre_tokenizers.Digits(individual_digits=True)]
    steps += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return _byte_level(pre_tokenizers.Sequence(steps), ("<｜begin▁of▁sentence｜>",))


def deepseek_llm() -> Tokenizer:
    return _deepseek_digits(DEEPSEEK_LLM)


def deepseek_coder() -> Tokenizer:
    return _deepseek_digits(DEEPSEEK_CODER)


def smollm2() -> Tokenizer:
    steps = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
    return _byte_level(pre_tokenizers.Sequence(steps))


def _sentencepiece_bpe(normalizer: Any, pre_tokenizer: Any, special: tuple[str, ...]) -> Tokenizer:
    """The library's trainer knows no byte fallback, so the bytes are put before what it learned."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", META)
    learner.pre_tokenizer = pre_tokenizers.Split(META, "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=2200, show_progress=False, min_frequency=3, limit_alphabet=700
    )
    _train(learner, trainer)
    model = json.loads(learner.to_str())["model"]
    tokens = [*special, *(f"<0x{value:02X}>" for value in range(256))]
    runs = [META * n for n in (2, 4, 8)]
    learned = sorted(model["vocab"], key=model["vocab"].get)
    tokens += [token for token in learned if token not in {"\n", "\t", *runs}] + runs
    merges = [(META, META), (META * 2, META * 2), (META * 4, META * 4)]
    merges += [tuple(pair) for pair in model["merges"] if not {"\n", "\t"} & set("".join(pair))]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    merges = [p for p in dict.fromkeys(merges) if p[0] + p[1] in vocab]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return tokenizer


def _legacy() -> Any:
    return normalizers.Sequence([normalizers.Prepend(META), normalizers.Replace(" ", META)])


def _llama_decoder(strip: bool = True) -> Any:
    steps = [decoders.Replace(META, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


def llama2() -> Tokenizer:
    tokenizer = _sentencepiece_bpe(_legacy(), None, ("<unk>", "<s>", "</s>"))
    tokenizer.decoder = _llama_decoder()
    return _with_template(tokenizer, "<s>")


def mistral() -> Tokenizer:
    pre_tokenizer = pre_tokenizers.Metaspace(META, prepend_scheme="first", split=False)
    special = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
    tokenizer = _sentencepiece_bpe(None, pre_tokenizer, special)
    tokenizer.decoder = _llama_decoder()
    return _with_template(tokenizer, "<s>")


def gemma() -> Tokenizer:
    pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
    tokenizer = _sentencepiece_bpe(normalizers.Replace(" ", META), pre_tokenizer, special)
    tokenizer.decoder = _llama_decoder(strip=False)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", META * 3)])
    return _with_template(tokenizer, "<bos>")


def phi3() -> Tokenizer:
    tokenizer = _sentencepiece_bpe(_legacy(), None, ("<unk>", "<s>"))
    tokenizer.decoder = _llama_decoder()
    strips = [AddedToken(text, rstrip=True, normalized=False) for text in ("<|user|>", "<|end|>")]
    tokenizer.add_special_tokens(strips)
    return tokenizer


def _unigram(byte_fallback: bool, prepend_scheme: str) -> Tokenizer:
    """The library's Unigram trainer panics on such texts; what BPE learned, scored, will do."""
    special = ["<unk>", "<s>", "</s>"]
    learned = json.loads(llama2().to_str())["model"]["vocab"]
    known = [t for t in sorted(learned, key=learned.get) if not t.startswith("<") or t == "<"]
    pieces = [(token, 0.0) for token in special]
    scores = [-3.0 - 0.004 * rank - rank * 7919 % 1009 * 1e-6 for rank in range(len(known))]
    pieces += list(zip(known, scores, strict=True))
    if byte_fallback:
        pieces += [(f"<0x{value:02X}>", 0.0) for value in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(META, prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(META, prepend_scheme=prepend_scheme)
    if byte_fallback:
        tokenizer.decoder = _llama_decoder()
    tokenizer.add_special_tokens(special)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = _unigram(False, "always")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return tokenizer


def unigram_bytes() -> Tokenizer:
    return _unigram(True, "always")


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=3000, show_progress=False, special_tokens=special
    )
    return _train(tokenizer, trainer)


def _with_template(tokenizer: Tokenizer, first: str) -> Tokenizer:
    from tokenizers.processors import TemplateProcessing

    number = tokenizer.token_to_id(first)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, number)]
    )
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    maker.__name__: maker
    for maker in (
        gpt2, gpt2_prefix_space, llama3, qwen2, cl100k, o200k, deepseek, deepseek_llm,
        deepseek_coder, smollm2, llama2, mistral, gemma, phi3, unigram, unigram_bytes, word_piece,
    )
}  # fmt: skip


@lru_cache(maxsize=32)
def sample(name: str) -> Tokenizer:
    """A tokenizer by name; made once in a session."""
    return MAKERS[name]()
