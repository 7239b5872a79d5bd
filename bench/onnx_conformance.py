"""Every node case of the `onnx` package through `mnnsmith convert`: right, or refused.

Writes bench/results/onnx_conformance.json and, with --write-docs, the table of docs/onnx-models.md.
With --check it fails when a case that was right is right no more, or when one is silently wrong.

    python bench/onnx_conformance.py [--workers N] [--only PATTERN] [--check] [--write-docs]
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import multiprocessing
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "onnx_conformance.json"
TIMEOUT_S = 60.0
# What the cases themselves allow is tighter for some; float32 programs differ in the last bits.
RTOL, ATOL = 1e-3, 1e-4


def cases() -> dict[str, Any]:
    """Cases by name, made in memory."""
    from onnx.backend.test.loader import load_model_tests

    with np.errstate(all="ignore"):
        return {case.name: case for case in load_model_tests(kind="node")}


def feeds_of(case: Any) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """Inputs by name and outputs in order, of each data set."""
    from onnx import TensorProto, numpy_helper

    def array(value: Any) -> Any:
        return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value

    names = [value.name for value in case.model.graph.input]
    feeds = [dict(zip(names, map(array, inputs), strict=False)) for inputs, _ in case.data_sets]
    return feeds, [list(map(array, outputs)) for _, outputs in case.data_sets]


def judge(case: Any, work: Path, worker: Any, quick: bool) -> tuple[str, str]:
    """("right" | "refused" | "wrong" | "crash", why)."""
    from mnnsmith.errors import MnnsmithError
    from mnnsmith.onnx_models.convert import convert_onnx

    out, path = work / "out", work / "model.onnx"
    shutil.rmtree(out, ignore_errors=True)
    path.write_bytes(case.model.SerializeToString())
    feeds, expected = feeds_of(case)
    try:
        told = convert_onnx(path, out, data=feeds, timeout_s=TIMEOUT_S, worker=worker)
        rules = ",".join(told.rewritten)
    except MnnsmithError as error:
        return "refused", f"{type(error).__name__}: {error.message.replace(f'{path}: ', '')}"[:300]
    except Exception:  # noqa: BLE001  A bug of ours is what is looked for.
        return "crash", traceback.format_exc()[-600:]
    try:
        return (None if quick else _run(out, told, feeds, expected)) or ("right", rules)
    except MnnsmithError as error:
        return "wrong", f"after conversion: {error.message}"[:300]


def _run(out: Path, told: Any, feeds: Any, expected: Any) -> tuple[str, str] | None:
    from mnnsmith.engine.module import Module
    from mnnsmith.onnx_models.attempt import as_engine_takes

    used = [i["name"] for i in told.inputs if i["used"]]
    outputs = [o["tensor"] for o in told.outputs]
    with Module(out, inputs=used, outputs=outputs, threads=1, precision="high") as module:
        for feed, wanted in zip(feeds, expected, strict=True):
            made = module.run({name: as_engine_takes(feed[name]) for name in used})
            for name, want in zip(outputs, wanted, strict=True):
                found = made[name]
                if found.shape != want.shape:
                    return "wrong", f"{name}: shape {found.shape} against {want.shape}"
                near = np.isclose(
                    found.astype(np.float64), want.astype(np.float64), RTOL, ATOL, equal_nan=True
                )
                if not near.all():
                    worst = np.abs(found.astype(np.float64) - want.astype(np.float64)).max()
                    return "wrong", f"{name}: off by {worst:.3g}"
    return None


def work_through(queue: Any, results: Any, quick: bool) -> None:
    from mnnsmith.onnx_models.tasks import Worker

    known = cases()
    with tempfile.TemporaryDirectory(prefix="conformance-") as name:
        work = Path(name)
        tasks = work / "tasks"
        tasks.mkdir()
        with Worker(tasks, timeout_s=TIMEOUT_S) as worker:
            while (case := queue.get()) is not None:
                results.put((case, *judge(known[case], work, worker, quick)))
                for old in tasks.iterdir():
                    shutil.rmtree(old)


def measure(
    names: list[str], workers: int, log: Path | None, quick: bool
) -> dict[str, tuple[str, str]]:
    context = multiprocessing.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    for name in [*names, *[None] * workers]:
        queue.put(name)
    processes = [
        context.Process(target=work_through, args=(queue, results, quick)) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    found = {}
    try:
        for count in range(1, len(names) + 1):
            name, verdict, why = results.get(timeout=20 * TIMEOUT_S)
            found[name] = (verdict, why)
            if log is not None:
                with log.open("a") as file:
                    file.write(f"{name}\t{verdict}\t{why!r}\n")
            if count % 100 == 0:
                print(count, dict(collections.Counter(v for v, _ in found.values())), flush=True)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return found


def regressions(found: dict[str, tuple[str, str]], before: dict[str, Any]) -> list[str]:
    """What a check fails for."""
    bad = [f"{n}: {v}: {why}" for n, (v, why) in sorted(found.items()) if v in ("wrong", "crash")]
    lost = [f"{n}: was right, now {found[n][0]}: {found[n][1]}" for n in before.get("right", ())
            if n in found and found[n][0] != "right"]  # fmt: skip
    return bad + lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="*")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--names", type=Path, help="a file of names, one a line")
    parser.add_argument(
        "--quick", action="store_true", help="trust the comparison of the conversion; write nothing"
    )
    options = parser.parse_args()
    names = sorted(fnmatch.filter(cases(), options.only))
    if options.names is not None:
        names = sorted(set(names) & set(options.names.read_text().split()))
    found = measure(names, options.workers, options.log, options.quick)
    before = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    print(dict(collections.Counter(v for v, _ in found.values())))
    failures = regressions(found, before)
    for line in failures:
        print(line)
    if options.check:
        return bool(failures)
    if not options.quick:
        write_results(found, before)
    if options.write_docs:
        from onnx_conformance_docs import write_docs

        write_docs(json.loads(RESULTS.read_text()))
    return 0


def write_results(found: dict[str, tuple[str, str]], before: dict[str, Any]) -> None:
    """The cases measured now, and what is known of the others."""
    import onnx

    from mnnsmith.onnx_runtime import onnx_runtime

    runtime = onnx_runtime()

    groups: dict[str, Any] = {"right": [], "refused": {}, "wrong": {}, "crash": {}}
    groups["right"] = [name for name in before.get("right", ()) if name not in found]
    for verdict in ("refused", "wrong", "crash"):
        known = before.get(verdict, {})
        groups[verdict] = {name: why for name, why in known.items() if name not in found}
    for name, (verdict, why) in sorted(found.items()):
        if verdict == "right":
            groups["right"].append(name)
        else:
            groups[verdict][name] = why
    groups["right"].sort()
    versions = {"onnx": onnx.__version__, "onnxruntime": runtime.__version__, "MNN": "3.6.1"}
    data = {"command": "python bench/onnx_conformance.py", "versions": versions, **groups}
    RESULTS.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
