"""Every family equals transformers at `memory: high`, on checkpoints whose attention is peaky."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weight_oracle
from mnnsmith.api import Engine, convert, prepare
from peaky import CASES, VOCAB, make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.reference]

PROMPTS = (1, 2, 17, 300, 1100)
DECODE_STEPS = 32
# Of the logits' standard deviation; and in nats.
MAX_ERROR, MAX_KL = 1e-3, 1e-8
QUANTIZED = ("w8g64", "w8g32-sym", "w4g32", "w4g64-sym", "w4g64-head8", "w8")


@dataclass
class Pair:
    """A checkpoint and its transformers model."""

    folder: Path
    model: Any

    def logits(self, ids: list[int]) -> np.ndarray:
        """float64 [len(ids), vocab]."""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].double().numpy()


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    return Pair(folder, make_checkpoint(CASES[request.param], folder))


def prompt(n: int) -> list[int]:
    return np.random.default_rng(n).integers(2, VOCAB, n).tolist()


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def assert_same(actual: np.ndarray, expected: np.ndarray, where: str) -> None:
    actual = actual.astype(np.float64)
    error = np.abs(actual - expected).max() / expected.std()
    p, q = log_softmax(expected), log_softmax(actual)
    kl = (np.exp(p) * (p - q)).sum(-1).max()
    assert error < MAX_ERROR and kl < MAX_KL, f"{where}: error {error:.3g} of std, KL {kl:.3g}"


def check_all(bundle: Path, pair: Pair) -> None:
    with Engine(bundle, memory="high", precision="high") as engine:
        for n in PROMPTS:
            ids = prompt(n)
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
        ids = prompt(17 + DECODE_STEPS)
        expected = pair.logits(ids)
        engine.reset()
        engine.forward(ids[:17])
        for i in range(17, len(ids)):
            assert_same(engine.forward([ids[i]]), expected[i], f"decode step {i}")
        check_greedy(engine, pair)


def check_greedy(engine: Engine, pair: Pair) -> None:
    import torch

    ids = prompt(12)
    with torch.no_grad():
        out = pair.model.generate(
            torch.tensor([ids]), max_new_tokens=DECODE_STEPS, do_sample=False,
            eos_token_id=None, pad_token_id=1,
        )[0, len(ids) :].tolist()  # fmt: skip
    engine.reset()
    assert list(engine.generate(ids, max_new_tokens=DECODE_STEPS)) == out


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_attention_is_peaky(pair: Pair) -> None:
    """The premise: heads look at few tokens, and logits differ; else the others prove little."""
    import torch

    ids = prompt(60)
    with torch.no_grad():
        out = pair.model(torch.tensor([ids]), output_attentions=True)
    best = torch.stack(out.attentions)[..., 20:, :].amax(-1)
    mean, spread = float(best.mean()), float(out.logits.std())
    assert mean > 0.2, f"mean of the largest attention weight: {mean:.2f}"
    assert spread > 0.5


@pytest.mark.parametrize("recipe", ["fp16", "fp32"])
@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_float_weights_equal_transformers(pair: Pair, recipe: str, tmp_path: Path) -> None:
    convert(pair.folder, tmp_path / "bundle", recipe=recipe)
    check_all(tmp_path / "bundle", pair)


def dequantized(pair: Pair, bundle: Path, recipe: str) -> Pair:
    """The reference with the weights that the bundle holds."""
    import copy

    import torch

    decoded = weight_oracle.matrices(bundle)
    model = copy.deepcopy(pair.model)
    state = model.state_dict()
    ready = prepare(pair.folder, recipe=recipe)
    slots = {n.name: n.slots["weight"] for n in ready.model.graph.nodes if n.kind == "linear"}
    with torch.no_grad():
        for name, slot in slots.items():
            rows = slice(slot.first_row, slot.first_row + slot.rows)
            state[slot.tensor][rows] = torch.from_numpy(decoded[name])
        state[ready.model.embedding.tensor].copy_(torch.from_numpy(decoded["embedding"]))
    return Pair(pair.folder, model.eval())


FAMILIES = ("llama-bias", "mistral-window", "qwen2", "qwen3", "gemma3_text", "phi3")
COMBINATIONS = [("llama-tied", recipe) for recipe in QUANTIZED] + [
    (family, recipe) for family in FAMILIES for recipe in ("w8g32-sym", "w4g64-head8")
]


@pytest.mark.parametrize(("pair", "recipe"), COMBINATIONS, indirect=["pair"])
def test_quantized_weights_equal_dequantized_transformers(
    pair: Pair, recipe: str, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    convert(pair.folder, bundle, recipe=recipe)
    check_all(bundle, dequantized(pair, bundle, recipe))
