"""The tables of docs/onnx-models.md, out of bench/results/onnx_conformance.json and the rules."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "onnx-models.md"
BEGIN, END = "<!-- begin {} -->", "<!-- end {} -->"
# How a refusal reads in the results: how the page puts it.
KINDS = (
    (r"no operator for", "no such operator in the engine"),
    (r"is of type (\w+)", r"type \1"),
    (r"is a (sequence|optional)", r"\1 as input or output"),
    (r"known to compute this wrongly.*?: ([^:]+)\.$", r"\1"),
    (r"differs from the original", "the engine's result differs"),
    (r"converter (crashed|failed)", "the converter fails"),
    (r"original itself does not run|does not load it", "nothing runs the original"),
    (r"no operator computes", "an output is lost in the conversion"),
    (r"", "the engine fails in the run"),
)


def write_docs(results: dict[str, Any]) -> None:
    """Put the tables between their marks."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in (("counts", _counts(results)), ("rules", _rules()),
                       ("refused", _refused(results))):  # fmt: skip
        begin, end = BEGIN.format(name), END.format(name)
        head, rest = page.split(begin)
        page = f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    PAGE.write_text(page, encoding="utf-8")


def _counts(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in sorted(results["versions"].items()))
    parts = [f"{len(results[kind])} {text}" for kind, text in (
        ("right", "right"), ("refused", "refused"), ("wrong", "silently wrong"),
        ("crash", "crashes of ours"))]  # fmt: skip
    total = sum(len(results[kind]) for kind in ("right", "refused", "wrong", "crash"))
    return f"{total} node cases ({versions}): {', '.join(parts)}."


def _rules() -> str:
    from mnnsmith.onnx_models.rules.registry import all_rules

    rows = [f"| `{rule.name}` | {', '.join(sorted(rule.operators)[:4])}"
            f"{', ...' if len(rule.operators) > 4 else ''} | {rule.reason} |"
            for rule in all_rules()]  # fmt: skip
    return "\n".join(["| rule | operators | what the engine does wrong |", "|---|---|---|", *rows])


def _refused(results: dict[str, Any]) -> str:
    from onnx_conformance import cases

    known = cases()
    table: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for name, why in results["refused"].items():
        nodes = known[name].model.graph.node
        operator = nodes[0].op_type if len(nodes) == 1 else _from_name(name)
        table[operator, _kind(why)].append(name)
    rows = [f"| {operator} | {kind} | {len(names)} | {_few(names)} |"
            for (operator, kind), names in sorted(table.items())]  # fmt: skip
    return "\n".join(["| operator | why refused | cases | such as |", "|---|---|---|---|", *rows])


def _from_name(name: str) -> str:
    return name.removeprefix("test_").split("_")[0]


def _kind(why: str) -> str:
    for pattern, text in KINDS:
        if match := re.search(pattern, why):
            return match.expand(text) if match.groups() else text
    raise AssertionError(why)


def _few(names: list[str]) -> str:
    return ", ".join(f"`{name.removeprefix('test_')}`" for name in names[:2])
