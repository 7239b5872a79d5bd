"""The vision tower of a SmolVLM checkpoint as ONNX, for ONNX Runtime: `write_tower(model, target)`.

As exporters write it: float32, MatMul and LayerNormalization, the Gelu operator, and batches of any
size.  It needs the package onnx; nothing of it is part of mnnsmith.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from mnnsmith.sources.checkpoint import Checkpoint, read_whole
from mnnsmith.sources.open import open_checkpoint

_OPSET, _IR_VERSION = 20, 9
_TOWER = "model.vision_model."


class _Writer:
    """Nodes and constants of one graph."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.tensors
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def tensor(self, name: str) -> np.ndarray:
        return read_whole(self._tensors[name]).astype(np.float32)

    def constant(self, value: np.ndarray) -> str:
        name = f"constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def shaped(self, x: str, shape: Sequence[int], order: Sequence[int] | None = None) -> str:
        """Reshape, then transpose."""
        x = self.node("Reshape", x, self.constant(np.array(shape, np.int64)))
        return x if order is None else self.node("Transpose", x, perm=list(order))

    def linear(self, x: str, name: str) -> str:
        product = self.node("MatMul", x, self.constant(self.tensor(name + ".weight").T))
        bias = name + ".bias"
        if bias not in self._tensors:
            return product
        return self.node("Add", product, self.constant(self.tensor(bias)))

    def norm(self, x: str, name: str, epsilon: float) -> str:
        weight, bias = (self.constant(self.tensor(f"{name}.{part}")) for part in ("weight", "bias"))
        return self.node("LayerNormalization", x, weight, bias, axis=-1, epsilon=epsilon)


def write_tower(model: Path, target: Path) -> None:
    """`pixel_values` float32 [n, 3, S, S] -> `image_embeds` float32 [n, tokens, width]."""
    checkpoint = open_checkpoint(model)
    vision, shuffle = checkpoint.config["vision_config"], checkpoint.config["scale_factor"]
    side = vision["image_size"] // vision["patch_size"]
    w = _Writer(checkpoint)
    x = w.node(
        "Conv", "pixel_values",
        *(w.constant(w.tensor(f"{_TOWER}embeddings.patch_embedding.{part}"))
          for part in ("weight", "bias")),
        kernel_shape=[vision["patch_size"]] * 2, strides=[vision["patch_size"]] * 2,
    )  # fmt: skip
    x = w.shaped(x, [0, vision["hidden_size"], side**2], [0, 2, 1])
    positions = w.tensor(f"{_TOWER}embeddings.position_embedding.weight")[None]
    x = w.node("Add", x, w.constant(positions))
    for layer in range(vision["num_hidden_layers"]):
        x = _layer(w, x, f"{_TOWER}encoder.layers.{layer}.", vision)
    x = w.norm(x, f"{_TOWER}post_layernorm", vision["layer_norm_eps"])
    cells, width = side // shuffle, shuffle * vision["hidden_size"]
    x = w.shaped(x, [-1, cells, shuffle, cells, width], [0, 1, 3, 2, 4])
    x = w.shaped(x, [-1, cells**2, shuffle * width])
    x = w.linear(x, "model.connector.modality_projection.proj")
    w.nodes.append(helper.make_node("Identity", [x], ["image_embeds"]))
    size = vision["image_size"]
    text = checkpoint.config["text_config"]["hidden_size"]
    float32 = TensorProto.FLOAT
    graph = helper.make_graph(
        w.nodes, "tower",
        [helper.make_tensor_value_info("pixel_values", float32, ["n", 3, size, size])],
        [helper.make_tensor_value_info("image_embeds", float32, ["n", cells**2, text])],
        w.constants,
    )  # fmt: skip
    opset = helper.make_opsetid("", _OPSET)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION), target)


def _layer(w: _Writer, x: str, prefix: str, vision: dict[str, Any]) -> str:
    heads = vision["num_attention_heads"]
    width = vision["hidden_size"] // heads
    y = w.norm(x, prefix + "layer_norm1", vision["layer_norm_eps"])
    query, key, value = (
        w.shaped(w.linear(y, f"{prefix}self_attn.{part}_proj"), [0, 0, heads, width], order)
        for part, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
    )
    scores = w.node("MatMul", query, key)
    scores = w.node("Mul", scores, w.constant(np.array(width**-0.5, np.float32)))
    seen = w.node("MatMul", w.node("Softmax", scores, axis=-1), value)
    seen = w.node("Transpose", seen, perm=[0, 2, 1, 3])
    seen = w.shaped(seen, [0, 0, heads * width])
    x = w.node("Add", x, w.linear(seen, prefix + "self_attn.out_proj"))
    y = w.linear(w.norm(x, prefix + "layer_norm2", vision["layer_norm_eps"]), prefix + "mlp.fc1")
    return w.node("Add", x, w.linear(w.node("Gelu", y, approximate="tanh"), prefix + "mlp.fc2"))
