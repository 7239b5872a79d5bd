"""A scheme: how one weight is stored, by a name that can be decoded: w4g64, w8g32-sym, fp16."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mnnsmith.errors import RecipeError

BITS = (4, 8)
BLOCKS = (32, 64, 128, 256)
_NAME = re.compile(r"w([0-9]{1,4})(?:g([0-9]{1,6}))?(-sym)?(-scale32)?")


@dataclass(frozen=True)
class Scheme:
    """bits: 4 or 8 (blocks of integers), 16 or 32 (floats).

    block: elements of a row that share a scale; 0 is the whole row (and always so for floats).
    symmetric: no offset per block.  scale_bits: precision of scales and offsets.
    """

    bits: int
    block: int = 0
    symmetric: bool = False
    scale_bits: int = 16

    @property
    def is_float(self) -> bool:
        return self.bits in (16, 32)

    @property
    def name(self) -> str:
        """The name that `parse_scheme` reads back."""
        if self.is_float:
            return f"fp{self.bits}"
        block = f"g{self.block}" if self.block else ""
        tail = ("-sym" if self.symmetric else "") + ("-scale32" if self.scale_bits == 32 else "")
        return f"w{self.bits}{block}{tail}"

    def bits_per_weight(self, cols: int) -> float:
        """Bits that one weight of a row of `cols` takes, scales included."""
        if self.is_float:
            return float(self.bits)
        per_block = self.scale_bits * (1 if self.symmetric else 2)
        return self.bits + per_block / (self.block or cols)


def parse_scheme(name: str, where: str) -> Scheme:
    """Read a scheme's name; raises `RecipeError` saying what would be right."""
    if name in ("fp16", "fp32"):
        return Scheme(int(name[2:]))
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise RecipeError(
            f"{where}: {name!r:.60} is not a scheme.",
            "Schemes are fp32, fp16, w8 and w4 with a block (w8g64, w4g32, ...), -sym, -scale32.",
        )
    bits, block = int(match[1]), int(match[2] or 0)
    if bits not in BITS:
        raise RecipeError(
            f"{where}: {name} asks for {bits} bits; the engine runs {_either(BITS)} on every chip.",
            "2 and 3 bits need an ARMv8.6 chip, 5 and 6 do not exist in the engine.",
        )
    if match[2] is not None and block not in BLOCKS:
        raise RecipeError(
            f"{where}: {name} asks for blocks of {block}; they are {_either(BLOCKS)} wide.",
            "Leave the block out (w8) for one scale per row.",
        )
    return Scheme(bits, block, match[3] is not None, 32 if match[4] else 16)


def _either(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"
