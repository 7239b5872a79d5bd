"""Sound bundles keep the bound in every block; a fault is placed at its block and operator."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mnnsmith.api import Engine, convert, prepare
from mnnsmith.bundle import open_bundle
from mnnsmith.conversion.prepare import Prepared
from mnnsmith.errors import UsageError
from mnnsmith.verify.checks.layers import allowed_error, check_layers
from mnnsmith.verify.context import Context, Weights
from mnnsmith.verify.references.onnx_reference import open_onnx
from mnnsmith.verify.references.reference import Reference
from mnnsmith.verify.references.transformers_reference import open_transformers
from mnnsmith.verify.stored.checkpoint import stored_checkpoint
from peaky import CASES, MIXTURES, make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.reference]


def context(
    bundle: Path, original: Prepared, *, stored: bool = True, bisect: bool = False
) -> Context:
    opened = open_bundle(bundle, whole=False)

    def open_reference(weights: Weights, *, computes: bool = False) -> Reference:
        checkpoint = original.checkpoint
        if stored and weights == "stored":
            checkpoint = stored_checkpoint(opened, original)
        return open_transformers(checkpoint, original.model, threads=1)

    return Context(opened, original, "quick", Engine, open_reference, threads=1, bisect=bisect)


SOUND = ("llama-bias", "qwen3", "gemma3_text", "phi3", "deepseek_v3", "qwen2_moe")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SOUND else [pytest.mark.slow])
        for name in [*CASES, *MIXTURES]
    ],
)
def test_sound_bundles_keep_the_bound_with_margin(name: str, tmp_path: Path) -> None:
    make_checkpoint({**CASES, **MIXTURES}[name], tmp_path / "model")
    recipe = "w4g32-head8-fit"
    convert(tmp_path / "model", tmp_path / "bundle", recipe=recipe)
    original = prepare(tmp_path / "model", recipe=recipe)
    outcome = check_layers(context(tmp_path / "bundle", original, bisect=True))
    figures = outcome.figures
    assert not outcome.findings and figures.first is None and not figures.bisected
    assert len(figures.exact) == len(figures.shipped) == 3 * original.model.layers
    for value in figures.exact:
        least = allowed_error(value.layer or 0)
        assert value.allowed is not None and least <= value.allowed <= 2 * least
        assert value.error < value.allowed / 4, value
        assert value.cosine > 1 - 1e-6 and value.max_abs < 1e-2 * value.reference_rms
    # What 4 bits and activations in 8 cost is of another order.
    assert min(value.error for value in figures.shipped) > 0.01
    assert all(value.allowed is None and value.snr_db < 45 for value in figures.shipped)
    layers = [value.layer for value in figures.exact]
    assert layers == sorted(layers)
    assert [v.kind for v in figures.exact[:3]] == ["attention", "mlp", "residual"]


# ------------------------------------------------------------------ faults


def config(model: Path, **fields: Any) -> None:
    data = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**data, **fields}))


def tensor(model: Path, name: str, change: Callable[[np.ndarray], None]) -> None:
    tensors = load_file(model / "model.safetensors")
    assert name in tensors
    change(tensors[name])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def engine_config(bundle: Path, **factors: float) -> None:
    data = json.loads((bundle / "llm_config.json").read_text())
    data.update({key: type(data[key])(data[key] * by) for key, by in factors.items()})
    (bundle / "llm_config.json").write_text(json.dumps(data))


def swap_heads(w: np.ndarray) -> None:
    w[:64] = np.concatenate([w[32:64], w[:32]])


def swap_rows(w: np.ndarray) -> None:
    w[[3, 77]] = w[[77, 3]]


@dataclass(frozen=True)
class Fault:
    """What is done to the checkpoint before it is converted, or to the bundle after it; where it
    shows, inside too, and what is said."""

    case: str
    first: str
    inside: str
    says: str
    before: Callable[[Path], None] | None = None
    after: Callable[[Path], None] | None = None


WIDE = {"mistral-window128": replace(CASES["mistral-window"], fields={"sliding_window": 128})}
_ROPE = {"rope_type": "default", "rope_theta": 20000.0}
FAULTS = {
    "rope base": Fault(
        "llama", "layer0/attention/o", "layer0/attention/mix", "rope (base",
        before=lambda m: config(m, rope_parameters=_ROPE),
    ),
    "norm epsilon": Fault(
        "llama", "layer0/attention/o", "layer0/attention_norm", "the epsilon of the norm",
        before=lambda m: config(m, rms_norm_eps=1e-5),
    ),
    "norm gain": Fault(
        "llama", "layer1/mlp/down", "layer1/mlp_norm", "the gain of the norm",
        before=lambda m: tensor(
            m, "model.layers.1.post_attention_layernorm.weight", lambda w: w.__imul__(1.01)
        ),
    ),
    "heads swapped": Fault(
        "llama", "layer1/attention/o", "layer1/attention/q", "head 0 has what head 1 should",
        before=lambda m: tensor(m, "model.layers.1.self_attn.q_proj.weight", swap_heads),
    ),
    "rows swapped": Fault(
        "llama", "layer2/mlp/down", "layer2/mlp/down", "these differ: rows 3, 77",
        before=lambda m: tensor(m, "model.layers.2.mlp.down_proj.weight", swap_rows),
    ),
    "attention scale": Fault(
        "llama-headdim", "layer0/attention/o", "layer0/attention/mix", "the scale of attention",
        after=lambda b: engine_config(b, attn_scale=1.05),
    ),
    "sliding window": Fault(
        "mistral-window", "layer0/attention/o", "layer0/attention/mix", "the mask of the window",
        after=lambda b: engine_config(b, sliding_window=1.05),
    ),
    "a window beyond the first hundred tokens": Fault(
        "mistral-window128", "layer0/attention/o", "layer0/attention/mix",
        "The first 128 tokens agree, the sliding window has 128",
        after=lambda b: engine_config(b, sliding_window=129 / 128),
    ),
    "bias": Fault(
        "qwen2", "layer2/attention/o", "layer2/attention/k", ": the bias",
        before=lambda m: tensor(
            m, "model.layers.2.self_attn.k_proj.bias", lambda w: w.__iadd__(0.01)
        ),
    ),
    "embedding row": Fault(
        "llama", "layer0/attention/o", "layer0/attention_norm", "it begins at token 84:",
        before=lambda m: tensor(
            m, "model.embed_tokens.weight", lambda w: w[84].__setitem__(slice(64), w[38, :64])
        ),
    ),
    "an expert": Fault(
        "qwen3_moe", "layer1/mlp/routed", "layer1/mlp/mixture", "one of the experts",
        before=lambda m: tensor(
            m, "model.layers.1.mlp.experts.3.down_proj.weight", lambda w: w.__imul__(1.1)
        ),
    ),
}  # fmt: skip


def test_without_bisect_it_says_what_a_landmark_tells(tmp_path: Path) -> None:
    make_checkpoint(CASES["llama"], tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "bundle", recipe="fp16")
    engine_config(tmp_path / "bundle", attn_scale=1.05)
    original = prepare(tmp_path / "model", recipe="fp16")
    outcome = check_layers(context(tmp_path / "bundle", original))
    assert not outcome.figures.bisected
    assert outcome.findings[0].where == "layer 0, attention (layer0/attention/o)"
    assert "It begins at position 1: rope" in str(outcome.findings[0].hint)
    assert "--bisect" in str(outcome.findings[0].hint)


def test_with_a_reference_of_every_value_each_operator_is_compared(tmp_path: Path) -> None:
    """ONNX Runtime computes our graph, clips included; rope's tables are told from rope."""
    make_checkpoint(CASES["llama"], tmp_path / "model")
    recipe = tmp_path / "recipe.json"
    clip = [{"value": "layer1/mlp/act", "limit": 0.3}]
    recipe.write_text(json.dumps({"default": "fp16", "clip": clip}))
    convert(tmp_path / "model", tmp_path / "bundle", recipe=recipe)
    original = prepare(tmp_path / "model", recipe=recipe)
    for theta, inside in ((10000.0, None), (20000.0, "rope/cos_low")):
        config(tmp_path / "model", rope_parameters={**_ROPE, "rope_theta": theta})
        right = prepare(tmp_path / "model", recipe=recipe)
        given = Context(
            open_bundle(tmp_path / "bundle"), original, "quick", Engine,
            lambda _, r=right, **__: open_onnx(r.checkpoint, r.model, threads=1), threads=1,
            bisect=True,
        )  # fmt: skip
        outcome = check_layers(given)
        bad = [v.name for v in outcome.figures.bisected if v.error > allowed_error(0)]
        if inside is None:
            assert not outcome.findings and not bad
        else:
            assert bad[0] == inside
            assert "tables of rope" in str(outcome.findings[0].hint)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_placed(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    for folder in ("model", "broken"):
        make_checkpoint({**CASES, **MIXTURES, **WIDE}[fault.case], tmp_path / folder)
    if fault.before is not None:
        fault.before(tmp_path / "broken")
    convert(tmp_path / "broken", tmp_path / "bundle", recipe="fp16")
    if fault.after is not None:
        fault.after(tmp_path / "bundle")
    original = prepare(tmp_path / "model", recipe="fp16")
    # The weights are right as far as the check knows: it is to find what it was not told.
    given = context(tmp_path / "bundle", original, stored=False, bisect=True)
    outcome = check_layers(given)
    figures, finding = outcome.figures, outcome.findings[0]
    assert figures.first == fault.first
    bad = [v.name for v in figures.bisected if v.allowed is None or v.error > v.allowed]
    assert bad[0] == fault.inside
    assert finding.severity == "error" and fault.says in str(finding.hint), finding


def test_what_is_allowed_does_not_grow_with_the_number_of_blocks() -> None:
    assert allowed_error(0) == 5e-5
    assert allowed_error(3, 2e-5) == allowed_error(60, 2e-5) == 2e-4
    # A stream that is off by more already gives blocks that are.
    assert allowed_error(60, 1e-4) == 4e-4


def test_without_an_original_it_says_what_is_missing(tmp_path: Path) -> None:
    make_checkpoint(CASES["llama"], tmp_path / "model")
    bundle = convert(tmp_path / "model", tmp_path / "bundle", recipe="fp16")
    with pytest.raises(UsageError, match="original"):
        check_layers(Context(bundle, None, "quick", Engine, lambda _: None))  # type: ignore
