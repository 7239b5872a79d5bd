"""Advice follows from figures, and is silent where nothing stands out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mnnsmith.engine.module_profile import ModuleProfile, OperatorProfile, Timing
from mnnsmith.onnx_models.hot_spots import advice


def step(name: str, kind: str, ms: float, gflop: float | None = None) -> OperatorProfile:
    return OperatorProfile(
        name, kind, (1, 8), None if gflop is None else gflop * 1e9, Timing((ms / 1e3,))
    )


def profile(*operators: OperatorProfile) -> ModuleProfile:
    return ModuleProfile(
        path=Path("model.mnn"), shapes={}, threads=2, precision="normal", memory="normal",
        plain=Timing((0.010,)), one_thread=Timing((0.019,)), operators=operators, memory_bytes=1,
        peak_rss_bytes=1, approximate_gelu=(),
    )  # fmt: skip


# 0.1 GFLOP in 5 ms is 20 GFLOP/s.
STEADY = (step("a", "Convolution", 5, 0.1), step("b", "Convolution", 4, 0.06))


def test_nothing_stands_out() -> None:
    assert advice(profile(*STEADY, step("c", "Raster", 1), step("d", "UnaryOp", 1))) == ()
    assert advice(dataclasses.replace(profile(*STEADY), one_thread=None)) == ()


def test_threads_that_gain_nothing() -> None:
    (line,) = advice(dataclasses.replace(profile(*STEADY), one_thread=Timing((0.0105,))))
    assert line.startswith("2 threads take 10 ms, one takes 10.5 ms")


def test_data_that_moves() -> None:
    moving = [step(f"move{index}", "Raster", 0.5 + index / 10) for index in range(4)]
    (line,) = advice(profile(*STEADY, *moving))
    assert line.startswith("22% of the time moves data")
    assert "move3, move2, move1 and others" in line


def test_functions_of_one_value() -> None:
    (line,) = advice(profile(*STEADY, step("gelu", "UnaryOp", 6)))
    assert line.startswith("40% of the time") and "gelu" in line


def test_work_that_is_too_small() -> None:
    small = [step(f"s{index}", "BinaryOp", 0.009) for index in range(10)]
    (line,) = advice(profile(step("a", "Convolution", 0.11, 0.001), *small))
    assert line.startswith("10 of 11 operators take less than 10 µs, 45% of the time")


def test_products_far_slower_than_others() -> None:
    (line,) = advice(profile(*STEADY, step("thin", "MatMul", 2, 0.004)))
    assert line.startswith("thin (MatMul, output 1x8) takes 18% at 2.0 GFLOP/s")
    assert "another reaches 20.0" in line
    # Slow, but of no weight.
    assert advice(profile(*STEADY, step("thin", "MatMul", 0.5, 0.001))) == ()


def test_gelu_by_tanh_and_models_without_times_by_operator() -> None:
    found = dataclasses.replace(profile(), approximate_gelu=("g",))
    gelu, whole = advice(found)
    assert gelu.startswith("GELU is computed by tanh: g.")
    assert "as a whole only" in whole
