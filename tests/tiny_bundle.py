"""A tiny llama bundle made with numpy alone, and the same model in numpy as its reference.

It shares no code with the product but the converter child, so the engine's tests stand by
themselves.  The attention is peaky (large query weights): a wrong mask, position or cache shows.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mnnsmith.engine import graph_json_to_mnn

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 2, 4, 2, 16, 96
EPSILON, THETA = 1e-5, 10000.0
SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
VOCAB = 256 + len(SPECIALS)
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class TinyLlama:
    """fp16 weights as float32 by name; `context` is the number of positions."""

    weights: dict[str, np.ndarray]
    context: int

    def logits(self, ids: list[int]) -> np.ndarray:
        """float64 [len(ids), vocab], computed without a cache."""
        w = {name: value.astype(np.float64) for name, value in self.weights.items()}
        n = len(ids)
        x = w["embed"][ids]
        angles = np.arange(n)[:, None] * THETA ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))
        mask = np.where(np.arange(n)[:, None] >= np.arange(n), 0.0, -np.inf)

        def norm(v: np.ndarray, name: str) -> np.ndarray:
            return v / np.sqrt((v * v).mean(-1, keepdims=True) + EPSILON) * w[name]

        def rotate(v: np.ndarray) -> np.ndarray:
            half = np.concatenate([-v[..., HEAD_DIM // 2 :], v[..., : HEAD_DIM // 2]], -1)
            return v * cos + half * sin

        for i in range(LAYERS):
            h = norm(x, f"{i}.norm1")
            q = rotate((h @ w[f"{i}.q"].T).reshape(n, HEADS, HEAD_DIM))
            k = rotate((h @ w[f"{i}.k"].T).reshape(n, KV_HEADS, HEAD_DIM))
            v = (h @ w[f"{i}.v"].T).reshape(n, KV_HEADS, HEAD_DIM)
            k, v = (np.repeat(t, HEADS // KV_HEADS, axis=1) for t in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM) + mask
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            x = x + np.einsum("hqk,khd->qhd", scores, v).reshape(n, -1) @ w[f"{i}.o"].T
            h = norm(x, f"{i}.norm2")
            gate = h @ w[f"{i}.gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w[f"{i}.up"].T)) @ w[f"{i}.down"].T
        return norm(x, "norm") @ w["embed"].T


def make_model(seed: int = 0, context: int = 640) -> TinyLlama:
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes[f"{i}.norm1"] = shapes[f"{i}.norm2"] = (HIDDEN,)
        shapes[f"{i}.q"] = (HEADS * HEAD_DIM, HIDDEN)
        shapes[f"{i}.k"] = shapes[f"{i}.v"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[f"{i}.o"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[f"{i}.gate"] = shapes[f"{i}.up"] = (MLP, HIDDEN)
        shapes[f"{i}.down"] = (HIDDEN, MLP)
    weights = {}
    for name, shape in shapes.items():
        value = random.standard_normal(shape)
        if len(shape) == 1:
            value = 1 + 0.2 * value
        else:
            value /= np.sqrt(shape[1])
            value *= {"q": 4.0, "embed": 4.0}.get(name.split(".")[-1], 1.5)
        weights[name] = value.astype(np.float16).astype(np.float32)
    return TinyLlama(weights, context)


class _Writer:
    """The graph JSON and the weight file of one model."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.names: list[str] = []
        self.ops: list[dict[str, Any]] = []

    def store(self, values: np.ndarray) -> list[int]:
        offset = len(self.data)
        self.data += values.tobytes()
        return [offset, values.nbytes]

    def op(self, kind: str, main_type: str, main: Any, inputs: list[int], name: str,
           outputs: int = 1, layout: str = "NCHW") -> int:  # fmt: skip
        """Returns the first output; a second one follows it."""
        first = len(self.names)
        self.names += [name] + [f"{name}:{i}" for i in range(1, outputs)]
        op = {"type": kind, "name": name, "main_type": main_type, "main": main,
              "outputIndexes": list(range(first, first + outputs)),
              "defaultDimentionFormat": layout}  # fmt: skip
        if inputs:
            op["inputIndexes"] = inputs
        self.ops.append(op)
        return first

    def input(self, name: str, dims: list[int], dtype: str) -> int:
        return self.op(
            "Input", "Input", {"dims": dims, "dtype": dtype, "dformat": "NCHW"}, [], name
        )

    def integer(self, value: int, name: str, *, scalar: bool = False) -> int:
        main = {"dataFormat": "NCHW", "dataType": "DT_INT32", "int32s": [value]}
        return self.op("Const", "Blob", main if scalar else main | {"dims": [1]}, [], name)

    def reshape(self, x: int, dims: list[int], name: str) -> int:
        return self.op("Reshape", "Reshape", {"dims": dims, "dimType": "NCHW"}, [x], name)

    def layout(self, x: int, source: str, dest: str, name: str) -> int:
        main = {"source": source, "dest": dest}
        return self.op("ConvertTensor", "TensorConvertInfo", main, [x], name)

    def linear(self, x: int, weight: np.ndarray, name: str) -> int:
        rows, columns = weight.shape
        common = {"kernelX": 1, "kernelY": 1, "strideX": 1, "strideY": 1, "dilateX": 1,
                  "dilateY": 1, "padMode": "CAFFE", "group": 1, "outputCount": rows,
                  "inputCount": columns}  # fmt: skip
        main = {"common": common, "quanParameter": {"type": 3},
                "external": [*self.store(weight.astype(np.float16)), 0, 0, 0]}  # fmt: skip
        return self.op("Convolution", "Convolution2D", main, [x], name, layout="NC4HW4")

    def norm(self, inputs: list[int], gain: np.ndarray, name: str) -> int:
        """One input: its norm.  Two: their sum, and then its norm."""
        offset, size = self.store(np.concatenate([gain, np.zeros_like(gain)]))
        main = {"axis": [-1], "epsilon": EPSILON, "group": 1, "useRMSNorm": True,
                "external": [offset, size // 2, size // 2]}  # fmt: skip
        return self.op("LayerNorm", "LayerNorm", main, inputs, name, len(inputs), "NC4HW4")


def write_bundle(folder: Path, model: TinyLlama | None = None) -> TinyLlama:
    """Write the bundle; returns the model that is in it."""
    model = model or make_model()
    folder.mkdir(parents=True)
    g = _Writer()
    w = model.weights
    tokens = g.input("input_ids", [-1, 1, HIDDEN], "DT_FLOAT")
    mask = g.input("attention_mask", [1, 1, -1, -1], "DT_FLOAT")
    positions = g.reshape(g.input("position_ids", [1, -1], "DT_INT32"), [-1], "positions")
    wanted = g.input("logits_index", [1], "DT_INT32")
    cos, sin = _rope_tables(g, positions, model.context)
    x = g.layout(g.reshape(tokens, [-1, HIDDEN, 1, 1], "x4"), "NCHW", "NC4HW4", "x")
    residual = None
    for i in range(LAYERS):
        if residual is None:
            h = g.norm([x], w[f"{i}.norm1"], f"{i}/norm1")
        else:
            x = g.norm([x, residual], w[f"{i}.norm1"], f"{i}/norm1")
            h = x + 1
        q, k, v = (g.linear(h, w[f"{i}.{part}"], f"{i}/{part}") for part in "qkv")
        rope = {"rope_cut_head_dim": HEAD_DIM, "num_head": HEADS, "kv_num_head": KV_HEADS,
                "head_dim": HEAD_DIM}  # fmt: skip
        q = g.op("RoPE", "RoPEParam", rope, [q, k, cos, sin], f"{i}/rope", 2, "NHWC")
        attention = {"kv_cache": True, "layer_index": i, "kv_shared_layer_index": -1,
                     "output_c4": True, "attnScale": 0.0}  # fmt: skip
        inputs = [q, q + 1, v, mask]
        a = g.op("Attention", "AttentionParam", attention, inputs, f"{i}/attention", 1, "NHWC")
        x = g.norm([x, g.linear(a, w[f"{i}.o"], f"{i}/o")], w[f"{i}.norm2"], f"{i}/norm2")
        gate, up = (g.linear(x + 1, w[f"{i}.{part}"], f"{i}/{part}") for part in ("gate", "up"))
        product = {"opType": "MUL_SILU", "T": "DT_FLOAT"}
        mlp = g.op("BinaryOp", "BinaryOp", product, [up, gate], f"{i}/mlp", layout="NC4HW4")
        residual = g.linear(mlp, w[f"{i}.down"], f"{i}/down")
    addition = {"opType": "ADD", "T": "DT_FLOAT"}
    x = g.op("BinaryOp", "BinaryOp", addition, [x, residual], "sum", layout="NC4HW4")
    ends = [g.integer(1 << 30, "end"), g.integer(0, "axis"), g.integer(1, "step")]
    x = g.op("StridedSlice", "StridedSliceParam", {"fromType": 1}, [x, wanted, *ends], "last",
             layout="NC4HW4")  # fmt: skip
    head_offset = len(g.data) + 2 * w["norm"].nbytes
    x = g.linear(g.norm([x], w["norm"], "norm"), w["embed"], "head")
    x = g.reshape(g.layout(x, "NC4HW4", "NCHW", "logits4"), [1, -1, VOCAB], "logits")
    _write_files(folder, g, model, head_offset)
    return model


def _rope_tables(g: _Writer, positions: int, context: int) -> list[int]:
    angles = np.arange(context)[:, None] * THETA ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    tables = []
    for function in (np.cos, np.sin):
        values = np.concatenate([function(angles)] * 2, -1).astype(np.float32)
        main = {"dims": list(values.shape), "dataFormat": "NCHW", "dataType": "DT_FLOAT",
                "external": g.store(values)}  # fmt: skip
        name = function.__name__
        table = g.op("Const", "Blob", main, [], f"{name}_table")
        axis = g.integer(0, f"{name}_axis", scalar=True)
        tables.append(g.op("GatherV2", "GatherV2", {}, [table, positions, axis], name))
    return tables


def _write_files(folder: Path, g: _Writer, model: TinyLlama, head_offset: int) -> None:
    net = {"bizCode": "MNN", "oplists": g.ops, "outputName": ["logits"], "tensorName": g.names,
           "tensorNumber": len(g.names), "sourceType": "ONNX", "preferForwardType": "CPU",
           "usage": "INFERENCE", "extraInfo": {"version": "3.6.1"}}  # fmt: skip
    graph = folder / "graph.json"
    graph.write_text(json.dumps(net))
    graph_json_to_mnn(graph, folder / "llm.mnn")
    graph.unlink()
    (folder / "llm.mnn.weight").write_bytes(g.data)
    (folder / "tokenizer.mtok").write_bytes(_tokenizer())
    config = {"llm_model": "llm.mnn", "llm_weight": "llm.mnn.weight",
              "tokenizer_file": "tokenizer.mtok", "backend_type": "cpu", "thread_num": 2,
              "precision": "low", "memory": "high", "reuse_kv": False}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tied = {"weight_offset": head_offset, "alpha_offset": 0, "alpha_size": 0, "quant_bit": 16,
            "quant_block": 0}  # fmt: skip
    described = {"model_type": "llama", "hidden_size": HIDDEN, "layer_nums": LAYERS,
                 "attention_mask": "float", "attention_type": "full", "is_mrope": False,
                 "max_position_embeddings": model.context, "tie_embeddings": tied,
                 "jinja": {"chat_template": TEMPLATE, "bos": "<s>", "eos": "</s>"}}  # fmt: skip
    (folder / "llm_config.json").write_text(json.dumps(described))


def _tokenizer() -> bytes:
    """A byte-level BPE without merges: one token a byte, then the special tokens."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    characters = {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    vocabulary = {characters[b]: b for b in range(256)}
    special_ids = {text: 256 + i for i, text in enumerate(SPECIALS)}

    def string(text: str) -> bytes:
        data = text.encode()
        return struct.pack("<H", len(data)) + data

    ids = " ".join(str(i) for i in [*special_ids.values(), special_ids["</s>"]])
    parts = [f"430 4\n{len(SPECIALS)} 1 0\n{ids}\n".encode()]
    # The pre-tokenizer maps bytes to characters (1, no regex); the model must not do it again (0).
    parts += [b"\0", b"\x01\x00", b"\0", struct.pack("<I", VOCAB), b"\0\0", bytes(4)]
    entries = sorted((vocabulary | special_ids).items(), key=lambda entry: entry[0].encode())
    parts += [string(text) + struct.pack("<I", i) for text, i in entries]
    parts += [b"\0", struct.pack("<I", len(SPECIALS))]
    parts += [struct.pack("<I3B", i, 1, 0, 0) + string(text) for text, i in special_ids.items()]
    parts += [struct.pack("<I", len(TEMPLATE)), TEMPLATE.encode()]
    parts += [string("</s>"), b"\0", string("<s>"), bytes(4)]
    return b"".join(parts)
