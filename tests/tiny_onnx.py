"""Tiny ONNX models made by hand, and the same as `.mnn` files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from mnnsmith.engine.converter import onnx_to_mnn


def to_mnn(
    model: onnx.ModelProto, folder: Path, name: str = "model", options: Sequence[str] = ()
) -> Path:
    """Save `model` as NAME.onnx in `folder`, and convert it to NAME.mnn as it is.

    options: of the engine's converter.
    """
    source, target = folder / f"{name}.onnx", folder / f"{name}.mnn"
    onnx.save(model, source)
    onnx_to_mnn(source, target, options, memory_limit_bytes=4 << 30)
    return target


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: dict[str, tuple[int, list[Any]]],
    weights: dict[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    """A model; inputs and outputs by name as element type and shape."""
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, *value) for name, value in inputs.items()],
        [helper.make_tensor_value_info(name, *value) for name, value in outputs.items()],
        [onnx.numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def mixed() -> onnx.ModelProto:
    """Inputs of every type that models have; a convolution, whose layout the engine changes."""
    rng = np.random.default_rng(1)
    nodes = [
        helper.make_node("Conv", ["image", "weight"], ["conv"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["conv"], ["relu"]),
        helper.make_node("Mul", ["relu", "scale"], ["scaled"]),
        helper.make_node("Add", ["ids", "ids"], ["doubled"]),
        helper.make_node("Not", ["mask"], ["inverse"]),
        helper.make_node("Cast", ["bytes"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Sqrt", ["wide"], ["root"]),
    ]
    return model_of(
        nodes,
        {
            "image": (TensorProto.FLOAT, ["batch", 3, "height", "width"]),
            "ids": (TensorProto.INT64, ["batch", 5]),
            "mask": (TensorProto.BOOL, [5]),
            "bytes": (TensorProto.UINT8, [2, 2]),
            "scale": (TensorProto.FLOAT, []),
        },
        {
            "scaled": (TensorProto.FLOAT, ["batch", 6, "height", "width"]),
            "doubled": (TensorProto.INT64, ["batch", 5]),
            "inverse": (TensorProto.BOOL, [5]),
            "root": (TensorProto.FLOAT, [2, 2]),
        },
        {"weight": rng.standard_normal((6, 3, 3, 3), dtype=np.float32)},
    )


def dense(size: int = 16, layers: int = 2) -> onnx.ModelProto:
    """Matrix products with erf-GELU between: x [batch, size] to y [batch, size]."""
    rng = np.random.default_rng(2)
    nodes: list[onnx.NodeProto] = []
    weights = {
        "root2": np.array(2**0.5, np.float32),
        "one": np.array(1, np.float32),
        "half": np.array(0.5, np.float32),
    }
    last = "x"
    for index in range(layers):
        weight, bias, gelu = f"weight{index}", f"bias{index}", f"gelu{index}"
        weights[weight] = rng.standard_normal((size, size), dtype=np.float32) / size**0.5
        weights[bias] = rng.standard_normal(size, dtype=np.float32)
        product, total = f"product{index}", f"total{index}"
        nodes += [
            helper.make_node("MatMul", [last, weight], [product]),
            helper.make_node("Add", [product, bias], [total]),
            helper.make_node("Div", [total, "root2"], [f"{gelu}_a"]),
            helper.make_node("Erf", [f"{gelu}_a"], [f"{gelu}_b"]),
            helper.make_node("Add", [f"{gelu}_b", "one"], [f"{gelu}_c"]),
            helper.make_node("Mul", [total, f"{gelu}_c"], [f"{gelu}_d"]),
            helper.make_node("Mul", [f"{gelu}_d", "half"], [gelu]),
        ]
        last = gelu
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    shape = ["batch", size]
    return model_of(
        nodes, {"x": (TensorProto.FLOAT, shape)}, {"y": (TensorProto.FLOAT, shape)}, weights
    )
