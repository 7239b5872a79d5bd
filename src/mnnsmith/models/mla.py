"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values out of one small latent.

Two forms that compute the same:

- expanded: keys and values of every head are computed from the latent and cached, as in plain
  attention; the cache holds 2 * heads * (nope + rope) floats a token and layer.
- latent: the latent itself is cached, as the one key-value head of attention with `heads` queries;
  W_uk moves into the query, W_uv behind the attention: 2 * (kv_rank + rope) floats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Layout, Value
from mnnsmith.graph.weights import HeadRows, MatrixSlot, Role, VectorSlot
from mnnsmith.models import layers as nn
from mnnsmith.models.config import ConfigReader

EXPANDED, LATENT = "expanded", "latent"
# The norms inside attention have their own epsilon, whatever rms_norm_eps says.
_LATENT_NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class MlaShape:
    """Widths of latent attention.

    q_rank: None where queries are projected directly.  interleaved: the checkpoint's rope pairs are
    neighbours (0, 1), (2, 3), ...; the engine rotates halves.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    scale: float
    interleaved: bool

    @property
    def key(self) -> int:
        """Width of a query or key head."""
        return self.nope + self.rope

    def cached(self, form: str) -> nn.AttentionShape:
        """The attention that the engine runs, whose keys and values it caches."""
        if form == LATENT:
            return nn.AttentionShape(self.heads, 1, self.rope + self.kv_rank, self.scale)
        return nn.AttentionShape(self.heads, self.heads, self.key, self.scale)


def mla_shape(config: ConfigReader, *, mscale: float, interleaved: bool) -> MlaShape:
    """The fields of a DeepSeek config; `mscale` multiplies the softmax scale (YaRN)."""
    heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", heads) != heads:
        raise config.unsupported("num_key_value_heads differs from num_attention_heads")
    config.only("attention_bias", (False,), False, "No released model has such biases.")
    config.raw("head_dim")
    nope, rope = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    value = config.integer("v_head_dim")
    if rope % 2 or value > nope + rope:
        raise config.unsupported(f"rope of {rope} or values of {value} elements in a head")
    return MlaShape(
        heads, config.integer("q_lora_rank") if config.has("q_lora_rank") else None,
        config.integer("kv_lora_rank"), nope, rope, value,
        (nope + rope) ** -0.5 * mscale, interleaved,
    )  # fmt: skip


def latent_attention(
    g: Graph,
    x: Value,
    shape: MlaShape,
    form: str,
    prefix: str,
    tables: tuple[Value, Value],
    mask: Value,
    layer: int,
    name: str,
) -> Value:
    """One attention block; `prefix` is that of the checkpoint's tensors."""
    block = _Block(g, shape, prefix, layer, name)
    q_nope, q_rope = block.queries(x)
    latent, k_rope = block.latents(x)
    cos, sin = tables
    q_rotated, k_rotated = g.rope(
        q_rope, k_rope, cos, sin, heads=shape.heads, kv_heads=1, head_dim=shape.rope,
        rotary_dim=shape.rope, name=f"{name}/rope",
    )  # fmt: skip
    if form == LATENT:
        mixed = block.attend_latent(q_nope, q_rotated, latent, k_rotated, mask)
    else:
        mixed = block.attend_expanded(q_nope, q_rotated, latent, k_rotated, mask)
    hidden = x.shape[1]
    assert isinstance(hidden, int)
    output = nn.Projection(f"{prefix}.o_proj", hidden)
    return nn.linear(g, mixed, output, Role.ATTENTION, layer, f"{name}/o")


@dataclass(frozen=True)
class _Block:
    """The pieces of one attention block."""

    g: Graph
    shape: MlaShape
    prefix: str
    layer: int
    name: str

    def queries(self, x: Value) -> tuple[Value, Value]:
        """The parts of all query heads without and with rope, packed channels."""
        shape, tensor = self.shape, f"{self.prefix}.q_proj"
        if shape.q_rank is not None:
            down = nn.Projection(f"{self.prefix}.q_a_proj", shape.q_rank)
            x = nn.linear(self.g, x, down, Role.ATTENTION, self.layer, f"{self.name}/q_down")
            gain = VectorSlot(f"{self.prefix}.q_a_layernorm.weight", shape.q_rank)
            x = self.g.rms_norm(x, gain, _LATENT_NORM_EPSILON, f"{self.name}/q_norm")
            tensor = f"{self.prefix}.q_b_proj"
        nope = HeadRows(shape.heads, shape.key, 0, shape.nope)
        rope = HeadRows(shape.heads, shape.key, shape.nope, shape.rope, shape.interleaved)
        return self._heads(x, tensor, nope, "q_nope"), self._heads(x, tensor, rope, "q_rope")

    def latents(self, x: Value) -> tuple[Value, Value]:
        """The normalized latent and the one rope key, packed channels."""
        shape, tensor = self.shape, f"{self.prefix}.kv_a_proj_with_mqa"
        down = nn.Projection(tensor, shape.kv_rank)
        latent = nn.linear(self.g, x, down, Role.ATTENTION, self.layer, f"{self.name}/kv_down")
        gain = VectorSlot(f"{self.prefix}.kv_a_layernorm.weight", shape.kv_rank)
        latent = self.g.rms_norm(latent, gain, _LATENT_NORM_EPSILON, f"{self.name}/kv_norm")
        rope = HeadRows(1, shape.rope, 0, shape.rope, shape.interleaved)
        return latent, self._heads(x, tensor, rope, "k_rope", first_row=shape.kv_rank)

    def attend_expanded(
        self, q_nope: Value, q_rope: Value, latent: Value, k_rope: Value, mask: Value
    ) -> Value:
        """Attention over keys and values of every head -> [seq, heads * value, 1, 1]."""
        g, shape, name = self.g, self.shape, self.name
        tensor, stride = f"{self.prefix}.kv_b_proj", shape.nope + shape.value
        keys = HeadRows(shape.heads, stride, 0, shape.nope)
        values = HeadRows(shape.heads, stride, shape.nope, shape.value)
        k_nope = self._split(self._heads(latent, tensor, keys, "k_nope"), shape.nope)
        v = self._split(self._heads(latent, tensor, values, "v"), shape.value)
        repeat = g.table(f"{name}/ones", np.ones((1, 1, shape.heads, 1), dtype=np.float32))
        k = g.concat([g.binary("multiply", k_rope, repeat, f"{name}/k_rope/all"), k_nope], -1,
                     f"{name}/k")  # fmt: skip
        q = g.concat([q_rope, self._split(q_nope, shape.nope)], -1, f"{name}/q")
        # The engine has one width for keys and values; a smaller value silently gives garbage.
        if shape.value < shape.key:
            v = g.pad_last(v, shape.key, f"{name}/v/padded")
        mixed = self._attend(q, k, v, mask, shape.cached(EXPANDED))
        mixed = g.reshape(mixed, [1, mixed.shape[1], shape.heads, shape.key], f"{name}/mixed")
        if shape.value < shape.key:
            mixed = g.slice(mixed, 0, shape.value, 3, f"{name}/mixed/values")
        return g.to_channels(mixed, shape.heads * shape.value, f"{name}/mixed/packed")

    def attend_latent(
        self, q_nope: Value, q_rope: Value, latent: Value, k_rope: Value, mask: Value
    ) -> Value:
        """Attention over the latent as one key-value head -> [seq, heads * value, 1, 1]."""
        g, shape, name = self.g, self.shape, self.name
        tensor, stride = f"{self.prefix}.kv_b_proj.weight", shape.nope + shape.value
        queries = []
        for h in range(shape.heads):
            part = g.slice(q_nope, h * shape.nope, (h + 1) * shape.nope, 1, f"{name}/q/{h}")
            slot = MatrixSlot(
                tensor, shape.kv_rank, shape.nope, Role.ATTENTION, self.layer, h * stride,
                transposed=True,
            )  # fmt: skip
            queries.append(g.linear(part, slot, f"{name}/q/{h}/up"))
        q_latent = self._split(g.concat(queries, 1, f"{name}/q/latent"), shape.kv_rank)
        q = g.concat([q_rope, q_latent], -1, f"{name}/q")
        seq = latent.shape[0]
        flat = g.from_channels(latent, [1, seq, 1, shape.kv_rank], f"{name}/latent")
        k = g.concat([k_rope, flat], -1, f"{name}/k")
        cached = shape.cached(LATENT)
        mixed = self._attend(q, k, k, mask, cached)
        mixed = g.reshape(mixed, [1, seq, shape.heads, cached.head_dim], f"{name}/mixed")
        mixed = g.slice(mixed, shape.rope, cached.head_dim, 3, f"{name}/mixed/latent")
        packed = g.to_channels(mixed, shape.heads * shape.kv_rank, f"{name}/mixed/packed")
        outputs = []
        for h in range(shape.heads):
            at = h * shape.kv_rank
            part = g.slice(packed, at, at + shape.kv_rank, 1, f"{name}/mixed/{h}")
            slot = MatrixSlot(
                tensor, shape.value, shape.kv_rank, Role.ATTENTION, self.layer,
                h * stride + shape.nope,
            )  # fmt: skip
            outputs.append(g.linear(part, slot, f"{name}/mixed/{h}/up"))
        return g.concat(outputs, 1, f"{name}/values")

    def _attend(self, q: Value, k: Value, v: Value, mask: Value, shape: nn.AttentionShape) -> Value:
        return self.g.attention(
            q, k, v, mask, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            scale=shape.scale, layer=self.layer, name=f"{self.name}/mix", packed=False,
        )  # fmt: skip

    def _heads(self, x: Value, tensor: str, rows: HeadRows, part: str, first_row: int = 0) -> Value:
        """A linear layer over some rows of every head."""
        cols = x.shape[1]
        assert isinstance(cols, int)
        slot = MatrixSlot(
            f"{tensor}.weight", rows.heads * rows.count, cols, Role.ATTENTION, self.layer,
            first_row, rows,
        )  # fmt: skip
        return self.g.linear(x, slot, f"{self.name}/{part}")

    def _split(self, x: Value, width: int) -> Value:
        """Packed channels to heads, [1, seq, heads, width]."""
        assert x.layout is Layout.NC4HW4
        return self.g.from_channels(x, [1, x.shape[0], self.shape.heads, width], f"{x.name}/heads")
