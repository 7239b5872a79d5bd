"""What a bundle is judged by: another program that computes the same model in float32.

A reference gives the hidden states before the head, from which logits are computed a few rows at a
time (a vocabulary is wide), and on request the values inside, by the names of our graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
IDS = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ReferenceRun:
    """What one run gave.

    ids: [windows, n].  hidden: float32 [windows, n, hidden], after the final norm.
    values: by name, float32 [windows, n, width]: heads, experts and the like are one after another
    in `width`, in the graph's order.
    """

    ids: IDS
    hidden: F32
    values: Mapping[str, F32]


@dataclass(frozen=True)
class Seen:
    """What tiles became.

    embeddings: float32 [tiles, tile_tokens, width of the text].  values: by name of the vision's
    graph, float32 [tiles, rows, width]: a row is a patch, or an embedding.
    """

    embeddings: F32
    values: Mapping[str, F32]


class PictureReference(Protocol):
    """The vision of a model in float32, and its text with pictures in it."""

    def available(self) -> Collection[str]:
        """Names of the vision graph's values that `see` can give."""
        ...

    def see(self, pixels: F32, values: Sequence[str] = ()) -> Seen:
        """Encode tiles, float32 [n, 3, S, S] as the tower takes them."""
        ...

    def run(self, ids: IDS, embeddings: F32) -> F32:
        """Hidden states before the head, float32 [n, hidden], of ids [n] from an empty cache.

        embeddings: [tiles, tile_tokens, width], which take the places of the image tokens.
        """
        ...


class Reference(Protocol):
    """A model in float32."""

    @property
    def pictures(self) -> PictureReference | None:
        """None of a model of text alone, and of one whose runs were saved."""
        ...

    @property
    def name(self) -> str:
        """As reports show it: "transformers 5.24.0, float32"."""
        ...

    @property
    def computes(self) -> bool:
        """Whether `run` takes any ids; else only what was run before is there."""
        ...

    def available(self) -> Collection[str]:
        """Names of the graph's values that `run` can give."""
        ...

    def run(self, ids: IDS, values: Sequence[str] = ()) -> ReferenceRun:
        """Feed windows of equal length, int64 [windows, n], each from an empty cache."""
        ...

    def decisive(self, ids: IDS) -> npt.NDArray[np.bool_]:
        """For each window, whether no router is so near a tie that rounding decides it.

        Of windows that are not, two right programs may choose different experts.  A model without
        routers has none.
        """
        ...

    def logits(self, hidden: F32) -> F32:
        """float32 [rows, vocabulary] of hidden states [rows, hidden]."""
        ...

    def __enter__(self) -> Reference: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
