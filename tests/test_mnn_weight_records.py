"""Weight records against the independent decoder, and every size against the bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import weight_oracle
from mnnsmith.errors import ConversionError
from mnnsmith.mnn.weight_records import (
    BlockEncoding,
    FloatEncoding,
    MatrixRecord,
    block_header,
    embedding_entry,
    matrix_record,
    pack_codes,
    pack_scales,
    quantization_parameter,
)

ENCODINGS = [
    BlockEncoding(bits, block, symmetric, scale_bits)
    for bits, block, symmetric, scale_bits in itertools.product(
        (4, 8), (32, 96), (False, True), (16, 32)
    )
]


def written(
    record: MatrixRecord, random: np.random.Generator, total: int
) -> tuple[bytearray, np.ndarray]:
    """The file with one random matrix in it, and the values that stand there."""
    encoding = record.encoding
    assert isinstance(encoding, BlockEncoding)
    rows, cols, block = record.rows, record.cols, encoding.block
    half = 1 << (encoding.bits - 1)
    codes = random.integers(0, 2 * half, (rows, cols), dtype=np.uint8)
    scale = random.uniform(0.01, 1, (rows, cols // block)).astype(np.float16).astype(np.float32)
    zero = None
    values = np.repeat(scale, block, axis=1) * (codes.astype(np.float32) - half)
    if not encoding.symmetric:
        zero = random.standard_normal(scale.shape).astype(np.float16).astype(np.float32)
        values = values + np.repeat(zero, block, axis=1)
    file = bytearray(b"\xaa" * total)

    def put(offset: int, data: bytes) -> None:
        file[offset : offset + len(data)] = data

    put(record.offset, block_header(rows, cols, encoding.bits))
    # Row by row, in any order, as threads do.
    for row in random.permutation(rows):
        part = pack_codes(codes[row : row + 1], encoding.bits).tobytes()
        assert len(part) == record.codes_row_bytes()
        put(record.codes_offset + int(row) * len(part), part)
        zeros = None if zero is None else zero[row : row + 1]
        part = pack_scales(scale[row : row + 1], zeros, encoding.scale_bits).tobytes()
        assert len(part) == record.scales_row_bytes()
        put(record.scales_offset + int(row) * len(part), part)
    return file, values


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1, 96), (37, 192), (3, 65568)])
def test_what_is_written_is_what_the_decoder_reads(
    encoding: BlockEncoding, rows: int, cols: int
) -> None:
    """65568 columns take the header with four bytes for each size."""
    random = np.random.default_rng(cols)
    record = matrix_record(100, rows, cols, encoding, has_bias=True)
    file, values = written(record, random, record.end + 50)
    data = np.frombuffer(bytes(file), np.uint8)
    external = record.external()
    assert external[0] == 100 and sum(external) == record.end
    assert external[3] == 4 * rows and record.end - record.bias_offset == 4 * rows
    found = weight_oracle._decode(data, external, quantization_parameter(record), rows, cols)
    np.testing.assert_array_equal(found, values)
    # Nothing before, in the bias, or after.
    assert set(file[:100]) == set(file[record.bias_offset :]) == {0xAA}
    bits_read = {4: 15, 8: 255}[encoding.bits]
    parameter = quantization_parameter(record)
    assert parameter["aMaxOrBits"] == encoding.bits and bits_read == 2**encoding.bits - 1
    blocks = rows * cols // encoding.block
    assert parameter["readType"] == (0 if encoding.symmetric else blocks)
    assert parameter["shapeInt32"] == (cols > 65535)


def test_the_header_byte_for_byte() -> None:
    assert block_header(2, 258, 4) == bytes([2, 2, 0, 2, 1, 16]) + bytes(
        [0xF8, 0xF9, 0xFA, 0xFB, 0xFC, 0xFD, 0xFE, 0xFF, 0, 1, 2, 3, 4, 5, 6, 7]
    )
    eight = block_header(1, 1, 8)
    assert eight[:6] == bytes([2, 1, 0, 1, 0, 0]) and len(eight) == 6 + 256
    assert np.frombuffer(eight[6:], np.int8).tolist() == list(range(-128, 128))
    wide = block_header(65536, 3, 4)
    assert wide[:10] == bytes([2, 0, 0, 1, 0, 3, 0, 0, 0, 16])
    assert block_header(65535, 65535, 4)[:6] == bytes([2, 255, 255, 255, 255, 16])


def test_the_first_code_of_a_pair_is_in_the_high_half() -> None:
    codes = np.array([[1, 2, 15, 0], [7, 8, 9, 10]], np.uint8)
    assert pack_codes(codes, 4).tolist() == [[0x12, 0xF0], [0x78, 0x9A]]
    assert pack_codes(codes, 8).tolist() == codes.tolist()
    # A view with strides, as a slice of columns gives.
    wide = np.arange(32, dtype=np.uint8).reshape(2, 16) % 16
    np.testing.assert_array_equal(pack_codes(wide[:, 4:8], 4), [[0x45, 0x67], [0x45, 0x67]])


def test_scales_are_pairs_of_zero_and_scale() -> None:
    scale, zero = np.array([[1.0, 2.0]], np.float32), np.array([[3.0, 4.0]], np.float32)
    assert pack_scales(scale, zero, 16).ravel().tolist() == [3, 1, 4, 2]
    assert pack_scales(scale, zero, 16).dtype == "<f2"
    assert pack_scales(scale, None, 32).ravel().tolist() == [1, 2]
    assert pack_scales(scale, None, 32).dtype == "<f4"


@pytest.mark.parametrize("bits", [16, 32])
def test_floats(bits: int) -> None:
    record = matrix_record(8, 3, 5, FloatEncoding(bits), has_bias=False)
    assert record.external() == [8, 15 * bits // 8, 0, 0, 0] and record.codes_offset == 8
    values = np.arange(15, dtype=np.float32).reshape(3, 5) / 4
    raw = b"\0" * 8 + values.astype(f"<f{bits // 8}").tobytes()
    found = weight_oracle._decode(
        np.frombuffer(raw, np.uint8), record.external(), quantization_parameter(record), 3, 5
    )
    np.testing.assert_array_equal(found, values)


def test_embedding_entries() -> None:
    record = matrix_record(1000, 10, 64, BlockEncoding(4, 32, False, 32), has_bias=False)
    assert embedding_entry(record) == {
        "weight_offset": 1000 + 22, "alpha_offset": 1000 + 22 + 320, "alpha_size": 160,
        "quant_bit": 4, "quant_block": 32, "alpha_dtype": "fp32",
    }  # fmt: skip
    plain = matrix_record(1000, 10, 64, FloatEncoding(16), has_bias=False)
    assert embedding_entry(plain)["weight_offset"] == 1000
    assert embedding_entry(plain)["quant_bit"] == 16
    with pytest.raises(ConversionError, match="at 16 bits only"):
        embedding_entry(matrix_record(0, 10, 64, FloatEncoding(32), has_bias=False))


def test_what_the_engine_cannot_hold() -> None:
    with pytest.raises(ConversionError, match="Block 64 does not divide the width 96"):
        matrix_record(0, 2, 96, BlockEncoding(4, 64, False), has_bias=False)
    with pytest.raises(ConversionError, match="no whole byte"):
        matrix_record(0, 2, 33, BlockEncoding(4, 33, False), has_bias=False)
    for bits, block, scale_bits in ((6, 32, 16), (2, 32, 16), (4, 0, 16), (4, 32, 8)):
        with pytest.raises(ConversionError, match="does not store weights as"):
            BlockEncoding(bits, block, False, scale_bits)
    with pytest.raises(ConversionError, match="16 or 32 bits, not 64"):
        FloatEncoding(64)
