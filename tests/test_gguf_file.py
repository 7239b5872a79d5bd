"""The reader of GGUF headers: what it finds, and that damage ends in our errors."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_samples import random_blocks, write_gguf, write_llama
from mnnsmith.errors import MnnsmithError, SourceError, UnsupportedError
from mnnsmith.sources.gguf import open_gguf
from mnnsmith.sources.gguf_file import MetadataArray, open_gguf_file
from mnnsmith.sources.gguf_types import OTHER_TYPES, TENSOR_TYPES


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(pairs: list[bytes], tensors: list[bytes], version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(pairs))
    return b"GGUF" + counts + b"".join(pairs) + b"".join(tensors)


def described(name: str, shape: list[int], type_id: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + dims + struct.pack("<IQ", type_id, offset)


def placed(head: bytes, data: int = 4096) -> bytes:
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


def opened(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    open_gguf_file(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    quantized = ("Q4_0", random_blocks("Q4_0", 96, 64))
    write_llama(path, tensors={"blk.0.ffn_up.weight": quantized})
    return path.read_bytes()


def test_everything_is_where_the_gguf_package_finds_it(tmp_path: Path, model: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(model)
    found = open_gguf_file(path)
    reader = gguf.GGUFReader(path)
    assert found.paths == (path,)
    assert set(found.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        info = found.tensors[tensor.name]
        assert info.shape == tuple(tensor.shape.tolist()[::-1])
        assert info.type_name == tensor.tensor_type.name
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert set(found.metadata) == set(fields)
    for key, field in fields.items():
        value = found.metadata[key]
        if isinstance(value, MetadataArray):
            contents = field.contents()
            own = value.strings() if isinstance(contents[0], str) else value.numbers().tolist()
            assert own == contents
        else:
            assert value == field.contents()
            assert type(value) is type(field.contents())


def test_version_2_is_read(tmp_path: Path, model: bytes) -> None:
    opened(tmp_path, model[:4] + struct.pack("<I", 2) + model[8:])


def test_every_truncation_is_reported(tmp_path: Path, model: bytes) -> None:
    """Of the header at every 13th byte and all of the last 200, and of the data in steps."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(model)
    data = min(info.offset for info in open_gguf_file(path).tensors.values())
    for size in [
        *range(0, data, 13),
        *range(data - 200, data),
        *range(data, len(model), 997),
        len(model) - 1,
    ]:
        with path.open("r+b") as handle:
            handle.truncate(0)
            handle.write(model[:size])
        with pytest.raises(SourceError) as caught:
            open_gguf_file(path)
        assert "cut.gguf" in caught.value.message
    with pytest.raises(SourceError, match=r"ends at byte \d+, the file has \d+"):
        open_gguf_file(path)


@settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_mutations_end_in_our_errors(tmp_path: Path, model: bytes, data: st.DataObject) -> None:
    """Random bytes and extreme numbers anywhere in the header, opened as a whole model."""
    content = bytearray(model)
    limit = content.index(b"token_embd.weight") + 1200
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, limit))
        new = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=9),
                st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]).map(
                    lambda number: struct.pack("<Q", number)
                ),
            )
        )
        content[at : at + len(new)] = new
    path = tmp_path / "mutated.gguf"
    path.write_bytes(content)
    begin = time.perf_counter()
    try:
        checkpoint = open_gguf(path)
        for tensor in list(checkpoint.tensors.values())[:4]:
            tensor.rows(0, min(2, tensor.shape[0]))
    except MnnsmithError as error:
        assert "mutated.gguf" in str(error)
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(60), "starts with b'PK"),
        (b"GG", "truncated"),
        (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 1), "1099511627776 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 40), "1099511627776 metadata pairs"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 63), "limit is 65535"),
        (header([string("a") + struct.pack("<I", 99)], []), "type 99"),
        (header([string("a") + struct.pack("<IIQ", 9, 9, 1)], []), "array of arrays"),
        (header([string("a") + struct.pack("<IIQ", 9, 8, 1 << 61)], []), "truncated: the array a"),
        (header([string("a") + struct.pack("<IIQ", 9, 10, 1 << 63)], []), "truncated: the array a"),
        (header([string("a") + struct.pack("<IB", 7, 2)], []), "bool and holds 2"),
        (header([string("a") + struct.pack("<IB", 0, 2)] * 2, []), "key a twice"),
        (header([struct.pack("<Q", 2) + b"\xff\xfe"], []), "not UTF-8"),
        (
            header([string("general.alignment") + struct.pack("<II", 4, 48)], []),
            "general.alignment is 48",
        ),
        (
            header([string("general.alignment") + struct.pack("<II", 4, 0)], []),
            "general.alignment is 0",
        ),
        (placed(header([], [described("a", [1] * 5)])), "5 dimensions"),
        (placed(header([], [described("a", [])])), "0 dimensions"),
        (placed(header([], [described("a", [4, 0])])), "none may be 0"),
        (placed(header([], [described("a", [33], 2)])), "multiple of 32"),
        (placed(header([], [described("a", [1 << 40, 1 << 40, 1 << 40])])), "truncated: tensor a"),
        (placed(header([], [described("a", [4], offset=4)])), "no multiple of 32"),
        (placed(header([], [described("a", [4], offset=1 << 62)])), "truncated: tensor a"),
        (placed(header([], [described("a", [4])] * 2)), "described twice"),
        (placed(header([], [described("a", [16]), described("b", [4], offset=32)])), "overlap"),
        (placed(header([], [described("a", [4], 77)])), "type 77, which is not known"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        opened(tmp_path, content)


def test_tensors_side_by_side_are_no_overlap(tmp_path: Path) -> None:
    opened(tmp_path, placed(header([], [described("b", [8], offset=32), described("a", [8])]), 64))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
        (b"tjgg" + bytes(60), "before GGUF"),
        (placed(header([], [described("a", [256], 23)])), "a, of type IQ4_XS"),
        (placed(header([], [described("a", [32], 39)])), "MXFP4"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        opened(tmp_path, content)


def test_a_big_endian_file_of_the_gguf_package_is_named(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    write_llama(path, endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(UnsupportedError, match="big endian"):
        open_gguf_file(path)


def test_every_other_type_of_the_gguf_package_is_refused_by_name(tmp_path: Path) -> None:
    for kind in gguf.GGMLQuantizationType:
        if kind.value not in TENSOR_TYPES:
            assert OTHER_TYPES[kind.value] == kind.name


def test_a_huge_array_takes_little_memory(tmp_path: Path) -> None:
    """A header of many empty strings, of which no list is made; then a false count of them."""
    strings = struct.pack("<IIQ", 9, 8, 200_000) + bytes(1_600_000)
    path = tmp_path / "x.gguf"
    path.write_bytes(placed(header([string("a") + strings], [])))
    tracemalloc.start()
    try:
        array = open_gguf_file(path).metadata["a"]
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
    assert isinstance(array, MetadataArray)
    assert array.count == 200_000


def test_a_header_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    head = header([string("a") + struct.pack("<IQ", 8, 65 << 20)], [])
    with path.open("wb") as handle:
        handle.write(head)
        handle.truncate(70 << 20)  # sparse
    with pytest.raises(SourceError, match="the limit is"):
        open_gguf_file(path)
    head = header([string("a") + struct.pack("<IIQ", 9, 0, 65 << 20)], [])
    with path.open("r+b") as handle:
        handle.write(head)
    with pytest.raises(SourceError, match="a header may have"):
        open_gguf_file(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no\.gguf: cannot be opened"):
        open_gguf_file(tmp_path / "no.gguf")
    with pytest.raises(SourceError, match="cannot be read"):
        open_gguf_file(tmp_path)


# ------------------------------------------------------------------------------------ split files


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_llama(tmp_path / "big model.gguf", split_max_tensors=8)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in found] == [f"big model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return found


def test_any_part_opens_the_whole(tmp_path: Path, parts: list[Path]) -> None:
    whole = tmp_path / "whole" / "model.gguf"
    whole.parent.mkdir()
    tensors = write_llama(whole)
    single = open_gguf(whole)
    for part in parts:
        checkpoint = open_gguf(part)
        assert checkpoint.files == tuple(parts)
        assert checkpoint.config == single.config
        assert checkpoint.tokenizer == single.tokenizer
        assert set(checkpoint.tensors) == set(single.tensors)
        assert len(checkpoint.tensors) == len(tensors) == 20
        for name, tensor in checkpoint.tensors.items():
            rows = tensor.shape[0]
            assert np.array_equal(tensor.rows(0, rows), single.tensors[name].rows(0, rows))


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(
        SourceError, match=r"3 files and 1 of them is not .*00002-of-00003"
    ) as error:
        open_gguf_file(parts[2])
    assert "Download all parts" in str(error.value)


def test_mixed_up_parts_are_reported(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(SourceError, match="says part 2 of 3; the file says part 3 of 3"):
        open_gguf_file(parts[0])


def test_a_part_of_another_split_is_reported(tmp_path: Path, parts: list[Path]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_llama(other / "x.gguf", split_max_tensors=5)
    parts[1].write_bytes((other / "x-00002-of-00004.gguf").read_bytes())
    with pytest.raises(SourceError, match="says part 2 of 3; the file says part 2 of 4"):
        open_gguf_file(parts[0])


def test_a_renamed_part_is_reported(tmp_path: Path, parts: list[Path]) -> None:
    moved = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(SourceError, match="one of 3 parts"):
        open_gguf_file(moved)


def test_a_tensor_in_two_parts_is_reported(tmp_path: Path) -> None:
    for number in (1, 2):
        pairs = [
            string("split.no") + struct.pack("<IH", 2, number - 1),
            string("split.count") + struct.pack("<IH", 2, 2),
        ]
        path = tmp_path / f"m-0000{number}-of-00002.gguf"
        path.write_bytes(placed(header(pairs, [described("a", [4])])))
    with pytest.raises(SourceError, match=r"tensor a is also in m-00001-of-00002\.gguf"):
        open_gguf_file(tmp_path / "m-00002-of-00002.gguf")


def test_a_wrong_number_of_tensors_is_reported(tmp_path: Path) -> None:
    for number in (1, 2):
        pairs = [
            string("split.no") + struct.pack("<IH", 2, number - 1),
            string("split.count") + struct.pack("<IH", 2, 2),
            string("split.tensors.count") + struct.pack("<Ii", 5, 3),
        ]
        path = tmp_path / f"m-0000{number}-of-00002.gguf"
        path.write_bytes(placed(header(pairs, [described(f"a{number}", [4])])))
    with pytest.raises(SourceError, match="says 3 tensors; the 2 parts hold 2"):
        open_gguf_file(path)


def test_an_impossible_part_number_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "m-00004-of-00003.gguf"
    path.write_bytes(placed(header([], [])))
    with pytest.raises(SourceError, match="part 4 of 3"):
        open_gguf_file(path)


def test_one_of_one_is_a_whole_model(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00001.gguf"
    write_gguf(path, "llama", {}, {"a": np.ones(4, np.float32)}, {})
    assert list(open_gguf_file(path).tensors) == ["a"]
