"""What a model file returns: a graph with all that the engine and the bundle must know of it."""

from __future__ import annotations

from dataclasses import dataclass

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.weights import MatrixSlot
from mnnsmith.models.layers import AttentionShape


@dataclass(frozen=True)
class IgnoredTensors:
    """Tensors of a checkpoint that are left out on purpose: a glob of names, and why."""

    pattern: str
    reason: str


@dataclass(frozen=True)
class LanguageModel:
    """A decoder, ready to be filled with weights.

    embedding: the input embedding, [vocabulary, hidden]; the same tensor as the head's if tied.
    attention: heads, widths and scale, for the engine's configuration and the KV cache's size.
    max_context: the longest context for which the graph is exact, in tokens.
    sliding_window: its width in tokens, None if every layer sees everything.
    fits_fp16: whether activations stay within the range of fp16, in which phones compute.
    notes: what the user should know ("context limited to 4096: ...").
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
