"""The operators of a transformer over `GraphCore`, each checked as it is added."""

from __future__ import annotations

from collections.abc import Sequence

from mnnsmith.graph.core import GraphCore
from mnnsmith.graph.values import Dim, DType, Layout, Value, multiple, split_dimension
from mnnsmith.graph.weights import MatrixSlot, Slot, VectorSlot


class Graph(GraphCore):
    """Arithmetic and the layers of a transformer."""

    # ------------------------------------------------------------------ arithmetic

    def binary(self, function: str, a: Value, b: Value, name: str) -> Value:
        """Elementwise a ? b; dimensions of size 1 are repeated, a scalar or [1] fits anything.

        Comparisons give int32.
        """
        if a.dtype is not b.dtype:
            self.fail(name, f"{function} of {a} and {b}: element types differ")
        shape = a.shape
        if b.shape not in ((), (1,)):
            if a.layout is not b.layout and Layout.NC4HW4 in (a.layout, b.layout):
                self.fail(name, f"{function} of {a} and {b}: layouts differ")
            if len(a.shape) != len(b.shape):
                self.fail(name, f"{function} of {a} and {b}: ranks differ")
            pairs = list(zip(a.shape, b.shape, strict=True))
            if any(m != n and 1 not in (m, n) for m, n in pairs):
                self.fail(name, f"{function} of {a} and {b}: shapes differ")
            shape = tuple(n if m == 1 else m for m, n in pairs)
        dtype = DType.INT32 if function == "equal" else a.dtype
        return self.add("binary", name, (a, b), [(shape, a.layout, dtype)], {"function": function})

    def softmax(self, x: Value, name: str) -> Value:
        """Over the last dimension of a plain tensor."""
        return self.add("softmax", name, (x,), [(x.shape, x.layout, x.dtype)])

    def reduce(self, function: str, x: Value, axis: int, name: str) -> Value:
        """ "sum" or "maximum" over one dimension, which stays with size 1."""
        axis %= len(x.shape)
        shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        attributes = {"function": function, "axis": axis}
        return self.add("reduce", name, (x,), [(shape, x.layout, x.dtype)], attributes)

    def to_float(self, x: Value, name: str) -> Value:
        """int32 to float32."""
        return self.add("to_float", name, (x,), [(x.shape, x.layout, DType.FLOAT)])

    def top_k(self, x: Value, k: int, name: str) -> tuple[Value, Value]:
        """The k largest of the last dimension, falling: values, and their indices as int32."""
        width = x.shape[-1]
        if not isinstance(width, int) or not 1 <= k <= width:
            self.fail(name, f"cannot take the {k} largest of {x}")
        shape = (*x.shape[:-1], k)
        values = self.add(
            "top_k", name, (x, self.integers([k])),
            [(shape, x.layout, x.dtype), (shape, x.layout, DType.INT32)],
            suffixes=("", "/indices"),
        )  # fmt: skip
        return values, self.values[values.index + 1]

    def gather_last(self, x: Value, indices: Value, name: str) -> Value:
        """x[i, indices[i, j]]: [n, width], [n, k] int32 -> [n, k]."""
        if len(x.shape) != 2 or len(indices.shape) != 2 or indices.dtype is not DType.INT32:
            self.fail(name, f"cannot gather {x} at {indices}")
        inputs = (x, indices, self.integers([1], ()))
        return self.add("gather_last", name, inputs, [(indices.shape, x.layout, x.dtype)])

    def matmul_transposed(self, x: Value, weight: Value, name: str) -> Value:
        """x W^T of plain tensors in floats: [n, cols], [rows, cols] -> [n, rows]."""
        if len(x.shape) != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
            self.fail(name, f"cannot multiply {x} by the transpose of {weight}")
        shape = (x.shape[0], weight.shape[0])
        return self.add("matmul_transposed", name, (x, weight), [(shape, x.layout, x.dtype)])

    def unary(self, function: str, x: Value, name: str) -> Value:
        """An elementwise function."""
        return self.add("unary", name, (x,), [(x.shape, x.layout, x.dtype)], {"function": function})

    # ------------------------------------------------------------------ the layers of a transformer

    def linear(
        self, x: Value, weight: MatrixSlot, name: str, bias: VectorSlot | None = None
    ) -> Value:
        """x W^T + b on the packed form: [seq, cols, 1, 1] -> [seq, rows, 1, 1]."""
        self.expect_channels(x, name, weight.cols)
        if bias is not None and bias.size != weight.rows:
            self.fail(name, f"bias {bias.tensor} has {bias.size} elements, not {weight.rows}")
        slots: dict[str, Slot] = {"weight": weight}
        if bias is not None:
            slots["bias"] = bias
        shape: tuple[Dim, ...] = (x.shape[0], weight.rows, 1, 1)
        return self.add("linear", name, (x,), [(shape, Layout.NC4HW4, DType.FLOAT)], slots=slots)

    def rms_norm(self, x: Value, gain: VectorSlot, epsilon: float, name: str) -> Value:
        """x / sqrt(mean(x^2) + epsilon) * gain over the channels (Zhang and Sennrich 2019)."""
        self.expect_channels(x, name, gain.size)
        return self.add(
            "rms_norm", name, (x,), [(x.shape, x.layout, x.dtype)],
            {"epsilon": epsilon}, {"gain": gain},
        )  # fmt: skip

    def add_rms_norm(
        self, x: Value, residual: Value, gain: VectorSlot, epsilon: float, name: str
    ) -> tuple[Value, Value]:
        """(x + residual, rms_norm(x + residual)) in one operator."""
        self.expect_channels(x, name, gain.size)
        self.expect_channels(residual, name, gain.size)
        out = (x.shape, x.layout, x.dtype)
        total = self.add(
            "rms_norm", name, (x, residual), [out, out], {"epsilon": epsilon}, {"gain": gain},
            suffixes=("/sum", ""),
        )  # fmt: skip
        return total, self.values[total.index + 1]

    def layer_norm(
        self, x: Value, gain: VectorSlot, bias: VectorSlot, epsilon: float, name: str
    ) -> Value:
        """(x - mean) / sqrt(variance + epsilon) * gain + bias, by row (Ba et al. 2016)."""
        self.expect_channels(x, name, gain.size)
        if bias.size != gain.size:
            self.fail(name, f"bias {bias.tensor} has {bias.size} elements, not {gain.size}")
        return self.add(
            "layer_norm", name, (x,), [(x.shape, x.layout, x.dtype)],
            {"epsilon": epsilon}, {"gain": gain, "bias": bias},
        )  # fmt: skip

    def add_layer_norm(
        self,
        x: Value,
        residual: Value,
        gain: VectorSlot,
        bias: VectorSlot,
        epsilon: float,
        name: str,
    ) -> tuple[Value, Value]:
        """(x + residual, layer_norm(x + residual)) in one operator."""
        for part in (x, residual):
            self.expect_channels(part, name, gain.size)
        out = (x.shape, x.layout, x.dtype)
        total = self.add(
            "layer_norm", name, (x, residual), [out, out],
            {"epsilon": epsilon}, {"gain": gain, "bias": bias}, suffixes=("/sum", ""),
        )  # fmt: skip
        return total, self.values[total.index + 1]

    def rope(
        self,
        q: Value,
        k: Value,
        cos: Value,
        sin: Value,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        name: str,
        qk_norm: tuple[VectorSlot, VectorSlot] | None = None,
        epsilon: float = 0.0,
    ) -> tuple[Value, Value]:
        """Rotate the first `rotary_dim` elements of each head, the two halves against each other.

        Su et al. 2021, in the half-split form.  With `qk_norm` each head is RMS-normalized first.
        q [seq, heads*head_dim, 1, 1] -> [1, seq, heads, head_dim] NHWC, k likewise.
        """
        self.expect_channels(q, name, heads * head_dim)
        self.expect_channels(k, name, kv_heads * head_dim)
        for t in (cos, sin):
            if t.shape[1:] != (rotary_dim,):
                self.fail(name, f"{t}: expected [seq, {rotary_dim}]")
        slots: dict[str, Slot] = {}
        if qk_norm is not None:
            for part, slot in zip(("q_gain", "k_gain"), qk_norm, strict=True):
                if slot.size != head_dim:
                    self.fail(name, f"{slot.tensor} has {slot.size} elements, not {head_dim}")
                slots[part] = slot
        seq = q.shape[0]
        outs = [((1, seq, n, head_dim), Layout.NHWC, DType.FLOAT) for n in (heads, kv_heads)]
        attributes = {
            "rotary_dim": rotary_dim, "heads": heads, "kv_heads": kv_heads,
            "head_dim": head_dim, "epsilon": epsilon,
        }  # fmt: skip
        rotated = self.add(
            "rope", name, (q, k, cos, sin), outs, attributes, slots, suffixes=("/q", "/k")
        )
        return rotated, self.values[rotated.index + 1]

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        mask: Value,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        layer: int,
        name: str,
        packed: bool = True,
    ) -> Value:
        """Causal attention over the engine's own KV cache; q, k, v have one head width.

        softmax(q k^T * scale + mask) v.  v is packed channels or [1, seq, kv_heads, head_dim].
        -> [seq, heads*head_dim, 1, 1] packed, or [1, seq, heads*head_dim] NHWC.
        """
        for x, n in ((q, heads), (k, kv_heads)):
            if x.shape[2:] != (n, head_dim):
                self.fail(name, f"{x}: expected [1, seq, {n}, {head_dim}]")
        if heads % kv_heads:
            self.fail(name, f"{heads} query heads cannot share {kv_heads} key heads")
        if v.shape[2:] != (kv_heads, head_dim):
            self.expect_channels(v, name, kv_heads * head_dim)
        shape: tuple[Dim, ...] = (q.shape[1], heads * head_dim, 1, 1)
        layout = Layout.NC4HW4
        if not packed:
            shape, layout = (1, q.shape[1], heads * head_dim), Layout.NHWC
        return self.add(
            "attention", name, (q, k, v, mask), [(shape, layout, DType.FLOAT)],
            {"layer": layer, "scale": scale, "kv_heads": kv_heads, "head_dim": head_dim},
        )  # fmt: skip

    def full_attention(
        self, q: Value, k: Value, v: Value, mask: Value, *, scale: float, name: str
    ) -> Value:
        """softmax(q k^T * scale + mask) v without a cache: every position sees every other.

        q, k, v [1, tokens, heads, head_dim], mask [1, 1, tokens, tokens].  Heads know nothing of
        each other, so those of several pictures may stand side by side.
        -> [1, tokens, heads*head_dim].
        """
        for x in (q, k, v):
            if len(x.shape) != 4 or x.shape != q.shape or x.shape[0] != 1:
                self.fail(name, f"{x}: expected [1, tokens, heads, head_dim]")
        _, tokens, heads, width = q.shape
        if mask.shape != (1, 1, tokens, tokens) or not isinstance(width, int):
            self.fail(name, f"{mask} is no mask of {q}")
        known, symbol = split_dimension(heads)
        shape: tuple[Dim, ...] = (1, tokens, multiple(known * width, symbol))
        return self.add(
            "full_attention", name, (q, k, v, mask), [(shape, q.layout, DType.FLOAT)],
            {"scale": scale},
        )  # fmt: skip

    def repeat(self, count: Value, x: Value, body: Graph, size: str, name: str) -> Value:
        """body(0, x), body(1, x), .. one after the other, stacked: [count, *shape of one].

        count: int32 [1]; size: its name as a dimension.
        body: a graph with inputs number [] int32, going [1] int32, and one of the shape of x; its
        outputs are the latter two as they came, then the result.
        """
        inputs = [node.outputs[0] for node in body.nodes if node.kind == "input"]
        given = [(v.shape, v.dtype) for v in inputs]
        wanted = [((), DType.INT32), ((1,), DType.INT32), (x.shape, x.dtype)]
        if given != wanted or body.outputs[:2] != inputs[1:] or len(body.outputs) != 3:
            self.fail(name, f"{body.name} cannot be repeated over {x}")
        if count.shape != (1,) or count.dtype is not DType.INT32:
            self.fail(name, f"{count} is no count")
        result = body.outputs[2]
        shape: tuple[Dim, ...] = (size, *result.shape)
        given_back = self.add(
            "repeat", name, (count, self.integers([1]), x),
            [(x.shape, x.layout, x.dtype), (shape, result.layout, result.dtype)],
            suffixes=("/given", ""), graphs=(body,),
        )  # fmt: skip
        return self.values[given_back.index + 1]

    def mixture(
        self, x: Value, weights: Value, ids: Value, experts: Sequence[Graph], layer: int, name: str
    ) -> Value:
        """sum_j weights[i, j] * experts[ids[i, j]](x[i]) (Shazeer et al. 2017).

        x [n, width], weights and ids [n, k]; each expert is a graph [n, width] -> [n, width] whose
        name the engine derives from the layer and the expert's number.
        """
        if weights.shape != ids.shape or ids.dtype is not DType.INT32 or len(x.shape) != 2:
            self.fail(name, f"cannot mix {x} with {weights} and {ids}")
        for number, expert in enumerate(experts):
            if expert.name != f"/expert/{layer}_{number}" or len(expert.outputs) != 1:
                self.fail(name, f"expert {number} is named {expert.name!r}")
            if expert.outputs[0].shape[1:] != x.shape[1:]:
                self.fail(name, f"expert {number} gives {expert.outputs[0]}")
        attributes = {"experts": len(experts), "top_k": ids.shape[1], "layer": layer}
        return self.add(
            "mixture", name, (x, weights, ids), [(x.shape, x.layout, x.dtype)], attributes,
            graphs=experts,
        )  # fmt: skip
