"""Where does a bundle's vision leave its original?  Tower by layer, and the connector.

As for text: in float against the original with the weights that the bundle stores, where any
difference is a fault, and as shipped against the original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mnnsmith.conversion.prepare import Prepared
from mnnsmith.conversion.slots import read_vector
from mnnsmith.engine import Engine
from mnnsmith.graph.core import Node
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Value
from mnnsmith.graph.weights import ConstantSlot, VectorSlot
from mnnsmith.models.language_model import VisionModel
from mnnsmith.verify.checks.causes import Evidence, likely_cause
from mnnsmith.verify.checks.layers import allowed_error
from mnnsmith.verify.checks.vision_values import VisionProbe, seen_values
from mnnsmith.verify.context import Context
from mnnsmith.verify.measure.differences import ValueDistance, compare, merged
from mnnsmith.verify.references.reference import F32, PictureReference
from mnnsmith.verify.results import Finding, ValueDifference

# Patches or channels that are named.
_FEW = 4
# How near to another row of the positions what is there must be, of their spread.
_SAME = 0.01
_CONNECTOR = "connector"


@dataclass(frozen=True)
class Place:
    """A value that is compared.  layer: -1 for the embeddings of patches, None behind the tower."""

    value: Value
    layer: int | None
    kind: str
    allowed: float

    @property
    def where(self) -> str:
        if self.layer is None:
            return f"connector ({self.value.name})"
        if self.layer < 0:
            return f"embeddings of patches ({self.value.name})"
        return f"vision layer {self.layer}, {self.kind} ({self.value.name})"


@dataclass(frozen=True, eq=False)
class Compared:
    """A place, its difference on each tile, and both values there where they were kept."""

    place: Place
    parts: tuple[ValueDistance, ...]
    actual: tuple[F32, ...]
    reference: tuple[F32, ...]

    @property
    def whole(self) -> ValueDistance:
        return merged(self.parts)

    @property
    def differs(self) -> bool:
        return not self.whole.error <= self.place.allowed

    def figures(self, *, judged: bool) -> ValueDifference:
        place = self.place
        allowed = place.allowed if judged else None
        return self.whole.figures(place.value.name, place.layer, place.kind, allowed)


def tower_places(vision: VisionModel) -> list[Place]:
    """Embeddings, the parts of every block, and the connector, in the order of computation."""
    marks = {mark.value.name: mark for mark in vision.graph.landmarks}
    places = []
    for value in seen_values(vision.graph):
        mark = marks.get(value.name)
        if mark is not None:
            allowed = allowed_error(max(mark.layer, 0))
            places.append(Place(value, mark.layer, mark.kind, allowed))
        elif value.name == _CONNECTOR:
            places.append(Place(value, None, _CONNECTOR, allowed_error(vision.layers)))
    return places


def compare_places(
    context: Context,
    vision: VisionModel,
    places: Sequence[Place],
    reference: PictureReference,
    pixels: Sequence[F32],
    open_engine: Callable[..., Engine],
    *,
    keep: bool = False,
) -> list[Compared]:
    """Both at each place, for tiles float32 [3, S, S].

    keep: also the values, which take a hundred megabytes a tile for a whole tower.
    """
    known = [place for place in places if place.value.name in reference.available()]
    names = [place.value.name for place in known]
    parts: dict[str, list[ValueDistance]] = {name: [] for name in names}
    kept: dict[str, list[tuple[F32, F32]]] = {name: [] for name in names}
    with VisionProbe(context.bundle, vision.graph, names, open_engine) as probe:
        for tile in pixels:
            found = probe.run(tile)
            seen = reference.see(tile[None], names).values
            for name in names:
                parts[name].append(compare(found[name], seen[name][0]))
                if keep:
                    kept[name].append((found[name], seen[name][0]))
    return [
        Compared(
            place,
            tuple(parts[place.value.name]),
            tuple(actual for actual, _ in kept[place.value.name]),
            tuple(expected for _, expected in kept[place.value.name]),
        )
        for place in known
    ]


def place_fault(
    context: Context,
    original: Prepared,
    first: Compared,
    reference: PictureReference,
    pixels: Sequence[F32],
    open_engine: Callable[..., Engine],
) -> tuple[tuple[ValueDifference, ...], Finding]:
    """The values between the place before and this one, operator by operator, and the fault."""
    vision = original.model.vision
    assert vision is not None
    places = _inner_places(vision, first.place)
    inner = compare_places(context, vision, places, reference, pixels, open_engine, keep=True)
    agreeing = [c.place.value.name for c in inner if not c.differs]
    # The last of them is `first` itself.
    begin = next((c for c in inner if c.differs), inner[-1])
    whole, inside = first.whole, ""
    if begin.place.value != first.place.value:
        inside = f" It begins at {begin.place.value.name}."
    finding = Finding(
        "error",
        first.place.where,
        f"is the first value that differs: error {whole.error:.3g} (allowed "
        f"{first.place.allowed:.2g}), cosine {whole.cosine:.6f}.{inside}",
        _cause(original, vision.graph, begin, agreeing),
    )
    return tuple(compared.figures(judged=True) for compared in inner), finding


def _inner_places(vision: VisionModel, place: Place) -> list[Place]:
    """Every value from behind the block before to this one."""
    values = seen_values(vision.graph)
    names = [value.name for value in values]
    ends = {m.layer: m.value.name for m in vision.graph.landmarks if m.kind == "residual"}
    before = vision.layers - 1 if place.layer is None else place.layer - 1
    start = names.index(ends[before]) + 1 if before in ends else 0
    makers = {v.name: node for node in vision.graph.nodes for v in node.outputs}
    return [
        Place(value, place.layer, makers[value.name].kind, place.allowed)
        for value in values[start : names.index(place.value.name) + 1]
    ]


def _cause(original: Prepared, graph: Graph, first: Compared, agreeing: Sequence[str]) -> str:
    node = next(n for n in graph.nodes if first.place.value in n.outputs)
    if first.place.layer is not None and first.place.layer < 0:
        return _embeddings(original, graph, first)
    if node.kind == "full_attention" or node.name.endswith("/rows"):
        return "q, k and v agree: the scale of attention, its mask, or the order of heads."
    if first.place.layer is None and node.name != "post_norm":
        what = "" if "shuffle" not in agreeing else " Its input agrees:"
        return (
            f"The tower agrees.{what} the order in which the connector takes the patches of a "
            "square (pixel shuffle), or its weight."
        )
    return likely_cause(_evidence(original, node, first, agreeing))


def _embeddings(original: Prepared, graph: Graph, first: Compared) -> str:
    """Off by the same in every tile is the table of positions; else it is what sees the pixels."""
    offsets = [a - r for a, r in zip(first.actual, first.reference, strict=True)]
    spread = float(np.abs(np.stack(offsets)).max())
    same = len(offsets) > 1 and all(
        float(np.abs(offset - offsets[0]).max()) < _SAME * spread for offset in offsets
    )
    if not same:
        return (
            "It differs from tile to tile: the kernels of the patches, the order of their pixels "
            "or colors, or how the picture is cut into patches."
        )
    slots = (node.slots.get("values") for node in graph.nodes if node.kind == "table")
    table = next(slot for slot in slots if isinstance(slot, ConstantSlot))
    rows = read_vector(table, original.checkpoint)
    held = rows + offsets[0]
    apart = (held**2).sum(-1)[:, None] + (rows**2).sum(-1)[None] - 2 * held @ rows.T
    nearest = apart.argmin(1)
    moved = [i for i in range(len(rows)) if nearest[i] != i]
    sure = [i for i in moved if apart[i, nearest[i]] < _SAME * float((rows[i] ** 2).sum())]
    if not sure:
        return "It is off by the same in every tile: the table of positions, or the patches' bias."
    shown = ", ".join(f"patch {i} has that of patch {nearest[i]}" for i in sure[:_FEW])
    return f"It is off by the same in every tile: positions stand in other places: {shown}."


def _evidence(original: Prepared, node: Node, first: Compared, agreeing: Sequence[str]) -> Evidence:
    worst = max(range(len(first.parts)), key=lambda i: first.parts[i].error)
    actual, reference = first.actual[worst], first.reference[worst]
    bias = node.slots.get("bias")
    if node.kind == "layer_norm" and isinstance(bias, VectorSlot):
        # Factors of tokens and channels show in what the norm gives before its bias.
        offset = read_vector(bias, original.checkpoint)
        actual, reference = actual - offset, reference - offset
    return Evidence(
        value=first.place.value,
        node=node,
        kind=node.kind,
        # Never the first block of a text, which begins with an embedding of ids.
        layer=1 + (first.place.layer or 0),
        allowed=first.place.allowed,
        ids=tuple(np.arange(len(a)) for a in first.actual),
        parts=first.parts,
        agreeing=frozenset(agreeing),
        actual=actual if np.isfinite(actual).all() else None,
        reference=reference,
    )


def opened(context: Context, **settings: object) -> Callable[..., Engine]:
    """How engines are opened here."""
    return functools.partial(context.open_engine, threads=context.threads, **settings)
