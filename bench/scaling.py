"""Time and memory of a conversion against the size of the model: synthetic llama shapes.

Each checkpoint is made, converted to w4g64 and, with --clean, deleted again.  What a model costs
beyond its own bytes shows in the columns per billion parameters.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from common import (
    Measured,
    Spread,
    finish,
    measure,
    megabytes,
    note,
    parser,
    provenance,
    spreads,
    table,
)
from convert_speed import RECIPE, ours_command
from make_synthetic import SHAPES, made_apart


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options.add_argument("--clean", action="store_true", help="delete each checkpoint after use")
    chosen = options.parse_args()
    facts = provenance(chosen.repeats, recipe=RECIPE)
    results = {}
    for size in chosen.sizes:
        folder = made_apart(chosen.work, size)
        runs = [_convert(folder, chosen.work, size, i) for i in range(chosen.repeats)]
        results[size] = runs
        if chosen.clean:
            shutil.rmtree(folder)
    finish("scaling", facts, {
        size: {"parameters": SHAPES[size].parameters, **spreads(runs), "runs": runs}
        for size, runs in results.items()
    }, _table(results), chosen.json)  # fmt: skip


def _convert(folder: Path, work: Path, size: str, index: int) -> Measured:
    output = work / "scaling-bundle"
    shutil.rmtree(output, ignore_errors=True)
    note(f"converting {size} B, round {index + 1}")
    try:
        return measure(ours_command(folder, output), log=work / "scaling.log")
    finally:
        shutil.rmtree(output, ignore_errors=True)


def _table(results: dict[str, list[Measured]]) -> str:
    rows = []
    for size, runs in results.items():
        billions = SHAPES[size].parameters / 1e9
        spread = spreads(runs)
        busy = Spread.of(run.cpu_s / run.wall_s for run in runs)
        rows.append([
            f"{billions:.2f} B", f"{2 * billions:.1f} GB", spread["wall_s"].text(),
            f"{spread['wall_s'].median / billions:.1f}", spread["cpu_s"].text(), busy.text(".2f"),
            megabytes(spread["peak_main_bytes"]), megabytes(spread["peak_rss_bytes"]),
        ])  # fmt: skip
    head = ["parameters", "checkpoint", "seconds", "seconds per billion", "CPU seconds",
            "cores at work", "peak RSS, converting process (MB)",
            "peak RSS, largest process (MB)"]  # fmt: skip
    return table(head, rows)


if __name__ == "__main__":
    main()
