"""A reference and an engine made of a few lines of numpy, so that what a check must find is known.

Both compute logits from the last two tokens, and the engine is wrong in just the way that a test
asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mnnsmith.bundle import Bundle
from mnnsmith.verify.context import Context, Level
from mnnsmith.verify.references.reference import ReferenceRun
from tiny_checkpoint import VOCAB, write_tokenizer

Fault = Callable[[np.ndarray, np.ndarray, "StandInEngine"], np.ndarray]

_TABLE = np.random.default_rng(7).normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)


def true_logits(ids: np.ndarray) -> np.ndarray:
    """float32 [n, vocabulary] after each of `ids` [n]."""
    before = np.concatenate([[0], ids[:-1]])
    return _TABLE[ids] + np.float32(0.7) * _TABLE[before][:, ::-1]


class StandInReference:
    """Its hidden states are the logits.  indecisive: windows with this token are near a tie.

    held: as one that is saved, it has beginnings of these windows only.
    """

    name = "stand-in"

    def __init__(self, indecisive: int | None = None, held: Sequence[np.ndarray] = ()) -> None:
        self.indecisive = indecisive
        self.held = held
        self.runs: list[np.ndarray] = []

    @property
    def computes(self) -> bool:
        return not self.held

    def available(self) -> Collection[str]:
        return ()

    def run(self, ids: np.ndarray, values: Sequence[str] = ()) -> ReferenceRun:
        self.runs.append(ids)
        for row in ids if self.held else ():
            longer = [rows for rows in self.held if rows.shape[1] >= row.size]
            assert any((rows[:, : row.size] == row).all(1).any() for rows in longer), row
        return ReferenceRun(ids, np.stack([true_logits(row) for row in ids]), {})

    def decisive(self, ids: np.ndarray) -> np.ndarray:
        return ~(ids == -1 if self.indecisive is None else ids == self.indecisive).any(1)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return hidden

    def __enter__(self) -> StandInReference:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class StandInEngine:
    """fault(logits, positions, engine) gives the logits that this engine gives instead."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.cache: list[int] = []
        self.rewound = False
        self.opened_with: dict[str, Any] = {}

    def __call__(self, folder: Path, **options: Any) -> StandInEngine:
        self.opened_with = options
        return self

    def __enter__(self) -> StandInEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def reset(self) -> None:
        self.cache, self.rewound = [], False

    def rewind(self, position: int) -> None:
        del self.cache[position:]
        self.rewound = True

    def forward(self, ids: Sequence[int], *, all_positions: bool = False) -> np.ndarray:
        start = len(self.cache)
        self.cache += ids
        logits = true_logits(np.array(self.cache))[start:]
        if self.fault:
            logits = self.fault(logits.copy(), np.arange(start, len(self.cache)), self)
        return logits if all_positions else logits[-1]

    def generate(self, ids: Sequence[int], max_new_tokens: int) -> Iterator[int]:
        last = self.forward(list(ids))
        for _ in range(max_new_tokens):
            token = int(last.argmax())
            yield token
            last = self.forward([token])


def stand_in_context(
    folder: Path,
    engine: StandInEngine,
    reference: StandInReference | None = None,
    *,
    level: Level = "quick",
    texts: tuple[Path, ...] = (),
    max_context: int = 2048,
) -> Context:
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder)
    model = {"vocab_size": VOCAB, "max_context": max_context, "stop_ids": []}
    bundle = Bundle(folder, SimpleNamespace(model=model), None, None, None)  # type: ignore[arg-type]
    chosen = reference or StandInReference()
    return Context(bundle, None, level, engine, lambda weights: chosen, texts)  # type: ignore[arg-type]
