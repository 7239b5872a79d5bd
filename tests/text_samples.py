"""Small real tokenizers and templates for the tests of text: made here, nothing is downloaded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from mnnsmith.text.tokenizer import TextTokenizer

TEMPLATES = Path(__file__).parent / "data" / "templates"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "The capital of France is Paris. What is the capital of Italy? It is Rome.\n",
    "def add(first, second):\n    return first + second\n",
    "<|im_start|>user and <|im_end|> are only text here, like < and | and >.\n",
    "Größe, naïve, 東京, привет, the end of the end of the text.\n",
) * 8


USER = {"role": "user", "content": " What is the capital of France? "}
BOT = {"role": "assistant", "content": "Paris."}
SYSTEM = {"role": "system", "content": "Be short."}
DIALOGUES: dict[str, list[dict[str, Any]]] = {
    "single": [USER],
    "system": [SYSTEM, USER],
    "multi": [USER, BOT, {"role": "user", "content": "And of <Italy> & 'Spain'?\n\n"}],
    "system multi": [SYSTEM, USER, BOT, USER, BOT, USER],
    "ends with assistant": [USER, BOT],
    "reasoning text": [
        USER,
        {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nParis."},
    ],
    "reasoning field": [USER, {**BOT, "reasoning": "Easy."}, USER],
    "null fields": [USER, {**BOT, "tool_calls": None}, USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}],
    "empty text": [{"role": "user", "content": ""}],
    "two users": [USER, USER],
    "tool call": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "find", "arguments": {"q": "<é>"}}}],
        },
        {"role": "tool", "content": "Paris"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"q": "text"}}}]


# For tests that use a tokenizer a hundred times; it has no state that shows.
opened = cache(TextTokenizer)


def template_source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def byte_level_json() -> str:
    """GPT-2 style, all 256 bytes, special tokens and a non-special `<think>` pair and tag."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    plain = [AddedToken(text, special=False) for text in ("<think>", "</think>", "<table>")]
    tokenizer.add_tokens(plain)
    return tokenizer.to_str()


@cache
def sentencepiece_json() -> str:
    """Llama-2 style: a space before the text, byte fallback, `<s>` in the learned vocabulary."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    ascii_text = [text.encode("ascii", "ignore").decode() for text in CORPUS]
    trained.train_from_iterator(
        ascii_text, BpeTrainer(vocab_size=480, special_tokens=names, show_progress=False)
    )
    spec: dict[str, Any] = json.loads(trained.to_str())
    spec["model"].update(byte_fallback=True, fuse_unk=True)
    # Byte tokens are part of the vocabulary, not added tokens.
    spec["added_tokens"] = [t for t in spec["added_tokens"] if not t["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    # Phi-3's control tokens take the white space after them.
    tokenizer.add_special_tokens(["<|im_start|>", AddedToken("<|im_end|>", rstrip=True)])
    return tokenizer.to_str()


@cache
def metaspace_json() -> str:
    """T5 / XLM style: Unigram behind Metaspace, with a space before the first word only."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [
        "▁the",
        "▁capital",
        "▁of",
        "▁France",
        "▁",
        "s",
        "the",
        "cap",
        "it",
        "al",
        "<",
        ">",
        "|",
    ]
    letters = [chr(code) for code in range(33, 127)]
    names = dict.fromkeys(["<unk>", "<s>", "</s>", *pieces, *words, *letters])
    vocab = [(name, -1.0 - len(name) ** -1) for name in names]
    tokenizer = Tokenizer(Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    return tokenizer.to_str()
