"""FP8 weights and their scales, against the definition written plainly."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.sources.fp8 import join_scales

FP8 = {"quant_method": "fp8"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}


@dataclass
class Held:
    """A tensor in memory."""

    name: str
    values: np.ndarray
    dtype: str = "F8_E4M3"
    block_format: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def rows(self, start: int, stop: int) -> np.ndarray:
        return np.atleast_1d(self.values)[start:stop].astype(np.float32)

    def quantized_rows(self, start: int, stop: int) -> Any:
        raise AssertionError


def joined(weight: np.ndarray, scale: np.ndarray, config: dict[str, Any], suffix: str) -> Any:
    tensors = {
        "x.weight": Held("x.weight", weight),
        f"x.weight{suffix}": Held(f"x.weight{suffix}", scale, "F32"),
    }
    result = join_scales(tensors, config, "here")
    assert set(result) == {"x.weight"}, "the scales are no tensor of their own"
    return result["x.weight"]


@pytest.mark.parametrize(
    ("rows", "cols"), [(128, 128), (256, 384), (200, 300), (64, 576), (129, 127), (1, 1), (300, 8)]
)
@pytest.mark.parametrize("block", [(128, 128), (1, 128), (64, 32)])
def test_blocks(rows: int, cols: int, block: tuple[int, int]) -> None:
    """The last block of a row or column may be narrower."""
    random = np.random.default_rng(rows)
    weight = random.standard_normal((rows, cols)).astype(np.float32)
    count = (-(-rows // block[0]), -(-cols // block[1]))
    scale = random.uniform(0.1, 9, count).astype(np.float32)
    expected = np.empty_like(weight)
    for r in range(rows):
        for c in range(cols):
            expected[r, c] = weight[r, c] * scale[r // block[0], c // block[1]]
    tensor = joined(weight, scale, {**FP8, "weight_block_size": list(block)}, "_scale_inv")
    assert tensor.shape == (rows, cols) and tensor.dtype == "F8_E4M3"
    np.testing.assert_array_equal(tensor.rows(0, rows), expected)
    for start, stop in ((0, 1), (rows // 2, rows), (rows // 3, rows // 2), (rows, rows)):
        np.testing.assert_array_equal(tensor.rows(start, stop), expected[start:stop])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale(shape: tuple[int, ...]) -> None:
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = joined(weight, np.full(shape, 0.5, np.float32), FP8, "_scale")
    np.testing.assert_array_equal(tensor.rows(1, 3), weight[1:] / 2)


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_a_scale_for_each_row(shape: tuple[int, ...]) -> None:
    weight = np.ones((3, 4), np.float32)
    scale = np.array([1, 2, 3], np.float32).reshape(shape)
    tensor = joined(weight, scale, {"quant_method": "fbgemm_fp8"}, "_scale")
    np.testing.assert_array_equal(tensor.rows(0, 3), [[1] * 4, [2] * 4, [3] * 4])


@pytest.mark.parametrize(
    ("weight", "scale", "config"),
    [
        ((200, 300), (3, 2), BLOCKS),  # transposed
        ((200, 300), (6,), BLOCKS),
        ((200, 300), (1, 1), BLOCKS),  # one scale, where the config says blocks
        ((256, 256), (2, 3), BLOCKS),
        ((4, 3), (3,), FP8),
        ((4, 4), (1, 4), FP8),  # a scale for each column
        ((4, 4), (4, 4), FP8),
        ((4, 4), (0,), FP8),
    ],
)
def test_scales_of_another_shape(
    weight: tuple[int, ...], scale: tuple[int, ...], config: dict[str, Any]
) -> None:
    with pytest.raises(SourceError, match=r"x.weight_scale_inv has shape .* needs \("):
        joined(np.ones(weight, np.float32), np.ones(scale, np.float32), config, "_scale_inv")


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (4,), (2, 2, 2)])
def test_fp8_that_is_no_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match="is FP8 with shape"):
        joined(np.ones(shape, np.float32), np.ones((), np.float32), FP8, "_scale")


def test_missing_and_damaged_scales() -> None:
    weight = {"x.weight": Held("x.weight", np.ones((2, 2)))}
    with pytest.raises(SourceError, match=r"x\.weight is F8_E4M3 and has no scale tensor"):
        join_scales(weight, FP8, "here")
    with pytest.raises(SourceError, match=r"x\.weight_scale holds values that are not finite"):
        joined(np.ones((2, 2)), np.array(np.nan), FP8, "_scale")


@pytest.mark.parametrize(
    ("config", "kind", "part"),
    [
        ({"quant_method": "gptq", "bits": 4}, UnsupportedError, "quantized with 'gptq'"),
        ({}, UnsupportedError, "quantized with None"),
        ({"quant_method": ["fp8"]}, UnsupportedError, "quantized with"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, UnsupportedError,
         "format 'pack-quantized' is not supported"),
        ({**FP8, "weight_block_size": [128]}, SourceError, "bad weight_block_size"),
        ({**FP8, "weight_block_size": [128, 0]}, SourceError, "bad weight_block_size"),
        ({**FP8, "weight_block_size": [128, 2.5]}, SourceError, "bad weight_block_size"),
        ({**FP8, "weight_block_size": 128}, SourceError, "bad weight_block_size 128"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(config: dict[str, Any], kind: Any, part: str) -> None:
    with pytest.raises(kind, match=part):
        join_scales({}, config, "here")


def test_a_block_wider_than_the_matrix_costs_no_memory() -> None:
    wide = {**FP8, "weight_block_size": [1, (1 << 20) - 1]}
    tensor = joined(
        np.ones((4000, 8), np.float32), np.full((4000, 1), 2, np.float32), wide, "_scale"
    )
    tracemalloc.start()
    assert (tensor.rows(0, 4000) == 2).all()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def test_scales_of_activations_are_left_out_and_plain_models_untouched() -> None:
    tensors = {
        "x.weight": Held("x.weight", np.ones((2, 2))),
        "x.weight_scale": Held("x.weight_scale", np.ones(()), "F32"),
        "x.input_scale": Held("x.input_scale", np.ones(()), "F32"),
        "norm.weight": Held("norm.weight", np.ones(2), "BF16"),
    }
    assert set(join_scales(tensors, FP8, "here")) == {"x.weight", "norm.weight"}
    plain = {"a": Held("a", np.ones(2), "F16"), "a_scale": Held("a_scale", np.ones(2), "F16")}
    assert join_scales(plain, None, "here") == plain
