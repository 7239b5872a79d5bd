"""Windows of text: nothing counts twice, everything follows from text, tokenizer and level."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mnnsmith.errors import UsageError
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.verify.texts.windows import (
    BLOCK_TOKENS,
    MAX_TOKENS,
    Section,
    cut_windows,
    leading_ids,
    shipped_sections,
    user_sections,
)
from tiny_checkpoint import write_tokenizer


def tokenizer(folder: Path, *, bos: bool = False) -> TextTokenizer:
    write_tokenizer(folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    if bos:
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [_bos(spec)], "tokens": ["<s>"]}},
        }
    return TextTokenizer(json.dumps(spec))


def _bos(spec: dict) -> int:
    return next(t["id"] for t in spec["added_tokens"] if t["content"] == "<s>")


def test_shipped_texts_are_many_kinds_and_plain() -> None:
    sections = shipped_sections()
    names = {section.name for section in sections}
    assert len(sections) == len(names) >= 17
    assert {"english-story", "german", "chinese", "arabic", "hindi", "python", "c"} <= names
    for section in sections:
        assert len(section.text) > 250 and "\ufffd" not in section.text
        # Typed control tokens would be read as such by some tokenizers.
        assert "<|" not in section.text and "</s>" not in section.text


@pytest.mark.parametrize("bos", [False, True])
def test_no_token_counts_twice(tmp_path: Path, bos: bool) -> None:
    """Numbered words: each prediction is of a place of its own, in order."""
    tok = tokenizer(tmp_path, bos=bos)
    lead = leading_ids(tok)
    assert len(lead) == int(bos)
    text = "".join(chr(33 + i % 90) for i in range(1000))
    ids = tok.encode(text)
    cut = cut_windows([Section("a", text)], tok, "full", 2048)
    place, predicted = 0, Counter()
    for window in cut.windows:
        body = window.ids[len(lead) :]
        assert window.ids[: len(lead)].tolist() == lead
        assert body.tolist() == ids[place : place + body.size]
        first = place if bos else place + 1
        predicted.update(range(first, place + body.size))
        assert window.targets.tolist() == ids[first : place + body.size]
        assert window.targets.size % BLOCK_TOKENS == 0
        # Row r of the logits of `inputs` is what foresees ids[r + 1].
        assert window.ids[1:].tolist()[window.skip :] == window.targets.tolist()
        place += body.size
    assert max(predicted.values()) == 1
    assert sum(predicted.values()) == cut.tokens > 950


def test_quick_is_a_balanced_part_of_full(tmp_path: Path) -> None:
    tok = tokenizer(tmp_path)
    quick = cut_windows(shipped_sections(), tok, "quick", 8192)
    full = cut_windows(shipped_sections(), tok, "full", 8192)
    shares = Counter()
    for window in quick.windows:
        shares[window.section] += window.targets.size
    assert set(shares) == {section.name for section in shipped_sections()}
    assert len(set(shares.values())) == 1 and quick.tokens <= MAX_TOKENS["quick"] < full.tokens
    assert full.complete and not quick.complete
    # A reference run kept at level full serves level quick: beginnings of its windows.
    starts = {window.section: window for window in reversed(full.windows)}
    for window in quick.windows:
        np.testing.assert_array_equal(starts[window.section].ids[: window.ids.size], window.ids)


def test_the_hash_tells_texts_and_cuts_apart(tmp_path: Path) -> None:
    tok = tokenizer(tmp_path)
    text = "The forge is cold. " * 40

    def digest(name: str = "a", text: str = text, context: int = 512) -> str:
        return cut_windows([Section(name, text)], tok, "quick", context).sha256

    assert digest() == digest()
    other = {digest(), digest("b"), digest(text=text.replace("cold", "hot")), digest(context=64)}
    assert len(other) == 4


def test_windows_fit_a_small_context(tmp_path: Path) -> None:
    cut = cut_windows(shipped_sections(), tokenizer(tmp_path, bos=True), "quick", 40)
    assert max(window.inputs.size for window in cut.windows) <= 40


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    tok = tokenizer(tmp_path)
    for text, context in (("short", 512), ("word " * 200, 20)):
        with pytest.raises(UsageError, match="too few tokens"):
            cut_windows([Section("a", text)], tok, "full", context)


def test_files_of_a_user_are_sections(tmp_path: Path) -> None:
    for name, text in (("a/x.txt", "one"), ("b/x.txt", "two"), ("y.txt", "three")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = user_sections([tmp_path / "a/x.txt", tmp_path / "b/x.txt", tmp_path / "y.txt"])
    assert [section.text for section in found] == ["one", "two", "three"]
    assert len({section.name for section in found}) == 3 and found[2].name == "y.txt"
    (tmp_path / "y.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        user_sections([tmp_path / "y.txt"])
    (tmp_path / "y.txt").write_text(" \n")
    with pytest.raises(UsageError, match="no text"):
        user_sections([tmp_path / "y.txt"])
