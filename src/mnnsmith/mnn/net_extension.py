"""Operators added to a finished `.mnn` graph, of which not one byte changes.

The engine's converter could write a graph as JSON and read it back, but rounds its floats.  Here
the new file begins with a root of its own, whose lists name the tables of the old file, which
follows as it was, and those of a second file with the new operators.  (Offsets of a flatbuffer lead
forward only, so the root comes first.)  Field numbers: `schema/default/MNN.fbs` of MNN 3.6.1.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from mnnsmith.errors import BundleError
from mnnsmith.mnn.flatbuffer import Reader

_FIELDS = 12
_OPERATORS, _TENSOR_NAMES, _TENSOR_COUNT, _PARTS = 3, 7, 8, 10
# Of a sub-graph.
_PART_NAME, _PART_TENSOR_NAMES, _PART_OPERATORS = 0, 3, 4
# One byte each; all others are offsets.
_FORWARD_TYPE, _SOURCE, _USAGE = 5, 6, 9
# Of the widest number in the files: whatever lies between them keeps it.
_ALIGNMENT = 16
_DAMAGED = "the graph file is damaged: an offset points outside of it."


def tensor_names(net: bytes, part: str | None = None) -> list[str]:
    """The names of a graph's tensors; a tensor's index is its place in the list.

    part: of this sub-graph.

    Raises BundleError for what is no flatbuffer, or has no such part.
    """
    reader = Reader(net)
    try:
        _, places = _lists(reader, part)
        return [reader.string(place).decode("utf-8", "replace") for place in places]
    except (struct.error, OverflowError) as error:
        raise BundleError(_DAMAGED) from error


def extend_net(
    net: bytes, addition: bytes, renamed: Mapping[int, str], part: str | None = None
) -> bytes:
    """The graph `net` with the operators and tensors of the graph `addition` after its own.

    Tensor indexes in `addition` count on: its first tensor comes after the last of `net`, and its
    operators may read those of `net`.  renamed: new names for tensors of `net`, by index.
    part: take this sub-graph of `net` in place of the whole.

    Raises BundleError for what is no flatbuffer, or has no such part.
    """
    try:
        return _extend(net, addition, renamed, part)
    except (struct.error, OverflowError) as error:
        raise BundleError(_DAMAGED) from error


def _lists(reader: Reader, part: str | None) -> tuple[list[int], list[int]]:
    """Where the operators and the tensors' names of a graph are, or of a part of it."""
    root = reader.indirect(0)
    if part is None:
        return list(reader.tables(root, _OPERATORS)), list(reader.tables(root, _TENSOR_NAMES))
    for table in reader.tables(root, _PARTS):
        at = reader.field(table, _PART_NAME)
        if at is not None and reader.string(reader.indirect(at)) == part.encode():
            return (
                list(reader.tables(table, _PART_OPERATORS)),
                list(reader.tables(table, _PART_TENSOR_NAMES)),
            )
    raise BundleError(f"the graph file has no part {part}.")


def _extend(net: bytes, addition: bytes, renamed: Mapping[int, str], part: str | None) -> bytes:
    old, new = Reader(net), Reader(addition)
    old_root = old.indirect(0)
    old_lists, new_lists = _lists(old, part), _lists(new, None)

    root_at = 4 + 4 + 2 * _FIELDS
    operators_at = root_at + 4 + 4 * _FIELDS
    names_at = operators_at + 4 + 4 * (len(old_lists[0]) + len(new_lists[0]))
    strings_at = names_at + 4 + 4 * (len(old_lists[1]) + len(new_lists[1]))
    strings = {index: _string(name) for index, name in renamed.items()}
    end = strings_at + sum(map(len, strings.values()))
    old_at = _aligned(end)
    new_at = _aligned(old_at + len(net))

    operators = [old_at + p for p in old_lists[0]] + [new_at + p for p in new_lists[0]]
    names = [old_at + p for p in old_lists[1]]
    place = strings_at
    for index, data in strings.items():
        names[index] = place
        place += len(data)
    names += [new_at + p for p in new_lists[1]]

    fields: dict[int, int] = {
        _OPERATORS: operators_at, _TENSOR_NAMES: names_at, _TENSOR_COUNT: len(names)
    }  # fmt: skip
    for number in set(range(_FIELDS)) - set(fields):
        at = old.field(old_root, number)
        if at is not None:
            one_byte = number in (_FORWARD_TYPE, _SOURCE, _USAGE)
            fields[number] = old.read("<B", at) if one_byte else old_at + old.indirect(at)

    head = _root(root_at, fields)
    head += _offsets(operators_at, operators) + _offsets(names_at, names)
    head += b"".join(strings.values())
    head += bytes(old_at - len(head))
    return head + net + bytes(new_at - old_at - len(net)) + addition


def _root(at: int, fields: Mapping[int, int]) -> bytes:
    """The beginning of a file: the offset of the root, what its fields are, and the root at `at`.

    fields: by number, a value or the place that an offset leads to.
    """
    numbers = [4 + 4 * n if n in fields else 0 for n in range(_FIELDS)]
    description = struct.pack(f"<HH{_FIELDS}H", 4 + 2 * _FIELDS, 4 + 4 * _FIELDS, *numbers)
    values = bytearray(struct.pack("<i", at - 4) + bytes(4 * _FIELDS))
    for number, value in fields.items():
        here = 4 + 4 * number
        plain = number in (_FORWARD_TYPE, _SOURCE, _USAGE, _TENSOR_COUNT)
        struct.pack_into("<I", values, here, value if plain else value - (at + here))
    return struct.pack("<I", at) + description + bytes(values)


def _offsets(at: int, places: Sequence[int]) -> bytes:
    """A list at `at` of offsets to `places`, which lie behind it."""
    offsets = [place - (at + 4 + 4 * i) for i, place in enumerate(places)]
    return struct.pack(f"<I{len(offsets)}I", len(offsets), *offsets)


def _string(text: str) -> bytes:
    """Length, bytes, at least one zero, up to a multiple of 4 bytes."""
    data = text.encode()
    return struct.pack("<I", len(data)) + data + bytes(4 - len(data) % 4)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
