"""What `tokenizer.ggml.pre` stands for: how a byte-level vocabulary's text is cut into words.

The file holds a name only.  The patterns are those of the models' own `tokenizer.json`, as also
given beside their equivalents in llama.cpp (src/llama-vocab.cpp); names whose original could not be
established are not in the table, and are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = rf"{_CASED}{_UPPER}*{_LOWER}+|{_CASED}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_SLASH}"
_GPT4O = (
    rf"{_CASED}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_CASED}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_REST_SLASH}"
)
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = r"\p{N}"
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_WIDE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before the merges.

    patterns: applied one after the other, each to the pieces that the last one left; what a pattern
    matches is a piece, and so is what lies between.
    nfc: text is brought to NFC first; ignore_merges: a whole word of the vocabulary is taken as it
    is; add_bos: what llama.cpp takes where the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def as_json(self) -> dict[str, Any]:
        """The `pre_tokenizer` of a tokenizer.json."""
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": self.patterns[-1] == _GPT2,
        }
        # ByteLevel has GPT-2's pattern built in, single digits have a part of their own.
        patterns = self.patterns[:-1] if byte_level["use_regex"] else self.patterns
        steps: list[dict[str, Any]] = [
            {"type": "Digits", "individual_digits": True}
            if pattern == _DIGITS
            else {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in patterns
        ]
        steps.append(byte_level)
        return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


_LLAMA3_RULES = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((_LLAMA3,))
_QWEN2_RULES = PreTokenizer((_QWEN2,), nfc=True)
_GPT2_RULES = PreTokenizer((_GPT2,))
_DIGITS_RULES = PreTokenizer((_DIGITS, _GPT2))
_GPT4O_RULES = PreTokenizer((_GPT4O,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2[: -len(r"|\s+")], r"\p{N}+", "[0-9][0-9][0-9]")
    ),
    "llama3": _LLAMA3_RULES,
    "llama-v3": _LLAMA3_RULES,
    "llama-bpe": _LLAMA3_RULES,
    "falcon3": _LLAMA3_RULES,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "qwen2": _QWEN2_RULES,
    "deepseek-r1-qwen": _QWEN2_RULES,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O_RULES,
    "llama4": _GPT4O_RULES,
    "gpt-2": _GPT2_RULES,
    "phi-2": _GPT2_RULES,
    "mpt": _GPT2_RULES,
    "smollm": _DIGITS_RULES,
    "starcoder": _DIGITS_RULES,
    "refact": _DIGITS_RULES,
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_WIDE, _DIGITS)),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3)),
}
