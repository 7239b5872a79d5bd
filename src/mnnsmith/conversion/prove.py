"""The proof that ends a conversion: the engine loads the bundle and computes with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mnnsmith.conversion.plan import Plan
from mnnsmith.engine import Engine
from mnnsmith.errors import ConversionError
from mnnsmith.models.language_model import LanguageModel

# The engine holds the weights in memory; beyond this, loading costs more than converting.
_LOAD_LIMIT_BYTES = 1 << 30
_PROBE_TOKENS = 4


def prove_bundle(folder: Path, model: LanguageModel, plan: Plan) -> dict[str, Any]:
    """Load the bundle and run a few tokens through it; returns what was proved.

    Raises `EngineError` if it does not load, `ConversionError` if the logits are not finite or all
    equal.  A bundle whose weights exceed 1 GiB is not loaded here, and says so.
    """
    if plan.weight_bytes > _LOAD_LIMIT_BYTES:
        return {"loaded": False, "reason": "weights exceed 1 GiB; `mnnsmith check --load` does it"}
    # Mapped, the weights would be written a second time.
    probe(folder, model.head.rows, model.max_context, config={"use_mmap": False})
    return {"loaded": True}


def probe(
    folder: Path, vocabulary: int, max_context: int, config: Mapping[str, Any] | None = None
) -> None:
    """Load a bundle in the engine and run a few tokens through it; raises if that goes wrong.

    config: as for `Engine`.
    """
    ids = [(7919 * (i + 1)) % vocabulary for i in range(min(_PROBE_TOKENS, max_context))]
    with Engine(folder, memory="low", config=config) as engine:
        logits = engine.forward(ids)
    if logits.shape != (vocabulary,):
        raise ConversionError(
            f"The converted model gives logits of shape {logits.shape}, expected ({vocabulary},)."
        )
    if not np.isfinite(logits).all() or float(np.ptp(logits)) == 0.0:
        raise ConversionError(
            "The converted model gives logits that are not finite or all equal.",
            "Check the checkpoint; if transformers runs it well, please report this as a bug.",
        )
