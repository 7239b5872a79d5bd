"""Reading flatbuffers, the form of `.mnn` files, with every offset checked.

A table lies behind the (signed) offset to the description of its fields; a field that holds no
number holds an offset to what lies further on in the file.  Source: the format's "internals" page.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

# Of all lists that are followed together.  The largest mixture of experts, DeepSeek-V3 with 45,000
# expert matrices, has 2.2 MB.
LISTS_LIMIT_BYTES = 16 << 20


class Reader:
    """Bounds-checked reads: `struct` raises outside of the buffer, negative places included."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        # Tables may be shared, so the work is bounded by what a whole file of them could hold.
        self.left = min(len(data), LISTS_LIMIT_BYTES)

    def read(self, form: str, place: int) -> int:
        """One number in the notation of `struct`."""
        if place < 0:
            raise struct.error("a place before the beginning")
        value: int = struct.unpack_from(form, self.data, place)[0]
        return value

    def indirect(self, place: int) -> int:
        """Where the offset at `place` leads."""
        return place + self.read("<I", place)

    def field(self, table: int, number: int) -> int | None:
        """Where the field lies, or None when it is not there."""
        description = table - self.read("<i", table)
        entry = 4 + 2 * number
        if entry + 2 > self.read("<H", description):
            return None
        offset = self.read("<H", description + entry)
        return table + offset if offset else None

    def tables(self, table: int, number: int) -> Iterator[int]:
        """Places of the tables (or strings) in the list that is a field."""
        place = self.field(table, number)
        if place is not None:
            for item in self._vector(self.indirect(place), 4):
                yield self.indirect(item)

    def int32s(self, place: int) -> Iterator[int]:
        """The numbers of a list."""
        for item in self._vector(place, 4):
            yield self.read("<i", item)

    def int64s(self, place: int) -> Iterator[int]:
        """The numbers of a list."""
        for item in self._vector(place, 8):
            yield self.read("<q", item)

    def string(self, place: int) -> bytes:
        """The bytes of a string."""
        items = self._vector(place, 1)
        if items.stop > len(self.data):
            raise struct.error("a string that goes beyond the end")
        return self.data[items.start : items.stop]

    def _vector(self, place: int, item_bytes: int) -> range:
        count = self.read("<I", place)
        self.left -= count * item_bytes
        if self.left < 0:
            raise struct.error("more items than a graph can have")
        return range(place + 4, place + 4 + count * item_bytes, item_bytes)
