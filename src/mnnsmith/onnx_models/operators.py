"""The ONNX operators that the engine's converter knows.

`operators.txt` is what the converter of MNN 3.6.1 prints for `--OP`, one name a line.
"""

from __future__ import annotations

import functools
from importlib import resources


@functools.cache
def known_operators() -> frozenset[str]:
    """Names of operators; the converter looks at no domain."""
    text = resources.files(__package__).joinpath("operators.txt").read_text(encoding="utf-8")
    # A constant is a tensor to the converter, no operator.
    return frozenset(text.split()) | {"Constant"}
