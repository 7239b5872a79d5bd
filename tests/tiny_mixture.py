"""A tiny mixture of experts (mixtral) written with numpy alone; its routers are decisive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import tiny_checkpoint

LAYERS, EXPERTS, CHOSEN, INNER = 3, 6, 2, 96


def write_mixture(folder: Path, *, seed: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    """A whole checkpoint folder; returns its tensors as float32."""
    fields = {
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **changes,
    }  # fmt: skip
    config = tiny_checkpoint.make_config(**fields)
    tensors = tiny_checkpoint.make_tensors(config, seed)
    hidden = config["hidden_size"]
    random = np.random.default_rng(seed + 1)

    def matrix(rows: int, cols: int, scale: float) -> np.ndarray:
        value = scale * random.standard_normal((rows, cols))
        return value.astype(np.float16).astype(np.float32)

    for name in [n for n in tensors if ".mlp." in n]:
        del tensors[name]
    for i in range(LAYERS):
        prefix = f"model.layers.{i}.block_sparse_moe"
        tensors[f"{prefix}.gate.weight"] = matrix(EXPERTS, hidden, 0.5)
        for j in range(EXPERTS):
            for part, shape in {
                "w1": (INNER, hidden),
                "w3": (INNER, hidden),
                "w2": (hidden, INNER),
            }.items():
                name = f"{prefix}.experts.{j}.{part}.weight"
                tensors[name] = matrix(*shape, 1.5 * shape[1] ** -0.5)
    tiny_checkpoint.write_checkpoint(folder, tensors=tensors, **fields)
    return tensors
