"""Whole models: what is written as GGUF comes back the same, and as transformers reads it."""

from __future__ import annotations

import copy
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from gguf_samples import VOCABULARY, write_gguf
from mnnsmith.sources.checkpoint import Checkpoint, read_whole
from mnnsmith.sources.gguf import open_gguf

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5],
}
# name -> (GGUF architecture, model type, fields beyond COMMON)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"tie_word_embeddings": False}),
    "llama-bias": ("llama", "llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama3": ("llama", "llama", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("llama", "llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-yarn": ("llama", "llama", {"rope_scaling": YARN}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
            "sliding_window": 8,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "phi3": ("phi3", "phi3", {"sliding_window": 8}),
    "phi3-longrope": (
        "phi3",
        "phi3",
        {
            "rope_scaling": LONGROPE,
            "original_max_position_embeddings": 64,
            "num_attention_heads": 2,
            "partial_rotary_factor": 0.5,
        },
    ),
}


def config_of(name: str) -> Any:
    from transformers import AutoConfig

    _, model_type, fields = MODELS[name]
    return AutoConfig.for_model(model_type, **copy.deepcopy(COMMON | fields))


def converted(config: Any, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors under GGUF names, changed as llama.cpp's converter changes them."""
    arch = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    key = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    out = {}
    for name, value in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            half = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
            value = half.swapaxes(1, 2).reshape(value.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            value = value + np.float32(1)
        out[new] = np.ascontiguousarray(value)
    return out


def metadata(config: Any, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Fields, and tensors of rope factors, as llama.cpp's converter writes them."""
    given = COMMON | MODELS[name][2]
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    rotated = int(head_dim * given.get("partial_rotary_factor", 1.0))
    fields: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": given["rope_theta"],
        "rope.dimension_count": rotated,
    }
    if given.get("sliding_window"):
        fields["attention.sliding_window"] = given["sliding_window"]
    scaling = given.get("rope_scaling") or {}
    tensors = {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        fields["rope.scaling.type"] = scaling["rope_type"]
        fields["rope.scaling.factor"] = scaling["factor"]
    if scaling.get("rope_type") == "yarn":
        fields["rope.scaling.original_context_length"] = 64
        fields["rope.scaling.yarn_beta_fast"] = scaling["beta_fast"]
        fields["rope.scaling.yarn_beta_slow"] = scaling["beta_slow"]
    if scaling.get("rope_type") == "longrope":
        fields["rope.scaling.original_context_length"] = 64
        for length in ("long", "short"):
            factors = np.array(scaling[f"{length}_factor"], np.float32)
            tensors[f"rope_factors_{length}.weight"] = factors
    if scaling.get("rope_type") == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        base = 1.0 / given["rope_theta"] ** (np.arange(0, rotated, 2) / rotated)
        divisors = (base / inverse.numpy()).astype(np.float32)
        tensors["rope_freqs.weight"] = np.where(np.abs(divisors - 1) < 1e-5, 1, divisors)
    return fields, tensors


def write_model(path: Path, name: str) -> Any:
    """A random transformers model, written as GGUF in float32; gives the model."""
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(name)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Gains near those of real models, and weights that make attention decisive.
            near = 0.0 if "gemma" in config.model_type else 1.0
            mean = near if key.endswith("norm.weight") else 0.0
            parameter.copy_(torch.randn_like(parameter) * 0.2 + mean)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    fields, factors = metadata(config, name)
    tensors = converted(config, state) | factors
    write_gguf(path, MODELS[name][0], fields, tensors)
    return model


def rebuilt(checkpoint: Checkpoint) -> Any:
    """A transformers model made of nothing but what the checkpoint says."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in checkpoint.config.items() if k != "model_type"}
    fields.setdefault("pad_token_id", None)  # phi3's own default lies outside so small a vocabulary
    config = AutoConfig.for_model(checkpoint.model_type, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {k: torch.from_numpy(read_whole(v)) for k, v in checkpoint.tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@pytest.mark.reference
@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_model_comes_back(tmp_path: Path, name: str) -> None:
    """Every tensor, and the logits of a model built from our config alone."""
    import torch

    path = tmp_path / "model.gguf"
    model = write_model(path, name)
    checkpoint = open_gguf(path)
    state = model.state_dict()
    expected = set(state)
    if model.config.tie_word_embeddings:
        expected.discard("lm_head.weight")
    assert set(checkpoint.tensors) == expected
    for key, tensor in checkpoint.tensors.items():
        # The one that gemma's norms have added costs a rounding.
        slack = 2e-7 if key.endswith("norm.weight") and "gemma" in checkpoint.model_type else 0
        assert np.allclose(read_whole(tensor), state[key].numpy(), rtol=0, atol=slack), key
    ids = torch.arange(60).reshape(1, -1) % VOCABULARY
    with torch.no_grad():
        logits, again = model(ids).logits, rebuilt(checkpoint)(ids).logits
    assert logits.std() > 0.1
    assert (logits - again).abs().max() < 1e-4 * logits.std()


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "phi3"])
def test_transformers_reads_the_same_tensors(tmp_path: Path, name: str) -> None:
    """Against the function behind `from_pretrained(gguf_file=...)`, with quantized weights."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    plain, path = tmp_path / "plain.gguf", tmp_path / "model.gguf"
    model = write_model(plain, name)
    reader = gguf.GGUFReader(plain)
    kinds = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"]
    tensors: dict[str, Any] = {}
    left = cycle(kinds)
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if data.ndim > 1:
            kind = next(left)
            packed = data.astype(np.float16) if kind == "F16" else quantize(data, Type[kind])
            tensors[tensor.name] = packed if kind == "F16" else (kind, packed)
        else:
            tensors[tensor.name] = data
    fields, _ = metadata(config_of(name), name)
    write_gguf(path, MODELS[name][0], fields, tensors)
    checkpoint = open_gguf(path)
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    assert set(loaded) == set(checkpoint.tensors)
    for key, tensor in checkpoint.tensors.items():
        assert np.array_equal(read_whole(tensor), loaded[key].float().numpy()), key
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {"F32", *kinds}


def test_quantized_rows_of_a_permuted_tensor(tmp_path: Path) -> None:
    """q and k keep their blocks, in Hugging Face's order (no torch needed)."""
    from gguf_samples import llama_tensors, write_llama

    original = llama_tensors()["blk.0.attn_q.weight"]
    packed = quantize(original, Type.Q4_0)
    order = np.arange(64).reshape(4, 2, 8).swapaxes(1, 2).reshape(-1)
    path = tmp_path / "model.gguf"
    write_llama(path, tensors={"blk.0.attn_q.weight": ("Q4_0", packed[order])})
    tensor = open_gguf(path).tensors["model.layers.0.self_attn.q_proj.weight"]
    found = tensor.quantized_rows(10, 50)
    assert np.array_equal(found.dequantize(), dequantize(packed, Type.Q4_0)[10:50])
