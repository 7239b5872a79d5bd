"""Tells a model's reasoning (`<think>...</think>`) from its answer while the text arrives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class TextPiece:
    """A piece of the output; `reasoning` tells which part it belongs to."""

    text: str
    reasoning: bool


class _State(Enum):
    START = "nothing but white space so far"
    REASONING = "inside the tags"
    AFTER = "between the closing tag and the answer"
    ANSWER = "answer"


class ReasoningSplitter:
    """Splits a streamed text at the reasoning tags.

    Reasoning is only what stands at the beginning: a tag within the answer is text.  The tags and
    the white space around them are dropped; everything else comes out as it came in.

    open_at_start: the prompt ended with the opening tag, so the text begins inside.
    """

    def __init__(
        self,
        *,
        open_at_start: bool = False,
        open_tag: str = "<think>",
        close_tag: str = "</think>",
    ) -> None:
        self._open, self._close = open_tag, close_tag
        self._held = ""
        self._begun = False
        self._state = _State.REASONING if open_at_start else _State.START

    def push(self, text: str) -> list[TextPiece]:
        """The pieces that are decided, none of them empty."""
        self._held += text
        pieces: list[TextPiece] = []
        while self._step(pieces):
            continue
        return [piece for piece in pieces if piece.text]

    def flush(self) -> list[TextPiece]:
        """The end of the text: what was held back is what it looks like.

        White space at the end of reasoning that was never closed is dropped.
        """
        held, self._held = self._held, ""
        if self._state is _State.REASONING:
            # A tag cut short is text; only white space was held for the sake of a closing tag.
            held = held.rstrip() if self._begun else held.strip()
        elif self._state is _State.AFTER:
            held = ""
        return [TextPiece(held, self._state is _State.REASONING)] if held else []

    def _step(self, pieces: list[TextPiece]) -> bool:
        """Take what can be decided out of the held text; True when there may be more."""
        if self._state is _State.START:
            return self._step_start()
        if self._state is _State.REASONING:
            return self._step_reasoning(pieces)
        if self._state is _State.AFTER:
            self._held = self._held.lstrip()
            if not self._held:
                return False
            self._state = _State.ANSWER
        pieces.append(TextPiece(self._held, False))
        self._held = ""
        return False

    def _step_start(self) -> bool:
        begun = self._held.lstrip()
        if begun.startswith(self._open):
            self._held = begun[len(self._open) :]
            self._state = _State.REASONING
            return True
        if self._open.startswith(begun):
            return False
        self._state = _State.ANSWER
        return True

    def _step_reasoning(self, pieces: list[TextPiece]) -> bool:
        if not self._begun:
            self._held = self._held.lstrip()
            if not self._begun and not self._held:
                return False
        at = self._held.find(self._close)
        if at >= 0:
            pieces.append(TextPiece(self._held[:at].rstrip(), True))
            self._held = self._held[at + len(self._close) :]
            self._state = _State.AFTER
            return True
        # Hold a beginning of the closing tag, and the white space before it.
        cut = len(self._held)
        for length in range(min(len(self._close) - 1, cut), 0, -1):
            if self._held.endswith(self._close[:length]):
                cut -= length
                break
        shown = self._held[:cut].rstrip()
        pieces.append(TextPiece(shown, True))
        self._begun = self._begun or bool(shown)
        self._held = self._held[len(shown) :]
        return False
