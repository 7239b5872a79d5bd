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


# Operators that the converter has and gets wrong, and that are functions of others.
WRONG_FUNCTIONS = frozenset({"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"})


def plain_operators() -> frozenset[str]:
    """Those that go to the converter as they are; others are decomposed, if ONNX knows how."""
    return known_operators() - WRONG_FUNCTIONS
