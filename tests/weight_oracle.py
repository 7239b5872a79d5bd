"""Weights read back out of a finished bundle, by code that shares nothing with the writer.

The graph is taken from the binary `llm.mnn`, as the engine's own converter dumps it, so what is
decoded is what the engine was told, not what we meant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mnnsmith.engine.converter import mnn_to_graph_json


def matrices(bundle: Path) -> dict[str, np.ndarray]:
    """Every linear layer's weight by operator name, float32 [rows, cols], and "embedding"."""
    data = np.memmap(bundle / "llm.mnn.weight", dtype=np.uint8, mode="r")
    return {**linear_layers(bundle / "llm.mnn"), "embedding": _embedding(bundle, data)}


def linear_layers(file: Path) -> dict[str, np.ndarray]:
    """Those of one graph, whose weights lie beside it."""
    graph = mnn_to_graph_json(file)
    data = np.memmap(f"{file}.weight", dtype=np.uint8, mode="r")
    found: dict[str, np.ndarray] = {}
    experts = [op for part in graph.get("subgraphs", ()) for op in part["nodes"]]
    for op in [*graph["oplists"], *experts]:
        if op["type"] == "Convolution":
            main = op["main"]
            rows, cols = main["common"]["outputCount"], main["common"]["inputCount"]
            assert op["name"] not in found
            found[op["name"]] = _decode(data, main["external"], main["quanParameter"], rows, cols)
    return found


def _decode(
    data: np.ndarray, external: list[int], quant: dict[str, Any], rows: int, cols: int
) -> np.ndarray:
    start, weight_bytes, scale_bytes = external[:3]
    raw = bytes(data[start : start + weight_bytes])
    kind = quant["type"]
    if kind in (3, 8):
        dtype = "<f2" if kind == 3 else "<f4"
        return np.frombuffer(raw, dtype).reshape(rows, cols).astype(np.float32)
    assert kind == 1 and raw[0] == 2
    size = 4 if quant.get("shapeInt32") else 2
    assert int.from_bytes(raw[1 : 1 + size], "little") == rows
    assert int.from_bytes(raw[1 + size : 1 + 2 * size], "little") == cols
    count = raw[1 + 2 * size] or 256
    at = 2 + 2 * size
    levels = np.frombuffer(raw[at : at + count], np.int8)
    bits = quant["aMaxOrBits"]
    assert count == 1 << bits
    packed = np.frombuffer(raw[at + count :], np.uint8)
    codes = packed if bits == 8 else np.stack([packed >> 4, packed & 15], -1).ravel()
    values = levels[codes].astype(np.float32).reshape(rows, cols)
    scale_type = "<f4" if quant.get("scaleStorage") == "FP32" else "<f2"
    stored = bytes(data[start + weight_bytes : start + weight_bytes + scale_bytes])
    alpha = np.frombuffer(stored, scale_type).astype(np.float32)
    return _apply(values, alpha, symmetric=quant.get("aMin", 0) == 0)


def _apply(values: np.ndarray, alpha: np.ndarray, *, symmetric: bool) -> np.ndarray:
    rows, cols = values.shape
    alpha = alpha.reshape(rows, -1, 1 if symmetric else 2)
    block = cols // alpha.shape[1]
    blocks = values.reshape(rows, -1, block) * alpha[..., -1:]
    if not symmetric:
        blocks = blocks + alpha[..., :1]
    return blocks.reshape(rows, cols)


def _embedding(bundle: Path, data: np.ndarray) -> np.ndarray:
    config = json.loads((bundle / "llm_config.json").read_text())
    manifest = json.loads((bundle / "mnnsmith.json").read_text())
    tie, cols = config["tie_embeddings"], config["hidden_size"]
    rows = manifest["model"]["vocab_size"]
    bits = tie["quant_bit"]
    start = tie["weight_offset"]
    raw = bytes(data[start : start + rows * cols * bits // 8])
    if bits == 16:
        return np.frombuffer(raw, "<f2").reshape(rows, cols).astype(np.float32)
    packed = np.frombuffer(raw, np.uint8)
    codes = packed if bits == 8 else np.stack([packed >> 4, packed & 15], -1).ravel()
    values = codes.reshape(rows, cols).astype(np.float32) - (1 << (bits - 1))
    scale_type = "<f4" if tie["alpha_dtype"] == "fp32" else "<f2"
    at, size = tie["alpha_offset"], tie["alpha_size"]
    alpha = np.frombuffer(bytes(data[at : at + size]), scale_type).astype(np.float32)
    blocks = cols // tie["quant_block"]
    return _apply(values, alpha, symmetric=alpha.size == rows * blocks)
