"""DeepSeek at its true size: whole conversions to w4g64-head8, and V3 told from two of its layers.

Checkpoints with random weights are made from the real configs (31 GB for V2-Lite), converted
and deleted again.  V3 has 61 layers, of which 58 have experts; one dense layer and one with experts
are made, and the time of the whole is extrapolated from the bytes, which is marked so.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from common import Measured, finish, measure, megabytes, note, parser, provenance, spreads, table
from convert_speed import ours_command
from deepseek_shapes import config_of, make

RECIPE = "w4g64-head8"
# Name -> config; v3 with two layers has the sizes of the real ones.
MODELS: dict[str, dict[str, Any]] = {
    "coder-6.7b": config_of("coder-6.7b"),
    "v2-lite": config_of("v2-lite"),
    "v3, 2 layers": config_of("v3", num_hidden_layers=2, first_k_dense_replace=1),
}
V3_PARAMETERS = 671.03e9


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    chosen = options.parse_args()
    results = {name: _convert(name, chosen.work, chosen.repeats) for name in chosen.only}
    finish("deepseek_scale", provenance(chosen.repeats, recipe=RECIPE),
           {name: {**spreads(runs), "checkpoint_bytes": size}
            for name, (runs, size) in results.items()},
           _table(results), chosen.json)  # fmt: skip


def _convert(name: str, work: Path, repeats: int) -> tuple[list[Measured], int]:
    folder, output = work / "deepseek-checkpoint", work / "deepseek-bundle"
    shutil.rmtree(folder, ignore_errors=True)
    note(f"making {name}")
    make(folder, MODELS[name])
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    runs = []
    try:
        for i in range(repeats):
            shutil.rmtree(output, ignore_errors=True)
            note(f"converting {name}, round {i + 1}")
            runs.append(measure(ours_command(folder, output, RECIPE), log=work / "deepseek.log"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(output, ignore_errors=True)
    return runs, size


def _table(results: dict[str, tuple[list[Measured], int]]) -> str:
    rows = []
    for name, (runs, size) in results.items():
        spread = spreads(runs)
        rows.append([
            name, f"{size / 2e9:.2f} B", f"{size / 1e9:.1f} GB", spread["wall_s"].text(),
            f"{2e9 * spread['wall_s'].median / size:.1f}", megabytes(spread["peak_main_bytes"]),
        ])  # fmt: skip
    if "v3, 2 layers" in results:
        runs, size = results["v3, 2 layers"]
        seconds = spreads(runs)["wall_s"].median * 2 * V3_PARAMETERS / size
        rows.append(["v3, whole (extrapolated)", f"{V3_PARAMETERS / 1e9:.0f} B", "1342 GB",
                     f"about {seconds / 3600:.1f} h", "", "as above"])  # fmt: skip
    head = ["model", "parameters", "checkpoint", "seconds", "seconds per billion",
            "peak RSS (MB)"]  # fmt: skip
    return table(head, rows)


if __name__ == "__main__":
    main()
