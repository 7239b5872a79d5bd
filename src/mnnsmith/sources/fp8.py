"""FP8 weights with their scales: the pair of tensors as one.

DeepSeek-V3 stores `X.weight` in E4M3 and `X.weight_scale_inv` with a float per 128x128 block;
others store one scale per tensor or per row.  weight = stored value * scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.sources.checkpoint import F32, BlockFormat, QuantizedRows, Tensor, read_whole

_SUFFIXES = ("_scale_inv", "_scale")


@dataclass(frozen=True)
class ScaledTensor:
    """An FP8 matrix times its scales; implements `checkpoint.Tensor`.

    block: rows and columns that share one scale.  scales: float32 [ceil(rows / block rows),
    ceil(cols / block cols)].
    """

    stored: Tensor
    scales: F32
    block: tuple[int, int]

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes + self.scales.nbytes

    @property
    def block_format(self) -> BlockFormat | None:
        return None

    def rows(self, start: int, stop: int) -> F32:
        """float32 [stop - start, cols]."""
        values = self.stored.rows(start, stop)
        by_row = self.scales[np.arange(start, stop) // self.block[0]]
        # The last block may be narrower than the others.
        cols = self.shape[1]
        values *= np.repeat(by_row, self.block[1], axis=1)[:, :cols]
        return values

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        raise UnsupportedError(f"{self.name}: {self.dtype} tensors hold no integer blocks.")


def join_scales(
    tensors: Mapping[str, Tensor], quantization: Mapping[str, Any] | None, origin: str
) -> dict[str, Tensor]:
    """Replace every FP8 matrix by its scaled form, and take its scales out of the list.

    `quantization` is the config's `quantization_config`; only FP8 ones are supported.
    """
    fp8 = {name for name, t in tensors.items() if t.dtype.startswith("F8_")}
    block_size = _block_size(quantization, origin)
    if not fp8:
        return dict(tensors)
    joined = dict(tensors)
    for name in sorted(fp8):
        scale_name = next((name + s for s in _SUFFIXES if name + s in tensors), None)
        if scale_name is None:
            raise SourceError(
                f"{origin}: {name} is {tensors[name].dtype} and has no scale tensor.",
                f"Expected {name}{_SUFFIXES[0]} or {name}{_SUFFIXES[1]}.",
            )
        joined[name] = _scaled(tensors[name], tensors[scale_name], block_size, origin)
        del joined[scale_name]
        # Scales of activations are for engines that compute in FP8.
        joined.pop(name.removesuffix("weight") + "input_scale", None)
    return joined


def _block_size(quantization: Mapping[str, Any] | None, origin: str) -> tuple[int, int] | None:
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if method not in ("fp8", "fbgemm_fp8", "compressed-tensors"):
        raise UnsupportedError(
            f"{origin}: the weights are quantized with {method!r:.60}, which we cannot read.",
            "Convert from the original checkpoint in 16 bits, or from its GGUF.",
        )
    if method == "compressed-tensors" and quantization.get("format") != "float-quantized":
        raise UnsupportedError(
            f"{origin}: compressed-tensors format {quantization.get('format')!r:.60} is not "
            "supported; only float-quantized (FP8) is."
        )
    size = quantization.get("weight_block_size")
    if size is None:
        return None
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(s) is int and 0 < s < 1 << 20 for s in size)
    ):
        raise SourceError(f"{origin}: bad weight_block_size {size!r:.60}.")
    return size[0], size[1]


def _scaled(
    stored: Tensor, scale: Tensor, block_size: tuple[int, int] | None, origin: str
) -> ScaledTensor:
    if len(stored.shape) != 2 or 0 in stored.shape:
        raise UnsupportedError(f"{origin}: {stored.name} is FP8 with shape {stored.shape}.")
    rows, cols = stored.shape
    if block_size is not None:
        # Rows are expanded to whole blocks of columns, so an absurd width would cost memory.
        block = (min(block_size[0], rows), min(block_size[1], cols))
    elif math.prod(scale.shape) == 1:
        block = (rows, cols)
    else:
        block = (1, cols)
    expected = (-(-rows // block[0]), -(-cols // block[1]))
    # One scale may stand as [] or [1], one per row as [rows]; blocks in another order are an error.
    flat = expected[1] == 1 and scale.shape in ((expected[0],), () if expected[0] == 1 else None)
    if scale.shape != expected and not flat:
        raise SourceError(
            f"{origin}: {scale.name} has shape {scale.shape}; {stored.name} {stored.shape} in "
            f"blocks of {block} needs {expected}."
        )
    scales = scale.rows(0, 1) if scale.shape == () else read_whole(scale)
    if not np.isfinite(scales).all():
        raise SourceError(f"{origin}: {scale.name} holds values that are not finite.")
    return ScaledTensor(stored, scales.reshape(expected), block)
