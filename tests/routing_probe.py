"""Which experts are chosen, token by token: by the engine, and by transformers.

The engine gives one output, so a twin of the bundle is made that differs in its last operators: in
place of logits it gives every router's choice.  All before that is the same graph with the same
weight file, run by the same engine with its cache.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mnnsmith.api import Engine, prepare
from mnnsmith.conversion.slots import read_vector
from mnnsmith.engine.converter import graph_json_to_mnn
from mnnsmith.mnn.graph_json import Weights, graph_json

DISTURBANCES = 8


@dataclass(frozen=True)
class Choice:
    """experts: the chosen ones of each token and sparse layer, ascending, int [n, layers, k];
    weights: theirs, in the same order."""

    experts: np.ndarray
    weights: np.ndarray

    @classmethod
    def sorted_by_expert(cls, experts: np.ndarray, weights: np.ndarray) -> Choice:
        order = experts.argsort(-1)
        return cls(
            np.take_along_axis(experts, order, -1).astype(int),
            np.take_along_axis(weights, order, -1),
        )


def write_probe(source: Path, bundle: Path, probe: Path, recipe: str) -> tuple[int, int]:
    """Write the twin of a bundle to `probe`; returns the shape of a choice, [layers, k].

    source: the checkpoint that the bundle was made of, with `recipe`.
    """
    ready = prepare(source, recipe=recipe)
    g = ready.model.graph
    mixtures = [node for node in g.nodes if node.kind == "mixture"]
    parts = [g.to_float(n.inputs[2], f"chosen/{i}") for i, n in enumerate(mixtures)]
    parts += [node.inputs[1] for node in mixtures]
    # As wide as logits, for the engine takes that for the vocabulary.
    both = g.pad_last(g.concat(parts, -1, "chosen/all"), ready.model.head.rows, "chosen/padded")
    g.reshape(both, [1, *both.shape], "chosen")
    weights = Weights(ready.plan.records, lambda slot: read_vector(slot, ready.checkpoint))
    net = graph_json(g, weights)
    swapped = {"logits": "unused", "chosen": "logits"}
    net["tensorName"] = [swapped.get(name, name) for name in net["tensorName"]]
    for operator in net["oplists"]:
        operator["name"] = swapped.get(operator["name"], operator["name"])
    shutil.copytree(bundle, probe)
    (probe / "graph.json").write_text(json.dumps(net))
    (probe / "llm.mnn").unlink()
    graph_json_to_mnn(probe / "graph.json", probe / "llm.mnn")
    return len(mixtures), int(mixtures[0].attributes["top_k"])


class Probe:
    """The twin at work; it keeps a cache as an `Engine` does."""

    def __init__(self, folder: Path, shape: tuple[int, int]) -> None:
        self.engine = Engine(folder, memory="high", precision="high")
        self._shape = shape

    def choose(self, ids: list[int]) -> Choice:
        """The choice for each of `ids`, after what the cache holds."""
        out = self.engine.forward(ids, all_positions=True)
        wanted = out[:, : 2 * self._shape[0] * self._shape[1]]
        experts, weights = wanted.reshape(len(ids), 2, *self._shape).transpose(1, 0, 2, 3)
        return Choice.sorted_by_expert(experts, weights)


@contextmanager
def reference_choice(model: Any) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Collect what the routers of a transformers model hand to the experts, layer by layer."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def hook(module: Any, arguments: tuple[Any, ...]) -> None:
        _, experts, weights = arguments
        seen.append((experts.numpy(), weights.numpy()))

    handles = [
        module.register_forward_pre_hook(hook)
        for name, module in model.named_modules()
        if name.endswith(".mlp.experts")
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def choose_by_reference(model: Any, ids: list[int]) -> Choice:
    """transformers' choice for each of `ids`, from an empty cache."""
    import torch

    with torch.no_grad(), reference_choice(model) as seen:
        model(torch.tensor([ids]))
    experts, weights = (np.stack(part, axis=1) for part in zip(*seen, strict=True))
    return Choice.sorted_by_expert(experts, weights)


def routing_is_decisive(model: Any, ids: list[int]) -> bool:
    """Whether each router of a transformers model chooses the same when its input is disturbed.

    The disturbance, 3e-5 of each element, is some ten times what float32 leaves uncertain.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    decisive = True

    def hook(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        nonlocal decisive
        for _ in range(DISTURBANCES):
            noise = torch.randn(arguments[0].shape, generator=generator)
            _, _, other = module.forward(arguments[0] * (1 + 3e-5 * noise))
            decisive &= torch.equal(other.sort(-1).values, output[2].sort(-1).values)

    routers = [m for name, m in model.named_modules() if name.endswith(".mlp.gate")]
    handles = [router.register_forward_hook(hook) for router in routers]
    try:
        if routers:
            with torch.no_grad():
                model(torch.tensor([ids]))
    finally:
        for handle in handles:
            handle.remove()
    return decisive
