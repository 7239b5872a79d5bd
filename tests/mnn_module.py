"""Run a graph of the engine in a process of its own: `run_module`, and the script it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np


def run_module(graph: Path, values: np.ndarray, outputs: list[str]) -> dict[str, np.ndarray]:
    """Outputs of the graph with one input, by name, computed in float32 on two threads."""
    given, results = graph.with_suffix(".npy"), graph.with_suffix(".npz")
    np.save(given, values.astype(np.float32))
    names = [str(path) for path in (graph, given, results)]
    subprocess.run([sys.executable, __file__, *names, *outputs], check=True, capture_output=True)
    with np.load(results) as found:
        return {name: found[name] for name in outputs}


def main(graph: str, given: str, results: str, *outputs: str) -> None:
    import MNN.expr as expr
    import MNN.nn as nn

    settings = {"backend": 0, "numThread": 2, "precision": "high", "memory": "high"}
    runtime = nn.create_runtime_manager((settings,))
    module = nn.load_module_from_file(
        graph, ["pixel_values"], list(outputs), runtime_manager=runtime, shape_mutable=True
    )
    values = np.load(given)
    found = module.forward([expr.const(values, list(values.shape), expr.NCHW)])
    # The arrays must be gone before the module is.
    copies = {name: np.array(v.read()).copy() for name, v in zip(outputs, found, strict=True)}
    del found
    np.savez(results, **copies)


if __name__ == "__main__":
    main(*sys.argv[1:])
