"""The reference's own greedy answers, and where a bundle leaves them.

Where does the bundle's greedy text leave the reference's?  Up to that place both have the same
beginning, so it is the first token of the reference's text that the bundle, fed with it, would not
have chosen.  The reference's text does not depend on the bundle, and can be kept for the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mnnsmith.engine import Engine
from mnnsmith.verify.references.reference import Reference

I64 = npt.NDArray[np.int64]
# (ids, count) -> how `count` tokens may go on after ids [n], int64 [count or fewer].
Draft: TypeAlias = Callable[[I64, int], I64]


def greedy_text(reference: Reference, prompts: I64, tokens: int, draft: Draft | None = None) -> I64:
    """The tokens with which the reference goes on, int64 [prompts, tokens].

    prompts: int64 [prompts, n].  A reference keeps no cache, so each token would be a run of the
    whole model.  draft: guesses; a run confirms a guess up to the first token that the reference
    would not choose, and puts that one right (Leviathan et al. 2023).  The text is the same
    whatever is guessed.
    """
    texts = [prompt[:0] for prompt in prompts]
    while open_ := [i for i, text in enumerate(texts) if text.size < tokens]:
        known = {i: np.concatenate([prompts[i], texts[i]]) for i in open_}
        guesses = {i: _guess(draft, known[i], tokens - 1 - texts[i].size) for i in open_}
        for i, best in _best(reference, known, guesses).items():
            wrong = best[:-1] != guesses[i]
            right = int(wrong.argmax()) if wrong.any() else guesses[i].size
            texts[i] = np.concatenate([texts[i], best[: right + 1]])
    return np.stack(texts)


def _guess(draft: Draft | None, ids: I64, count: int) -> I64:
    return ids[:0] if draft is None or count == 0 else draft(ids, count)


def _best(reference: Reference, known: dict[int, I64], guesses: dict[int, I64]) -> dict[int, I64]:
    """The reference's choice after what is known, and after each guessed token, [guesses + 1].

    Windows of equal length run together.
    """
    windows = {i: np.concatenate([known[i], guesses[i]]) for i in known}
    found = {}
    for length in sorted({window.size for window in windows.values()}):
        places = [i for i, window in windows.items() if window.size == length]
        hidden = reference.run(np.stack([windows[i] for i in places])).hidden
        for i, rows in zip(places, hidden, strict=True):
            wanted = np.ascontiguousarray(rows[known[i].size - 1 :])
            found[i] = reference.logits(wanted).argmax(-1).astype(np.int64)
    return found


def engine_draft(engine: Engine) -> Draft:
    """Guesses of a bundle: it is near the reference, and has a cache."""

    def draft(ids: I64, count: int) -> I64:
        engine.reset()
        return np.array(list(engine.generate(ids.tolist(), max_new_tokens=count)), dtype=np.int64)

    return draft


def divergence_position(engine: Engine, prompt: I64, text: I64) -> int | None:
    """At which token of `text` [n] the engine, decoding step by step, would choose another."""
    engine.reset()
    logits = engine.forward(prompt.tolist())
    for place, token in enumerate(text.tolist()):
        if int(logits.argmax()) != token:
            return place
        if place + 1 < text.size:
            logits = engine.forward([token])
    return None
