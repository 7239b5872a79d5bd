"""Rope settings as transformers reads them, and tables that are exact at any position."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import DType
from mnnsmith.graph.weights import Table
from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.registry import build_language_model
from mnnsmith.models.rope import RopeFrequencies, rope_settings, rope_tables

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
MLA: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 2,
}  # fmt: skip
CLASSES = {
    "llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2",
    "qwen3": "Qwen3", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "phi3": "Phi3",
    "gemma3_text": "Gemma3", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3",
}  # fmt: skip


def build(family: str, fields: dict[str, Any]) -> LanguageModel:
    sizes = MLA if family.startswith("deepseek") else SIZES
    if family == "gemma3_text":
        sizes = {**sizes, "layer_types": ["sliding_attention", "full_attention"]}
    elif family.endswith("_moe"):
        sizes = {**sizes, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    config = {**sizes, "model_type": family, **fields}
    return build_language_model(family, config, "here", ContextLimits())[0]


def tables_of(g: Graph, prefix: str = "") -> dict[str, np.ndarray]:
    return {
        node.name.rsplit("/", 1)[1]: node.slots["values"].values
        for node in g.nodes
        if node.kind == "table" and node.name.startswith(f"rope{prefix}/")
        and isinstance(node.slots["values"], Table)
    }  # fmt: skip


def settings(**fields: Any) -> dict[str, Any]:
    return rope_settings(ConfigReader({"max_position_embeddings": 8192, **fields}, "config"))


def test_both_spellings() -> None:
    old = settings(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    new = settings(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0})
    assert old == new == {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}


def test_rope_scaling_wins_as_a_whole() -> None:
    """As in transformers; a mixture of the two would be a third model."""
    found = settings(
        rope_theta=1e4,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    assert found == {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("kind", ["dynamic", "ntk-by-parts", "mrope"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_other_types_are_refused_by_name(kind: str, family: str) -> None:
    with pytest.raises(UnsupportedError, match=kind):
        build(family, {"rope_scaling": {"rope_type": kind, "factor": 2.0}})


def test_phi3_takes_only_the_types_that_its_class_takes() -> None:
    with pytest.raises(UnsupportedError, match="only default, longrope"):
        build("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}})


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT = {"short_factor": [1 + 0.05 * i for i in range(32)], "long_factor": [2.0] * 32}
PART = {key: value[:24] for key, value in SHORT.items()}
YARN = {"factor": 40.0, "original_max_position_embeddings": 512}


def _new(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, **fields}}


def _old(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": kind, **fields}}


LIKE_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    # Without any rope field, each class has its own base.
    **{f"{family}-none": (family, {}) for family in CLASSES},
    "theta": ("llama", {"rope_theta": 5e5}),
    "theta-inside-wins": ("llama", {"rope_theta": 5e5, **_new("default", rope_theta=2e4)}),
    "theta-mixtral": ("mixtral", {"rope_theta": 5e5}),
    "theta-million": ("qwen3", _new("default", rope_theta=1e6)),
    "linear": ("llama", _old("linear", factor=4.0)),
    "linear-3": ("mistral", _new("linear", factor=3, rope_theta=5e5)),
    "llama3": ("llama", _new("llama3", **LLAMA3, original_max_position_embeddings=1024)),
    "llama3-old": ("llama", {
        "rope_theta": 5e5, **_old("llama3", **LLAMA3, original_max_position_embeddings=512)}),
    "llama3-narrow": ("llama", _new(
        "llama3", **{**LLAMA3, "high_freq_factor": 1.5}, original_max_position_embeddings=4096)),
    "llama3-no-original": ("llama", _new("llama3", **LLAMA3)),
    "llama3-outside-wins": ("llama", {
        "original_max_position_embeddings": 256,
        **_new("llama3", **LLAMA3, original_max_position_embeddings=1024)}),
    "llama3-outside": ("qwen2", {
        "original_max_position_embeddings": 256, **_new("llama3", **LLAMA3)}),
    "yarn": ("llama", _new("yarn", **YARN)),
    "yarn-old": ("qwen2", {"rope_theta": 1e6, **_old("yarn", **YARN)}),
    "yarn-no-original": ("llama", _new("yarn", factor=4.0)),
    "yarn-outside-wins": ("qwen3", {
        "original_max_position_embeddings": 2048, **_new("yarn", **YARN)}),
    "yarn-betas": ("llama", _new("yarn", **YARN, beta_fast=16, beta_slow=2)),
    "yarn-no-betas": ("llama", _new("yarn", **YARN, beta_fast=0, beta_slow=None)),
    "yarn-attention": ("llama", _new("yarn", **YARN, attention_factor=1.5)),
    "yarn-mscale": ("llama", _new("yarn", **YARN, mscale=1.0, mscale_all_dim=0.8)),
    "yarn-mscale-zero": ("llama", _new("yarn", **YARN, mscale=0.7, mscale_all_dim=0)),
    "yarn-truncate": ("llama", _new("yarn", **YARN, truncate=False)),
    "yarn-truncate-null": ("llama", _new("yarn", **YARN, truncate=None)),
    "yarn-null-factor": ("llama", _new("yarn", **{**YARN, "factor": None})),
    "yarn-short": ("llama", _new("yarn", **{**YARN, "factor": 0.5})),
    "yarn-deepseek2": ("deepseek_v2", _old("yarn", **YARN, mscale=1.0, mscale_all_dim=0.8)),
    "yarn-deepseek3": ("deepseek_v3", _old("yarn", **YARN, mscale=0.7, mscale_all_dim=0.7)),
    "longrope": ("llama", _new("longrope", **SHORT, original_max_position_embeddings=4096)),
    "longrope-factor": ("llama", _new(
        "longrope", **SHORT, original_max_position_embeddings=4096, factor=16.0)),
    "longrope-attention": ("llama", _new(
        "longrope", **SHORT, original_max_position_embeddings=4096, attention_factor=1.2)),
    "longrope-no-original": ("llama", _new("longrope", **SHORT)),
    "phi3-su": ("phi3", {
        "original_max_position_embeddings": 2048,
        **_old("su", **SHORT, original_max_position_embeddings=4096)}),
    "phi3-yarn": ("phi3", _old("yarn", **SHORT)),
    "phi3-inside-loses": ("phi3", _new(
        "longrope", **SHORT, original_max_position_embeddings=2048)),
    "phi3-part": ("phi3", {"partial_rotary_factor": 0.75, **_old("longrope", **PART)}),
    "phi3-part-default": ("phi3", {"partial_rotary_factor": 0.75}),
    "phi3-part-inside": ("phi3", _new("default", partial_rotary_factor=0.5)),
    "gemma-old": ("gemma3_text", {
        "rope_theta": 5e5, "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma-nested": ("gemma3_text", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}}),
    "gemma-half-nested": ("gemma3_text", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0}}}),
    "gemma-both": ("gemma3_text", {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 4e5},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0}}}),
    "gemma-llama3": ("gemma3_text", {
        "original_max_position_embeddings": 256, "rope_parameters": {
            "full_attention": {"rope_type": "llama3", **LLAMA3}}}),
    "gemma-yarn": ("gemma3_text", {"rope_scaling": {"rope_type": "yarn", **YARN}}),
    "gemma-flat": ("gemma3_text", _new("linear", factor=8.0, rope_theta=2e4)),
    "gemma-flat-theta": ("gemma3_text", {"rope_theta": 5e5, **_new("linear", factor=8.0)}),
}  # fmt: skip


@pytest.mark.reference
@pytest.mark.parametrize("name", LIKE_TRANSFORMERS)
def test_frequencies_are_those_of_the_class_in_transformers(name: str) -> None:
    """From a config to the tables of the graph, against the module that transformers makes."""
    from transformers import AutoConfig

    family, fields = LIKE_TRANSFORMERS[name]
    widths = {"head_dim": 64} if family in ("gemma3_text", "qwen3") else {}
    sizes = MLA if family.startswith("deepseek") else SIZES
    if family == "gemma3_text":
        widths["layer_types"] = ["sliding_attention", "full_attention"]
    # Each side may write to what it is given.
    copies = [_deep_copy({**sizes, **widths, **fields}) for _ in range(2)]
    config = AutoConfig.for_model(family, **copies[0])
    package = family.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    rotary = getattr(module, f"{CLASSES[family]}RotaryEmbedding")(config)
    g = build(family, copies[1]).graph
    kinds = ("full_attention", "sliding_attention") if family == "gemma3_text" else ("",)
    for kind in kinds:
        inverse = getattr(rotary, f"{kind}_inv_freq" if kind else "inv_freq").numpy()
        scale = getattr(rotary, f"{kind}_attention_scaling" if kind else "attention_scaling")
        tables = tables_of(g, f"/{kind}" if kind else "")
        # Row 1 holds the angles themselves, of which none is above 1: the sine keeps all digits.
        assert tables["sin_low"][1].shape == inverse.shape
        np.testing.assert_allclose(tables["sin_low"][1], np.sin(inverse), rtol=1e-6)
        np.testing.assert_allclose(tables["cos_high"][0], scale, rtol=1e-7)


def _deep_copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _deep_copy(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, list) else value


def test_longrope_limits_the_context_to_what_the_short_factors_reach() -> None:
    # The field beside the rope object, by default 4096 in phi3, goes before the one inside.
    inside = _new("longrope", **SHORT, original_max_position_embeddings=2048)
    assert build("llama", inside).max_context == 2048
    assert build("phi3", inside).max_context == 4096
    nested = {"rope_parameters": {"full_attention": inside["rope_parameters"]}}
    assert build("gemma3_text", {"head_dim": 64, **nested}).max_context == 2048


@pytest.mark.parametrize("family", sorted(set(CLASSES) - {"phi3"}))
@pytest.mark.parametrize("kind", ["default", "linear"])
def test_a_part_of_a_head_is_refused_where_the_class_cannot_rotate_it(
    family: str, kind: str
) -> None:
    fields = {} if kind == "default" else {"rope_scaling": {"rope_type": kind, "factor": 2.0}}
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor = 0\.5.*whole heads"):
        build(family, {"partial_rotary_factor": 0.5, **fields})
    build(family, {"partial_rotary_factor": 1.0, **fields})


@pytest.mark.parametrize(
    ("family", "fields", "key"),
    [
        ("llama", _new("default", factor=2.0), "factor"),
        ("llama", _new("linear", factor=2.0, attention_factor=1.5), "attention_factor"),
        ("llama", _old("llama3", **LLAMA3, mscale=0.7), "mscale"),
        ("qwen2", _new("default", mrope_section=[16, 24, 24]), "mrope_section"),
        ("qwen3", _old("yarn", **YARN, attn_factor=1.5), "attn_factor"),
        ("phi3", _old("longrope", **SHORT, short_mscale=1.2), "short_mscale"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "x": 1}}, "x"),
        # transformers keeps rope_type "default", for it looks at "type" only without a rope_type.
        ("gemma3_text", _old("linear", factor=8.0), "factor"),
    ],
)
def test_a_key_that_the_type_does_not_read_is_refused(
    family: str, fields: dict[str, Any], key: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"{key} = .*does not read it"):
        build(family, fields)


def test_keys_without_a_meaning_for_the_computation_pass() -> None:
    build("llama", _old("yarn", **YARN, finetuned=True, rope_type="yarn", short_factor=None))


def test_truncate_of_gemma3_is_refused_for_transformers_looks_elsewhere() -> None:
    scaling = {"rope_type": "yarn", **YARN, "truncate": False}
    with pytest.raises(UnsupportedError, match="truncate"):
        build("gemma3_text", {"rope_scaling": scaling})


def test_a_flat_rope_of_gemma3_is_named_as_without_effect() -> None:
    model = build("gemma3_text", _new("linear", factor=8.0))
    assert any("factor, rope_type without effect" in note for note in model.notes), model.notes


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": None},
        _new("linear", factor=None),
        _new("yarn", factor=2.0, original_max_position_embeddings=None),
        {"original_max_position_embeddings": None, **_new("yarn", factor=2.0)},
        {"rope_scaling": {"rope_type": None}},
    ],
)
def test_null_where_transformers_fails_is_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(SourceError):
        build("llama", fields)


@pytest.mark.parametrize("context", [64, 4096, 131072])
def test_tables_reach_beyond_the_context_and_are_exact(context: int) -> None:
    inverse = np.array([1.0, 0.037, 1e-4], dtype=np.float32)
    g = Graph()
    positions = g.input("p", ["seq"], DType.INT32)
    rope_tables(g, positions, RopeFrequencies(inverse, 1.25), context, "rope")
    tables = tables_of(g)
    low_rows = len(tables["cos_low"])
    assert low_rows * len(tables["cos_high"]) >= 262144
    for p in (0, 1, 63, 4095, 4096, 70001, 262143):
        high, low = divmod(p, low_rows)
        parts = {name: table[high if "high" in name else low].astype(np.float64)
                 for name, table in tables.items()}  # fmt: skip
        cos = parts["cos_high"] * parts["cos_low"] - parts["sin_high"] * parts["sin_low"]
        sin = parts["sin_high"] * parts["cos_low"] + parts["cos_high"] * parts["sin_low"]
        # The low angle is rounded to float32, as transformers rounds it; the entries are, too.
        rounded = (np.float32(low) * inverse).astype(np.float64)
        angle = high * low_rows * inverse.astype(np.float64) + rounded
        np.testing.assert_allclose(cos, 1.25 * np.cos(angle), atol=3e-7)
        np.testing.assert_allclose(sin, 1.25 * np.sin(angle), atol=3e-7)
