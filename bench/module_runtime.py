"""What a call of a model costs, and what pipelining and batching gain.

A perceptron and a small convolutional network are made here and converted; each runs on one
thread.  `call` is a request from Python against the time inside the child process; `pipeline` has
pictures prepared, run and read, one after another or overlapped; `batching` has threads that each
ask for one row at a time, as the users of a service do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from common import Spread, finish, interleaved, note, paired_ratio, parser, provenance, table
from onnx import TensorProto, helper, numpy_helper

import mnnsmith
from mnnsmith.engine import Batcher, Module, pipeline

SIZE, LAYERS = 1024, 6
SIDE = 256
CALLS = 200
PICTURES = 60
USERS, REQUESTS = 16, 40
MAX_BATCH, MAX_DELAY_S = 16, 0.002


def main() -> None:
    options = parser(__doc__)
    chosen = options.parse_args()
    facts = provenance(
        chosen.repeats, users=USERS, requests=REQUESTS, max_batch=MAX_BATCH, max_delay_s=MAX_DELAY_S
    )
    chosen.work.mkdir(parents=True, exist_ok=True)
    perceptron = _bundle(chosen.work, "perceptron", _perceptron())
    pictures = _bundle(chosen.work, "pictures", _convolutions())
    with Module(perceptron, threads=1) as small, Module(pictures, threads=1) as large:
        calls = interleaved({"one row": lambda _: _call(small)}, chosen.repeats)
        stages = interleaved({
            "one after another": lambda _: _pictures(large, overlapped=False),
            "overlapped": lambda _: _pictures(large, overlapped=True),
        }, chosen.repeats)  # fmt: skip
        users = interleaved({
            "each by itself": lambda _: _serve(small.run),
            "batched": lambda _: _batched(small),
        }, chosen.repeats)  # fmt: skip
    results = {"call": calls, "pipeline": stages, "batching": users}
    finish("module_runtime", facts, results, _table(results), chosen.json)


def _bundle(work: Path, name: str, model: onnx.ModelProto) -> Path:
    note(f"converting {name}")
    source = work / f"{name}.onnx"
    onnx.save(model, source)
    return mnnsmith.convert_onnx(source, work / name, force=True).path


def _call(module: Module) -> dict[str, float]:
    """Microseconds of a request with one row, and of the run in the child process."""
    feeds = {"x": np.ones((1, SIZE), np.float32)}
    module.warm_up(feeds, 20)
    before = module.statistics
    began = time.perf_counter()
    for _ in range(CALLS):
        module.run(feeds)
    whole_s = time.perf_counter() - began
    inside_s = module.statistics.run_s - before.run_s
    return {"call_us": 1e6 * whole_s / CALLS, "inside_us": 1e6 * inside_s / CALLS}


def _pictures(module: Module, *, overlapped: bool) -> float:
    """Pictures a second, from 8-bit pictures to the place of the largest value of each map."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (2 * SIDE, 2 * SIDE, 3), dtype=np.uint8)
    mean, deviation = np.float32([123, 116, 103]), np.float32([58, 57, 57])

    def pre(index: int) -> dict[str, Any]:
        whole = np.roll(raw, index, axis=0).astype(np.float32)
        halved = whole.reshape(SIDE, 2, SIDE, 2, 3).mean(axis=(1, 3))
        return {"x": ((halved - mean) / deviation).transpose(2, 0, 1)[None]}

    def post(index: int, outputs: dict[str, Any]) -> np.ndarray:
        maps = np.repeat(np.repeat(outputs["y"][0], 4, axis=1), 4, axis=2)
        return np.argmax(maps.reshape(maps.shape[0], -1), axis=1)

    module.warm_up(pre(0), 3)
    began = time.perf_counter()
    if overlapped:
        found = list(pipeline(range(PICTURES), pre, module, post))
    else:
        found = [post(index, module.run(pre(index))) for index in range(PICTURES)]
    assert len(found) == PICTURES
    return PICTURES / (time.perf_counter() - began)


def _batched(module: Module) -> dict[str, float]:
    with Batcher(module, max_batch=MAX_BATCH, max_delay_s=MAX_DELAY_S) as batcher:
        found = _serve(batcher.run)
        done = batcher.statistics
    return {**found, "rows_a_batch": done.rows / done.batches}


def _serve(run: Callable[[dict[str, Any]], Any]) -> dict[str, float]:
    """Requests a second of all users together; milliseconds that one waits."""
    feeds = {"x": np.ones((1, SIZE), np.float32)}

    def user(_: int) -> list[float]:
        waits = []
        for _ in range(REQUESTS):
            began = time.perf_counter()
            run(feeds)
            waits.append(1e3 * (time.perf_counter() - began))
        return waits

    with ThreadPoolExecutor(USERS) as pool:
        began = time.perf_counter()
        waits = np.concatenate(list(pool.map(user, range(USERS))))
        seconds = time.perf_counter() - began
    return {
        "requests_per_s": USERS * REQUESTS / seconds,
        "median_ms": float(np.median(waits)),
        "p95_ms": float(np.percentile(waits, 95)),
    }


def _table(results: dict[str, dict[str, list[Any]]]) -> str:
    calls, stages, users = results["call"], results["pipeline"], results["batching"]
    one = calls["one row"]
    gain = paired_ratio(stages["overlapped"], stages["one after another"])
    rates = {name: [run["requests_per_s"] for run in runs] for name, runs in users.items()}
    served = paired_ratio(rates["batched"], rates["each by itself"])
    rows = [
        ["call, one row", "inside, µs", Spread.of(run["inside_us"] for run in one).text(".0f"), ""],
        ["", "whole, µs", Spread.of(run["call_us"] for run in one).text(".0f"), ""],
        *(
            [f"pictures, {name}", "a second", Spread.of(runs).text(), times]
            for (name, runs), times in zip(
                stages.items(), ("", f"{gain.text('.2f')} times"), strict=True
            )
        ),
    ]
    for name, runs in users.items():
        times = f"{served.text('.2f')} times" if name == "batched" else ""
        rows.append([f"{USERS} users, {name}", "a second", Spread.of(rates[name]).text(), times])
        for key in ("median_ms", "p95_ms"):
            label = f"wait, {key.removesuffix('_ms')}, ms"
            rows.append(["", label, Spread.of(run[key] for run in runs).text(), ""])
    return table(["what", "unit", "median (min to max)", "gain"], rows)


def _perceptron() -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    nodes, weights, last = [], [], "x"
    for index in range(LAYERS):
        matrix = rng.standard_normal((SIZE, SIZE), dtype=np.float32) / SIZE**0.5
        weights.append(numpy_helper.from_array(matrix, f"weight{index}"))
        out = "y" if index == LAYERS - 1 else f"relu{index}"
        nodes += [
            helper.make_node("MatMul", [last, f"weight{index}"], [f"product{index}"]),
            helper.make_node("Relu", [f"product{index}"], [out]),
        ]
        last = out
    return _model(nodes, weights, ["batch", SIZE], ["batch", SIZE])


def _convolutions() -> onnx.ModelProto:
    rng = np.random.default_rng(2)
    nodes, weights, last, channels = [], [], "x", 3
    for index, wide in enumerate((16, 32, 32)):
        kernel = rng.standard_normal((wide, channels, 3, 3), dtype=np.float32) / channels
        weights.append(numpy_helper.from_array(kernel, f"kernel{index}"))
        out = "y" if index == 2 else f"relu{index}"
        stride = 2 if index < 2 else 1
        nodes += [
            helper.make_node(
                "Conv", [last, f"kernel{index}"], [f"conv{index}"],
                pads=[1, 1, 1, 1], strides=[stride, stride],
            ),
            helper.make_node("Relu", [f"conv{index}"], [out]),
        ]  # fmt: skip
        last, channels = out, wide
    return _model(nodes, weights, ["batch", 3, SIDE, SIDE], ["batch", 32, SIDE // 4, SIDE // 4])


def _model(nodes: Any, weights: Any, shape: list[Any], result: list[Any]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "bench",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, result)],
        weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


if __name__ == "__main__":
    main()
