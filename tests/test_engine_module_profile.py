"""Times by operator: what is counted, what is named, and that the sum is the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from mnnsmith.engine import Module
from mnnsmith.engine.module_profile import Timing, profile
from mnnsmith.errors import UsageError
from tiny_onnx import dense, mixed, model_of, to_mnn

ROWS, SIZE, LAYERS = 32, 128, 4


def test_median_and_quartiles() -> None:
    timing = Timing((4.0, 1.0, 2.0, 3.0, 5.0))
    assert (timing.median_s, timing.quartiles_s) == (3.0, (2.0, 4.0))
    assert Timing((7.0,)).quartiles_s == (7.0, 7.0)


@pytest.mark.engine
def test_products_are_counted_and_the_sum_is_the_whole(tmp_path: Path) -> None:
    path = to_mnn(dense(SIZE, LAYERS), tmp_path)
    feeds = {"x": np.ones((ROWS, SIZE), np.float32)}
    found = profile(path, feeds, repeats=15, threads=1)
    assert found.shapes == {"x": (ROWS, SIZE)}
    assert found.one_thread is None
    assert len(found.plain.times_s) == 15
    kinds = {one.kind: one for one in found.kinds()}
    # A matrix product is a convolution of size 1 to the engine; GELU was recognized as one step.
    assert kinds["Convolution"].count == kinds["UnaryOp"].count == LAYERS
    assert kinds["Convolution"].flop == pytest.approx(LAYERS * 2 * ROWS * SIZE * SIZE, rel=1e-5)
    assert kinds["UnaryOp"].flop is None
    assert kinds["UnaryOp"].gflop_per_s is None
    assert 0.05 < (kinds["Convolution"].gflop_per_s or 0) < 5000
    assert sum(found.share(one.seconds) for one in found.kinds()) == pytest.approx(1)
    names = [one.name for one in found.operators if one.kind == "UnaryOp"]
    assert names == [f"gelu{index}" for index in range(LAYERS)]
    first, second = found.longest(2)
    assert first.timing.median_s >= second.timing.median_s
    assert first.timing.median_s == max(one.timing.median_s for one in found.operators)
    # Wide, since other work shares the processor.
    assert 0.2 < found.operators_s / found.plain.median_s < 5
    weights_bytes = 4 * LAYERS * SIZE * SIZE
    assert found.memory_bytes is not None
    assert weights_bytes < found.memory_bytes < 20 * weights_bytes
    assert found.memory_bytes < found.peak_rss_bytes
    assert found.approximate_gelu == ()


@pytest.mark.engine
def test_inputs_of_every_type_and_a_second_thread(tmp_path: Path) -> None:
    path = to_mnn(mixed(), tmp_path)
    feeds = {
        "image": np.ones((2, 3, 8, 9), np.float32),
        "ids": np.ones((2, 5), np.int64),
        "mask": np.ones(5, bool),
        "bytes": np.ones((2, 2), np.uint8),
        "scale": np.float32(3),
    }
    found = profile(path, feeds, repeats=2, warm_ups=0, threads=2)
    assert found.threads == 2
    assert found.one_thread is not None
    (conv,) = [one for one in found.operators if one.kind == "Convolution"]
    assert conv.shape == (2, 6, 8, 9)
    assert conv.flop == pytest.approx(2 * (2 * 8 * 9) * (3 * 3 * 3 * 6), rel=1e-5)
    with pytest.raises(UsageError, match="repeats"):
        profile(path, feeds, repeats=0)
    with pytest.raises(UsageError, match="inputs none were given"):
        profile(path, {})


@pytest.mark.engine
def test_a_model_with_a_branch_is_timed_as_a_whole(tmp_path: Path) -> None:
    """Sums that decide: the engine's interface for single operators cannot run it."""

    def branch(kind: str) -> onnx.GraphProto:
        value = helper.make_tensor_value_info(f"{kind}_out", TensorProto.FLOAT, None)
        return helper.make_graph(
            [helper.make_node(kind, ["x"], [f"{kind}_out"])], kind.lower(), [], [value]
        )

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node(
            "If", ["positive"], ["y"], then_branch=branch("Neg"), else_branch=branch("Abs")
        ),
    ]
    shape = (TensorProto.FLOAT, ["n", 3])
    graph = model_of(nodes, {"x": shape}, {"y": shape}, {"zero": np.zeros((), np.float32)})
    path = to_mnn(graph, tmp_path)
    feeds = {"x": np.ones((2, 3), np.float32)}
    with Module(path, threads=1) as module:
        np.testing.assert_array_equal(module.run(feeds)["y"], -feeds["x"])
        np.testing.assert_array_equal(module.run({"x": -2 * feeds["x"]})["y"], 2 * feeds["x"])
    found = profile(path, feeds, repeats=3, threads=1)
    assert (found.operators, found.kinds()) == ((), ())
    assert found.memory_bytes is None
    assert len(found.plain.times_s) == 3


@pytest.mark.engine
def test_small_signed_inputs_run_and_are_timed_as_a_whole(tmp_path: Path) -> None:
    shape = ["n", 4]
    model = model_of(
        [
            helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
            helper.make_node("Neg", ["wide"], ["negative"]),
            helper.make_node("Cast", ["negative"], ["y"], to=TensorProto.INT8),
        ],
        {"x": (TensorProto.INT8, shape)},
        {"y": (TensorProto.INT8, shape)},
    )
    path = to_mnn(model, tmp_path)
    feeds = {"x": np.array([[1, -2, 127, -127], [0, 5, 6, 7]])}
    with Module(path, threads=1) as module:
        found = module.run(feeds)["y"]
    assert found.dtype == np.int8
    np.testing.assert_array_equal(found, -feeds["x"])
    assert profile(path, feeds, repeats=1, threads=1).operators == ()


@pytest.mark.engine
def test_gelu_by_tanh_is_seen(tmp_path: Path) -> None:
    """The converter's own default, which ours overrides."""
    path = to_mnn(dense(16, 2), tmp_path, options=("--useGeluApproximation", "1"))
    found = profile(path, {"x": np.ones((1, 16), np.float32)}, repeats=1, threads=1)
    assert found.approximate_gelu == ("gelu0", "gelu1")
