"""Whether a bundle is whole: hashes, structure, and on request the engine's own word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mnnsmith.bundle import Bundle, open_bundle
from mnnsmith.bundle.bundle import EDITABLE
from mnnsmith.bundle.manifest import UNLISTED
from mnnsmith.conversion.prove import probe
from mnnsmith.conversion.structure import check_structure
from mnnsmith.errors import BundleError, MnnsmithError
from mnnsmith.files import sha256_of
from mnnsmith.mnn.config_files import TOKENIZER_FILE
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
    bundle = open_bundle(path, whole=False)
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
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return Finding(name, False, f"{where}cannot be read: {error.strerror or error}")


def _names(bundle: Bundle) -> list[str]:
    return sorted(bundle.manifest.files)


def _hash(bundle: Bundle, name: str) -> str:
    expected, size = bundle.manifest.files[name]
    found_size = (bundle.path / name).stat().st_size
    if found_size != size and name not in EDITABLE:
        raise BundleError(f"{name}: has {found_size} bytes, expected {size}")
    found = sha256_of(bundle.path / name)
    if found != expected and name in EDITABLE:
        return "edited since the conversion, as it may be"
    if found != expected:
        raise BundleError(f"{name}: sha256 is {found[:16]}..., expected {expected[:16]}...")
    return f"{size} bytes, sha256 {found[:16]}..."


def _strangers(bundle: Bundle) -> str:
    known = {*bundle.manifest.files, *UNLISTED}
    names = {path.name for path in bundle.path.iterdir()}
    others = sorted(names - known)
    if others:
        # As Python writes them: anybody may have put them there.
        shown = (name if name.isprintable() else ascii(name) for name in others[:8])
        raise BundleError(f"not in the manifest: {', '.join(shown)}")
    return f"{len(names)} files"


def _tokenizer(bundle: Bundle) -> str:
    read_mtok(bundle.path / TOKENIZER_FILE)
    return f"{TOKENIZER_FILE} is well formed"


def _graph(bundle: Bundle) -> str:
    return check_structure(bundle.path, bundle.vocab_size)


def _load(bundle: Bundle) -> str:
    probe(bundle.path, bundle.vocab_size, bundle.max_context)
    return "a few tokens give finite logits"
