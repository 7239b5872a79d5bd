"""safetensors files: what the reference library writes is read, what it refuses is refused."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import tiny_checkpoint as tiny
from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.sources.safetensors import decode, open_safetensors


def entry(dtype: str, shape: Any, start: Any, stop: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_what_the_library_writes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tensors = {
        "f32": random.standard_normal((5, 7)).astype(np.float32),
        "f16": random.standard_normal((3, 2, 4)).astype(np.float16),
        "scalar": np.array(2.5, dtype=np.float32),
        "vector": random.standard_normal(9).astype(np.float16),
        "empty": np.zeros((0, 4), np.float32),
        "ünïcode\n": np.ones(1, np.float32),
    }
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    found = open_safetensors(path)
    assert set(found) == set(tensors)
    for name, value in tensors.items():
        tensor = found[name]
        assert tensor.shape == value.shape and tensor.nbytes == value.nbytes
        rows = len(value) if value.ndim else 1
        got = tensor.rows(0, rows)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got.reshape(value.shape), value.astype(np.float32))
        for start, stop in ((0, 0), (rows, rows), (1, rows)):
            if start <= stop <= rows and value.ndim:
                np.testing.assert_array_equal(tensor.rows(start, stop), value[start:stop])
        for start, stop in ((-1, 1), (0, rows + 1), (rows + 1, rows)):
            with pytest.raises(SourceError, match="do not exist"):
                tensor.rows(start, stop)


def test_types() -> None:
    """Every code of the small types against its definition, written plainly."""
    wide = np.arange(1 << 16, dtype=np.uint32)
    bf16 = decode(bytearray(wide.astype("<u2").tobytes()), "BF16", "x")
    np.testing.assert_array_equal(bf16.view(np.uint32), wide << 16)
    codes = bytearray(range(256))
    e4m3, e5m2 = decode(codes, "F8_E4M3", "x"), decode(codes, "F8_E5M2", "x")
    for code in range(256):
        sign, e4, m3 = -1 if code & 128 else 1, code >> 3 & 15, code & 7
        if (e4, m3) == (15, 7):
            assert np.isnan(e4m3[code])
        else:
            value = m3 / 8 * 2.0**-6 if e4 == 0 else (1 + m3 / 8) * 2.0 ** (e4 - 7)
            assert e4m3[code] == sign * value
        e5, m2 = code >> 2 & 31, code & 3
        if e5 == 31:
            assert np.isinf(e5m2[code]) if m2 == 0 else np.isnan(e5m2[code])
        else:
            value = m2 / 4 * 2.0**-14 if e5 == 0 else (1 + m2 / 4) * 2.0 ** (e5 - 15)
            assert e5m2[code] == sign * value
    assert e4m3[0x7E] == 448 and np.signbit(e4m3[0x80])
    for dtype in ("I64", "F64", "BOOL", "U8"):
        with pytest.raises(UnsupportedError, match=f"x: weights of type {dtype} are not supported"):
            decode(bytearray(8), dtype, "x")


GOOD = {"a": entry("F32", [2, 2], 0, 16), "b": entry("F16", [4], 16, 24)}


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ([], "header is not a JSON object"),
        ({"a": 1}, "its header entry is not an object"),
        ({"a": {}}, "unknown dtype None"),
        ({"a": entry("F33", [1], 0, 4)}, "unknown dtype 'F33'"),
        ({"a": entry(["F32"], [1], 0, 4)}, "unknown dtype"),  # type: ignore[arg-type]
        ({"a": entry("F32", 1, 0, 4)}, "bad shape 1"),
        ({"a": entry("F32", [-1], 0, 4)}, r"bad shape \[-1\]"),
        ({"a": entry("F32", [1.0], 0, 4)}, r"bad shape \[1.0\]"),
        ({"a": entry("F32", [True], 0, 4)}, "bad shape"),
        ({"a": entry("F32", [2**62], 0, 4)}, "bad shape"),
        ({"a": entry("F32", [1] * 9, 0, 4)}, "bad shape"),
        ({"a": entry("F32", [1], 0, None)}, "bad data_offsets"),
        ({"a": entry("F32", [1], -4, 0)}, "bad data_offsets"),
        ({"a": {**entry("F32", [1], 0, 4), "data_offsets": [0]}}, "bad data_offsets"),
        ({"a": entry("F32", [1], 4, 0)}, r"takes 4 bytes, its data_offsets span -4"),
        ({"a": entry("F32", [2, 2], 0, 12)}, "takes 16 bytes, its data_offsets span 12"),
        ({"a": entry("F32", [2**61, 2**61], 0, 4)}, "its data_offsets span 4"),
        ({"a": entry("F32", [8], 0, 32)}, "the tensor ends at byte .* the file at"),
        ({**GOOD, "c": entry("F16", [2], 14, 18)}, "the tensors a and c overlap"),
        ({**GOOD, "c": entry("F32", [2, 2], 0, 16)}, "overlap"),
        ({"a": entry("F32", [float("nan")], 0, 4)}, "bad shape"),
    ],
)
def test_headers_that_are_refused(tmp_path: Path, header: Any, part: str) -> None:
    path = tmp_path / "x.safetensors"
    tiny.write_raw_safetensors(path, json.dumps(header).encode(), bytes(24))
    with pytest.raises(SourceError, match=part) as caught:
        open_safetensors(path)
    assert str(path) in str(caught.value)
    # The reference does not take them either.
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(path, "np"):
        pass


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"", "0 bytes are too few"),
        (b"1234567", "7 bytes are too few"),
        (struct.pack("<Q", 100) + b"{}", "says that it has 100 bytes, the file has 10"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "the file has 10"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "not UTF-8"),
        (struct.pack("<Q", 2) + b"{{", "not valid JSON"),
        (struct.pack("<Q", 0), "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>not found</html>", "no safetensors file"),
    ],
)
def test_files_that_are_no_safetensors(tmp_path: Path, raw: bytes, part: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(SourceError, match=part):
        open_safetensors(path)


def test_a_header_of_many_tensors_is_read_in_time(tmp_path: Path) -> None:
    """90,000 tensors, as the largest mixture of experts has."""
    header = {f"model.layers.{i}.mlp.experts.w": entry("F16", [1], 2 * i, 2 * i + 2)
              for i in range(90_000)}  # fmt: skip
    path = tmp_path / "x.safetensors"
    tiny.write_raw_safetensors(path, json.dumps(header).encode(), bytes(180_000))
    start = time.process_time()
    assert len(open_safetensors(path)) == 90_000
    assert time.process_time() - start < 4


def test_a_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.ones((100, 100), np.float32)}, path)
    tensor = open_safetensors(path)["a"]
    with path.open("r+b") as file:
        file.truncate(20_000)
    tensor.rows(0, 40)
    with pytest.raises(SourceError, match=r"x.safetensors \(a\): the file ends at byte 20000"):
        tensor.rows(0, 100)
