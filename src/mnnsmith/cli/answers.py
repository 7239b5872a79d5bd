"""How an answer is shown while it streams, and what is said about it afterwards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from mnnsmith.cli.console import Style, clean, is_terminal, note

if TYPE_CHECKING:
    from mnnsmith.session import Answer
    from mnnsmith.text.reasoning import TextPiece


class AnswerPrinter:
    """Writes the pieces of one answer to stdout; reasoning only on a terminal, dimmed."""

    def __init__(self) -> None:
        self._style = Style(sys.stdout)
        self._terminal = is_terminal(sys.stdout)
        self._reasoning = False
        self._last = ""

    def write(self, piece: TextPiece) -> None:
        """Show one piece at once."""
        if piece.reasoning and not self._terminal:
            return
        if piece.reasoning != self._reasoning:
            self._reasoning = piece.reasoning
            sys.stdout.write(self._style.dim if piece.reasoning else f"{self._style.reset}\n\n")
        sys.stdout.write(clean(piece.text, sys.stdout))
        sys.stdout.flush()
        self._last = piece.text[-1:]

    def end(self) -> None:
        """Back to normal colour and to the start of a line."""
        reset = self._style.reset if self._reasoning else ""
        sys.stdout.write(reset + ("" if self._last == "\n" else "\n"))
        sys.stdout.flush()


def explain_end(answer: Answer) -> None:
    """Say so on stderr when an answer did not come to its own end."""
    if answer.finish_reason == "length":
        note(f"(stopped after {len(answer.token_ids)} tokens: --max-tokens)")
    elif answer.finish_reason == "context":
        note("(stopped: the context is full)")


def as_json(answer: Answer, load_s: float) -> dict[str, Any]:
    """The object that `run --json` writes; docs/cli.md lists its fields."""
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "stop_string": answer.stop_string,
        "seed": answer.seed,
        "tokens": {
            "prompt": answer.prompt_tokens,
            "prompt_reused": answer.reused_tokens,
            "answer": len(answer.token_ids),
            "answer_ids": list(answer.token_ids),
        },
        "tiles": {"prompt": answer.tiles, "prompt_reused": answer.reused_tiles},
        "timings": {
            "load_s": round(load_s, 4),
            "first_token_s": round(answer.first_token_s, 4),
            "total_s": round(answer.total_s, 4),
            "prompt_tokens_per_s": round(answer.prompt_tokens_per_s, 2),
            "tokens_per_s": round(answer.tokens_per_s, 2),
        },
    }
