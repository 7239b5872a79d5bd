"""Which layers have a window, with the defaults of each class of transformers."""

from __future__ import annotations

from typing import Any

import pytest

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.registry import build_language_model

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 8192, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
ON = {"use_sliding_window": True, "max_window_layers": 1}


def build(
    family: str, fields: dict[str, Any], limits: ContextLimits | None = None
) -> LanguageModel:
    config = {**SIZES, "model_type": family, **fields}
    return build_language_model(family, config, "here", limits or ContextLimits())[0]


def sliding_layers(model: LanguageModel) -> list[bool]:
    """Which layers take the second of the two masks that the engine gives."""
    attention = [node for node in model.graph.nodes if node.kind == "attention"]
    assert [node.attributes["layer"] for node in attention] == [0, 1, 2]
    return [node.inputs[3].name == "mask/sliding" for node in attention]


@pytest.mark.parametrize(
    ("family", "fields", "width"),
    [
        # The key is absent: the class decides.
        ("mistral", {}, 4096),
        ("gemma3_text", {}, 4096),
        ("qwen2", ON, 4096),
        ("qwen3", ON, 4096),
        ("qwen3_moe", ON, 4096),
        ("mixtral", {}, None),
        ("phi3", {}, None),
        # Windows that are switched off.
        ("qwen2", {"sliding_window": 100}, None),
        ("qwen3", {}, None),
        ("qwen2_moe", {"sliding_window": 100}, None),
        ("qwen3_moe", {"sliding_window": 100}, None),
        # null means none.
        ("mistral", {"sliding_window": None}, None),
        ("mixtral", {"sliding_window": None}, None),
        ("phi3", {"sliding_window": None}, None),
        ("qwen2", {**ON, "sliding_window": None}, None),
        ("qwen3_moe", {**ON, "sliding_window": None}, None),
        ("gemma3_text", {"sliding_window": None, "sliding_window_pattern": 1}, None),
        # A number is one.
        ("mistral", {"sliding_window": 100}, 100),
        ("mixtral", {"sliding_window": 100}, 100),
        ("phi3", {"sliding_window": 100}, 100),
        ("qwen2", {**ON, "sliding_window": 100}, 100),
        ("qwen3", {**ON, "sliding_window": 100}, 100),
        ("gemma3_text", {"sliding_window": 100}, 100),
        # As wide as the context, it changes nothing.
        ("mistral", {"sliding_window": 8192}, None),
        ("mistral", {"max_position_embeddings": 4096}, None),
    ],
)
def test_the_window_is_the_one_of_the_class(
    family: str, fields: dict[str, Any], width: int | None
) -> None:
    model = build(family, fields)
    assert model.sliding_window == width
    expected = [False, True, True] if family in ("qwen2", "qwen3") else [True] * 3
    assert sliding_layers(model) == ([False] * 3 if width is None else expected)


@pytest.mark.reference
@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"],
)
def test_the_default_is_that_of_transformers(family: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(family, **SIZES, **ON)
    assert build(family, ON).sliding_window == getattr(theirs, "sliding_window", None)


def test_layer_types_say_which_layers_slide() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    for family in ("gemma3_text", "qwen2", "qwen3"):
        model = build(family, {**ON, "layer_types": kinds, "sliding_window": 64})
        assert sliding_layers(model) == [True, False, True]


def test_gemma3_without_layer_types_goes_by_the_pattern() -> None:
    model = build("gemma3_text", {"sliding_window": 64, "sliding_window_pattern": 2})
    assert sliding_layers(model) == [True, False, True]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe"])
def test_sliding_layers_with_windows_switched_off_are_refused(family: str) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    with pytest.raises(UnsupportedError, match="use_sliding_window is false"):
        build(family, {"layer_types": kinds})
    build(family, {"layer_types": ["full_attention"] * 3})


@pytest.mark.parametrize("family", ["gemma3_text", "qwen2"])
def test_sliding_layers_need_a_width(family: str) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    with pytest.raises(SourceError, match="sliding_window is null"):
        build(family, {**ON, "layer_types": kinds, "sliding_window": None})


def test_an_absent_window_limits_no_shorter_context() -> None:
    assert build("mistral", {}, ContextLimits(4096)).sliding_window is None
    assert build("mistral", {}, ContextLimits(4097)).sliding_window == 4096


@pytest.mark.parametrize("family", ["mistral", "qwen2", "mixtral", "qwen3_moe"])
def test_null_key_value_heads_mean_as_many_as_heads(family: str) -> None:
    """Unlike an absent key, for which the class has a number of its own."""
    assert build(family, {"num_key_value_heads": None}).attention.kv_heads == 4


@pytest.mark.parametrize(
    ("family", "older", "newer"),
    [
        ("mixtral", "num_local_experts", "num_experts"),
        ("qwen3_moe", "num_experts", "num_local_experts"),
    ],
)
def test_the_experts_go_by_two_names(family: str, older: str, newer: str) -> None:
    def experts(fields: dict[str, Any]) -> int:
        graph = build(family, {"num_experts_per_tok": 2, **fields}).graph
        return len(next(node for node in graph.nodes if node.kind == "mixture").graphs)

    counts = [experts(fields) for fields in ({older: 6}, {newer: 6}, {older: 6, newer: 6})]
    assert counts == [6, 6, 6]
    assert experts({}) == {"mixtral": 8, "qwen3_moe": 128}[family]
    with pytest.raises(SourceError, match="they mean the same"):
        experts({older: 6, newer: 8})
