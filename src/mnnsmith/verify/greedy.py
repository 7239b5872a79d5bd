"""The reference's own greedy answers, and where a bundle leaves them.

Where does the bundle's greedy text leave the reference's?  Up to that place both have the same
beginning, so it is the first token of the reference's text that the bundle, fed with it, would not
have chosen.  The reference's text does not depend on the bundle, and can be kept for the next.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mnnsmith.engine import Engine
from mnnsmith.verify.reference import Reference

I64 = npt.NDArray[np.int64]


def greedy_text(reference: Reference, prompts: I64, tokens: int) -> I64:
    """The tokens with which the reference goes on, int64 [prompts, tokens].

    prompts: int64 [prompts, n].  Runs the growing windows anew for each token: a reference keeps
    no cache, and for few short windows that costs little.
    """
    ids = prompts
    for _ in range(tokens):
        last = reference.run(ids).hidden[:, -1]
        best = reference.logits(np.ascontiguousarray(last)).argmax(-1)
        ids = np.concatenate([ids, best[:, None].astype(np.int64)], axis=1)
    return ids[:, prompts.shape[1] :]


def divergence_position(engine: Engine, prompt: I64, text: I64) -> int | None:
    """At which token of `text` [n] the engine, decoding step by step, would choose another."""
    engine.reset()
    logits = engine.forward(prompt.tolist())
    for place, token in enumerate(text.tolist()):
        if int(logits.argmax()) != token:
            return place
        if place + 1 < text.size:
            logits = engine.forward([token])
    return None
