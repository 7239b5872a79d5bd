"""The decoder that most families share: two norms, attention, feed-forward, residuals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Value
from mnnsmith.graph.weights import MatrixSlot, Role, VectorSlot
from mnnsmith.models import layers as nn
from mnnsmith.models import moe
from mnnsmith.models.config import ConfigReader

# (graph, normalized hidden state, layer) -> what the residual gets.
Part: TypeAlias = Callable[[Graph, Value, int], Value]


@dataclass(frozen=True)
class Stack:
    """Sizes of a decoder, and the tensors at its two ends."""

    hidden: int
    layers: int
    epsilon: float
    embedding: MatrixSlot
    head: MatrixSlot


def read_stack(config: ConfigReader, default_epsilon: float, *, tied_by_default: bool) -> Stack:
    """The fields that every decoder has."""
    hidden = config.integer("hidden_size")
    vocabulary = config.integer("vocab_size")
    embedding = MatrixSlot("model.embed_tokens.weight", vocabulary, hidden, Role.EMBEDDING)
    tied = config.flag("tie_word_embeddings", tied_by_default)
    name = embedding.tensor if tied else "lm_head.weight"
    return Stack(
        hidden,
        config.integer("num_hidden_layers"),
        config.number("rms_norm_eps", default_epsilon, most=1.0),
        embedding,
        MatrixSlot(name, vocabulary, hidden, Role.HEAD),
    )


def layer_prefix(layer: int) -> str:
    """The checkpoint's name of a block."""
    return f"model.layers.{layer}"


def layer_name(layer: int) -> str:
    """Our name of a block in the graph."""
    return f"layer{layer}"


def mark_parts(g: Graph, attention: Value, feed_forward: Value, layer: int) -> None:
    """Say which values are the outputs of a block's two parts."""
    g.mark(attention, f"{layer_prefix(layer)}.self_attn", layer, "attention")
    g.mark(feed_forward, f"{layer_prefix(layer)}.mlp", layer, "mlp")


def mark_block(g: Graph, residual: Value, layer: int) -> None:
    """Say which value is the output of a block."""
    g.mark(residual, layer_prefix(layer), layer, "residual")


def add_stack(
    g: Graph, inputs: nn.DecoderInputs, stack: Stack, attention: Part, feed_forward: Part
) -> None:
    """Add all blocks, the final norm and the head."""

    def gain(layer: int, norm: str) -> VectorSlot:
        return VectorSlot(f"{layer_prefix(layer)}.{norm}.weight", stack.hidden)

    x, delta = inputs.hidden, None
    for i in range(stack.layers):
        name, first = layer_name(i), gain(i, "input_layernorm")
        if delta is None:
            normed = g.rms_norm(x, first, stack.epsilon, f"{name}/attention_norm")
        else:
            x, normed = g.add_rms_norm(x, delta, first, stack.epsilon, f"{name}/attention_norm")
            mark_block(g, x, i - 1)
        mixed = attention(g, normed, i)
        second = gain(i, "post_attention_layernorm")
        x, normed = g.add_rms_norm(x, mixed, second, stack.epsilon, f"{name}/mlp_norm")
        delta = feed_forward(g, normed, i)
        mark_parts(g, mixed, delta, i)
    assert delta is not None
    x = g.binary("add", x, delta, "residual")
    mark_block(g, x, stack.layers - 1)
    norm = VectorSlot("model.norm.weight", stack.hidden)
    nn.head(g, x, inputs.logits_index, norm, stack.epsilon, stack.head)
    moe.add_choices(g, stack.head.rows)
