"""How weights are stored: the converter's own options by the name of a recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mnnsmith.errors import RecipeError, UnsupportedError

_NAME = re.compile(r"w([2-8])(?:g(\d+))?")
# Share of the largest magnitude that outputs may be off, by what weights lose.
_TOLERANCES = {8: 0.05, 7: 0.1, 6: 0.15, 5: 0.2}
_COARSE = 0.35
FLOAT_TOLERANCE, HALF_TOLERANCE = 1e-3, 1e-2


@dataclass(frozen=True)
class Storage:
    """name: as the manifest has it.  options: of the converter.  tolerance: unless one is given."""

    name: str
    options: tuple[str, ...]
    tolerance: float


def storage(recipe: str | None, *, fp16: bool) -> Storage:
    """What `recipe` and `--fp16` ask for; raises RecipeError for a name that is none."""
    if recipe is None or recipe in ("fp32", "fp16"):
        if recipe == "fp16" or (fp16 and recipe is None):
            return Storage("fp16", ("--fp16",), HALF_TOLERANCE)
        if fp16:
            raise RecipeError("--fp16 and --recipe fp32 contradict each other.")
        return Storage("fp32", (), FLOAT_TOLERANCE)
    if fp16:
        raise RecipeError(f"--fp16 and --recipe {recipe} contradict each other.")
    if recipe == "int8":
        raise UnsupportedError(
            "int8 activations need calibration, which is not there yet.",
            "w8 stores weights in 8 bits and computes as before.",
        )
    match = _NAME.fullmatch(recipe)
    if match is None:
        raise RecipeError(
            f"{recipe!r} is no recipe for an ONNX model.",
            "Take fp32, fp16, w8, or w4g32 (bits 2 to 8, g and the block's length).",
        )
    bits = int(match[1])
    options = ["--weightQuantBits", str(bits)]
    if match[2]:
        options += ["--weightQuantBlock", str(int(match[2]))]
    return Storage(recipe, tuple(options), _TOLERANCES.get(bits, _COARSE))
