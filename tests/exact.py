"""What "equal to transformers" means, and how it is checked: prompts, decoding, splits, greedy."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import weight_oracle
from mnnsmith.api import Engine, prepare
from mnnsmith.graph.weights import MatrixSlot
from peaky import VOCAB, load_reference
from routing_probe import routing_is_decisive

DECODE_STEPS = 32
MAX_DRAWS = 20
# Of the logits' standard deviation; and in nats.
MAX_ERROR, MAX_KL = 1e-3, 1e-8


@dataclass
class Pair:
    """A checkpoint and its transformers model; what was computed once is kept."""

    folder: Path
    model: Any
    _prompts: dict[int, list[int]] = field(default_factory=dict)
    _logits: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    def prompt(self, n: int) -> list[int]:
        """`n` token ids for which no router of the reference is near a tie.

        Among thousands of choices some are closer than float32 computes; there, two right programs
        choose differently, and all that follows differs.  Only the reference decides.
        """
        if n not in self._prompts:
            drawn = (prompt(n, seed) for seed in range(MAX_DRAWS))
            self._prompts[n] = next(ids for ids in drawn if routing_is_decisive(self.model, ids))
        return self._prompts[n]

    def logits(self, ids: list[int]) -> np.ndarray:
        """float64 [len(ids), vocab]."""
        import torch

        if tuple(ids) not in self._logits:
            with torch.no_grad():
                out = self.model(torch.tensor([ids])).logits[0].double().numpy()
            self._logits[tuple(ids)] = out
        return self._logits[tuple(ids)]


def prompt(n: int, seed: int = 0) -> list[int]:
    """`n` token ids, always the same ones."""
    return np.random.default_rng([n, seed]).integers(2, VOCAB, n).tolist()


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def assert_same(actual: np.ndarray, expected: np.ndarray, where: str) -> None:
    """Within both bounds, or an error that gives the figures."""
    actual = actual.astype(np.float64)
    error = np.abs(actual - expected).max() / expected.std()
    p, q = log_softmax(expected), log_softmax(actual)
    kl = (np.exp(p) * (p - q)).sum(-1).max()
    assert error < MAX_ERROR and kl < MAX_KL, f"{where}: error {error:.3g} of std, KL {kl:.3g}"


def check_all(bundle: Path, pair: Pair, prompts: Sequence[int]) -> None:
    """Prompts of every length, one of 300 in two parts, teacher-forced decoding, greedy text."""
    with Engine(bundle, memory="high", precision="high") as engine:
        for n in prompts:
            ids = pair.prompt(n)
            engine.reset()
            expected = pair.logits(ids)
            assert_same(engine.forward(ids, all_positions=True), expected, f"prompt of {n}")
            if n == 300:
                for cut in (1, 7, 299):
                    engine.reset()
                    engine.forward(ids[:cut])
                    rest = engine.forward(ids[cut:], all_positions=True)
                    assert_same(rest, expected[cut:], f"split at {cut}")
        # Teacher-forced decoding, each step against a full pass of the reference.
        ids = pair.prompt(17 + DECODE_STEPS)
        expected = pair.logits(ids)
        engine.reset()
        engine.forward(ids[:17])
        for i in range(17, len(ids)):
            assert_same(engine.forward([ids[i]]), expected[i], f"decode step {i}")
        check_greedy(engine, pair)


def check_long(bundle: Path, pair: Pair) -> None:
    """A text that goes beyond position 4096, as a prompt and decoded across it."""
    ids = prompt(4200)
    expected = pair.logits(ids)
    with Engine(bundle, memory="high", precision="high") as engine:
        logits = engine.forward(ids, all_positions=True)
        assert_same(logits[:4096], expected[:4096], "prompt, first 4096")
        assert_same(logits[4096:], expected[4096:], "prompt, beyond")
        engine.reset()
        engine.forward(ids[:4090])
        for i in range(4090, 4104):
            assert_same(engine.forward([ids[i]]), expected[i], f"decode step {i}")


def check_greedy(engine: Engine, pair: Pair) -> None:
    """Free greedy text is the reference's."""
    import torch

    ids = prompt(12)
    with torch.no_grad():
        out = pair.model.generate(
            torch.tensor([ids]), max_new_tokens=DECODE_STEPS, do_sample=False,
            eos_token_id=None, pad_token_id=1,
        )[0, len(ids) :].tolist()  # fmt: skip
    engine.reset()
    assert list(engine.generate(ids, max_new_tokens=DECODE_STEPS)) == out


def check_peaky(pair: Pair) -> None:
    """The premise: heads look at few tokens, and logits differ; else the others prove little."""
    import torch

    ids = prompt(60)
    with torch.no_grad():
        out = pair.model(torch.tensor([ids]), output_attentions=True)
    best = torch.stack(out.attentions)[..., 20:, :].amax(-1)
    mean, spread = float(best.mean()), float(out.logits.std())
    assert mean > 0.2, f"mean of the largest attention weight: {mean:.2f}"
    assert spread > 0.5


def dequantized(pair: Pair, bundle: Path, recipe: str, folder: Path) -> Pair:
    """The reference with the weights that the bundle holds, as a float32 checkpoint in `folder`.

    It goes through a checkpoint, where every expert and every part of a head has the place that
    the slots name, and transformers puts them where it wants them.
    """
    from safetensors.numpy import load_file, save_file

    decoded = weight_oracle.matrices(bundle)
    ready = prepare(pair.folder, recipe=recipe)
    shutil.copytree(pair.folder, folder)
    file = folder / "model.safetensors"
    tensors = {name: t.astype(np.float32) for name, t in load_file(file).items()}
    replaced = dict.fromkeys(tensors, 0)
    for node in ready.model.graph.all_nodes():
        slot = node.slots.get("weight")
        if isinstance(slot, MatrixSlot):
            values = decoded[node.name]
            tensors[slot.tensor][slot.source_rows()] = values.T if slot.transposed else values
            replaced[slot.tensor] += values.size
    tensors[ready.model.embedding.tensor][:] = decoded["embedding"]
    for name, count in replaced.items():
        assert count in (0, tensors[name].size), name
    save_file(tensors, file, metadata={"format": "pt"})
    return Pair(folder, load_reference(folder))
