"""Time and memory of `mnnsmith convert` beside MNN's own exporter, the whole command each time.

SmolLM2-135M, fp16 safetensors to 4 bits in blocks of 64 (the head too), in turns.  The exporter
comes from a checkout of alibaba/MNN at tag 3.6.1 (--upstream) and runs in an environment of its
own (--upstream-python; see upstream_export.py for what it needs).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from common import (
    BENCH,
    Measured,
    finish,
    interleaved,
    measure,
    megabytes,
    mnnsmith_command,
    paired_ratio,
    parser,
    provenance,
    spreads,
    table,
)
from make_smollm2 import make_smollm2

OURS = "mnnsmith convert"
UPSTREAM = "llmexport.py"
RECIPE = "w4g64"


def ours_command(model: Path, output: Path, recipe: str = RECIPE) -> list[str | Path]:
    """The command a user types."""
    return [mnnsmith_command(), "convert", model, "-o", output, "--recipe", recipe]


def upstream_command(
    python: Path, checkout: Path, model: Path, output: Path, *options: str
) -> list[str | Path]:
    """The exporter with the same recipe: its defaults are 4 bits in blocks of 64."""
    script = BENCH / "upstream_export.py"
    arguments = ["--path", model, "--export", "mnn", "--dst_path", output]
    return [
        python,
        script,
        checkout,
        *arguments,
        "--quant_bit",
        "4",
        "--quant_block",
        "64",
        *options,
    ]


def upstream_versions(python: Path) -> dict[str, str]:
    """Versions of what the exporter runs on."""
    code = (
        "import json; from importlib.metadata import version;"
        "print(json.dumps({n: version(n) for n in ('torch', 'transformers', 'onnx', 'MNN')}))"
    )
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(found.stdout)
    return versions


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--upstream", type=Path, default=None, help="checkout of alibaba/MNN")
    options.add_argument("--upstream-python", type=Path, default=None, help="its interpreter")
    chosen = options.parse_args()
    _, model = make_smollm2(chosen.work)
    log = chosen.work / "convert_speed.log"
    output = chosen.work / "convert-speed"

    def run(command: list[str | Path]) -> Measured:
        shutil.rmtree(output, ignore_errors=True)
        try:
            return measure(command, cwd=chosen.work, log=log)
        finally:
            shutil.rmtree(output, ignore_errors=True)

    contestants = {OURS: lambda _: run(ours_command(model, output))}
    facts = provenance(chosen.repeats, model="SmolLM2-135M-Instruct fp16", recipe=RECIPE)
    if chosen.upstream is not None:
        if chosen.upstream_python is None:
            raise SystemExit("--upstream needs --upstream-python")
        facts["upstream_versions"] = upstream_versions(chosen.upstream_python)
        command = upstream_command(chosen.upstream_python, chosen.upstream, model, output)
        contestants[UPSTREAM] = lambda _: run(command)
    runs = interleaved(contestants, chosen.repeats)
    finish("convert_speed", facts, {name: spreads(found) for name, found in runs.items()} | {
        "runs": runs,
        "wall_ratio": _ratio(runs, "wall_s"),
        "cpu_ratio": _ratio(runs, "cpu_s"),
    }, _table(runs), chosen.json)  # fmt: skip


def _ratio(runs: dict[str, list[Measured]], field: str) -> object:
    if UPSTREAM not in runs:
        return None
    values = {name: [getattr(run, field) for run in found] for name, found in runs.items()}
    return paired_ratio(values[UPSTREAM], values[OURS])


def _table(runs: dict[str, list[Measured]]) -> str:
    rows = []
    for name, found in runs.items():
        spread = spreads(found)
        rows.append([
            f"`{name}`", spread["wall_s"].text(), spread["cpu_s"].text(),
            megabytes(spread["peak_rss_bytes"]), megabytes(spread["peak_tree_bytes"]),
        ])  # fmt: skip
    head = ["SmolLM2-135M fp16 to w4g64", "seconds", "CPU seconds",
            "peak RSS, largest process (MB)", "all processes together (MB)"]  # fmt: skip
    return table(head, rows)


if __name__ == "__main__":
    main()
