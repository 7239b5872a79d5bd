"""The engine with our `.mtok` files against the `tokenizers` library, over the whole corpus.

What differs must fall into the kinds that docs/tokenizers.md lists, and each kind must show up
where it is expected: a cure in a later engine, or a fault of ours, breaks these tests.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import tokenizer_samples as samples
from engine_tokenizer import EngineTokens, run_engine, write_model
from mnnsmith.mnn.mtok import write_mtok
from mnnsmith.mnn.mtok_reader import read_mtok
from mnnsmith.sources.checkpoint import TokenizerFiles
from mnnsmith.sources.open import open_checkpoint

pytestmark = pytest.mark.engine

TOKENIZER_FILE = "tokenizer.mtok"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "model"
    write_model(folder)
    return folder


# --- kinds of texts that the engine cuts otherwise ----------------------------------------------


def odd_space(text: str) -> bool:
    """Unicode calls them white space; the engine's table of categories does not."""
    return any(char in text for char in "\u0085\u2028\u2029")


def new_character(text: str) -> bool:
    """Characters of Unicode 15.1 and 16 (Garay, and others that the corpus has)."""
    return any(0x10D40 <= ord(char) <= 0x10D8F or 0x2FFC <= ord(char) <= 0x2FFF for char in text)


def heap_of_marks(text: str) -> bool:
    """Two marks in a row, or Hangul in parts."""
    marks = "".join("m" if unicodedata.category(char)[0] == "M" else "-" for char in text)
    composed = unicodedata.normalize("NFD", text)
    heaps = "".join("m" if unicodedata.combining(char) else "-" for char in composed)
    return "mm" in marks or "mm" in heaps or any(0x1100 <= ord(char) <= 0x11FF for char in text)


def text_behind_token(text: str) -> bool:
    return re.search(r"(<s>|</s>|<unk>|\[/?INST\])[^ ]", text) is not None


def odd_space_behind_token(text: str) -> bool:
    """The engine takes ASCII white space along, the library all."""
    return re.search(r"(<\|user\|>|<\|end\|>)[ \t-\r]*[^\x00-\x7f]", text) is not None


def far_away(text: str) -> bool:
    """Private or unassigned beyond the first plane."""
    return any(ord(char) > 0xFFFF and unicodedata.category(char) in ("Co", "Cn") for char in text)


def young_punctuation(text: str) -> bool:
    """The library's table for BERT's pre-tokenizer is of Unicode 8."""
    return any(unicodedata.category(char)[0] == "P" for char in text if ord(char) > 0x7F)


def long_word(text: str) -> bool:
    return any(len(word) > 100 for word in text.split())


def unknown_by_case(text: str) -> bool:
    """The text of the unknown token, once letters are small."""
    return "<UNK>" in text


def typed_byte(text: str) -> bool:
    return "<0x" in text


Kind = Callable[[str], bool]
# Kinds that must occur, and whether a small vocabulary shows them or not is chance for others.
NARROW = ({odd_space}, {new_character})
EXACT: tuple[set[Kind], set[Kind]] = (set(), set())
EXPECTED: dict[str, tuple[set[Kind], set[Kind]]] = {
    "gpt2": NARROW,
    "gpt2_prefix_space": NARROW,
    "llama3": NARROW,
    "qwen2": ({odd_space, heap_of_marks}, {new_character}),
    "cl100k": NARROW,
    "o200k": EXACT,
    "deepseek": (set(), {odd_space, new_character}),
    "deepseek_llm": EXACT,
    "deepseek_coder": NARROW,
    "smollm2": NARROW,
    "llama2": EXACT,
    "mistral": ({text_behind_token}, set()),
    "gemma": EXACT,
    "phi3": ({odd_space_behind_token}, set()),
    "unigram": ({heap_of_marks, unknown_by_case}, set()),
    "unigram_bytes": ({typed_byte}, set()),
    "word_piece": ({far_away, long_word, young_punctuation}, set()),
}
LEADING_SPACE = {"phi3", "unigram", "unigram_bytes"}


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EngineTokens]:
    """What the engine makes of the corpus with a sample's file; each sample runs once."""
    done: dict[str, EngineTokens] = {}

    def engine(name: str) -> EngineTokens:
        if name not in done:
            path = tmp_path_factory.mktemp(name) / TOKENIZER_FILE
            write_mtok(TokenizerFiles(samples.sample(name).to_str()), path)
            read_mtok(path)
            done[name] = run_engine(model, path, list(samples.corpus()))
        return done[name]

    return engine


def _same_score(tokenizer: Tokenizer, first: list[int], second: list[int]) -> bool:
    """Whether Unigram finds two ways of cutting equally good."""
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    worst = min(score for _, score in vocab) - 10
    score = {number: worst if number == 0 else value for number, (_, value) in enumerate(vocab)}
    return abs(sum(score[n] for n in first) - sum(score[n] for n in second)) < 1e-9


@pytest.mark.parametrize("name", list(samples.MAKERS))
def test_ids_and_texts_equal_the_library_but_for_the_known_kinds(
    name: str, run: Callable[[str], EngineTokens]
) -> None:
    tokenizer = samples.sample(name)
    engine = run(name)
    texts = samples.corpus()
    expected = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    assert len(texts) > 10_000

    must, may = EXPECTED[name]
    found: set[Kind] = set()
    ties = 0
    for text, right, ids in zip(texts, expected, engine.ids, strict=True):
        if ids == right:
            continue
        kinds = [kind for kind in must | may if kind(text)]
        if not kinds:
            assert name.startswith("unigram"), (text, right, ids)
            assert _same_score(tokenizer, right, ids), (text, right, ids)
            ties += 1
        found.update(kinds)
    assert must <= found
    assert (ties > 0) == name.startswith("unigram")


@pytest.mark.parametrize("name", [name for name in samples.MAKERS if name != "word_piece"])
def test_shown_tokens_make_the_text_that_the_library_decodes(
    name: str, run: Callable[[str], EngineTokens]
) -> None:
    tokenizer = samples.sample(name)
    engine = run(name)
    led = 0
    # Unigram reads a typed <0x41> as the byte's token; bytes that make no text are shown otherwise.
    texts = [t for t in samples.corpus() if name != "unigram_bytes" or "<0x" not in t]
    for encoding in tokenizer.encode_batch(texts):
        right = tokenizer.decode(encoding.ids, skip_special_tokens=False)
        shown = engine.decode(encoding.ids)
        if shown != right:
            # The decoder takes a space from the start of a text; the engine shows token by token.
            assert name in LEADING_SPACE, (right, shown)
            assert shown == " " + right
            led += 1
    assert (led > 0) == (name in LEADING_SPACE)


def test_the_real_tokenizer_of_smollm2_is_equal_everywhere(
    smollm2_gguf: Path, model: Path, tmp_path: Path
) -> None:
    files = open_checkpoint(str(smollm2_gguf)).tokenizer
    path = tmp_path / TOKENIZER_FILE
    report = write_mtok(files, path)
    assert (report.vocab_size, report.differences) == (49152, ())
    texts = list(samples.corpus())
    engine = run_engine(model, path, texts)
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    right = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    assert engine.ids == right
    decoded = [tokenizer.decode(ids, skip_special_tokens=False) for ids in right]
    assert [engine.decode(ids) for ids in right] == decoded


@pytest.mark.parametrize("name", ["deepseek", "o200k"])
def test_long_runs_pass_the_wide_matcher(name: str, model: Path, tmp_path: Path) -> None:
    """The engine dies of twenty thousand and more; see docs/tokenizers.md."""
    tokenizer = samples.sample(name)
    path = tmp_path / TOKENIZER_FILE
    write_mtok(TokenizerFiles(tokenizer.to_str()), path)
    texts = ["好" * 3000, "a" * 3000, " " * 3000]
    engine = run_engine(model, path, texts)
    assert engine.ids == [encoding.ids for encoding in tokenizer.encode_batch(texts)]
