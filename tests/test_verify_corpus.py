"""The corpus: many, distinct, the same in every process, and of every kind."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import unicodedata

from mnnsmith.verify.texts.corpus import corpus_strings

PRINT_HASH = (
    "import hashlib; from mnnsmith.verify.texts.corpus import corpus_strings as c; "
    "print(hashlib.sha256('\\0'.join(c()).encode()).hexdigest())"
)


def test_over_ten_thousand_distinct_texts() -> None:
    texts = corpus_strings()
    assert len(texts) == len(set(texts)) >= 10_000
    assert max(map(len, texts)) <= 4000
    assert not any("\0" in text for text in texts)


def test_the_same_in_another_process() -> None:
    here = hashlib.sha256("\0".join(corpus_strings()).encode()).hexdigest()
    other = subprocess.run(
        [sys.executable, "-c", PRINT_HASH], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == here


def test_every_kind_of_text_is_there() -> None:
    texts = corpus_strings()
    whole = "".join(texts)
    names = {unicodedata.name(char, "").split(" ")[0] for char in set(whole)}
    scripts = "LATIN CYRILLIC GREEK HEBREW ARABIC DEVANAGARI TAMIL THAI TIBETAN GEORGIAN ARMENIAN"
    more = "ETHIOPIC CJK HIRAGANA KATAKANA HANGUL KHMER MYANMAR CHEROKEE MATHEMATICAL"
    assert set(scripts.split()) | set(more.split()) <= names
    for part in (
        "\u200d", "\U0001f1e9\U0001f1ea", "👍🏽", "\u0301", " " * 100, "\n" * 33, "\t" * 16,
        "\x1b", "\x01", "\x85", "\u202e", "\ue000", "\ufffd", "<|im_start|>",
        "<｜begin▁of▁sentence｜>", "it's", "https://", "#include", "१२३", "<0x41>",
    ):  # fmt: skip
        assert part in whole, ascii(part)
    categories = {unicodedata.category(char) for char in set(whole)}
    assert categories >= {"Lu", "Ll", "Lo", "Mn", "Mc", "Nd", "Nl", "No", "Zs", "Cc", "Cf", "Co"}
