"""How the next token is chosen: the options, validated once."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any

from mnnsmith.errors import UsageError

# What every JSON reader keeps exactly: numbers below 2^53.
_SEED_BITS = 53


@dataclass(frozen=True)
class SamplingOptions:
    """Options of one generation, applied in this order; the defaults choose the best token.

    repetition_penalty: divides positive and multiplies negative logits of tokens that occur in the
        context (prompt and answer); 1 = off, above 1 = fewer repeats.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens of the answer so far,
        once and per occurrence; -2 to 2, 0 = off.
    temperature: divides the logits; 0 = always the best token.
    top_k: only the k best tokens; 0 = all.
    top_p: the smallest set of tokens that holds this probability; 1 = all.
    min_p: only tokens with at least this share of the best one's probability; 0 = all.
    seed: the same seed, prompt and options give the same answer; None = a new seed each time.

    Raises UsageError that names the option, its range and the value found.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check_number("temperature", 0.0, 100.0)
        self._check_number("top_p", 0.0, 1.0, above=True)
        self._check_number("min_p", 0.0, 1.0)
        self._check_number("repetition_penalty", 0.0, 100.0, above=True)
        self._check_number("presence_penalty", -2.0, 2.0)
        self._check_number("frequency_penalty", -2.0, 2.0)
        self._check_integer("top_k")
        if self.seed is not None:
            self._check_integer("seed")

    def _check_number(self, name: str, low: float, high: float, *, above: bool = False) -> None:
        value: Any = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and low <= value <= high) or (
            above and value == low
        ):
            start = f"above {low:g}, at most" if above else f"from {low:g} to"
            raise UsageError(f"{name} must be a number {start} {high:g}, found {value!r}.")

    def _check_integer(self, name: str) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
            raise UsageError(f"{name} must be an integer of at least 0, found {value!r}.")

    def request(self) -> dict[str, Any]:
        """The options as the runner takes them, the seed drawn where none is given."""
        seed = secrets.randbits(_SEED_BITS) if self.seed is None else self.seed
        return {
            "temperature": float(self.temperature),
            "top_k": self.top_k,
            "top_p": float(self.top_p),
            "min_p": float(self.min_p),
            "repetition_penalty": float(self.repetition_penalty),
            "presence_penalty": float(self.presence_penalty),
            "frequency_penalty": float(self.frequency_penalty),
            "seed": seed,
        }
