"""How large activations become on a text, against the range of fp16, in which phones compute.

Values are measured in float32, so that what lies beyond the range is seen and not what becomes of
it.  How MNN 3.6.1 computes with `precision: low` on ARM (source/backend/arm82, CPULayerNorm.cpp and
CPUAttention.cpp): what operators pass on is fp16, and beyond 65504 infinite; a norm sums its
squares in float32, and so do the softmax and integer products; q is divided by its largest element
before q k^T is formed, the product and the scaled scores are fp16.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mnnsmith.bundle import Bundle
from mnnsmith.errors import BundleError, SourceError, UsageError
from mnnsmith.files import read_json_object
from mnnsmith.graph.core import Node
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import DType
from mnnsmith.quant.recipe import FP16_MAX
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.verify.checks.exact import SETTINGS
from mnnsmith.verify.checks.probe import F32, Probe, readable
from mnnsmith.verify.context import Context, Level
from mnnsmith.verify.references.reference import IDS
from mnnsmith.verify.results import Finding, Outcome, RangeFigures, Severity, ValueRange
from mnnsmith.verify.texts.windows import cut_windows, shipped_sections, user_sections

# Another text may well have values so many times as large.
_NEAR = FP16_MAX / 4
# Room for rounding on the way, and a round number.
_CLIP_LIMIT = 60000
_TOKENS: dict[Level, int] = {"quick": 512, "full": 8192}
# Of each window: more texts say more than longer ones.
_WINDOW_TOKENS: dict[Level, int] = {"quick": 64, "full": 256}
# These move data or are made of none; the head is as wide as the vocabulary and comes last.
_NOT_MEASURED = frozenset({
    "input", "table", "integers", "convert", "reshape", "slice", "concat", "pad", "gather",
})  # fmt: skip
_HEAD = "lm_head"
# Of values that are held at once.
_BUDGET_BYTES = 96 << 20
_SCORES = "scores"
_FINITE_MAX = float(np.finfo(np.float32).max)
_LISTED = 4
# More are named by patterns.
_CLIPS = 8
_LAYER = re.compile(r"^layer[0-9]+/")


@dataclass
class _Largest:
    """The largest magnitude so far, and where it stands."""

    max_abs: float = 0.0
    token: int = 0
    channel: int = 0

    def see(self, values: F32, start: int) -> None:
        """values [n, width] of the tokens from `start` on; what is no number counts as largest."""
        magnitudes = np.abs(values)
        magnitudes[~np.isfinite(magnitudes)] = _FINITE_MAX
        place = int(magnitudes.argmax())
        row, channel = divmod(place, values.shape[1])
        if magnitudes[row, channel] > self.max_abs:
            self.max_abs = float(magnitudes[row, channel])
            self.token, self.channel = start + row, channel


@dataclass
class _Scores:
    """A bound on |q k^T| of one attention, by Cauchy and Schwarz: norms of heads, [heads]."""

    node: Node
    scale: float
    largest: _Largest = field(default_factory=_Largest)
    _keys: F32 | None = None

    def begin(self) -> None:
        """A new text: an empty cache."""
        self._keys = None

    def see(self, q: F32, k: F32, start: int) -> None:
        """q [n, heads * head_dim], k [n, kv_heads * head_dim] of the tokens from `start` on."""
        width = int(self.node.attributes["head_dim"])
        norms = [np.linalg.norm(x.reshape(len(x), -1, width), axis=-1) for x in (q, k)]
        keys = norms[1].max(0)
        self._keys = keys if self._keys is None else np.maximum(self._keys, keys)
        heads = np.repeat(self._keys, norms[0].shape[1] // keys.size)
        # As scores, and as they are before the scale, of a query divided by its largest element.
        factor = max(self.scale, 1 / max(1.0, float(np.abs(q).max())))
        self.largest.see((norms[0] * heads * factor).astype(np.float32), start)


def check_ranges(context: Context) -> Outcome[RangeFigures]:
    """Measure every value between operators, and attention's scores, on the texts.

    Where the bundle's `config.json` lets phones compute in fp16, a value beyond its range is an
    error and one beyond a quarter of it a warning; else they are notes.  What lies within the
    experts of a mixture cannot be read, which a note says.  Raises `UsageError` without an
    original, which gives shapes of the values.
    """
    if context.original is None:
        raise UsageError("the values' shapes are told by the original.", "Give --source MODEL.")
    graph = context.original.model.graph
    windows = _windows(context)
    found = _measure(context, graph, windows)
    fp16 = _computes_in_fp16(context.bundle)
    tokenizer = TextTokenizer(context.bundle.tokenizer_json())
    ids = np.concatenate(windows)
    tokens = [tokenizer.decode([int(i)], skip_special=False) for i in ids]
    figures = RangeFigures(
        tokens=ids.size,
        limit=FP16_MAX,
        values=tuple(_of_every_layer(found)),
    )
    findings = tuple(_findings(found, graph, tokens, fp16=fp16))
    if context.original.model.mixture:
        inside = "what lies within an expert cannot be read: gate, up and their product there."
        findings = (*findings, Finding("note", "experts", inside))
    return Outcome(_summary(found, fp16=fp16), figures, findings)


def _windows(context: Context) -> list[IDS]:
    """Ids from the sections in turn, [n] each, until there are enough."""
    sections = user_sections(context.texts) if context.texts else shipped_sections()
    tokenizer = TextTokenizer(context.bundle.tokenizer_json())
    cut = cut_windows(sections, tokenizer, context.level, context.bundle.max_context).windows
    by_section = [[w for w in cut if w.section == s.name] for s in sections]
    rounds = max(len(part) for part in by_section)
    turns = [part[i] for i in range(rounds) for part in by_section if i < len(part)]
    # All that is fed must be ids that the model knows.
    ids = [w.inputs for w in turns if w.inputs.max() < context.bundle.vocab_size]
    ids = [part[: _WINDOW_TOKENS[context.level]] for part in ids]
    if not ids:
        raise UsageError(
            f"no text has a window of tokens that all lie in the vocabulary of "
            f"{context.bundle.vocab_size}.",
            "Give another text.",
        )
    ends = np.cumsum([part.size for part in ids])
    return ids[: 1 + int(np.searchsorted(ends, _TOKENS[context.level]))]


def _measure(context: Context, graph: Graph, windows: Sequence[IDS]) -> list[ValueRange]:
    """The largest of every value, in the order of computation."""
    names = measured(graph)
    found = {name: _Largest() for name in names}
    attentions = [n for n in graph.nodes if n.kind == "attention"]
    scores = [_Scores(node, float(node.attributes["scale"])) for node in attentions]
    # q and k may be parts put together, which are not measured by themselves.
    keys = [value.name for node in attentions for value in node.inputs[:2]]
    opened = functools.partial(context.open_engine, threads=context.threads, **SETTINGS)
    with Probe(context.bundle, graph, [*names, *keys], opened) as probe:
        step = max(1, _BUDGET_BYTES // (4 * probe.width))
        place = 0
        for window in windows:
            probe.engine.reset()
            for part in scores:
                part.begin()
            ids = window.tolist()
            for start in range(0, len(ids), step):
                values = probe.run(ids[start : start + step])
                for name in names:
                    found[name].see(values[name], place + start)
                for part in scores:
                    q, k = (values[value.name] for value in part.node.inputs[:2])
                    part.see(q, k, place + start)
            place += len(ids)
    layers = layer_numbers(graph)
    result = []
    for node in graph.nodes:
        for value in node.outputs:
            if value.name in found:
                largest = found[value.name]
                result.append(_range(value.name, layers.get(value.name), largest))
        for part in scores:
            if part.node is node:
                name = f"{node.name}/{_SCORES}"
                result.append(_range(name, layers.get(node.outputs[0].name), part.largest))
    return result


def measured(graph: Graph) -> list[str]:
    """Names of the values that are measured.

    Of one that is clipped, what is passed on is the clipped one; before it, infinity does no harm.
    """
    clipped = {node.inputs[0] for node in graph.nodes if node.kind == "clip"}
    skipped = {
        value for node in graph.nodes for value in node.outputs
        if node.kind in _NOT_MEASURED or node.name == _HEAD
    }  # fmt: skip
    return [
        value.name for value in readable(graph)
        if value.dtype is DType.FLOAT and value not in clipped and value not in skipped
    ]  # fmt: skip


def layer_numbers(graph: Graph) -> dict[str, int]:
    """The block that each value lies in; none for what comes before the first and after the last.

    A block ends with its residual; the next one's norm computes that too.
    """
    ends = {mark.value.name: mark.layer for mark in graph.landmarks if mark.kind == "residual"}
    names = [value.name for node in graph.nodes for value in node.outputs]
    found: dict[str, int] = {}
    begin = next(i for i, name in enumerate(names) if name.startswith("layer0/"))
    for place, name in enumerate(names):
        if name in ends:
            found |= dict.fromkeys(names[begin : place + 1], ends[name])
            begin = place + 1
    return found


def _range(name: str, layer: int | None, largest: _Largest) -> ValueRange:
    return ValueRange(name, layer, largest.max_abs, largest.token, largest.channel)


def _of_every_layer(found: Sequence[ValueRange]) -> Iterator[ValueRange]:
    """The largest of each layer, and whatever is near the limit, in order."""
    largest: dict[int | None, ValueRange] = {}
    for value in found:
        known = largest.get(value.layer)
        if known is None or value.max_abs > known.max_abs:
            largest[value.layer] = value
    for value in found:
        if value.max_abs > _NEAR or largest[value.layer] is value:
            yield value


def _computes_in_fp16(bundle: Bundle) -> bool:
    path = bundle.path / "config.json"
    try:
        return bool(read_json_object(path).get("precision", "low") == "low")
    except SourceError as error:
        raise BundleError(error.message, error.hint) from error


def _findings(
    found: Sequence[ValueRange], graph: Graph, tokens: Sequence[str], *, fp16: bool
) -> Iterator[Finding]:
    """One for what is no number, one for what is beyond the range, one for what is near its end.

    tokens: the texts of the tokens, in order.
    """
    broken = [value for value in found if value.max_abs >= _FINITE_MAX]
    beyond = [value for value in found if FP16_MAX < value.max_abs < _FINITE_MAX]
    # What is clipped goes no further.
    clips = {node.outputs[0].name for node in graph.nodes if node.kind == "clip"}
    near = [v for v in found if _NEAR < v.max_abs <= FP16_MAX and v.name not in clips]
    if broken:
        yield Finding(
            "error",
            _layers(broken),
            f"not finite even in float32, first {broken[0].name}.",
            "A weight is damaged; mnnsmith verify --check weights finds it.",
        )
    kinds: tuple[tuple[list[ValueRange], str, Severity], ...] = (
        (beyond, "beyond the range", "error"),
        (near, "near the end of the range", "warning"),
    )
    for values, what, severity in kinds:
        if values:
            yield Finding(
                severity if fp16 else "note",
                _layers(values),
                f"{what} of fp16 ({FP16_MAX:g}): {_listed(values, tokens)}; config.json lets "
                f"phones compute in {'fp16' if fp16 else 'float32'}.",
                _advice(values, graph) if fp16 else 'Leave its "precision" as it is.',
            )


def _layers(values: Sequence[ValueRange]) -> str:
    """Where the values are."""
    layers = sorted({value.layer for value in values if value.layer is not None})
    if not layers:
        return values[0].name
    if len(layers) > 2 and layers[-1] - layers[0] == len(layers) - 1:
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"


def _listed(values: Sequence[ValueRange], tokens: Sequence[str]) -> str:
    largest = sorted(values, key=lambda value: -value.max_abs)
    parts = [
        f"{v.name} {v.max_abs:.4g} (channel {v.channel}, token {v.token} {tokens[v.token]!r:.20})"
        for v in largest[:_LISTED]
    ]
    left = len(values) - _LISTED
    return ", ".join(parts) + (f", and {left} more" if left > 0 else "")


def _advice(values: Sequence[ValueRange], graph: Graph) -> str:
    """The two ways out; a clip is none for sums that go on and on, nor for scores."""
    float32 = 'Write "precision": "normal" in config.json: phones then compute in float32.'
    sums = {mark.value.name for mark in graph.landmarks if mark.kind == "residual"}
    sums |= {n.outputs[0].name for n in graph.nodes if n.kind == "rms_norm" and len(n.inputs) == 2}
    names = [value.name for value in values]
    if any(name in sums or name.endswith(f"/{_SCORES}") for name in names):
        return float32
    if len(names) > _CLIPS:
        names = list(dict.fromkeys(_LAYER.sub("layer*/", name) for name in names))
    clip = json.dumps([{"value": name, "limit": _CLIP_LIMIT} for name in names])
    return f'{float32} Or convert with a recipe file that clips them: "clip": {clip}'


def _summary(found: Sequence[ValueRange], *, fp16: bool) -> str:
    largest = max(found, key=lambda value: value.max_abs)
    part = largest.max_abs / FP16_MAX
    precision = "fp16" if fp16 else "float32"
    return (
        f"largest {largest.max_abs:.4g} ({largest.name}), {part:.2g} of the range of fp16; phones "
        f"compute in {precision}"
    )
