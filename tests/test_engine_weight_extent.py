"""How many bytes of weights a graph reads, on flatbuffers made here byte by byte."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence

import pytest

from mnnsmith.engine.weight_extent import required_weight_bytes
from mnnsmith.errors import EngineError

Part = Callable[[bytearray], int]
CONVOLUTION = 9


def table(parts: dict[int, Part | int]) -> Part:
    """A table of fields by number: a byte, or the offset of another part."""

    def put(data: bytearray) -> int:
        numbers = max(parts, default=-1) + 1
        description = len(data)
        data += struct.pack("<HH", 4 + 2 * numbers, 0) + bytes(2 * numbers)
        place = len(data)
        data += struct.pack("<i", place - description)
        places = {}
        for number, part in parts.items():
            places[number] = len(data)
            struct.pack_into("<H", data, description + 4 + 2 * number, len(data) - place)
            data += bytes([part, 0, 0, 0]) if isinstance(part, int) else bytes(4)
        for number, part in parts.items():
            if not isinstance(part, int):
                struct.pack_into("<I", data, places[number], part(data) - places[number])
        return place

    return put


def vector(parts: Sequence[Part]) -> Part:
    def put(data: bytearray) -> int:
        place = len(data)
        data += struct.pack("<I", len(parts)) + bytes(4 * len(parts))
        for index, part in enumerate(parts):
            at = place + 4 + 4 * index
            struct.pack_into("<I", data, at, part(data) - at)
        return place

    return put


def integers(values: Sequence[int]) -> Part:
    def put(data: bytearray) -> int:
        place = len(data)
        data += struct.pack(f"<I{len(values)}q", len(values), *values)
        return place

    return put


def operator(*external: int, **more: Part) -> Part:
    fields: dict[int, Part | int] = {1: CONVOLUTION, 2: table({6: integers(external)})}
    if "elsewhere" in more:
        fields[7] = more["elsewhere"]
    return table(fields)


def graph(operators: Sequence[Part], subgraphs: Sequence[Sequence[Part]] = ()) -> bytes:
    parts = [table({4: vector(nodes)}) for nodes in subgraphs]
    data = bytearray(4)
    place = table({3: vector(operators), 10: vector(parts)})(data)
    struct.pack_into("<I", data, 0, place)
    return bytes(data)


def text(value: bytes) -> Part:
    def put(data: bytearray) -> int:
        place = len(data)
        data += struct.pack("<I", len(value)) + value + b"\0"
        return place

    return put


def test_the_furthest_end_of_all_operators() -> None:
    assert required_weight_bytes(graph([])) == 0
    assert required_weight_bytes(graph([operator(100, 20, 5, 3, 0), operator(0, 50)])) == 128
    experts = [[operator(0, 1)], [operator(0, 1), operator(1 << 40, 7)]]
    assert required_weight_bytes(graph([operator(100, 20)], experts)) == (1 << 40) + 7


def test_every_cut_is_an_error_or_less_to_read() -> None:
    whole = graph([operator(100, 20, 5, 3, 0)], [[operator(200, 8)]])
    for size in range(len(whole)):
        with pytest.raises(EngineError, match="damaged"):
            required_weight_bytes(whole[:size])


def test_negative_places() -> None:
    with pytest.raises(EngineError, match="damaged"):
        required_weight_bytes(graph([operator(100, -20)]))


def test_weights_in_another_file() -> None:
    with pytest.raises(EngineError, match="outside the bundle"):
        required_weight_bytes(graph([operator(0, 8, elsewhere=text(b"/etc/passwd"))]))


def test_the_work_is_bounded() -> None:
    """Few bytes that stand for many operators, and a graph that is nothing but operators."""

    def shared(nodes: Part, count: int) -> Part:
        placed: list[int] = []

        def put(data: bytearray) -> int:
            if not placed:
                placed.append(nodes(data))
            return placed[0]

        return vector([put] * count)

    part = table({4: shared(operator(0, 8), 3000)})
    nested = bytearray(4)
    place = table({10: shared(part, 3000)})(nested)
    struct.pack_into("<I", nested, 0, place)

    def many(data: bytearray) -> int:
        place = len(data)
        data += struct.pack("<I", 6_000_000) + bytes(24_000_000)
        return place

    wide = bytearray(4)
    struct.pack_into("<I", wide, 0, table({3: many})(wide))
    for data in (nested, wide):
        began = time.process_time()
        with pytest.raises(EngineError, match="damaged"):
            required_weight_bytes(bytes(data))
        assert time.process_time() - began < 1
