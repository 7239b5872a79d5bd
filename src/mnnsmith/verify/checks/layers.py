"""Where does a bundle leave its original?  Values of every block, in the order of computation.

Twice: in float against the original with the weights that the bundle stores, where any difference
is a fault, and as shipped against the original, which shows what quantization costs and where.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from mnnsmith.engine import Engine
from mnnsmith.errors import UsageError
from mnnsmith.graph.core import Landmark
from mnnsmith.graph.graph import Graph
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.verify.checks.bisect import bisect_block
from mnnsmith.verify.checks.causes import Evidence, likely_cause
from mnnsmith.verify.checks.exact import SETTINGS
from mnnsmith.verify.checks.feeding import cuts, feed
from mnnsmith.verify.checks.probe import Probe, readable
from mnnsmith.verify.context import Context
from mnnsmith.verify.measure.differences import ValueDistance, compare, merged
from mnnsmith.verify.references.reference import IDS, Reference
from mnnsmith.verify.references.together import run_together
from mnnsmith.verify.results import Finding, LayerFigures, Outcome, ValueDifference
from mnnsmith.verify.texts.exact_prompts import decisive_prompts, long_tokens
from mnnsmith.verify.texts.windows import shipped_sections

# Of each prompt but the longest; bounds the memory for the values of all layers.
_TOKENS = 96
# What float32 explains for each of the first blocks, and in any; and, where the stream that a block
# reads is off by more already, how many times that.
_EACH_BLOCK, _ANY_BLOCK, _GROWTH = 5e-5, 2e-4, 4.0
_NOT_DECISIVE = Finding(
    "warning",
    "routers",
    "every prompt that was drawn brings a router so near a tie that rounding decides it; two right "
    "programs may then differ, so layers were compared as shipped only.",
)


@dataclass(frozen=True)
class _Compared:
    """One landmark: its difference on each prompt, and on all."""

    mark: Landmark
    parts: tuple[ValueDistance, ...]
    whole: ValueDistance
    allowed: float

    @property
    def differs(self) -> bool:
        return not self.whole.error <= self.allowed

    @property
    def where(self) -> str:
        return f"layer {self.mark.layer}, {self.mark.kind} ({self.mark.value.name})"


def allowed_error(layer: int, before: float = 0.0) -> float:
    """The largest `ValueDistance.error` that float32 explains in block `layer` (0 is the first).

    before: the error of the residual stream that the block reads, as far as that is allowed itself;
    what a block makes of it cannot be better, and attention that is peaky multiplies it.

    Measured: 3e-6 in the first block, at most 2e-5 in the third, over all families that the tests
    have, whose attention is peaky; 4.2e-5 in any of SmolLM2's thirty.
    """
    return max(min(_EACH_BLOCK * (1 + layer), _ANY_BLOCK), _GROWTH * before)


def check_layers(context: Context) -> Outcome[LayerFigures]:
    """Compare residual stream, attention and MLP of every block.

    Fails where one of them differs by more than `allowed_error` in float, and says what that points
    to.  `context.bisect`: then compare all values inside the block, operator by operator.  Prompts
    on which a router is near a tie are not used; if there are no others, a warning says so.

    Raises `UsageError` without an original.
    """
    if context.original is None:
        raise UsageError("layers are compared with those of the original.", "Give --source MODEL.")
    model = context.original.model
    tokenizer = TextTokenizer(context.bundle.tokenizer_json())
    opened = functools.partial(context.open_engine, threads=context.threads)
    exactly = functools.partial(opened, **SETTINGS)
    bisected: tuple[ValueDifference, ...] = ()
    findings: list[Finding] = []
    with context.open_reference("stored") as reference:
        name = reference.name
        marks = _landmarks(model.graph, reference.available())
        prompts = _prompts(context, tokenizer, reference)
        exact = _compare(context, marks, prompts, reference, exactly) if prompts else []
        first = next((compared for compared in exact if compared.differs), None)
        if first is not None:
            evidence = _evidence(model, first, prompts)
            if context.bisect:
                bisected, evidence = bisect_block(
                    context.bundle, model.graph, evidence, reference, exactly
                )
            findings.append(_fault(first, evidence, bisect=context.bisect))
    if not prompts:
        findings.append(_NOT_DECISIVE)
        prompts = [_text(tokenizer, model, context.bundle.max_context)]
    # A saved one has other texts, and no values.
    with context.open_reference("original", computes=True) as reference:
        shipped = _compare(context, marks, prompts, reference, opened)
    figures = LayerFigures(
        reference=name,
        tokens=sum(ids.size for ids in prompts),
        exact=tuple(_figures(compared, compared.allowed) for compared in exact),
        shipped=tuple(_figures(compared, None) for compared in shipped),
        first=None if first is None else first.mark.value.name,
        bisected=bisected,
    )
    return Outcome(_summary(figures, first), figures, tuple(findings))


def _prompts(context: Context, tokenizer: TextTokenizer, reference: Reference) -> list[IDS]:
    """Beginnings of those of the exact check, int64 [n] each; of the longest one a longer part, for
    what shows only behind a sliding window or a piece of the engine's."""
    found = [prompt.ids for prompt in decisive_prompts(context, tokenizer, reference)]
    usual = min((ids.size for ids in found), default=0)
    longest = long_tokens(context, "quick")
    return [ids[: _TOKENS if ids.size == usual else longest] for ids in found]


def _landmarks(graph: Graph, available: Collection[str]) -> list[Landmark]:
    """Those that the reference has, in the order of computation."""
    order = {value.name: place for place, value in enumerate(readable(graph))}
    marks = [mark for mark in graph.landmarks if mark.value.name in available]
    return sorted(marks, key=lambda mark: order[mark.value.name])


def _text(tokenizer: TextTokenizer, model: LanguageModel, room: int) -> IDS:
    """The beginning of the shipped texts, int64 [n]."""
    ids = [i for section in shipped_sections() for i in tokenizer.encode(section.text)]
    known = [i for i in ids if i < model.embedding.rows]
    return np.array(known[: min(_TOKENS, room)], dtype=np.int64)


def _compare(
    context: Context,
    marks: Sequence[Landmark],
    prompts: Sequence[IDS],
    reference: Reference,
    open_engine: Callable[..., Engine],
) -> list[_Compared]:
    names = [mark.value.name for mark in marks]
    parts: dict[str, list[ValueDistance]] = {name: [] for name in names}
    assert context.original is not None
    graph = context.original.model.graph
    runs = run_together(reference, prompts, names)
    with Probe(context.bundle, graph, names, open_engine) as probe:
        for ids, run in zip(prompts, runs, strict=True):
            actual = feed(probe, ids)
            for name in names:
                parts[name].append(compare(actual[name], run.values[name][0]))
    found: list[_Compared] = []
    before = 0.0
    layer = 0
    stream: _Compared | None = None
    for mark in marks:
        if mark.layer != layer and stream is not None:
            layer, before = mark.layer, min(stream.whole.error, stream.allowed)
        distances = parts[mark.value.name]
        allowed = allowed_error(mark.layer, before)
        found.append(_Compared(mark, tuple(distances), merged(distances), allowed))
        stream = found[-1] if mark.kind == "residual" else stream
    return found


def _evidence(model: LanguageModel, first: _Compared, prompts: Sequence[IDS]) -> Evidence:
    mark, graph = first.mark, model.graph
    place = next(i for i, node in enumerate(graph.nodes) if mark.value in node.outputs)
    prefix = f"layer{mark.layer}/"
    return Evidence(
        value=mark.value,
        node=graph.nodes[place],
        kind=mark.kind,
        layer=mark.layer,
        allowed=first.allowed,
        ids=tuple(prompts),
        parts=first.parts,
        cuts=tuple(sorted({cut for ids in prompts for cut in cuts(ids.size)})),
        window=model.sliding_window,
        routed=any(n.kind == "mixture" and n.name.startswith(prefix) for n in graph.nodes),
        clipped=any(node.kind == "clip" for node in graph.nodes[:place]),
    )


def _fault(first: _Compared, evidence: Evidence, *, bisect: bool) -> Finding:
    whole = first.whole
    place = ""
    if evidence.value != first.mark.value:
        place = f" Inside the block it begins at {evidence.value.name}."
    more = "" if bisect else " Go on inside the block: mnnsmith verify --bisect."
    return Finding(
        "error",
        first.where,
        f"is the first value that differs: error {whole.error:.3g} (allowed {first.allowed:.2g}), "
        f"cosine {whole.cosine:.6f}, largest difference {whole.max_abs:.3g} where the RMS is "
        f"{whole.reference_rms:.3g}.{place}",
        likely_cause(evidence) + more,
    )


def _figures(compared: _Compared, allowed: float | None) -> ValueDifference:
    mark = compared.mark
    return compared.whole.figures(mark.value.name, mark.layer, mark.kind, allowed)


def _summary(figures: LayerFigures, first: _Compared | None) -> str:
    shipped = f"as shipped, SNR {min(v.snr_db for v in figures.shipped):.0f} dB at least"
    if first is not None:
        return f"differs from {first.where} on; {shipped}"
    if not figures.exact:
        return f"compared {shipped}"
    worst = max(value.error for value in figures.exact)
    return f"{len(figures.exact)} values agree: error {worst:.2g} at most; {shipped}"
