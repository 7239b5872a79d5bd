"""The SigLIP tower of Idefics3 and SmolVLM, and the pixel-shuffle connector behind it.

One graph, tiles [n, 3, S, S] in and embeddings [n, tokens, 1, width of the text] out.  Inside, a
row is one patch of one tile, patch by patch and tile by tile within a patch: linear layers and
norms do not care, and the heads of all tiles stand side by side as the attention operator wants
them.  Formulas: Zhai et al. 2023 (tower), Laurençon et al. 2024 (connector).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Dim, Value, multiple
from mnnsmith.graph.weights import ConstantSlot, MatrixSlot, Role, VectorSlot
from mnnsmith.models.config import ConfigReader
from mnnsmith.models.layers import Projection, linear

CHANNELS = 3
# Of a tile; the mask has this many squared values.
_MOST_PATCHES = 4096
TOWER, CONNECTOR = "model.vision_model", "model.connector"
# Of a run-time dimension: how many tiles are encoded at once.
TILES = "tiles"


@dataclass(frozen=True)
class VisionShape:
    """Sizes of tower and connector; pixels, patches and widths.

    shuffle: patches a side that become one embedding.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    epsilon: float
    patch: int
    tile: int
    shuffle: int
    text_width: int

    @property
    def side(self) -> int:
        return self.tile // self.patch

    @property
    def patches(self) -> int:
        return self.side**2

    @property
    def tile_tokens(self) -> int:
        """Embeddings that one tile becomes."""
        return (self.side // self.shuffle) ** 2


def vision_shape(vision: ConfigReader, shuffle: int, text_width: int) -> VisionShape:
    """Read `vision_config`; the defaults are those of transformers' classes."""
    vision.only("hidden_act", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh", "SigLIP has this one.")
    vision.only("num_channels", (CHANNELS,), CHANNELS, "Pictures are red, green and blue.")
    shape = VisionShape(
        hidden=vision.integer("hidden_size", 1152),
        inner=vision.integer("intermediate_size", 3072),
        layers=vision.integer("num_hidden_layers", 12),
        heads=vision.integer("num_attention_heads", 16),
        epsilon=vision.number("layer_norm_eps", 1e-6, most=1.0),
        patch=vision.integer("patch_size", 32),
        tile=vision.integer("image_size", 224),
        shuffle=shuffle,
        text_width=text_width,
    )
    if shape.hidden % shape.heads:
        raise vision.error(f"hidden_size {shape.hidden} is no multiple of {shape.heads} heads")
    if not shape.side or shape.side % shuffle:
        raise vision.error(
            f"tiles of {shape.tile} pixels have {shape.side} patches of {shape.patch} a side; "
            f"scale_factor {shuffle} does not divide them"
        )
    if shape.patches > _MOST_PATCHES or shape.tile_tokens < 2:
        raise vision.error(
            f"tiles of {shape.patches} patches, {shape.tile_tokens} embeddings, are none of SigLIP"
        )
    return shape


def tower_graph(shape: VisionShape) -> Graph:
    """The whole graph."""
    g = Graph()
    pixels = g.input("pixel_values", [TILES, CHANNELS, shape.tile, shape.tile])
    embeddings = encode_tiles(g, pixels, shape)
    rows: list[Dim] = [TILES, shape.tile_tokens, 1, shape.text_width]
    g.mark_output(g.from_channels(embeddings, rows, "image_embeds"))
    return g


def encode_tiles(g: Graph, pixels: Value, shape: VisionShape) -> Value:
    """Tower and connector: [tiles, 3, S, S] -> packed [tiles * tokens, width of the text, 1, 1]."""
    x = _embed(g, pixels, shape)
    # Without a mask the engine's operator would be causal.
    blank = np.zeros((1, 1, shape.patches, shape.patches), np.float32)
    shared = _Shared(g.table("mask", blank), *_gelu_factors(g))
    delta: Value | None = None
    for i in range(shape.layers):
        prefix, name = f"{TOWER}.encoder.layers.{i}", f"layer{i}"
        norm = _norm(f"{prefix}.layer_norm1", shape)
        if delta is None:
            normed = g.layer_norm(x, *norm, shape.epsilon, f"{name}/attention_norm")
        else:
            x, normed = g.add_layer_norm(x, delta, *norm, shape.epsilon, f"{name}/attention_norm")
            g.mark(x, f"{TOWER}.encoder.layers.{i - 1}", i - 1, "residual")
        mixed = _attention(g, normed, shared, shape, f"{prefix}.self_attn", i)
        norm = _norm(f"{prefix}.layer_norm2", shape)
        x, normed = g.add_layer_norm(x, mixed, *norm, shape.epsilon, f"{name}/mlp_norm")
        delta = _feed_forward(g, normed, shared, shape, f"{prefix}.mlp", i)
        g.mark(mixed, f"{prefix}.self_attn", i, "attention")
        g.mark(delta, f"{prefix}.mlp", i, "mlp")
    assert delta is not None
    norm = _norm(f"{TOWER}.post_layernorm", shape)
    x, normed = g.add_layer_norm(x, delta, *norm, shape.epsilon, "post_norm")
    g.mark(x, f"{TOWER}.encoder.layers.{shape.layers - 1}", shape.layers - 1, "residual")
    return _connect(g, normed, shape)


@dataclass(frozen=True)
class _Shared:
    """Constants of all layers: the mask, and the factors of `_gelu`."""

    mask: Value
    cubic: Value
    linear: Value


def _norm(tensor: str, shape: VisionShape) -> tuple[VectorSlot, VectorSlot]:
    return (
        VectorSlot(f"{tensor}.weight", shape.hidden),
        VectorSlot(f"{tensor}.bias", shape.hidden),
    )


def _embed(g: Graph, pixels: Value, shape: VisionShape) -> Value:
    """Patches as rows, through the convolution as a linear layer, plus their positions."""
    side, patch = shape.side, shape.patch
    if shape.tile % patch:
        # The convolution leaves out what makes no whole patch.
        whole = side * patch
        pixels = g.slice(g.slice(pixels, 0, whole, 2, "crop/rows"), 0, whole, 3, "crop")
    cells = g.reshape(pixels, [TILES, CHANNELS, side, patch, side, patch], "patches/cells")
    rows = g.transpose(cells, [2, 4, 0, 1, 3, 5], "patches/rows")
    kernel = (CHANNELS, patch, patch)
    width = CHANNELS * patch * patch
    packed = g.to_channels(rows, width, "patches")
    name = f"{TOWER}.embeddings.patch_embedding"
    weight = MatrixSlot(f"{name}.weight", shape.hidden, width, Role.PATCH, kernel=kernel)
    bias = VectorSlot(f"{name}.bias", shape.hidden)
    x = g.linear(packed, weight, "patch_embedding", bias)
    # transformers looks for the bucket of each patch's place; of a full tile that is its own row.
    slot = ConstantSlot(
        f"{TOWER}.embeddings.position_embedding.weight", (shape.patches, shape.hidden)
    )
    table = g.reshape(
        g.constant("position_table", slot), [shape.patches, 1, shape.hidden], "positions"
    )
    plain = g.from_channels(x, [shape.patches, TILES, shape.hidden], "patch_embedding/plain")
    total = g.binary("add", plain, table, "embeddings/sum")
    embedded = g.to_channels(total, shape.hidden, "embeddings")
    g.mark(embedded, f"{TOWER}.embeddings", -1, "residual")
    return embedded


def _attention(
    g: Graph, x: Value, shared: _Shared, shape: VisionShape, prefix: str, layer: int
) -> Value:
    """Every patch of a tile sees every other one (Vaswani et al. 2017)."""
    width, name = shape.hidden // shape.heads, f"layer{layer}/attention"
    heads: list[Dim] = [1, shape.patches, multiple(shape.heads, TILES), width]
    q, k, v = (
        g.from_channels(
            _linear(g, x, f"{prefix}.{part}_proj", shape.hidden, layer, f"{name}/{part}"),
            heads,
            f"{name}/{part}/heads",
        )
        for part in ("q", "k", "v")
    )
    mixed = g.full_attention(q, k, v, shared.mask, scale=width**-0.5, name=f"{name}/mix")
    rows = g.to_channels(mixed, shape.hidden, f"{name}/rows")
    return _linear(g, rows, f"{prefix}.out_proj", shape.hidden, layer, f"{name}/out")


def _feed_forward(
    g: Graph, x: Value, shared: _Shared, shape: VisionShape, prefix: str, layer: int
) -> Value:
    """fc2(gelu(fc1(x)))."""
    name = f"layer{layer}/mlp"
    inner = _linear(g, x, f"{prefix}.fc1", shape.inner, layer, f"{name}/fc1")
    active = _gelu(g, inner, shared, f"{name}/act")
    return _linear(g, active, f"{prefix}.fc2", shape.hidden, layer, f"{name}/fc2")


def _linear(g: Graph, x: Value, tensor: str, rows: int, layer: int, name: str) -> Value:
    return linear(g, x, Projection(tensor, rows, bias=True), Role.VISION, layer, name)


def _gelu_factors(g: Graph) -> tuple[Value, Value]:
    """The two constants of `_gelu`."""
    slope = 2 * math.sqrt(2 / math.pi)
    return (
        g.table("gelu/cubic", np.array([math.sqrt(slope * 0.044715)], np.float32)),
        g.table("gelu/linear", np.array([slope], np.float32)),
    )


def _gelu(g: Graph, x: Value, shared: _Shared, name: str) -> Value:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016), as x sigmoid(2..).

    The engine's own operator takes a rational function for tanh, which is 1e-4 off near its ends.
    The factor before the square keeps fp16 from overflowing.
    """
    square = g.unary("square", g.binary("multiply", x, shared.cubic, f"{name}/scaled"), f"{name}/2")
    slope = g.binary("add", square, shared.linear, f"{name}/slope")
    gate = g.unary("sigmoid", g.binary("multiply", slope, x, f"{name}/gate"), f"{name}/sigmoid")
    return g.binary("multiply", gate, x, name)


def _connect(g: Graph, x: Value, shape: VisionShape) -> Value:
    """Squares of patches side by side, then one linear layer."""
    cells, n = shape.side // shape.shuffle, shape.shuffle
    grid = g.from_channels(x, [cells, n, cells, n, TILES, shape.hidden], "shuffle/grid")
    squares = g.transpose(grid, [4, 0, 2, 1, 3, 5], "shuffle/squares")
    packed = g.to_channels(squares, n * n * shape.hidden, "shuffle")
    projection = Projection(f"{CONNECTOR}.modality_projection.proj", shape.text_width)
    return linear(g, packed, projection, Role.VISION, None, "connector")
