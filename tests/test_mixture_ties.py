"""Ties in routing: experts whose scores are the same number.

transformers leaves the choice to `torch.topk`, which promises nothing about ties, and in fact takes
now one and now the other; so does the engine, by a rule of its own.  What can be held is tested:
both choose among the tied ones only, and where the tied experts are equal nothing shows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from exact import Pair, assert_same
from mnnsmith.api import Engine, convert
from peaky import MIXTURES, load_reference, make_checkpoint
from routing_probe import Probe, choose_by_reference, write_probe

pytestmark = [pytest.mark.engine, pytest.mark.reference]

# In different groups where there are groups.
FIRST, SECOND = 2, 5
TOKENS = 200


def tie(name: str, folder: Path, *, equal_experts: bool) -> Pair:
    """A checkpoint in which two experts always have the same score."""
    from safetensors.torch import load_file, save_file

    make_checkpoint(MIXTURES[name], folder)
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        if key.endswith(("gate.weight", "e_score_correction_bias")):
            tensor[SECOND] = tensor[FIRST]
        elif equal_experts and f".experts.{SECOND}." in key:
            tensor.copy_(tensors[key.replace(f".experts.{SECOND}.", f".experts.{FIRST}.")])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Pair(folder, load_reference(folder))


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "qwen3_moe", "mixtral"])
def test_equal_experts_with_equal_scores_give_equal_outputs(name: str, tmp_path: Path) -> None:
    pair = tie(name, tmp_path / "checkpoint", equal_experts=True)
    convert(pair.folder, tmp_path / "bundle", recipe="fp32")
    ids = np.random.default_rng(1).integers(2, 384, TOKENS).tolist()
    expected = pair.logits(ids)
    with Engine(tmp_path / "bundle", memory="high", precision="high") as engine:
        assert_same(engine.forward(ids, all_positions=True), expected, "prompt")
        engine.reset()
        engine.forward(ids[:-8])
        for i in range(TOKENS - 8, TOKENS):
            assert_same(engine.forward([ids[i]]), expected[i], f"decode step {i}")


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "qwen3_moe", "mixtral"])
def test_both_choose_among_the_tied_experts_only(name: str, tmp_path: Path) -> None:
    pair = tie(name, tmp_path / "checkpoint", equal_experts=False)
    convert(pair.folder, tmp_path / "bundle", recipe="fp32")
    twin = tmp_path / "probe"
    probe = Probe(twin, write_probe(pair.folder, tmp_path / "bundle", twin, "fp32"))
    ids = np.random.default_rng(1).integers(2, 384, TOKENS).tolist()
    with probe.engine:
        found = probe.choose(ids)
    expected = choose_by_reference(pair.model, ids)
    # The first sparse layer: what comes after depends on its choice.
    ours, theirs = found.experts[:, 0].copy(), expected.experts[:, 0].copy()
    tied = [np.isin(part, (FIRST, SECOND)).sum(-1) == 1 for part in (ours, theirs)]
    assert (tied[0] == tied[1]).all() and tied[0].sum() > TOKENS / 10
    different = (ours != theirs).any(-1)
    assert different.sum() > TOKENS / 50, "the two rules were found to differ"
    for part in (ours, theirs):
        part[part == SECOND] = FIRST
    assert (np.sort(ours) == np.sort(theirs)).all()
    weights = [np.sort(choice.weights[:, 0]) for choice in (found, expected)]
    np.testing.assert_allclose(*weights, rtol=1e-3, atol=1e-5)
