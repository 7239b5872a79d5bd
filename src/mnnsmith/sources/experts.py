"""Experts that a checkpoint stores fused, as the tensors of one expert each.

`X.experts.gate_up_proj` [experts, 2 * inner, hidden] and `X.experts.down_proj` [experts, hidden,
inner] become `X.experts.N.gate_proj.weight`, `.up_proj.weight` and `.down_proj.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.sources.checkpoint import Tensor
from mnnsmith.sources.safetensors import SafeTensor

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"
# Mixtral's published names for what transformers 5 calls otherwise when it saves experts fused.
_MIXTRAL_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MIXTRAL_EXPERT = re.compile(r"(.*)\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_MIXTRAL_ROUTER = re.compile(r"(.*)\.mlp\.gate\.weight")


def split_experts(tensors: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Replace every fused expert tensor by its parts; others stay as they are.

    Raises `SourceError` for a part that is there twice, `UnsupportedError` for fused experts that
    are not plain floats.
    """
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        fused = name.endswith((_GATE_UP, _DOWN)) and len(tensor.shape) == 3
        parts = _parts(name, tensor, origin) if fused else {name: tensor}
        twice = sorted(split.keys() & parts.keys())
        if twice:
            raise SourceError(
                f"{origin}: {twice[0]} is there on its own and within a fused tensor.",
                "The files mix two ways of saving experts; take one of them out.",
            )
        split.update(parts)
    return split


def mixtral_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a Mixtral checkpoint under its published names, `block_sparse_moe...w1`."""
    return {_mixtral_name(name): tensor for name, tensor in tensors.items()}


def _mixtral_name(name: str) -> str:
    if expert := _MIXTRAL_EXPERT.fullmatch(name):
        part = _MIXTRAL_PARTS[expert[3]]
        return f"{expert[1]}.block_sparse_moe.experts.{expert[2]}.{part}.weight"
    if router := _MIXTRAL_ROUTER.fullmatch(name):
        return f"{router[1]}.block_sparse_moe.gate.weight"
    return name


def _parts(name: str, fused: Tensor, origin: str) -> dict[str, Tensor]:
    """Views of the file: an expert's rows are neighbours in it."""
    experts, rows, cols = fused.shape
    prefix = name.rsplit(".", 1)[0]
    if not isinstance(fused, SafeTensor):
        raise UnsupportedError(f"{origin}: {name} is {fused.dtype}; fused experts must be floats.")
    spans = {"down_proj": (0, rows)}
    if name.endswith(_GATE_UP):
        if rows % 2:
            raise SourceError(f"{origin}: {name} {fused.shape} cannot hold a gate and an up part.")
        spans = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)}
    row_bytes = fused.nbytes // (experts * rows) if experts * rows else 0
    parts: dict[str, Tensor] = {}
    for expert in range(experts):
        for part, (first, last) in spans.items():
            own = f"{prefix}.{expert}.{part}.weight"
            parts[own] = replace(
                fused, name=own, shape=(last - first, cols), nbytes=(last - first) * row_bytes,
                offset=fused.offset + (expert * rows + first) * row_bytes,
            )  # fmt: skip
    return parts
