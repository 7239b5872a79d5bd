"""A verification as JUnit XML: each check and each gate is a test case."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from mnnsmith.verify.results import Check, Finding, Gate, Verification

# What XML 1.0 cannot hold, escaped or not.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(result: Verification) -> str:
    """The XML; findings that are no errors stand in `system-out`, the verdict as a property."""
    name = f"mnnsmith verify {result.subject.bundle}"
    cases = [_check(check) for check in result.checks] + [_gate(gate) for gate in result.gates]
    failures = sum(case.find("failure") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    suite = ElementTree.Element(
        "testsuite",
        _clean(
            name=name,
            tests=str(len(cases)),
            failures=str(failures),
            errors="0",
            skipped=str(skipped),
            time=f"{result.seconds:.2f}",
            timestamp=result.date.removesuffix("Z"),
        ),
    )
    properties = ElementTree.SubElement(suite, "properties")
    ElementTree.SubElement(properties, "property", _clean(name="verdict", value=result.verdict))
    suite.extend(cases)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    text = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _check(check: Check) -> ElementTree.Element:
    case = _case("mnnsmith.verify", check.name, check.seconds)
    errors = [finding for finding in check.findings if finding.severity == "error"]
    others = [finding for finding in check.findings if finding.severity != "error"]
    if check.status == "failed":
        _add(case, "failure", check.summary, errors)
    elif check.status == "skipped":
        _add(case, "skipped", check.summary, [])
    if others:
        output = ElementTree.SubElement(case, "system-out")
        output.text = _plain("\n".join(_told(finding) for finding in others))
    return case


def _gate(gate: Gate) -> ElementTree.Element:
    case = _case("mnnsmith.verify.gates", gate.name, 0.0)
    if not gate.passed:
        _add(case, "failure", f"found {gate.found}, the limit is {gate.limit}", [])
    return case


def _case(group: str, name: str, seconds: float) -> ElementTree.Element:
    return ElementTree.Element(
        "testcase", _clean(classname=group, name=name, time=f"{seconds:.2f}")
    )


def _add(case: ElementTree.Element, tag: str, message: str, findings: list[Finding]) -> None:
    element = ElementTree.SubElement(case, tag, _clean(message=message))
    if findings:
        element.text = _plain("\n".join(_told(finding) for finding in findings))


def _told(finding: Finding) -> str:
    hint = f"\n{finding.hint}" if finding.hint else ""
    return f"{finding.severity}: {finding.where}: {finding.message}{hint}"


def _plain(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)


def _clean(**attributes: str) -> dict[str, str]:
    return {name: _plain(value) for name, value in attributes.items()}
