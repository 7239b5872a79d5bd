"""What a bundle's `mnnsmith.json` keeps of a verification: the verdict and the main figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mnnsmith.bundle import Bundle
from mnnsmith.bundle.manifest import note_in_manifest
from mnnsmith.errors import MissingResourceError
from mnnsmith.verify.results import Check, Finding, Verification
from mnnsmith.verify.results_json import to_plain

KEY = "verification"


def record(bundle: Bundle, result: Verification) -> Verification:
    """Note the result in the manifest; where that cannot be written, the result says so."""
    try:
        note_in_manifest(bundle.path, KEY, summary(result))
    except MissingResourceError as error:
        note = Finding("note", "mnnsmith.json", f"not recorded: {error.message}")
        first, *others = result.checks
        return replace(result, checks=(_with(first, note), *others))
    return result


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


def _with(check: Check, finding: Finding) -> Check:
    return replace(check, findings=(*check.findings, finding))
