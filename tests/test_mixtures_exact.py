"""DeepSeek and the mixtures of experts equal transformers at `memory: high`.

The checkpoints have peaky attention and decisive routers.  Quantized bundles are held against
transformers with the weights that the bundle holds, experts and parts of heads included.

That the same experts are chosen is not inferred from the logits: `routing_probe` has the engine
give each router's choice, and transformers' is taken where it is handed to the experts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from exact import DECODE_STEPS, Pair, check_all, check_peaky, dequantized
from mnnsmith.api import convert
from peaky import MIXTURES, make_checkpoint
from routing_probe import Probe, choose_by_reference, write_probe

pytestmark = [pytest.mark.engine, pytest.mark.reference]

PROMPTS = (1, 2, 300, 1300)
LATENT = tuple(name for name in MIXTURES if name.startswith("deepseek"))
# The narrowest input, one head of W_uk in the latent form, has 32 elements.
QUICK = (
    ("deepseek_v2-grouped", "w4g32-head8"),
    ("deepseek_v3-yarn", "w8g32-sym-latent"),
    ("qwen2_moe", "w4g32-sym"),
)
MORE = [
    (name, recipe + form)
    for name in MIXTURES
    if not name.endswith("-hub")
    for recipe in ("w8g32", "w4g32-head8")
    for form in (("", "-latent") if name in LATENT else ("",))
    if (name, recipe + form) not in QUICK
]


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    return Pair(folder, make_checkpoint(MIXTURES[request.param], folder))


@pytest.mark.parametrize("pair", MIXTURES, indirect=True)
def test_attention_is_peaky(pair: Pair) -> None:
    check_peaky(pair)


def check_choice(bundle: Path, pair: Pair, recipe: str) -> None:
    """Every token goes to the same experts with the same weights, in prompts and in decoding."""
    twin = bundle.with_name("probe")
    probe = Probe(twin, write_probe(pair.folder, bundle, twin, recipe))
    with probe.engine:
        for n in (1300, 17 + DECODE_STEPS):
            ids = pair.prompt(n)
            expected = choose_by_reference(pair.model, ids)
            probe.engine.reset()
            parts = [ids] if n == 1300 else [ids[:17], *([i] for i in ids[17:])]
            found = [probe.choose(part) for part in parts]
            experts = np.concatenate([choice.experts for choice in found])
            weights = np.concatenate([choice.weights for choice in found])
            other = (experts != expected.experts).any((1, 2))
            assert not other.any(), f"{other.sum()} of {n} tokens, first {int(other.argmax())}"
            np.testing.assert_allclose(weights, expected.weights, rtol=1e-3, atol=1e-5)


def check_premise(pair: Pair) -> None:
    """No expert of the checkpoint stands idle, and none is chosen by all."""
    last = choose_by_reference(pair.model, pair.prompt(1300)).experts
    for layer in range(last.shape[1]):
        share = np.bincount(last[:, layer].ravel()) / len(last)
        assert share.size > 2 and share.min() > 0.02 and share.max() < 0.95, share


@pytest.mark.parametrize("pair", MIXTURES, indirect=True)
def test_float_weights_equal_transformers(pair: Pair, tmp_path: Path) -> None:
    check_premise(pair)
    convert(pair.folder, tmp_path / "bundle", recipe="fp16")
    check_all(tmp_path / "bundle", pair, PROMPTS)
    check_choice(tmp_path / "bundle", pair, "fp16")


@pytest.mark.parametrize("pair", LATENT, indirect=True)
def test_latent_attention_equals_transformers(pair: Pair, tmp_path: Path) -> None:
    convert(pair.folder, tmp_path / "bundle", recipe="fp16-latent")
    check_all(tmp_path / "bundle", pair, PROMPTS)
    check_choice(tmp_path / "bundle", pair, "fp16-latent")


@pytest.mark.parametrize(
    ("pair", "recipe"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    indirect=["pair"],
)
def test_quantized_weights_equal_dequantized_transformers(
    pair: Pair, recipe: str, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    convert(pair.folder, bundle, recipe=recipe)
    held = dequantized(pair, bundle, recipe, tmp_path / "reference")
    check_all(bundle, held, PROMPTS)
    check_choice(bundle, held, recipe)
