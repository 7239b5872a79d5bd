"""What a model file returns: a graph with all that the engine and the bundle must know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mnnsmith.graph.core import Node
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.weights import MatrixSlot, Table
from mnnsmith.models.canvas import CanvasLayout
from mnnsmith.models.layers import AttentionShape


@dataclass(frozen=True)
class IgnoredTensors:
    """Tensors of a checkpoint that are left out on purpose: a glob of names, and why."""

    pattern: str
    reason: str


@dataclass(frozen=True)
class VisionModel:
    """What turns tiles of a picture into embeddings that stand in the text.

    graph: tiles [n, 3, S, S], normalized, to [n, tile_tokens, 1, width of the text].
    tile: pixels a side, S.  tile_tokens: embeddings that one tile becomes.
    image_token: the id that stands for each of them in the text.
    of_canvas: the graph that takes whole pictures instead, see `models.canvas`.
    """

    graph: Graph
    layers: int
    hidden_size: int
    tile: int
    tile_tokens: int
    image_token: int
    of_canvas: Callable[[MatrixSlot, CanvasLayout], Graph]


@dataclass(frozen=True)
class LanguageModel:
    """A decoder, ready to be filled with weights.

    embedding: the input embedding, [vocabulary, hidden]; the same tensor as the head's if tied.
    attention: heads, widths and scale, for the engine's configuration and the KV cache's size.
    max_context: the longest context for which the graph is exact, in tokens.
    sliding_window: its width in tokens, None if every layer sees everything.
    fits_fp16: whether activations stay within the range of fp16, in which phones compute.
    notes: what the user should know ("context limited to 4096: ...").
    vision: what lets it see pictures, None for a model of text alone.
    """

    graph: Graph
    embedding: MatrixSlot
    head: MatrixSlot
    hidden_size: int
    layers: int
    attention: AttentionShape
    max_context: int
    sliding_window: int | None = None
    fits_fp16: bool = True
    ignored: tuple[IgnoredTensors, ...] = ()
    notes: tuple[str, ...] = ()
    vision: VisionModel | None = None

    def all_nodes(self) -> Iterator[Node]:
        """The operators of the decoder, its experts, and its vision."""
        yield from self.graph.all_nodes()
        if self.vision is not None:
            yield from self.vision.graph.all_nodes()

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.embedding.tensor == self.head.tensor

    @property
    def mixture(self) -> bool:
        """Whether it has experts, of which each token uses a few."""
        return any(node.kind == "mixture" for node in self.graph.nodes)

    @property
    def float16(self) -> bool:
        """Whether phones may compute it in fp16: routing is to be computed in float32."""
        return self.fits_fp16 and not self.mixture

    def kv_bytes_per_token(self, element_bytes: int = 4) -> int:
        """Bytes that one token takes in the KV cache (float32 on x86, 2 bytes in fp16)."""
        shape = self.attention
        return 2 * self.layers * shape.kv_heads * shape.head_dim * element_bytes


def rename_tensors(model: LanguageModel, rename: Callable[[str], str]) -> LanguageModel:
    """The same decoder, as a part of a larger model that has its tensors under other names."""
    graph = model.graph
    graph.nodes = [
        replace(node, slots={
            part: slot if isinstance(slot, Table) else replace(slot, tensor=rename(slot.tensor))
            for part, slot in node.slots.items()
        })
        for node in graph.nodes
    ]  # fmt: skip
    graph.landmarks = [replace(mark, module=rename(mark.module)) for mark in graph.landmarks]
    return replace(
        model,
        embedding=replace(model.embedding, tensor=rename(model.embedding.tensor)),
        head=replace(model.head, tensor=rename(model.head.tensor)),
    )
