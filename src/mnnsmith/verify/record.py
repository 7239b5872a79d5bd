"""What a bundle keeps of its last verification.

`mnnsmith.json` has the verdict and the main figures, `verification.json` the whole result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mnnsmith.bundle import Bundle
from mnnsmith.bundle.manifest import MANIFEST, VERIFICATION, note_in_manifest, read_manifest
from mnnsmith.errors import MissingResourceError, UsageError
from mnnsmith.files import is_file, replace_text
from mnnsmith.verify.results import CHECKS, Finding, Verification
from mnnsmith.verify.results_json import read_verification, to_json, to_plain

KEY = "verification"


def record(bundle: Bundle, result: Verification) -> Verification:
    """Note the result in the bundle; where it cannot or shall not be noted, the result says so.

    A run of chosen checks does not take the place of one that made more of them.
    """
    lost = _checked(read_manifest(bundle.path).data.get(KEY)) - {c.name for c in result.checks}
    if lost:
        text = f"not recorded: an earlier verification made more checks ({', '.join(sorted(lost))})"
        return _noted(result, text)
    try:
        replace_text(bundle.path / VERIFICATION, to_json(result))
        note_in_manifest(bundle.path, KEY, summary(result))
    except MissingResourceError as error:
        return _noted(result, f"not recorded: {error.message}")
    return result


def recorded_verification(bundle: Bundle) -> Verification:
    """The whole result that `record` noted.

    Raises `UsageError` where there is none, or it is damaged or of other files than the bundle's.
    """
    path = bundle.path / VERIFICATION
    if not is_file(path):
        raise UsageError(
            f"{bundle.path}: was not verified yet.", "Run `mnnsmith verify` on it first."
        )
    result = read_verification(path)
    expected = {name: digest for name, (digest, _) in bundle.manifest.files.items()}
    if result.subject.files != expected:
        raise UsageError(
            f"{path}: is about other files than the bundle has now.", "Verify the bundle again."
        )
    return result


def _checked(noted: Any) -> set[str]:
    """Names of the checks that a manifest's note tells of, which anybody may have written."""
    checks = noted.get("checks") if isinstance(noted, dict) else None
    return {name for name in checks if name in CHECKS} if isinstance(checks, dict) else set()


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
        "date": result.date,
        "level": result.level,
        "mnnsmith": result.mnnsmith,
        "engine": result.engine,
        "source": to_plain(subject.source),
        "source_revision": subject.source_revision,
        "device": subject.device,
        "settings": subject.settings,
        "seconds": result.seconds,
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
