"""Recipe `keep`: what becomes of a weight that its source already stores in blocks."""

from __future__ import annotations

from mnnsmith.quant.scheme import Scheme

# The nearest scheme for block formats that the engine has no counterpart of: no fewer bits than the
# source where the engine has them, and the narrowest block.
_NEAREST = {
    "Q2_K": Scheme(4, 32),
    "Q3_K": Scheme(4, 32),
    "Q4_K": Scheme(4, 32),
    "Q5_0": Scheme(8, 32),
    "Q5_1": Scheme(8, 32),
    "Q5_K": Scheme(8, 32),
    "Q6_K": Scheme(8, 32),
}


def nearest_scheme(dtype: str) -> Scheme:
    """The scheme for a weight of the given source type whose blocks cannot be carried over.

    Floats stay floats, at 16 bits.
    """
    return _NEAREST.get(dtype, Scheme(16))
