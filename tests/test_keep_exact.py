"""Blocks that `keep` carries over, read back out of the finished bundle: equal to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

import weight_oracle
from gguf_samples import LLAMA_FIELDS, llama_tensors, write_llama
from mnnsmith.api import convert

pytestmark = pytest.mark.engine

PARTS = {
    "attn_q": "attention/q", "attn_k": "attention/k", "attn_v": "attention/v",
    "attn_output": "attention/o", "ffn_gate": "mlp/gate", "ffn_up": "mlp/up",
    "ffn_down": "mlp/down",
}  # fmt: skip
SCHEMES = {"Q4_0": "w4g32-sym", "Q8_0": "w8g32-sym", "Q4_1": "w4g32-scale32"}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in the order that the llama architecture has them in a GGUF file."""
    half = rows.reshape(heads, 2, len(rows) // heads // 2, -1)
    return np.ascontiguousarray(half.swapaxes(1, 2).reshape(rows.shape))


@pytest.mark.parametrize("kind", SCHEMES)
def test_every_matrix_of_a_bundle(tmp_path: Path, kind: str) -> None:
    stored: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    for name, values in llama_tensors(seed=3).items():
        if values.ndim == 1:
            continue
        packed = quantize(values, Type[kind])
        decoded = dequantize(packed, Type[kind])
        heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
        _, *block = name.split(".")
        if name == "token_embd.weight":
            expected["lm_head"] = expected["embedding"] = decoded
        else:
            expected[f"layer{block[0]}/{PARTS[block[1]]}"] = decoded
            if block[1] in heads:
                packed = interleaved(packed, LLAMA_FIELDS[heads[block[1]]])
        stored[name] = (kind, packed)
    write_llama(tmp_path / "m.gguf", tensors=stored)
    bundle = convert(tmp_path / "m.gguf", tmp_path / "out", recipe="keep")
    weights = bundle.manifest.data["weights"]
    assert all(w["carried"] and w["scheme"] == SCHEMES[kind] for w in weights.values())
    found = weight_oracle.matrices(bundle.path)
    assert set(found) == set(expected)
    for name, values in expected.items():
        if kind == "Q4_1":
            # The same two terms, summed in another order.
            np.testing.assert_allclose(found[name], values, rtol=0, atol=np.abs(values).max() / 2e6)
        else:
            np.testing.assert_array_equal(found[name], values, err_msg=name)
