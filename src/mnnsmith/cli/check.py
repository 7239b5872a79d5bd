"""`mnnsmith check`: whether a bundle is whole."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mnnsmith.cli import options as o
from mnnsmith.cli.console import Style, say, say_json
from mnnsmith.errors import BundleError

Load = Annotated[
    bool, typer.Option("--load", help="Also load the bundle in the engine and compute with it.")
]


def check(directory: o.BundleDir, load: Load = False, json_output: o.Json = False) -> None:
    """Check hashes and structure of a bundle; exit code 6 when something is wrong."""
    from mnnsmith import api

    report = api.check(directory, load=load)
    failed = [finding for finding in report.findings if not finding.passed]
    if json_output:
        say_json(
            {
                "bundle": str(report.path),
                "passed": report.passed,
                "findings": [
                    {"name": f.name, "passed": f.passed, "detail": f.detail}
                    for f in report.findings
                ],
            }
        )
    else:
        style = Style(sys.stdout)
        for finding in report.findings:
            mark, colour = ("ok  ", "") if finding.passed else ("FAIL", style.red)
            # A name out of the bundle must not look like a line of its own.
            say(f"{mark} {finding.name}: {finding.detail}".replace("\n", "\n     "), colour)
    if failed:
        raise BundleError(
            f"{directory}: {len(failed)} of {len(report.findings)} checks failed.",
            "Copy the bundle again, or convert the model again.",
        )
