"""The two forms of latent attention side by side: prefill and decode time, and bytes of the cache.

Two layers of DeepSeek-V2-Lite's real dimensions, w4g64, random weights: the time of the whole model
is about 13 times that of one of these layers.  Forms are measured in turn, at several depths of the
context, each with its cache filled by a real prompt.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Spread, finish, note, parser, provenance, table
from deepseek_shapes import config_of, make

from mnnsmith.api import Engine, convert, prepare

FORMS = {"expanded": "w4g64", "latent": "w4g64-latent"}
DECODED = 12


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    options.add_argument("--layers", type=int, default=2)
    chosen = options.parse_args()
    folder = chosen.work / f"v2-lite-{chosen.layers}-layers"
    note(f"making {folder.name}")
    make(folder, config_of("v2-lite", num_hidden_layers=chosen.layers))
    bundles = {}
    for form, recipe in FORMS.items():
        bundles[form] = chosen.work / f"v2-lite-{form}"
        convert(folder, bundles[form], recipe=recipe, force=True)
    floats = {
        form: prepare(folder, recipe=recipe).model.kv_bytes_per_token(1) // chosen.layers
        for form, recipe in FORMS.items()
    }
    results: dict[str, dict[int, list[dict[str, float]]]] = {form: {} for form in FORMS}
    for length in chosen.lengths:
        for _ in range(chosen.repeats):
            for form, bundle in bundles.items():
                note(f"{form}, {length} tokens")
                results[form].setdefault(length, []).append(_measure(bundle, length))
    facts = provenance(chosen.repeats, recipe="w4g64", layers=chosen.layers)
    shutil.rmtree(folder)
    finish("mla_forms", facts, {"floats_per_token_and_layer": floats, "runs": results},
           _table(results, floats), chosen.json)  # fmt: skip


def _measure(bundle: Path, length: int) -> dict[str, float]:
    ids = np.random.default_rng(length).integers(0, 102400, length).tolist()
    with Engine(bundle, config={"use_mmap": False}) as engine:
        began = time.perf_counter()
        engine.forward(ids)
        prefill_s = time.perf_counter() - began
        times = []
        for token in ids[:DECODED]:
            began = time.perf_counter()
            engine.forward([token])
            times.append(time.perf_counter() - began)
        peak = engine.statistics.peak_rss_bytes
    return {"prefill_ms_per_token": 1e3 * prefill_s / length,
            "decode_ms": 1e3 * float(np.median(times)), "peak_rss_bytes": peak}  # fmt: skip


def _table(results: dict[str, dict[int, list[dict[str, float]]]], floats: dict[str, int]) -> str:
    rows = []
    for length in next(iter(results.values())):
        for form, found in results.items():
            runs = found[length]
            cells: list[Any] = [form, length]
            for key, digits in (("prefill_ms_per_token", ".2f"), ("decode_ms", ".2f")):
                cells.append(Spread.of(run[key] for run in runs).text(digits))
            cells.append(f"{Spread.of(run['peak_rss_bytes'] / 1e6 for run in runs).median:.0f}")
            rows.append([*map(str, cells), str(floats[form])])
    head = ["form", "context", "prefill, ms a token", "decode, ms a token", "peak RSS (MB)",
            "cached floats a token and layer"]  # fmt: skip
    return table(head, rows)


if __name__ == "__main__":
    main()
