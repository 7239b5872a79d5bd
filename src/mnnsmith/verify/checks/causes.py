"""What a difference points to: the first value that differs, and on which tokens and channels.

All before it agrees, so the fault lies between.  Some patterns are telling: attention over one
token is that token's value whatever q, k, rope, scale and mask are, so a right first token excludes
values, norms and weights behind; a wrong epsilon scales whole tokens, a wrong gain channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mnnsmith.graph.core import Node
from mnnsmith.graph.values import Value
from mnnsmith.graph.weights import MatrixSlot
from mnnsmith.verify.measure.differences import ValueDistance

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# A few rows of a weight, or tokens of a text, are named; more are a pattern of another kind.
_FEW = 4
# How much of a difference an explanation must leave at most.
_EXPLAINED = 0.1


@dataclass(frozen=True)
class Evidence:
    """The first value that differs.

    node: the operator that gives it.  kind: "attention", "mlp" or "residual" for the output of a
    part of a block, else the kind of the operator.  ids, parts: the prompts, int64 [n] each, and
    the difference on each.  cuts: positions before which a prompt was fed apart from what follows.
    window: the width of the model's sliding window, where it has one.  routed: whether the layer
    has experts.  clipped: whether a recipe's clip lies before it.  head_dim: where the value
    consists of heads.  agreeing: values before it that were compared and agree.
    actual, reference: the value on one prompt, [n, width], where that was kept; both are finite.
    """

    value: Value
    node: Node
    kind: str
    layer: int
    allowed: float
    ids: tuple[I64, ...]
    parts: tuple[ValueDistance, ...]
    cuts: tuple[int, ...] = ()
    window: int | None = None
    routed: bool = False
    clipped: bool = False
    head_dim: int | None = None
    agreeing: frozenset[str] = field(default_factory=frozenset)
    actual: F32 | None = None
    reference: F32 | None = None

    @property
    def bad(self) -> list[Flags]:
        """Which tokens differ, for each prompt."""
        # A single token scatters more than the mean of many; of a small difference, most of it.
        largest = max(float(part.token_errors.max()) for part in self.parts)
        limit = min(10 * self.allowed, largest / 3)
        return [part.token_errors > limit for part in self.parts]

    @property
    def first_position(self) -> int:
        """The first position that differs in any prompt."""
        return min(int(bad.argmax()) for bad in self.bad if bad.any())


def likely_cause(evidence: Evidence) -> str:
    """A sentence or two on what to look at."""
    told = _TELLERS.get(evidence.kind, _operator)(evidence)
    row = _one_token(evidence)
    if row is not None:
        told = (
            f"In every prompt it begins at token {row}: the row of the embedding for this id. If "
            f"that is right: {told[0].lower()}{told[1:]}"
        )
    if evidence.clipped:
        told += " The recipe clips a value before it: where that takes effect, they must differ."
    return told


def _attention(e: Evidence) -> str:
    """The output of attention, from the normalized input on."""
    position = e.first_position
    if position == 0:
        return (
            "The first token differs, for which attention only passes its value on: the norm before"
            " attention (epsilon, gain), the weights of v or o, or the order of heads."
        )
    return _positions(e) or (
        f"It begins at position {position}: rope (base, scaling, width, which elements pair up), "
        "the scale of attention, the mask, or q and k (weights, norms, order of heads)."
    )


def _mlp(e: Evidence) -> str:
    if e.routed:
        return (
            "Attention agrees: the norm after it, the router (scores, groups, normalization, "
            "factor of the weights), one of the experts, or the shared expert."
        )
    return (
        "Attention agrees: the norm after it (epsilon, gain), the weights of gate, up or down, or "
        "the activation."
    )


def _residual(e: Evidence) -> str:
    start = ", or the embedding that it begins with (its factor)" if e.layer == 0 else ""
    return (
        "Attention and MLP agree, their sum does not: the residual connections, norms or factors "
        f"on the way back to the stream{start}."
    )


def _linear(e: Evidence) -> str:
    slot = e.node.slots.get("weight")
    assert isinstance(slot, MatrixSlot)
    bad = np.flatnonzero(np.max([part.channel_errors for part in e.parts], axis=0) > 10 * e.allowed)
    if 0 < bad.size <= _FEW and bad.size < slot.rows:
        rows = bad if slot.transposed else slot.source_rows()[bad]
        return f"Its input agrees; of {slot.tensor} these differ: {_listed('row', rows)}."
    heads = _heads(e)
    if heads is not None:
        return f"Its input agrees. {heads} (weight {slot.tensor})"
    if "bias" in e.node.slots and _constant_offset(e):
        return "Its input agrees, and it is off by the same for every token: the bias."
    return (
        f"Its input agrees: the weight {slot.tensor}, as a whole or its rows in another order, or "
        "how the recipe stores it."
    )


def _norm(e: Evidence) -> str:
    if e.actual is not None and e.reference is not None:
        a, r = e.actual.astype(np.float64), e.reference.astype(np.float64)
        tokens = (a * r).sum(-1, keepdims=True) / _safe((r * r).sum(-1, keepdims=True))
        channels = (a * r).sum(0, keepdims=True) / _safe((r * r).sum(0, keepdims=True))
        left = [float(np.linalg.norm(a - factor * r)) for factor in (tokens, channels)]
        if min(left) < _EXPLAINED * float(np.linalg.norm(a - r)):
            if left[0] <= left[1]:
                return (
                    "Its input agrees, and each token is off by a factor of its own: the epsilon "
                    "of the norm, or what it takes the mean of."
                )
            return "Its input agrees, and each channel is off by a factor: the gain of the norm."
    return "Its input agrees: epsilon or gain of the norm."


def _rope(e: Evidence) -> str:
    if e.first_position == 0:
        return (
            "q and k agree, and they are turned wrongly even at position 0, where rope leaves them "
            "as they are: a norm of q and k, or the factor of the rope tables (YaRN, longrope)."
        )
    return (
        f"q and k agree, rotated they differ from position {e.first_position} on: base or scaling "
        "of rope, its width, or which elements pair up."
    )


def _gather(_: Evidence) -> str:
    """Rows of a table, by the token's position."""
    return "The tables of rope differ: its base, scaling or factor, or the positions."


def _mixed(e: Evidence) -> str:
    """Attention itself, by operator."""
    heads = _heads(e)
    if heads is not None:
        return f"q, k and v agree. {heads}"
    seen = [name for name in e.agreeing if name.endswith(("/rope/q", "/rope/k"))]
    rope = "" if len(seen) == 2 else "rope (base, scaling, width, which elements pair up), "
    if e.first_position == 0:
        return "q, k and v agree, the first token does not: the order of heads, or values' width."
    return _positions(e) or (
        f"q, k and v agree, and it begins at position {e.first_position}: {rope}the scale of "
        "attention, or the mask."
    )


def _activation(e: Evidence) -> str:
    function = e.node.attributes["function"]
    return f"Its inputs agree: the activation or the way they are put together ({function})."


def _mixture(e: Evidence) -> str:
    tokens = sum(int(bad.sum()) for bad in e.bad)
    total = sum(bad.size for bad in e.bad)
    return (
        f"{tokens} of {total} tokens differ: one of the experts that they choose, or the weights "
        "and numbers that the router gives (scores, groups, normalization, factor)."
    )


def _operator(e: Evidence) -> str:
    if "/attention/" in e.value.name:
        # The reference has none of the values between the projections and this one.
        return f"What could be compared before it agrees. {_attention(e)}"
    return f"All before it agrees: the operator {e.node.name} ({e.node.kind}) or what it reads."


_TELLERS = {
    "attention": _attention, "mlp": _mlp, "residual": _residual, "linear": _linear,
    "rms_norm": _norm, "layer_norm": _norm, "rope": _rope, "mix": _mixed, "binary": _activation,
    "unary": _activation, "mixture": _mixture, "gather": _gather,
}  # fmt: skip


def _positions(e: Evidence) -> str | None:
    """What the position from which on tokens differ says by itself."""
    position = e.first_position
    if position in e.cuts:
        return (
            f"The tokens before {position} agree, and at {position} a later part of the text was "
            "fed: the KV cache, or positions and mask of what comes after it."
        )
    if e.window is not None and position >= e.window - 1:
        return (
            f"The first {position} tokens agree, the sliding window has {e.window}: the mask of "
            "the window, or which layers have one."
        )
    return None


def _one_token(e: Evidence) -> int | None:
    """The one id at which the difference begins, wherever it stands.

    Only for the first block, before which there is nothing but the embedding.  Either the tokens
    that differ are that id's, or several prompts differ from it on, at different positions.
    """
    if e.layer != 0:
        return None
    pairs = [(ids, bad) for ids, bad in zip(e.ids, e.bad, strict=True) if bad.any()]
    firsts = {int(ids[bad.argmax()]) for ids, bad in pairs}
    if len(firsts) != 1:
        return None
    token = firsts.pop()
    alone = all(np.array_equal(bad, ids == token) for ids, bad in pairs)
    moves = len({int(bad.argmax()) for _, bad in pairs}) > 1
    return token if alone or moves else None


def _heads(e: Evidence) -> str | None:
    """Which heads hold what others should, or which ones alone are wrong."""
    if e.actual is None or e.reference is None or e.head_dim is None:
        return None
    if e.actual.shape[1] % e.head_dim:
        return None
    shape = (len(e.actual), e.actual.shape[1] // e.head_dim, e.head_dim)
    a, r = e.actual.reshape(shape).astype(np.float64), e.reference.reshape(shape)
    heads = range(a.shape[1])
    norms = _safe(np.linalg.norm(r, axis=(0, 2)))
    # How far head i is from what head j should be.
    apart = np.array(
        [[float(np.linalg.norm(a[:, i] - r[:, j])) / norms[j] for j in heads] for i in heads]
    )
    wrong = np.flatnonzero(np.diag(apart) > 10 * e.allowed)
    held = {
        int(i): int(apart[i].argmin()) for i in wrong if apart[i].min() < _EXPLAINED * apart[i, i]
    }
    if held:
        pairs = ", ".join(f"head {i} has what head {j} should" for i, j in held.items())
        return f"The order of heads: {pairs}."
    if 0 < wrong.size < len(heads):
        return f"Of {len(heads)} heads these differ: {_listed('head', wrong)}."
    return None


def _constant_offset(e: Evidence) -> bool:
    """Whether every token is off by the same."""
    if e.actual is None or e.reference is None:
        return False
    d = e.actual.astype(np.float64) - e.reference
    return bool(np.linalg.norm(d - d.mean(0)) < _EXPLAINED * np.linalg.norm(d))


def _listed(word: str, numbers: Sequence[int] | I64) -> str:
    return f"{word}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _safe(x: F64) -> F64:
    return np.where(x == 0, 1.0, x)
