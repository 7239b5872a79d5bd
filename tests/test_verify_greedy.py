"""The reference's greedy text: the same whatever is guessed, in as few runs as guesses allow."""

from __future__ import annotations

import numpy as np
import pytest

from mnnsmith.verify.checks.greedy import Draft, engine_draft, greedy_text
from verify_stand_ins import VOCAB, StandInEngine, StandInReference, true_logits

PROMPTS = np.random.default_rng(3).integers(0, VOCAB, (3, 5))
TOKENS = 12


def plain(prompt: np.ndarray) -> list[int]:
    """One token after the other."""
    ids = prompt
    for _ in range(TOKENS):
        ids = np.append(ids, true_logits(ids)[-1].argmax())
    return ids[prompt.size :].tolist()


EXPECTED = [plain(prompt) for prompt in PROMPTS]


def perfect(ids: np.ndarray, count: int) -> np.ndarray:
    prompt, done = ids[: PROMPTS.shape[1]], ids.size - PROMPTS.shape[1]
    (row,) = np.flatnonzero((prompt == PROMPTS).all(1))
    return np.array(EXPECTED[row][done : done + count])


def wrong_at_times(ids: np.ndarray, count: int) -> np.ndarray:
    guess = perfect(ids, count)
    guess[3:4] = (guess[3:4] + 1) % VOCAB
    return guess


def short(ids: np.ndarray, count: int) -> np.ndarray:
    return perfect(ids, min(count, 2))


@pytest.mark.parametrize(
    ("draft", "runs"),
    [
        (None, TOKENS),
        (perfect, 1),
        (wrong_at_times, 3),
        (short, 4),
        (lambda ids, count: np.zeros(count, dtype=np.int64), None),
        (engine_draft(StandInEngine()), 1),  # type: ignore[arg-type]
        (engine_draft(StandInEngine(lambda logits, *_: -logits)), None),  # type: ignore[arg-type]
    ],
)
def test_guesses_change_the_number_of_runs_only(draft: Draft | None, runs: int | None) -> None:
    reference = StandInReference()
    assert greedy_text(reference, PROMPTS, TOKENS, draft).tolist() == EXPECTED
    assert runs is None or len(reference.runs) == runs
    # No token is run that is not needed.
    assert max(ids.shape[1] for ids in reference.runs) == PROMPTS.shape[1] + TOKENS - 1


def test_windows_that_a_guess_confirmed_serve_without_guesses() -> None:
    """As from a saved reference, which has only what was run before."""

    first = StandInReference()
    greedy_text(first, PROMPTS, TOKENS, wrong_at_times)
    saved = StandInReference(held=first.runs)
    assert greedy_text(saved, PROMPTS, TOKENS).tolist() == EXPECTED
