"""A verification as Markdown and as JUnit XML: whole, and safe whatever is in it."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

from mnnsmith.verify.output import junit, markdown
from mnnsmith.verify.results import Check, Figures, Finding
from verification_samples import HOSTILE, judged


def test_markdown_has_verdict_checks_figures_gates_and_findings() -> None:
    text = markdown.render(judged())
    lines = text.splitlines()
    assert lines[0] == "## ❌ smol-w4: verification failed, 1 check skipped: layers"
    told = "llama, recipe w4g32-head8, against SmolLM2-135M-Instruct; level quick, device local, "
    assert f"{told}38 s." in lines
    assert "| tokens | ❌ | 3 of 12425 texts differ | 4.2 |" in lines
    assert "| layers | ➖ | not asked for | 0.0 |" in lines
    assert "| min-top1 | ❌ | 0.95 | 0.912 (0.899 to 0.925) |" in lines
    assert "| KL, nats | 0.002 | 0.0018 to 0.0022 |" in lines
    greedy = "1 of 3, for 32 tokens; the others leave at token 17, 29"
    assert f"| same greedy answers | {greedy} |  |" in lines
    assert "| perplexity increase | 0.54 % | 0.10 % to 0.98 % |" in lines
    assert "| code \\| Python | 324 | 0.0016 | 98.0 % | 6.1 | 6.1 |" in lines
    assert "| mlp | w4g32 | 30 | 16.6 | 0.0798 |" in lines
    assert "- ⚠️ **layers**" not in text and "- ⚠️ **tokens**, layer 3: close to the limit" in lines
    assert "  Convert the model again." in lines


def test_nothing_in_a_finding_becomes_markup() -> None:
    text = markdown.render(judged())
    # Outside of blocks of code, which start with six spaces here.
    plain = "\n".join(line for line in text.splitlines() if not line.startswith("      "))
    assert "\x1b" not in text and "\x07" not in text
    assert re.search(r"(?<!\\)<b>", plain) is None
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
    assert cells == {4, 5, 6, 7}


def test_a_difference_keeps_its_lines() -> None:
    finding = Finding("error", "llm_config.json", "differs:\n--- expected\n+'a|b'\n")
    checks = (Check("template", "failed", "1 differs", 1.0, (finding,)),)
    lines = markdown.render(judged(checks=checks)).splitlines()
    at = lines.index("      --- expected")
    assert lines[at - 2 : at + 3] == [
        "- ❌ **template**, llm\\_config.json: differs:", "", "      --- expected",
        "      +'a|b'", "",
    ]  # fmt: skip


def test_a_result_without_figures() -> None:
    plain = replace(judged(gates=()), figures=Figures())
    assert "KL" not in markdown.render(plain) and "gate" not in markdown.render(plain)


def test_junit_is_valid_and_has_a_case_for_each_check_and_gate() -> None:
    text = junit.render(judged())
    suite = ElementTree.fromstring(text.encode())[0]
    counts = {name: suite.get(name) for name in ("tests", "failures", "skipped", "errors")}
    assert counts == {"tests": "5", "failures": "2", "skipped": "1", "errors": "0"}
    verdict = suite.find("properties/property")
    assert verdict is not None and verdict.get("value") == "failed, 1 check skipped: layers"
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert list(cases) == ["files", "tokens", "layers", "max-kl", "min-top1"]
    failure = cases["tokens"].find("failure")
    assert failure is not None and failure.get("message") == "3 of 12425 texts differ"
    expected = HOSTILE.translate({0x1B: "\ufffd", 0x07: "\ufffd", 0xFFFE: "\ufffd"})
    assert failure.text == f"error: tokenizer.mtok: {expected}\nConvert the model again."
    output = cases["tokens"].find("system-out")
    assert output is not None and str(output.text).startswith("warning: layer 3: close")
    gate = cases["min-top1"].find("failure")
    assert gate is not None
    assert gate.get("message") == "found 0.912 (0.899 to 0.925), the limit is 0.95"
    assert cases["max-kl"].find("failure") is None


def test_junit_holds_what_xml_cannot() -> None:
    odd = "".join(map(chr, (*range(32), 0x7F, 0x85, 0xD800, 0xFFFE, 0xFFFF, 0x1F600)))
    checks = (Check("files", "failed", odd, 1.0, (Finding("error", odd, odd, odd),)),)
    ElementTree.fromstring(junit.render(judged(checks=checks)).encode())
