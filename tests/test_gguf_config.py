"""Metadata to config, and names to names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_samples import LLAMA_FIELDS, U32, VOCABULARY, llama_tensors, write_gguf, write_llama
from mnnsmith.errors import MnnsmithError, SourceError, UnsupportedError
from mnnsmith.sources.checkpoint import Checkpoint, read_whole
from mnnsmith.sources.gguf import open_gguf


def llama(tmp_path: Path, **options: Any) -> Checkpoint:
    path = tmp_path / "model.gguf"
    write_llama(path, **options)
    return open_gguf(path)


def test_llama(tmp_path: Path) -> None:
    checkpoint = llama(tmp_path)
    assert checkpoint.format == "gguf"
    assert checkpoint.model_type == "llama"
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }
    assert "model.layers.1.mlp.down_proj.weight" in checkpoint.tensors
    assert len(checkpoint.tensors) == 20
    assert any("shares the token embedding" in note for note in checkpoint.notes)


def test_a_head_of_its_own(tmp_path: Path) -> None:
    head = np.ones((VOCABULARY, 64), np.float32)
    checkpoint = llama(tmp_path, tensors={"output.weight": head})
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.tensors["lm_head.weight"].shape == (VOCABULARY, 64)
    assert not any("shares" in note for note in checkpoint.notes)


def test_biases(tmp_path: Path) -> None:
    extra = {
        f"blk.{i}.{part}.bias": np.zeros(size, np.float32)
        for i in range(2)
        for part, size in (("attn_q", 64), ("attn_k", 32), ("attn_v", 32), ("attn_output", 64))
    }
    config = llama(tmp_path, tensors=extra).config
    assert (config["attention_bias"], config["mlp_bias"]) == (True, False)
    extra = {"blk.0.ffn_up.bias": np.zeros(96, np.float32)}
    config = llama(tmp_path, tensors=extra).config
    assert (config["attention_bias"], config["mlp_bias"]) == (False, True)


def test_float32_fields_become_the_decimals_they_were(tmp_path: Path) -> None:
    fields = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 500000.0}
    config = llama(tmp_path, fields=fields).config
    assert config["rms_norm_eps"] == 1e-6
    assert config["rope_theta"] == 500000.0


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count",
    "feed_forward_length", "context_length", "attention.layer_norm_rms_epsilon"])  # fmt: skip
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(SourceError, match=rf"lacks llama\.{key}"):
        llama(tmp_path, fields={key: None})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_count": "2"}, "llama.block_count must be a whole number"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "finite number"),
        ({"embedding_length": 0}, "must all be above 0"),
        ({"attention.key_length": 0}, "must all be above 0"),
        ({"block_count": 3}, "block_count is 3; the tensors are of 2 blocks"),
        ({"block_count": 2**31 - 1}, "block_count is 2147483647"),
        ({"vocab_size": 99}, "vocab_size is 99, token_embd.weight has"),
        ({"attention.key_length": 32, "rope.dimension_count": 32}, "has 64 rows; 4 heads of 32"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        llama(tmp_path, fields=fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_count": 8}, "llama.expert_count is 8"),
        ({"attention.causal": False}, "llama.attention.causal is False"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"attention.scale": 0.5}, "attention.scale is 0.5"),
        ({"rope.dimension_count": 8}, "rope turns 8 of 16"),
        ({"attention.value_length": 32}, "keys of 16 and values of 32"),
        ({"attention.head_count_kv": [2, 4]}, "differs between layers"),
        ({"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}, "'dynamic'"),
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
    ],
)
def test_what_no_config_expresses_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        llama(tmp_path, fields=fields)


def test_equal_numbers_per_layer_are_one_number(tmp_path: Path) -> None:
    config = llama(tmp_path, fields={"attention.head_count_kv": [2, 2]}).config
    assert config["num_key_value_heads"] == 2


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, "mamba", {}, {"a": np.ones(4, np.float32)})
    with pytest.raises(UnsupportedError, match=r"'mamba'[^$]*gemma3, llama, phi3, qwen2, qwen3"):
        open_gguf(path)


def test_a_tensor_too_many_is_named(tmp_path: Path) -> None:
    for name in ("blk.0.ffn_gate_inp.weight", "mm.0.weight", "blk.0.attn_q_norm.weight"):
        with pytest.raises(SourceError, match=f"{name} does not belong to architecture llama"):
            llama(tmp_path, tensors={name: np.ones((4, 64), np.float32)})


def test_no_embedding(tmp_path: Path) -> None:
    tensors = llama_tensors()
    del tensors["token_embd.weight"]
    path = tmp_path / "x.gguf"
    write_gguf(path, "llama", LLAMA_FIELDS, tensors)
    with pytest.raises(SourceError, match=r"no tensor token_embd\.weight"):
        open_gguf(path)


# ------------------------------------------------------------------------------------ rope scaling


def test_linear_scaling(tmp_path: Path) -> None:
    expected = {"rope_type": "linear", "factor": 4.0}
    for fields in (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scale_linear": 4.0},
    ):
        assert llama(tmp_path, fields=fields).config["rope_scaling"] == expected
    for fields in (
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
    ):
        assert llama(tmp_path, fields=fields).config["rope_scaling"] is None


def test_yarn_scaling(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert llama(tmp_path, fields=fields).config["rope_scaling"] == expected
    more = {"yarn_attn_factor": 1.1, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    found = llama(tmp_path, fields=fields | {f"rope.scaling.{k}": v for k, v in more.items()})
    assert found.config["rope_scaling"] == {
        **expected, "attention_factor": 1.1, "beta_fast": 16.0, "beta_slow": 2.0,
    }  # fmt: skip
    with pytest.raises(UnsupportedError, match="yarn_ext_factor"):
        llama(tmp_path, fields=fields | {"rope.scaling.yarn_ext_factor": 0.5})
    del fields["rope.scaling.original_context_length"]
    with pytest.raises(SourceError, match="original_context_length"):
        llama(tmp_path, fields=fields)


def llama3_divisors(
    theta: float, dim: int, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """As llama.cpp's converter computes `rope_freqs.weight`, one frequency after the other."""
    out = []
    for i in range(0, dim, 2):
        frequency = np.float32(1.0) / np.float32(theta) ** np.float32(np.float32(i) / dim)
        wavelength = 2 * np.pi / float(frequency)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize(
    ("theta", "dim", "factor", "low", "high", "original"),
    [
        (500000.0, 128, 8.0, 1.0, 4.0, 8192),  # Llama 3.1
        (500000.0, 64, 32.0, 1.0, 4.0, 8192),  # Llama 3.2
        (10000.0, 128, 4.0, 1.0, 4.0, 2048),
        (500000.0, 128, 8.0, 1.0, 8.0, 6000),
        (500000.0, 256, 16.0, 2.0, 5.0, 3333),
        (10000.0, 16, 8.0, 1.0, 4.0, 8192),  # one frequency in between or none
    ],
)
def test_llama3_scaling_is_recovered(
    tmp_path: Path, theta: float, dim: int, factor: float, low: float, high: float, original: int
) -> None:
    divisors = llama3_divisors(theta, dim, factor, low, high, original)
    path = tmp_path / "x.gguf"
    fields = LLAMA_FIELDS | {
        "embedding_length": dim * 4,
        "rope.freq_base": theta,
        "rope.dimension_count": dim,
        "block_count": 1,
    }
    tensors = {
        "token_embd.weight": np.ones((VOCABULARY, 4), np.float32),
        "blk.0.attn_norm.weight": np.ones(4, np.float32),
        "rope_freqs.weight": divisors,
    }
    write_gguf(path, "llama", fields, tensors)
    checkpoint = open_gguf(path)
    if (divisors == 1).all():
        assert checkpoint.config["rope_scaling"] is None
        return
    scaling = checkpoint.config["rope_scaling"]
    found = llama3_divisors(
        theta,
        dim,
        scaling["factor"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )
    assert np.allclose(found, divisors, rtol=2e-5, atol=0)
    assert type(scaling["original_max_position_embeddings"]) is int
    if original == 8192 and dim > 16:
        assert scaling == {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    assert "rope_freqs.weight became llama3 rope scaling." in checkpoint.notes
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    freqs = np.array([1, 3, 1, 2, 2, 1, 5, 5], np.float32)
    with pytest.raises(UnsupportedError, match="llama3 rope scaling does"):
        llama(tmp_path, tensors={"rope_freqs.weight": freqs})
    for bad in (freqs[:5], np.zeros(8, np.float32), np.full(8, np.nan, np.float32)):
        with pytest.raises(SourceError, match=r"rope_freqs\.weight"):
            llama(tmp_path, tensors={"rope_freqs.weight": bad})


# ------------------------------------------------------------------------------ other architectures


def other(
    tmp_path: Path, name: str, fields: dict[str, Any], extra: dict[str, np.ndarray]
) -> Checkpoint:
    path = tmp_path / f"{name}.gguf"
    base = {k: v for k, v in LLAMA_FIELDS.items() if k not in ("rope.dimension_count",)}
    base |= {"attention.key_length": 16, "attention.value_length": 16}
    last = (base | fields)["block_count"] - 1
    few = {
        "token_embd.weight": np.ones((VOCABULARY, 64), np.float32),
        f"blk.{last}.attn_norm.weight": np.ones(64, np.float32),
    }
    write_gguf(path, name, base | fields, few | extra)
    return open_gguf(path)


def test_qwen2_and_qwen3(tmp_path: Path) -> None:
    bias = {"blk.0.attn_q.bias": np.arange(64, dtype=np.float32)}
    checkpoint = other(tmp_path, "qwen2", {}, bias)
    assert checkpoint.model_type == "qwen2"
    found = read_whole(checkpoint.tensors["model.layers.0.self_attn.q_proj.bias"])
    assert found.tolist() == list(range(64))  # not interleaved
    assert checkpoint.config["use_sliding_window"] is False
    norm = {"blk.1.attn_k_norm.weight": np.ones(16, np.float32)}
    checkpoint = other(tmp_path, "qwen3", {}, norm)
    assert checkpoint.model_type == "qwen3"
    assert checkpoint.config["attention_bias"] is False
    assert "model.layers.1.self_attn.k_norm.weight" in checkpoint.tensors


def test_gemma3(tmp_path: Path) -> None:
    fields = {
        "attention.sliding_window": 32,
        "block_count": 12,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    extra = {
        "blk.3.post_ffw_norm.weight": np.full(64, 1.5, np.float32),
        "blk.3.ffn_norm.weight": np.full(64, 0.75, np.float32),
        "blk.3.attn_q_norm.weight": np.full(16, 1.0, np.float32),
        "blk.3.attn_q.weight": np.full((64, 64), 2.0, np.float32),
    }
    checkpoint = other(tmp_path, "gemma3", fields, extra)
    config = checkpoint.config
    assert config["model_type"] == "gemma3_text"
    assert config["query_pre_attn_scalar"] == 16
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 10000.0)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["sliding_window"] == 32
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [
        5,
        11,
    ]
    assert len(config["layer_types"]) == 12
    prefix = "model.layers.3"
    values = {
        f"{prefix}.post_feedforward_layernorm.weight": 0.5,
        f"{prefix}.pre_feedforward_layernorm.weight": -0.25,
        f"{prefix}.self_attn.q_norm.weight": 0.0,
        f"{prefix}.self_attn.q_proj.weight": 2.0,
    }
    for name, value in values.items():
        assert (read_whole(checkpoint.tensors[name]) == value).all(), name
    large = other(tmp_path, "gemma3", fields | {"block_count": 62, "embedding_length": 168 * 4}, {})
    assert large.config["query_pre_attn_scalar"] == 168
    config = other(tmp_path, "gemma3", {"block_count": 2}, {}).config
    assert config["layer_types"] == ["full_attention"] * 2
    assert config["sliding_window"] is None


def test_phi3(tmp_path: Path) -> None:
    extra = {
        "blk.0.attn_qkv.weight": np.ones((128, 64), np.float32),
        "blk.0.ffn_up.weight": np.ones((192, 64), np.float32),
    }
    fields = {"attention.sliding_window": 0, "rope.dimension_count": 12}
    checkpoint = other(tmp_path, "phi3", fields, extra)
    config = checkpoint.config
    assert config["partial_rotary_factor"] == 0.75
    assert config["sliding_window"] is None
    assert config["rope_scaling"] is None
    assert config["original_max_position_embeddings"] == 128
    assert checkpoint.tensors["model.layers.0.self_attn.qkv_proj.weight"].shape == (128, 64)
    assert checkpoint.tensors["model.layers.0.mlp.gate_up_proj.weight"].shape == (192, 64)
    with pytest.raises(SourceError, match="ffn_gate"):
        other(tmp_path, "phi3", fields, {"blk.0.ffn_gate.weight": np.ones((96, 64), np.float32)})


def test_phi3_longrope(tmp_path: Path) -> None:
    long = {"rope_factors_long.weight": np.array([1.0, 1.1, 2, 3, 4, 5, 6, 7], np.float32)}
    short = {"rope_factors_short.weight": np.full(8, 1.05, np.float32)}
    fields = {
        "rope.dimension_count": 16,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(4) / np.log(32))),
        "attention.sliding_window": 100,
    }
    config = other(tmp_path, "phi3", fields, long | short).config
    assert config["original_max_position_embeddings"] == 32
    assert config["sliding_window"] == 100
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [1.0, 1.1, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        "short_factor": [1.05] * 8,
    }
    fields["rope.scaling.attn_factor"] = 1.25
    config = other(tmp_path, "phi3", fields, long | short).config
    assert config["rope_scaling"]["attention_factor"] == 1.25
    with pytest.raises(SourceError, match="one of the two"):
        other(tmp_path, "phi3", fields, long)
    for original in (0, 1):
        fields["rope.scaling.original_context_length"] = original
        with pytest.raises(SourceError, match="longrope needs"):
            other(tmp_path, "phi3", fields, long | short)


EXTREMES = [
    0, 1, -1, 2, 3, 62, 2**31 - 1, 2**32 - 1, -(2**31), 0.0, -1.5, 1e-38, 3e38, float("nan"),
    float("inf"), True, False, "", "yarn", "longrope", [1, 2], [0.5], ["a"],
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_value_of_any_key_ends_well(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """One of our errors, or a config; never another exception, a warning or a huge list."""
    name = data.draw(st.sampled_from(["llama", "qwen2", "qwen3", "gemma3", "phi3"]))
    keys = [
        *LLAMA_FIELDS, "attention.key_length", "attention.sliding_window", "rope.freq_base_swa",
        "attention.sliding_window_pattern", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.attn_factor", "expert_count",
    ]  # fmt: skip
    fields = {"attention.sliding_window": 8, "rope.scaling.original_context_length": 32}
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        value = data.draw(st.sampled_from(EXTREMES))
        if key in U32 and isinstance(value, int) and not 0 <= value < 2**32:
            value = 0
        elif isinstance(value, int) and value >= 2**31:
            value = 2**31 - 1
        fields[key] = value
    extra: dict[str, np.ndarray] = {}
    if name == "phi3":
        extra = {f"rope_factors_{k}.weight": np.ones(8, np.float32) for k in ("long", "short")}
    if name == "llama":
        divisors = data.draw(st.lists(st.floats(0.5, 9, width=32), min_size=8, max_size=8))
        extra = {"rope_freqs.weight": np.array(divisors, np.float32)}
    path = tmp_path_factory.mktemp("any") / "x.gguf"
    tensors = llama_tensors() if name == "llama" else {
        "token_embd.weight": np.ones((VOCABULARY, 64), np.float32),
        "blk.1.attn_norm.weight": np.ones(64, np.float32),
    }  # fmt: skip
    write_gguf(path, name, LLAMA_FIELDS | fields, tensors | extra)
    try:
        assert len(json.dumps(open_gguf(path).config)) < 10_000
    except MnnsmithError as error:
        assert "x.gguf" in str(error)


@pytest.mark.parametrize("window", [64, 127])
def test_a_window_that_the_file_does_not_place_is_refused(tmp_path: Path, window: int) -> None:
    with pytest.raises(UnsupportedError, match=f"attention.sliding_window is {window}"):
        llama(tmp_path, fields={"attention.sliding_window": window})


@pytest.mark.parametrize("window", [0, 128, 4096])
def test_a_window_without_effect(tmp_path: Path, window: int) -> None:
    assert llama(tmp_path, fields={"attention.sliding_window": window}).model_type == "llama"
