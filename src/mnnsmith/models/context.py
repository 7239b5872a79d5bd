"""How long a context a graph is built for, and which layers see only a window of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mnnsmith.errors import UsageError
from mnnsmith.models.config import ConfigReader

# The names of layer types in transformers.
FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class ContextLimits:
    """What the user asked for: `max_context` tokens, or None for the model's own limit.

    mla: the form of latent attention, "expanded" or "latent" (see `models.mla`).
    """

    max_context: int | None = None
    mla: str = "expanded"

    def resolve(self, positions: int, longest_exact: int | None) -> tuple[int, tuple[str, ...]]:
        """The context to build for, and notes for the user.

        positions: `max_position_embeddings`.  longest_exact: a limit of the rope tables.
        """
        limit = positions if longest_exact is None else min(positions, longest_exact)
        if self.max_context is None:
            if limit < positions:
                return limit, (
                    f"context limited to {limit} of {positions} tokens: beyond it the model turns "
                    "to other rope frequencies (longrope), which a table cannot hold",
                )
            return limit, ()
        if not 1 <= self.max_context <= limit:
            reason = "the model's max_position_embeddings"
            if limit < positions:
                reason = "the last position of longrope's short frequencies"
            raise UsageError(
                f"--max-context {self.max_context} is out of range: it goes from 1 to {limit}, "
                f"{reason}.",
                "A longer context would give wrong answers silently.",
            )
        return self.max_context, ()


def no_windows(config: ConfigReader, layers: int, context: int) -> list[int | None]:
    """Every layer sees everything."""
    del config, context
    return [None] * layers


def uniform_windows(
    config: ConfigReader, layers: int, context: int, *, absent: int | None
) -> list[int | None]:
    """`sliding_window` for every layer; `absent` is what the family's class has for no such key."""
    return [_within(_width(config, absent), context)] * layers


def typed_windows(
    config: ConfigReader, layers: int, context: int, default: Sequence[str], *, absent: int | None
) -> list[int | None]:
    """`sliding_window` for the layers that `layer_types` (else `default`) calls sliding.

    absent: what the family's class has where the config has no such key.
    """
    width = _width(config, absent)
    kinds = layer_kinds(config, layers, default)
    if width is None and SLIDING in kinds:
        raise config.error("layer_types has sliding layers, and sliding_window is null")
    return [_within(width, context) if kind == SLIDING else None for kind in kinds]


def layer_kinds(config: ConfigReader, layers: int, default: Sequence[str]) -> list[str]:
    """The type of each layer: `layer_types`, else `default`."""
    kinds = config.raw("layer_types")
    if kinds is None:
        kinds = list(default)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise config.error(f"layer_types must be a list of {layers} names")
    for kind in set(map(str, kinds)) - {FULL, SLIDING}:
        raise config.unsupported(f"layer type {kind!r:.60} is not one that we know")
    return list(map(str, kinds))


def windows_switched_off(config: ConfigReader, layers: int) -> list[int | None]:
    """No layer has a window, whatever `sliding_window` says; none may be called sliding."""
    config.raw("sliding_window")
    if SLIDING in layer_kinds(config, layers, [FULL] * layers):
        raise config.unsupported("layer_types has sliding layers, and use_sliding_window is false")
    return [None] * layers


def _width(config: ConfigReader, absent: int | None) -> int | None:
    """null means no window; no such key means what the class of transformers has by default."""
    if not config.contains("sliding_window"):
        return absent
    return config.integer("sliding_window") if config.has("sliding_window") else None


def _within(window: int | None, context: int) -> int | None:
    """A window at least as wide as the context changes nothing, and is None."""
    return window if window is not None and window < context else None
