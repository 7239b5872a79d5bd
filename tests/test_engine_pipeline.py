"""Stages at work at the same time, and requests that run together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from mnnsmith.engine.batcher import Batcher
from mnnsmith.engine.module import Module
from mnnsmith.engine.pipeline import pipeline
from mnnsmith.errors import EngineError, UsageError
from tiny_onnx import model_of, to_mnn

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def row_sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x [n, k] * factor: y = x * factor [n, k] and total [n]."""
    nodes = [
        helper.make_node("Mul", ["x", "factor"], ["y"]),
        helper.make_node("ReduceSum", ["y", "axes"], ["total"], keepdims=0),
    ]
    shape = ["n", "k"]
    model = model_of(
        nodes,
        {"x": (TensorProto.FLOAT, shape), "factor": (TensorProto.FLOAT, [1])},
        {"y": (TensorProto.FLOAT, shape), "total": (TensorProto.FLOAT, ["n"])},
        {"axes": np.array([1])},
    )
    return to_mnn(model, tmp_path_factory.mktemp("sums"))


@pytest.fixture
def module(row_sums: Path) -> Iterator[Module]:
    with Module(row_sums, threads=1) as opened:
        yield opened


FACTOR = np.array([2.0], np.float32)


def numbers(value: float, rows: int = 1, columns: int = 3) -> dict[str, Any]:
    return {"x": np.full((rows, columns), value, np.float32), "factor": FACTOR}


def test_the_pipeline_keeps_the_order_and_pairs_items_with_outputs(module: Module) -> None:
    def pre(item: int) -> dict[str, Any]:
        time.sleep(0.002 * (item % 3))
        return numbers(item, rows=item % 4 + 1)

    found = list(
        pipeline(range(40), pre, module, lambda item, out: (item, out["total"]), pre_threads=3)
    )
    assert [item for item, _ in found] == list(range(40))
    for item, total in found:
        np.testing.assert_array_equal(total, np.full(item % 4 + 1, 6.0 * item))
    assert list(pipeline([], pre, module, lambda item, out: item)) == []


def test_the_stages_overlap(module: Module) -> None:
    """Two stages of 20 ms each take the time of one."""

    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return numbers(1)

    began = time.monotonic()
    assert len(list(pipeline(range(20), slow, module, slow))) == 20
    assert time.monotonic() - began < 0.75 * 20 * 0.04


def test_the_pipeline_does_not_run_ahead_of_a_slow_reader(module: Module) -> None:
    begun: list[int] = []

    def pre(item: int) -> dict[str, Any]:
        begun.append(item)
        return numbers(item)

    results = pipeline(range(100), pre, module, lambda item, out: item, ahead=3)
    assert next(results) == 0
    time.sleep(0.2)
    assert len(begun) <= 4
    results.close()  # type: ignore[attr-defined]
    assert len(begun) <= 4
    assert module.run(numbers(1))["total"] == 6


def test_an_error_comes_in_its_place(module: Module) -> None:
    def pre(item: int) -> dict[str, Any]:
        if item == 3:
            raise KeyError("third")
        return numbers(item) if item != 5 else {}

    results = pipeline(range(9), pre, module, lambda item, out: item)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="third"):
        next(results)
    results = pipeline(range(4, 9), pre, module, lambda item, out: item)
    assert next(results) == 4
    with pytest.raises(UsageError, match="inputs none were given"):
        next(results)
    with pytest.raises(UsageError, match="ahead"):
        next(pipeline([1], pre, module, lambda item, out: item, ahead=0))


def test_a_batch_gives_each_request_its_own_rows(module: Module) -> None:
    with Batcher(module, max_batch=8, max_delay_s=0.5, shared=("factor",)) as batcher:
        futures = [batcher.submit(numbers(value, rows=value % 3 + 1)) for value in range(4)]
        # 1 + 2 + 3 + 1 rows: not full, so they leave when the time is up, together.
        for value, future in enumerate(futures):
            outputs = future.result(timeout=10)
            np.testing.assert_array_equal(outputs["total"], np.full(value % 3 + 1, 6.0 * value))
            assert outputs["y"].shape == (value % 3 + 1, 3)
        assert module.statistics.runs == 1
        done = batcher.statistics
        assert (done.requests, done.rows, done.batches) == (4, 7, 1)


def test_a_full_batch_does_not_wait(module: Module) -> None:
    with Batcher(module, max_batch=4, max_delay_s=30, shared=("factor",)) as batcher:
        began = time.monotonic()
        futures = [batcher.submit(numbers(value)) for value in range(8)]
        assert [float(one.result(timeout=20)["total"][0]) for one in futures] == [
            6.0 * value for value in range(8)
        ]
        assert time.monotonic() - began < 10
        assert module.statistics.runs == 2
        # Larger than a batch: alone, and at once.
        assert batcher.run(numbers(1, rows=9))["total"].shape == (9,)
        # What is left when it closes is done without waiting.
        last = batcher.submit(numbers(7))
    assert last.result(timeout=0)["total"] == 42
    assert time.monotonic() - began < 20
    with pytest.raises(UsageError, match="closed"):
        batcher.submit(numbers(1))


def test_unequal_shapes_and_shared_inputs_never_mix(module: Module) -> None:
    with Batcher(module, max_batch=64, max_delay_s=0.2, shared=("factor",)) as batcher:
        other = {**numbers(1), "factor": np.array([3.0], np.float32)}
        requests = [numbers(1), numbers(2, columns=5), other, numbers(3), numbers(4, columns=5)]
        futures = [batcher.submit(one) for one in requests]
        totals = [float(one.result(timeout=10)["total"][0]) for one in futures]
        assert totals == [6, 20, 9, 18, 40]
        assert batcher.statistics.batches == module.statistics.runs == 3


def test_many_threads_get_their_own_answers(module: Module) -> None:
    with (
        Batcher(module, max_batch=8, max_delay_s=0.01, shared=("factor",)) as batcher,
        ThreadPoolExecutor(12) as pool,
    ):
        results = pool.map(
            lambda value: batcher.run(numbers(value, columns=value % 2 + 1))["total"][0],
            range(150),
        )
        assert list(results) == [2.0 * value * (value % 2 + 1) for value in range(150)]
        assert batcher.statistics.requests == 150
        assert batcher.statistics.batches < 120


def test_a_wrong_request_harms_no_other(module: Module) -> None:
    with Batcher(module, max_batch=3, max_delay_s=0.2, shared=("factor",)) as batcher:
        good = batcher.submit(numbers(1))
        for wrong in (
            {"x": np.zeros((1, 3), int), "factor": FACTOR},
            {"x": np.zeros((0, 3), np.float32), "factor": FACTOR},
            {"x": np.zeros(3, np.float32), "factor": FACTOR},
        ):
            with pytest.raises(UsageError):
                batcher.submit(wrong)
        dropped = batcher.submit(numbers(5))
        assert dropped.cancel()
        assert good.result(timeout=10)["total"] == 6
        assert batcher.statistics.requests == 1
    for options in ({"max_batch": 0}, {"max_delay_s": -1}, {"shared": ("z",)}):
        with pytest.raises(UsageError):
            Batcher(module, **options)  # type: ignore[arg-type]
    with Batcher(module) as batcher, pytest.raises(UsageError, match=r"x 4, factor 1.*\n.*shared"):
        batcher.submit(numbers(1, rows=4))


def test_a_failure_reaches_everyone_who_waits(module: Module) -> None:
    with Batcher(module, max_batch=2, max_delay_s=30, shared=("factor",)) as batcher:
        first = batcher.submit(numbers(1))
        module.close()
        second = batcher.submit(numbers(2))
        for future in (first, second):
            with pytest.raises(EngineError, match="closed"):
                future.result(timeout=10)
    assert all(one.name != "mnnsmith-batcher" for one in threading.enumerate())


def test_a_model_that_joins_rows_is_refused(tmp_path: Path) -> None:
    model = model_of(
        [helper.make_node("ReduceSum", ["x", "axes"], ["sum"], keepdims=1)],
        {"x": (TensorProto.FLOAT, ["n", 3])},
        {"sum": (TensorProto.FLOAT, [1, 3])},
        {"axes": np.array([0])},
    )
    with (
        Module(to_mnn(model, tmp_path), threads=1) as summing,
        Batcher(summing, max_batch=2, max_delay_s=30) as batcher,
    ):
        futures = [batcher.submit({"x": np.ones((1, 3), np.float32)}) for _ in range(2)]
        for future in futures:
            with pytest.raises(UsageError, match=r"output sum has the shape \(1, 3\) for 2 rows"):
                future.result(timeout=10)
