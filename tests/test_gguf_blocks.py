"""Block decoders and row order, bit for bit against the `gguf` package's own decoders."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from gguf_samples import SCALES_AT, random_blocks, write_gguf
from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.sources.checkpoint import read_whole
from mnnsmith.sources.gguf_file import open_gguf_file
from mnnsmith.sources.gguf_tensor import GgufTensor, interleaved_rows
from mnnsmith.sources.gguf_types import TENSOR_TYPES


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


def tensor_of(
    tmp_path: Path, type_name: str, raw: np.ndarray, heads: int = 0, shift: float = 0.0
) -> GgufTensor:
    path = tmp_path / f"{type_name}.gguf"
    # Tensors of odd sizes on both sides show that the offset is honoured.
    write_gguf(
        path,
        "llama",
        {},
        {
            "before": np.ones(7, np.float32),
            "x": (type_name, raw),
            "behind": np.ones(5, np.float32),
        },
        {},
    )
    return GgufTensor(open_gguf_file(path).tensors["x"], "x", heads, shift)


def test_types_and_sizes_are_those_of_the_gguf_package() -> None:
    for type_id, (name, block, nbytes) in TENSOR_TYPES.items():
        assert Type(type_id).name == name
        assert gguf.GGML_QUANT_SIZES[Type(type_id)] == (block, nbytes)


@pytest.mark.parametrize("type_name", sorted(SCALES_AT))
def test_blocks_decode_bit_for_bit(tmp_path: Path, type_name: str) -> None:
    raw = random_blocks(type_name, rows=300, cols=512)  # more than one slice of the decoder
    expected = dequantize(raw, Type[type_name])
    tensor = tensor_of(tmp_path, type_name, raw)
    assert tensor.shape == (300, 512)
    assert tensor.dtype == type_name
    assert tensor.nbytes == raw.size
    assert np.array_equal(bits(tensor.rows(0, 300)), bits(expected))
    for start, stop in ((0, 1), (299, 300), (17, 130), (5, 5)):
        assert np.array_equal(bits(tensor.rows(start, stop)), bits(expected[start:stop]))


def test_every_half_is_decoded_exactly(tmp_path: Path) -> None:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(256, 256)
    raw = halves.view(np.uint8).reshape(256, -1)
    found = tensor_of(tmp_path, "F16", raw).rows(0, 256)
    finite = np.isfinite(halves)
    assert np.array_equal(bits(found[finite]), bits(halves.astype(np.float32)[finite]))
    assert np.array_equal(np.isnan(found), np.isnan(halves))
    assert np.array_equal(np.isposinf(found), np.isposinf(halves))


def test_every_bfloat_is_decoded_exactly(tmp_path: Path) -> None:
    stored = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    found = tensor_of(tmp_path, "BF16", stored.view(np.uint8)).rows(0, 256)
    assert np.array_equal(bits(found), stored.astype(np.uint32) << 16)


def test_float32_is_taken_as_it_is(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(9, 5)).astype(np.float32)
    tensor = tensor_of(tmp_path, "F32", values.view(np.uint8).reshape(9, -1))
    assert np.array_equal(tensor.rows(2, 7), values[2:7])
    assert tensor.block_format is None
    with pytest.raises(UnsupportedError, match="F32"):
        tensor.quantized_rows(0, 1)


@pytest.mark.parametrize(
    ("type_name", "width", "symmetric"),
    [("Q4_0", 4, True), ("Q4_1", 4, False), ("Q8_0", 8, True)],
)
def test_blocks_carry_over_bit_for_bit(
    tmp_path: Path, type_name: str, width: int, symmetric: bool
) -> None:
    """Of weights quantized as models are: no scale is so far from its minimum that 8 d is lost."""
    values = np.random.default_rng(2).normal(0, 0.03, (70, 96)).astype(np.float32)
    raw = quantize(values, Type[type_name])
    tensor = tensor_of(tmp_path, type_name, raw)
    form = tensor.block_format
    assert form is not None
    assert (form.bits, form.block, form.symmetric) == (width, 32, symmetric)
    blocks = tensor.quantized_rows(3, 67)
    assert blocks.codes.shape == (64, 96)
    assert blocks.codes.dtype == np.uint8
    assert blocks.codes.max() < 1 << width
    assert blocks.scale.shape == (64, 3)
    assert np.array_equal(blocks.scale.astype(np.float16).astype(np.float32), blocks.scale)
    assert (blocks.zero is None) == symmetric
    found = blocks.dequantize()
    assert np.array_equal(found, dequantize(raw, Type[type_name])[3:67])
    assert np.array_equal(found, tensor.rows(3, 67))


def test_a_q4_1_offset_is_rounded_once_where_it_does_not_fit(tmp_path: Path) -> None:
    raw = np.zeros((1, 20), np.uint8)
    raw[0, :4] = np.array([2.0**-24, 1.5], np.float16).view(np.uint8)
    zero = tensor_of(tmp_path, "Q4_1", raw).quantized_rows(0, 1).zero
    assert zero is not None
    assert zero[0, 0] == np.float32(1.5 + 8 * 2.0**-24)
    assert zero[0, 0] != 1.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type_name", sorted(SCALES_AT))
def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, type_name: str, value: float) -> None:
    raw = random_blocks(type_name, rows=4, cols=256)
    at = SCALES_AT[type_name][-1]
    raw[2, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    tensor = tensor_of(tmp_path, type_name, raw)
    tensor.rows(0, 2)
    with pytest.raises(SourceError, match=r"x has a block scale .* rows 1 to 3"):
        tensor.rows(1, 3)
    if tensor.block_format is not None:
        with pytest.raises(SourceError, match="block scale"):
            tensor.quantized_rows(1, 3)


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: the two halves of a head become pairs."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


@pytest.mark.parametrize("type_name", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0", "Q6_K"])
def test_interleaved_rows_are_put_back(tmp_path: Path, type_name: str) -> None:
    original = np.random.default_rng(3).normal(size=(48, 256)).astype(np.float32)
    if type_name in ("F32", "F16"):
        stored = original.astype(np.float32 if type_name == "F32" else np.float16)
        raw = permuted(stored, 3).view(np.uint8).reshape(48, -1)
        expected = stored.astype(np.float32)
    else:
        packed = random_blocks(type_name, 48, 256, seed=4)
        raw, expected = permuted(packed, 3), dequantize(packed, Type[type_name])
    tensor = tensor_of(tmp_path, type_name, raw, heads=3)
    for start, stop in ((0, 48), (0, 1), (15, 17), (5, 40), (47, 48), (9, 9)):
        assert np.array_equal(tensor.rows(start, stop), expected[start:stop]), (start, stop)
        if tensor.block_format is not None and start < stop:
            found = tensor.quantized_rows(start, stop).dequantize()
            assert np.allclose(found, expected[start:stop], rtol=1e-6, atol=1e-7)


def test_interleaved_biases_are_put_back(tmp_path: Path) -> None:
    bias = np.arange(32, dtype=np.float32)
    raw = permuted(bias, 2).view(np.uint8)
    found = read_whole(tensor_of(tmp_path, "F32", raw, heads=2))
    assert np.array_equal(found, bias)


def test_a_range_reads_no_more_than_its_heads() -> None:
    source = interleaved_rows(64, 128, head_dim=64)
    assert sorted(source) == list(range(64, 128))
    source = interleaved_rows(64, 96, head_dim=64)
    assert list(source) == list(range(64, 128, 2))


def test_a_shift_is_added(tmp_path: Path) -> None:
    values = np.array([1.25, 0.5, 3.0], np.float32)
    tensor = tensor_of(tmp_path, "F32", values.view(np.uint8), shift=-1.0)
    assert tensor.rows(0, 3).tolist() == [0.25, -0.5, 2.0]
    raw = random_blocks("Q8_0", 2, 32)
    assert tensor_of(tmp_path, "Q8_0", raw, shift=-1.0).block_format is None


def test_rows_outside_are_refused(tmp_path: Path) -> None:
    tensor = tensor_of(tmp_path, "Q8_0", random_blocks("Q8_0", 4, 32))
    for start, stop in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(SourceError, match="of 4"):
            tensor.rows(start, stop)


def test_a_file_cut_after_it_was_opened_is_reported(tmp_path: Path) -> None:
    tensor = tensor_of(tmp_path, "Q8_0", random_blocks("Q8_0", 4, 32))
    with tensor.info.path.open("r+b") as handle:
        handle.truncate(tensor.info.offset + 40)
    with pytest.raises(SourceError, match="the file ends at byte"):
        tensor.rows(0, 4)


def test_a_file_that_is_replaced_stays_the_one_that_was_opened(tmp_path: Path) -> None:
    tensor = tensor_of(tmp_path, "Q8_0", random_blocks("Q8_0", 4, 32))
    before = tensor.rows(0, 4)
    tensor.info.path.unlink()
    tensor.info.path.write_bytes(b"another")
    np.testing.assert_array_equal(tensor.rows(0, 4), before)
