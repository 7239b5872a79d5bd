"""Whether a bundle is whole: hashes, structure, and on request the engine's own word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mnnsmith.bundle import Bundle, open_bundle
from mnnsmith.bundle.manifest import MANIFEST
from mnnsmith.conversion.prove import probe
from mnnsmith.engine.converter import mnn_to_graph_json
from mnnsmith.errors import BundleError, MnnsmithError
from mnnsmith.files import read_json_object, sha256_of
from mnnsmith.mnn.config_files import MODEL_FILE, TOKENIZER_FILE, WEIGHT_FILE
from mnnsmith.mnn.mtok_reader import read_mtok


@dataclass(frozen=True)
class Finding:
    """One check: its name, whether it passed, and what it found."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class CheckReport:
    """All findings on one bundle."""

    path: Path
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)


def check(path: str | Path, *, load: bool = False) -> CheckReport:
    """Check a bundle: sizes and hashes of its files, then tokenizer, graph and configuration.

    load: also load it in the engine and compute with it.  Raises `BundleError` only if `path` is no
    bundle at all; what is wrong with one is in the report.
    """
    bundle = open_bundle(path)
    findings = [_finding(f"{name} is unchanged", _hash, bundle, name) for name in _names(bundle)]
    findings.append(_finding("no other files", _strangers, bundle))
    findings.append(_finding("tokenizer reads back", _tokenizer, bundle))
    findings.append(_finding("graph fits the weights", _graph, bundle))
    if load:
        findings.append(_finding("the engine computes with it", _load, bundle))
    return CheckReport(bundle.path, tuple(findings))


def _finding(name: str, test: Callable[..., str], *arguments: Any) -> Finding:
    try:
        return Finding(name, True, test(*arguments))
    except MnnsmithError as error:
        return Finding(name, False, error.message)


def _names(bundle: Bundle) -> list[str]:
    return sorted(bundle.manifest.files)


def _hash(bundle: Bundle, name: str) -> str:
    expected, size = bundle.manifest.files[name]
    found = sha256_of(bundle.path / name)
    if found != expected:
        raise BundleError(f"{name}: sha256 is {found[:16]}..., expected {expected[:16]}...")
    return f"{size} bytes, sha256 {found[:16]}..."


def _strangers(bundle: Bundle) -> str:
    known = {*bundle.manifest.files, MANIFEST}
    others = sorted(p.name for p in bundle.path.iterdir() if p.name not in known)
    if others:
        raise BundleError(f"not in the manifest: {', '.join(others[:8])}")
    return f"{len(known)} files"


def _tokenizer(bundle: Bundle) -> str:
    read_mtok(bundle.path / TOKENIZER_FILE)
    return f"{TOKENIZER_FILE} is well formed"


def _graph(bundle: Bundle) -> str:
    """Every operator's weights lie inside the weight file, and no two overlap."""
    size = (bundle.path / WEIGHT_FILE).stat().st_size
    spans = []
    operators = mnn_to_graph_json(bundle.path / MODEL_FILE)["oplists"]
    for operator in operators:
        external = operator.get("main", {}).get("external", [])
        if external:
            spans.append((external[0], external[0] + sum(external[1:4]), operator["name"]))
    end, last = 0, ""
    for start, stop, name in sorted(spans):
        if start < end or stop > size:
            raise BundleError(
                f"{name}: weights at {start}..{stop} "
                + (f"overlap those of {last}" if start < end else f"end beyond {size}")
            )
        end, last = stop, name
    tie = read_json_object(bundle.path / "llm_config.json").get("tie_embeddings", {})
    if tie.get("alpha_offset", 0) + tie.get("alpha_size", 0) > size:
        raise BundleError("tie_embeddings: its scales end beyond the weight file")
    return f"{len(operators)} operators, {len(spans)} with weights"


def _load(bundle: Bundle) -> str:
    probe(bundle.path, bundle.vocab_size, bundle.max_context)
    return "a few tokens give finite logits"
