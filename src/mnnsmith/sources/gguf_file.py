"""A strict reader of GGUF files: metadata and tensor descriptions, no weights.

Every count, length, type and offset of the header is checked against the file before it is used, so
that a damaged or hostile file ends in one of our errors after bounded time and memory.  Only the
header is held in memory; arrays (a vocabulary has hundreds of thousands of strings) stay packed
until asked for.  Weights are read later by position, never through a memory map:
pages of a map count as resident memory, and a file cut short under a map kills the process.

The layout is that of the GGUF specification (ggml, docs/gguf.md), versions 2 and 3:
"GGUF", u32 version, u64 tensors, u64 key-value pairs, the pairs, the tensor descriptions, padding
to `general.alignment`, the tensor data.  Numbers are little endian; strings are u64 length + UTF-8.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.files import OpenFile, is_lfs_pointer, lfs_error
from mnnsmith.sources.gguf_types import ARRAY, BOOL, OTHER_TYPES, SCALARS, STRING, TENSOR_TYPES

MAGIC = b"GGUF"
HEADER_LIMIT = 64 << 20  # the largest real ones (262 144 tokens with merges) have about 12 MiB
KEY_LIMIT = 65_535  # set by the specification
NAME_LIMIT = 1_024  # ggml itself allows 63 bytes
DIMENSION_LIMIT = 4
ALIGNMENT_LIMIT = 1 << 20
TENSOR_LIMIT = 1 << 20
PAIR_LIMIT = 1 << 16


_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    shape: outermost dimension first (as numpy and torch have it; the file has them reversed).
    type_name: F32, Q4_K, ...; block, block_bytes: elements and bytes of one block of that type.
    offset: bytes from the start of `file`; nbytes: bytes of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    block: int
    block_bytes: int
    file: OpenFile
    offset: int
    nbytes: int

    @property
    def path(self) -> Path:
        return self.file.path


@dataclass(frozen=True)
class MetadataArray:
    """An array of the metadata, packed as the file has it.

    where: file and key, for messages; type_id: of its elements; raw: the packed elements.
    """

    where: str
    type_id: int
    count: int
    raw: bytes = field(repr=False)

    def numbers(self) -> npt.NDArray[Any]:
        """The elements of an array of numbers, 1-D, in the stored type."""
        if self.type_id not in SCALARS:
            raise SourceError(f"{self.where} should hold numbers and holds strings.")
        return np.frombuffer(self.raw, dtype=SCALARS[self.type_id][2], count=self.count)

    def strings(self) -> list[str]:
        """The elements of an array of strings; SourceError where one is not UTF-8."""
        if self.type_id != STRING:
            name = SCALARS[self.type_id][0]
            raise SourceError(f"{self.where} should hold strings and holds {name} numbers.")
        raw, position, out = self.raw, 0, []
        length_of = struct.Struct("<Q").unpack_from
        for index in range(self.count):
            end = position + 8 + length_of(raw, position)[0]
            try:
                out.append(raw[position + 8 : end].decode("utf-8"))
            except UnicodeDecodeError as error:
                raise SourceError(f"{self.where}: element {index} is not UTF-8: {error}") from error
            position = end
        return out


Value = bool | int | float | str | MetadataArray


@dataclass(frozen=True)
class GgufFile:
    """A GGUF model: one file, or all parts of a split one.

    metadata: of the first part; tensors: by name, in the order of the files.
    """

    paths: tuple[Path, ...]
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]


def open_gguf_file(path: Path) -> GgufFile:
    """Read the header of a GGUF model, given its file or any part of a split one.

    SourceError for a missing, cut, damaged or contradictory file; UnsupportedError for a version,
    byte order or tensor type that we do not read.
    """
    paths = _parts(path)
    metadata: dict[str, Value] = {}
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(paths):
        part_metadata, part_tensors = _read_header(part)
        _check_split(part, part_metadata, number, len(paths))
        for info in part_tensors:
            if info.name in tensors:
                raise SourceError(
                    f"{part}: tensor {info.name} is also in {tensors[info.name].path.name}."
                )
            tensors[info.name] = info
        if number == 0:
            metadata = part_metadata
    total = metadata.get("split.tensors.count")
    if len(paths) > 1 and isinstance(total, int) and total != len(tensors):
        raise SourceError(
            f"{paths[0]}: split.tensors.count says {total} tensors; "
            f"the {len(paths)} parts hold {len(tensors)}."
        )
    return GgufFile(paths, metadata, tensors)


def _parts(path: Path) -> tuple[Path, ...]:
    """All parts of a split model in order, or the file alone."""
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        return (path,)
    number, count = int(match["no"]), int(match["count"])
    if not 1 <= number <= count:
        raise SourceError(f"{path}: the name says part {number} of {count}.")
    parts = [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in _upto(count)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
        raise SourceError(
            f"{path}: the model is split in {count} files and {len(missing)} of them "
            f"{'is' if len(missing) == 1 else 'are'} not in {path.parent}: {shown}.",
            "Download all parts into one folder, with their names unchanged.",
        )
    return tuple(parts)


def _upto(count: int) -> range:
    return range(1, count + 1)


def _check_split(part: Path, metadata: dict[str, Value], number: int, parts: int) -> None:
    count, own = metadata.get("split.count", 1), metadata.get("split.no", 0)
    if parts == 1 and count in (0, 1):
        return
    if parts == 1:
        raise SourceError(
            f"{part}: is one of {count} parts of a split model, but its name does not say which.",
            "Give the parts their names back: NAME-00001-of-00003.gguf and so on.",
        )
    if count != parts or own != number:
        raise SourceError(
            f"{part}: the name says part {number + 1} of {parts}; the file says part "
            f"{own + 1 if isinstance(own, int) else own} of {count}.",
            "The parts are mixed up, or belong to different models.",
        )


@dataclass
class _Cursor:
    """The header of one file, read forward; `data` grows as it is needed."""

    file: OpenFile
    size: int
    data: bytes = b""
    position: int = 0

    @property
    def path(self) -> Path:
        return self.file.path

    def fail(self, what: str, hint: str | None = None) -> NoReturn:
        raise SourceError(f"{self.path}: {what}", hint)

    def need(self, count: int, what: str) -> int:
        """Make `count` more bytes available and give their position."""
        end = self.position + count
        if end > self.size:
            self.fail(
                f"truncated: {what} ends at byte {end}, the file has {self.size}.",
                "Download it again.",
            )
        if end > HEADER_LIMIT:
            self.fail(f"{what} reaches byte {end}; a header may have {HEADER_LIMIT}.")
        if end > len(self.data):
            # Doubling keeps the number of reads small without reading weights of small files.
            target = min(self.size, HEADER_LIMIT, max(end, 2 * len(self.data), 1 << 16))
            self.data = os.pread(self.file.fd, target, 0)
            if end > len(self.data):
                self.fail(f"{what} could not be read to byte {end}.")
        start, self.position = self.position, end
        return start

    def number(self, code: str, what: str) -> int:
        start = self.need(struct.calcsize(code), what)
        return int(struct.unpack_from(code, self.data, start)[0])

    def string(self, limit: int, what: str) -> str:
        length = self.number("<Q", f"the length of {what}")
        if length > limit:
            self.fail(f"{what} has {length} bytes; the limit is {limit}.")
        start = self.need(length, what)
        try:
            return self.data[start : self.position].decode("utf-8")
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.path}: {what} is not UTF-8: {error}") from error


def _read_header(path: Path) -> tuple[dict[str, Value], list[TensorInfo]]:
    file = OpenFile(path)
    try:
        return _parse(_Cursor(file, os.fstat(file.fd).st_size))
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror}.") from error


def _parse(cursor: _Cursor) -> tuple[dict[str, Value], list[TensorInfo]]:
    _check_magic(cursor)
    tensors = cursor.number("<Q", "the number of tensors")
    pairs = cursor.number("<Q", "the number of metadata pairs")
    if tensors > TENSOR_LIMIT or pairs > PAIR_LIMIT:
        cursor.fail(
            f"says it has {tensors} tensors and {pairs} metadata pairs; "
            f"the limits are {TENSOR_LIMIT} and {PAIR_LIMIT}."
        )
    metadata: dict[str, Value] = {}
    for index in range(pairs):
        key = cursor.string(KEY_LIMIT, f"key {index} of the metadata")
        if key in metadata:
            cursor.fail(f"the metadata has the key {key} twice.")
        metadata[key] = _read_value(cursor, key)
    described = [_read_description(cursor, index) for index in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    valid = type(alignment) is int and 1 <= alignment <= ALIGNMENT_LIMIT
    if not valid or int(alignment) & (int(alignment) - 1):  # type: ignore[arg-type]
        cursor.fail(f"general.alignment is {alignment}, which is no power of two up to 2^20.")
    return metadata, list(_place(cursor, described, int(alignment)))  # type: ignore[arg-type]


def _check_magic(cursor: _Cursor) -> None:
    path, size = cursor.path, cursor.size
    if size == 0:
        cursor.fail("is empty (0 bytes).", "Download it again.")
    head = os.pread(cursor.file.fd, 64, 0)
    if is_lfs_pointer(head):
        raise lfs_error(path)
    if head[:4] in (b"ggml"[::-1], b"ggmf"[::-1], b"ggjt"[::-1], b"ggla"[::-1]):
        raise UnsupportedError(
            f"{path}: is of a GGML format from before GGUF ({head[3::-1].decode()}).",
            "Convert it to GGUF with llama.cpp, or take a newer file.",
        )
    if head[:4] != MAGIC[: len(head)]:
        cursor.fail(f"starts with {head[:4]!r} where a GGUF file has {MAGIC!r}.")
    cursor.need(4, "the magic bytes")
    version = cursor.number("<I", "the version")
    if version and version & 0xFFFF == 0:
        raise UnsupportedError(
            f"{path}: is big endian (GGUF version {version >> 24} with its bytes reversed).",
            "Only little-endian files are read; make one with llama.cpp's gguf_convert_endian.py.",
        )
    if version not in (2, 3):
        raise UnsupportedError(f"{path}: is of GGUF version {version}; versions 2 and 3 are read.")


def _read_value(cursor: _Cursor, key: str) -> Value:
    type_id = cursor.number("<I", f"the type of {key}")
    if type_id == STRING:
        return cursor.string(HEADER_LIMIT, f"the value of {key}")
    if type_id == ARRAY:
        return _read_array(cursor, key)
    if type_id not in SCALARS:
        cursor.fail(f"the value of {key} is of type {type_id}, which GGUF does not define.")
    name, code, _ = SCALARS[type_id]
    start = cursor.need(struct.calcsize(code), f"the value of {key}")
    value = struct.unpack_from(code, cursor.data, start)[0]
    if type_id == BOOL:
        if value > 1:
            cursor.fail(f"the value of {key} is a {name} and holds {value}.")
        return bool(value)
    return value  # type: ignore[no-any-return]


def _read_array(cursor: _Cursor, key: str) -> MetadataArray:
    type_id = cursor.number("<I", f"the element type of {key}")
    count = cursor.number("<Q", f"the length of {key}")
    if type_id == ARRAY:
        cursor.fail(f"{key} is an array of arrays, which no known GGUF model has.")
    if type_id != STRING and type_id not in SCALARS:
        cursor.fail(f"the elements of {key} are of type {type_id}, which GGUF does not define.")
    start = cursor.position
    if type_id == STRING:
        # A string takes eight bytes at least, so a false count fails before the loop.
        cursor.need(8 * count, f"the array {key}")
        cursor.position = start
        _skip_strings(cursor, count, f"the array {key}")
    else:
        cursor.need(count * struct.calcsize(SCALARS[type_id][1]), f"the array {key}")
    raw = cursor.data[start : cursor.position]
    return MetadataArray(f"{cursor.path}: {key}", type_id, count, raw)


def _skip_strings(cursor: _Cursor, count: int, what: str) -> None:
    length_of = struct.Struct("<Q").unpack_from
    position, data = cursor.position, cursor.data
    for _ in range(count):
        if position + 8 > len(data):
            cursor.position = position
            cursor.need(8, what)
            data = cursor.data
        position += 8 + length_of(data, position)[0]
        if position > len(data):
            cursor.need(position - cursor.position, what)
            data = cursor.data
    cursor.position = position


def _read_description(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (outermost first), type id and offset in the data of tensor `index`."""
    name = cursor.string(NAME_LIMIT, f"the name of tensor {index}")
    rank = cursor.number("<I", f"the number of dimensions of {name}")
    if not 1 <= rank <= DIMENSION_LIMIT:
        cursor.fail(f"tensor {name} has {rank} dimensions; GGUF allows 1 to {DIMENSION_LIMIT}.")
    start = cursor.need(8 * rank, f"the shape of {name}")
    shape = struct.unpack_from(f"<{rank}Q", cursor.data, start)[::-1]
    type_id = cursor.number("<I", f"the type of {name}")
    offset = cursor.number("<Q", f"the offset of {name}")
    return name, shape, type_id, offset


def _place(
    cursor: _Cursor, described: list[tuple[str, tuple[int, ...], int, int]], alignment: int
) -> Iterator[TensorInfo]:
    """Check where the tensors lie, and give them in the file's order."""
    base = -(-cursor.position // alignment) * alignment
    _refuse_types(cursor.path, described)
    out: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset in described:
        type_name, block, block_bytes = TENSOR_TYPES[type_id]
        elements = 1
        for dimension in shape:  # in Python's integers: a product of four u64 overflows numpy's
            elements *= dimension
        if name in out:
            cursor.fail(f"tensor {name} is described twice.")
        if elements == 0 or shape[-1] % block:
            cursor.fail(
                f"tensor {name} of type {type_name} has the shape {list(shape)}; "
                f"the last dimension must be a multiple of {block} and none may be 0."
            )
        if offset % alignment:
            cursor.fail(f"tensor {name} starts at {offset}, no multiple of {alignment}.")
        nbytes = elements // block * block_bytes
        if base + offset + nbytes > cursor.size:
            cursor.fail(
                f"truncated: tensor {name} ({type_name}, {list(shape)}) ends at byte "
                f"{base + offset + nbytes}, the file has {cursor.size}.",
                "Download it again.",
            )
        out[name] = TensorInfo(
            name, shape, type_name, block, block_bytes, cursor.file, base + offset, nbytes
        )
    previous: TensorInfo | None = None
    for info in sorted(out.values(), key=lambda info: info.offset):
        if previous is not None and previous.offset + previous.nbytes > info.offset:
            cursor.fail(f"tensors {previous.name} and {info.name} overlap at {info.offset}.")
        previous = info
    yield from out.values()


def _refuse_types(path: Path, described: list[tuple[str, tuple[int, ...], int, int]]) -> None:
    refused = [item for item in described if item[2] not in TENSOR_TYPES]
    if not refused:
        return
    name, _, type_id, _ = refused[0]
    if type_id not in OTHER_TYPES:
        raise SourceError(f"{path}: tensor {name} is of type {type_id}, which is not known.")
    known = ", ".join(sorted(entry[0] for entry in TENSOR_TYPES.values()))
    raise UnsupportedError(
        f"{path}: {len(refused)} tensors are of a type that is not read, the first is {name}, "
        f"of type {OTHER_TYPES[type_id]}.",
        f"Take a file of the same model in one of {known}.",
    )
