"""What a bundle keeps of its last verification.

`mnnsmith.json` has the verdict and the main figures, `verification.json` the whole result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mnnsmith.bundle import Bundle
from mnnsmith.bundle.manifest import (
    MANIFEST,
    VERIFICATION,
    Manifest,
    note_in_manifest,
    read_manifest,
)
from mnnsmith.errors import BundleError, MissingResourceError, UsageError
from mnnsmith.files import is_file, replace_text
from mnnsmith.verify.output.results_json import parse_verification, read_result, to_json, to_plain
from mnnsmith.verify.results import CHECKS, Finding, Verification

KEY = "verification"
_LEFT_OUT = "(examples are left out: they quote a text that was given)"


def record(bundle: Bundle, result: Verification, *, private: bool = False) -> Verification:
    """Note the result in the bundle; where it cannot or shall not be noted, the result says so.

    private: it is of a user's own text, which must not go where the bundle goes: the sample and
    quotations are left out of what is noted.
    A run of chosen checks that passed does not take the place of one that made more of them; one
    that failed does.  Nothing is noted in a bundle that was replaced during the run.
    """
    try:
        manifest = read_manifest(bundle.path)
        if _hashes(manifest) != result.subject.files:
            return _noted(result, "not recorded: the bundle was replaced during the verification")
        lost = _ran(manifest) - {check.name for check in result.checks if check.status != "skipped"}
        if result.passed and lost:
            text = f"an earlier verification made more checks ({', '.join(sorted(lost))})"
            return _noted(result, f"not recorded: {text}")
        kept = _without_text(result) if private else result
        text = to_json(kept)
        replace_text(bundle.path / VERIFICATION, text)
        # Last, with the digest of the other: that both are of one run can be seen.
        note_in_manifest(bundle.path, KEY, {**summary(kept), "result_sha256": _digest(text)})
    except (MissingResourceError, BundleError) as error:
        return _noted(result, f"not recorded: {error.message}")
    return result


def recorded_verification(bundle: Bundle) -> Verification:
    """The whole result that `record` noted.

    Raises `UsageError` where there is none, or it is damaged, of another run than the manifest
    notes, or of other files than the bundle's.
    """
    path = bundle.path / VERIFICATION
    noted = bundle.manifest.data.get(KEY)
    if not is_file(path) or not isinstance(noted, dict):
        raise UsageError(
            f"{bundle.path}: was not verified yet.", "Run `mnnsmith verify` on it first."
        )
    text = read_result(path)
    result = parse_verification(text, str(path))
    if result.subject.files != _hashes(bundle.manifest):
        raise UsageError(
            f"{path}: is about other files than the bundle has now.", "Verify the bundle again."
        )
    if noted.get("result_sha256") != _digest(text):
        raise UsageError(
            f"{path}: is not the result that {MANIFEST} notes.", "Verify the bundle again."
        )
    return result


def _hashes(manifest: Manifest) -> dict[str, str]:
    return {name: digest for name, (digest, _) in manifest.files.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _files_digest(files: Mapping[str, str]) -> str:
    return _digest(json.dumps(files, sort_keys=True))


def _ran(manifest: Manifest) -> set[str]:
    """Checks that ran on these very files, by a manifest's note, which anybody may have written."""
    noted = manifest.data.get(KEY)
    if not isinstance(noted, dict) or noted.get("files_sha256") != _files_digest(_hashes(manifest)):
        return set()
    checks = noted.get("checks")
    return {
        name
        for name, check in (checks.items() if isinstance(checks, dict) else ())
        if name in CHECKS and isinstance(check, dict) and check.get("status") != "skipped"
    }


def _without_text(result: Verification) -> Verification:
    """Without the sample, and without what the tokens check quotes, which no other check does."""
    figures = result.figures
    if figures.statistical is not None:
        figures = replace(figures, statistical=replace(figures.statistical, sample=()))
    checks = tuple(
        replace(check, findings=tuple(map(_unquoted, check.findings)))
        if check.name == "tokens"
        else check
        for check in result.checks
    )
    return replace(result, checks=checks, figures=figures)


def _unquoted(finding: Finding) -> Finding:
    told, colon, _ = finding.message.partition(": ")
    return replace(finding, message=f"{told} {_LEFT_OUT}") if colon else finding


def _noted(result: Verification, text: str) -> Verification:
    first, *others = result.checks
    note = Finding("note", MANIFEST, text)
    first = replace(first, findings=(*first.findings, note))
    return replace(result, checks=(first, *others))


def summary(result: Verification) -> dict[str, Any]:
    """The object under "verification": all of it but findings, figures by layer and lists."""
    subject = result.subject
    return {
        "passed": result.passed,
        "skipped": list(result.skipped),
        "date": result.date,
        "level": result.level,
        "mnnsmith": result.mnnsmith,
        "engine": result.engine,
        "source": to_plain(subject.source),
        "source_revision": subject.source_revision,
        "device": subject.device,
        "settings": subject.settings,
        "seconds": result.seconds,
        "files_sha256": _files_digest(subject.files),
        "checks": {
            check.name: {"status": check.status, "summary": to_plain(check.summary)}
            for check in result.checks
        },
        "gates": to_plain(result.gates),
        "figures": _main_figures(result),
    }


def _main_figures(result: Verification) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exact, statistical = result.figures.exact, result.figures.statistical
    if exact is not None:
        found["exact_max_kl"] = exact.max_kl
    if statistical is not None:
        names = (
            "reference", "tokens", "kl", "kl_median", "kl_p99", "kl_max", "top1", "top5",
            "perplexity", "reference_perplexity", "perplexity_increase",
        )  # fmt: skip
        found |= {name: to_plain(getattr(statistical, name)) for name in names}
    return found
