"""Reasoning told from the answer, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mnnsmith.text.reasoning import ReasoningSplitter


def split(pieces: list[str], open_at_start: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(open_at_start=open_at_start)
    found = [part for piece in pieces for part in splitter.push(piece)] + splitter.flush()
    assert all(part.text for part in found)
    kinds = [part.reasoning for part in found]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes first, in one stretch"
    return (
        "".join(part.text for part in found if part.reasoning),
        "".join(part.text for part in found if not part.reasoning),
    )


CASES = [
    ("Paris.", False, "", "Paris."),
    ("  Paris. ", False, "", "  Paris. "),
    ("<think>\nEasy, it is.\n</think>\n\nParis.\n", False, "Easy, it is.", "Paris.\n"),
    ("\n<think></think>\n\nParis.", False, "", "Paris."),
    ("Easy.\n</think>\n\nParis.", True, "Easy.", "Paris."),
    ("<think>a\n\n b </ c < / </thin </think>d", False, "a\n\n b </ c < / </thin", "d"),
    ("<think>never closed </thi", False, "never closed </thi", ""),
    ("<think>  \n", False, "", ""),
    ("<thin", False, "", "<thin"),
    ("<thinking>x", False, "", "<thinking>x"),
    ("A tag <think>in</think> the answer", False, "", "A tag <think>in</think> the answer"),
    ("<think>a</think>b<think>c</think>d", False, "a", "b<think>c</think>d"),
    ("x</think>y", False, "", "x</think>y"),
    ("", False, "", ""),
    ("<think>a</think>", False, "a", ""),
]


@pytest.mark.parametrize(("text", "open_at_start", "reasoning", "answer"), CASES)
def test_split_at_every_place(text: str, open_at_start: bool, reasoning: str, answer: str) -> None:
    for cut in range(len(text) + 1):
        assert split([text[:cut], text[cut:]], open_at_start) == (reasoning, answer)
    assert split(list(text), open_at_start) == (reasoning, answer)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/think>", " ", "\n", "a"])))
def test_the_cuts_do_not_matter(pieces: list[str]) -> None:
    text = "".join(pieces)
    for open_at_start in (False, True):
        assert (
            split([text], open_at_start)
            == split(pieces, open_at_start)
            == split(list(text), open_at_start)
        )


def test_text_is_shown_as_soon_as_it_is_decided() -> None:
    splitter = ReasoningSplitter()
    assert [part.text for part in splitter.push("<think>ab")] == ["ab"]
    assert [part.text for part in splitter.push("cd </")] == ["cd"]
    assert [part.text for part in splitter.push("think>e")] == ["e"]
    assert [part.text for part in splitter.push("f")] == ["f"]
