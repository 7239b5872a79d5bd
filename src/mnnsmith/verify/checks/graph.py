"""A bundle's graph and the engine's settings of it, part by part, against what the original gives.

Outputs can hide a wrong number, such as the epsilon of a norm whose input is large, or a setting
that only another of the engine's backends reads; this does not.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mnnsmith.bundle import Bundle
from mnnsmith.conversion.convert import config_files
from mnnsmith.conversion.plan import WeightPlan
from mnnsmith.conversion.prepare import Prepared
from mnnsmith.conversion.slots import read_vector
from mnnsmith.engine.converter import graph_json_to_mnn, mnn_to_graph_json
from mnnsmith.errors import BundleError, SourceError
from mnnsmith.files import read_json_object
from mnnsmith.graph.graph import Graph
from mnnsmith.mnn.config_files import MODEL_FILE, VISION_MODEL_FILE
from mnnsmith.mnn.graph_json import Weights, graph_json
from mnnsmith.verify.results import Finding, Severity
from mnnsmith.version import __version__

_CONFIG = "llm_config.json"
# Weights and the template have comparisons of their own.
_WEIGHTS = frozenset({"external", "quanParameter", "gamma", "beta"})
_OTHERWISE = frozenset({"tie_embeddings", "jinja"})
_SHOWN = 8
# Before the names of vision's operators, as the manifest has them.
VISUAL = "visual/"
_HINT = "Convert the model again; if it stays so, please report it with the model's name."


def compare_graph(bundle: Bundle, original: Prepared, reported: Collection[str]) -> list[Finding]:
    """Everything but the weights in which `llm.mnn` and `llm_config.json` differ from what this
    version writes for the original.

    reported: operators of which a finding says already that they are amiss.  Another version of
    mnnsmith may build a graph of another form, which is a warning; numbers of an operator that both
    have are errors.  Raises `BundleError` where a file cannot be read.
    """
    form: Severity = "error" if bundle.manifest.data.get("mnnsmith") == __version__ else "warning"
    findings = list(_settings(bundle, original))
    model, plan = original.model, original.plan
    findings += _compare(bundle, original, reported, form, MODEL_FILE, model.graph, plan)
    if model.vision is not None and plan.vision is not None:
        graph = model.vision.graph
        findings += _compare(
            bundle, original, reported, form, VISION_MODEL_FILE, graph, plan.vision
        )
    return findings


def _compare(
    bundle: Bundle,
    original: Prepared,
    reported: Collection[str],
    form: Severity,
    file: str,
    graph: Graph,
    plan: WeightPlan,
) -> list[Finding]:
    """One graph of the bundle; vision's operators have their prefix in findings."""
    pair = _graphs(bundle, original, file, graph, plan)
    if pair is None:
        return []
    prefix = VISUAL if file == VISION_MODEL_FILE else ""
    findings = []
    found, wanted = ({op["name"]: op for op in part} for part in pair)
    grouped: dict[tuple[Severity, str], list[str]] = {}
    for name in dict.fromkeys((*wanted, *found)):
        if prefix + name not in reported:
            for severity, text in _operator(found.get(name), wanted.get(name), form):
                grouped.setdefault((severity, text), []).append(name)
    for (severity, text), names in list(grouped.items())[:_SHOWN]:
        more = f" (and of {len(names) - 1} more operators)" if len(names) > 1 else ""
        place = prefix + names[0]
        findings.append(Finding(severity, place, f"{place}: {text}{more}.", _HINT))
    if len(grouped) > _SHOWN:
        worst: Severity = "error" if any(s == "error" for s, _ in grouped) else "warning"
        text = f"{len(grouped) - _SHOWN} more differences of the graph."
        findings.append(Finding(worst, file, text))
    return findings


def _settings(bundle: Bundle, original: Prepared) -> Iterator[Finding]:
    try:
        found = read_json_object(bundle.path / _CONFIG)
    except SourceError as error:
        raise BundleError(error.message, "Convert the model again.") from error
    wanted = config_files(original)[_CONFIG]
    for key in sorted({*found, *wanted} - _OTHERWISE):
        if found.get(key) != wanted.get(key):
            text = f"{key} is {found.get(key)!r:.80}, expected {wanted.get(key)!r:.80}."
            yield Finding("error", _CONFIG, text, _HINT)


def _graphs(
    bundle: Bundle, original: Prepared, file: str, graph: Graph, plan: WeightPlan
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]] | None:
    """All operators of the bundle and of the original as the engine reads them back; None where the
    files are equal."""
    weights = Weights(plan.records, lambda slot: read_vector(slot, original.checkpoint))
    with tempfile.TemporaryDirectory(prefix="mnnsmith-") as folder:
        source, written = Path(folder, "graph.json"), Path(folder, file)
        net = graph_json(graph, weights)
        source.write_text(json.dumps(net), encoding="utf-8")
        graph_json_to_mnn(source, written)
        if written.read_bytes() == (bundle.path / file).read_bytes():
            return None
        wanted = mnn_to_graph_json(written)
    return _operators(mnn_to_graph_json(bundle.path / file)), _operators(wanted)


def _operators(net: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of the graph and of its parts, with the names of their inputs and outputs.

    A net from outside may be anything; what has no name or no such value is left as it is.
    """
    parts = [part for part in _items(net.get("subgraphs")) if isinstance(part, dict)]
    graphs = [(net["oplists"], net.get("tensorName"))]
    graphs += [(part.get("nodes"), part.get("tensors")) for part in parts]
    return [
        _named(operator, _items(values))
        for operators, values in graphs
        for operator in _items(operators)
        if isinstance(operator, dict) and isinstance(operator.get("name"), str)
    ]


def _items(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _named(operator: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    ends = {
        word: [
            values[i] if type(i) is int and 0 <= i < len(values) else i
            for i in _items(operator.get(key))
        ]
        for word, key in (("inputs", "inputIndexes"), ("outputs", "outputIndexes"))
    }
    return {**operator, **ends}


def _operator(
    found: Mapping[str, Any] | None, wanted: Mapping[str, Any] | None, form: Severity
) -> Iterator[tuple[Severity, str]]:
    if found is None or wanted is None:
        yield form, "is missing" if found is None else "the model has no such operator"
        return
    same = True
    if found.get("type") != wanted.get("type"):
        same = False
        yield form, _unlike("type", found.get("type"), wanted.get("type"))
    for key, word in (("inputs", "reads"), ("outputs", "gives")):
        if found[key] != wanted[key]:
            same = False
            ends = _apart(found[key], wanted[key])
            yield form, f"{word} {ends[0]}, expected {ends[1]}"
    if same:
        here, there = (_fields(operator.get("main"), "") for operator in (found, wanted))
        for key in sorted({*here, *there}):
            if here.get(key) != there.get(key):
                yield "error", _unlike(key, here.get(key), there.get(key))


def _apart(found: list[Any], wanted: list[Any]) -> tuple[str, str]:
    """Of two lists of values, those at places where they differ."""
    pairs = list(itertools.zip_longest(found, wanted))
    here, there = zip(*(pair for pair in pairs if pair[0] != pair[1]), strict=True)
    return ", ".join(map(str, here)), ", ".join(map(str, there))


def _fields(value: Any, path: str) -> dict[str, Any]:
    """The numbers and texts of nested objects by their paths, weights left out."""
    if not isinstance(value, dict):
        return {path: value}
    fields: dict[str, Any] = {}
    for key, inner in value.items():
        if key not in _WEIGHTS:
            fields |= _fields(inner, f"{path}.{key}" if path else key)
    return fields


def _unlike(key: str, found: object, wanted: object) -> str:
    return f"{key} is {found!r:.80}, expected {wanted!r:.80}"
