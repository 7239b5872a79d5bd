"""Phi-3, Phi-3.5 and Phi-4-mini: llama with q, k, v and gate, up fused in the checkpoint."""

from __future__ import annotations

from functools import partial

from mnnsmith.models import layers as nn
from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits, uniform_windows
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.llama import Variant, build_variant
from mnnsmith.models.rope import RopeRules

# Early checkpoints call longrope "su" or "yarn"; transformers takes no other type for this family.
_ROPE = RopeRules(
    kinds=("default", "longrope"), renamed={"su": "longrope", "yarn": "longrope"},
    original_positions=4096, partial=True,
)  # fmt: skip


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graph of `Phi3ForCausalLM`."""
    variant = Variant(
        qkv_bias=False, o_bias=False, windows=partial(uniform_windows, absent=None),
        attention=_attention, mlp=_mlp, rope=_ROPE, epsilon=1e-5,
    )  # fmt: skip
    return build_variant(config, limits, variant)


def _attention(prefix: str, shape: nn.AttentionShape, hidden: int) -> nn.AttentionWeights:
    """Rows of qkv_proj: all queries, all keys, all values."""
    fused = f"{prefix}.qkv_proj"
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return nn.AttentionWeights(
        q=nn.Projection(fused, q_rows),
        k=nn.Projection(fused, kv_rows, first_row=q_rows),
        v=nn.Projection(fused, kv_rows, first_row=q_rows + kv_rows),
        o=nn.Projection(f"{prefix}.o_proj", hidden),
    )


def _mlp(prefix: str, hidden: int, inner: int) -> tuple[nn.Projection, ...]:
    """Rows of gate_up_proj: the gate, then up."""
    fused = f"{prefix}.gate_up_proj"
    return (
        nn.Projection(fused, inner),
        nn.Projection(fused, inner, first_row=inner),
        nn.Projection(f"{prefix}.down_proj", hidden),
    )
