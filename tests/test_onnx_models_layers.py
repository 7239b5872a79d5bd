"""The first tensor that differs from the original, found among those that merely moved."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from mnnsmith.engine.module_graph import OperatorInfo
from mnnsmith.errors import SourceError, UsageError
from mnnsmith.onnx_models.layers import TensorComparison, compare_layers, first_divergence
from mnnsmith.onnx_models.tasks import Worker
from tiny_onnx import dense, mixed, model_of, to_mnn

LAYERS = 5


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(tmp_path_factory.mktemp("worker")) as opened:
        yield opened


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_mnn(dense(16, LAYERS), tmp_path_factory.mktemp("dense"))


@pytest.mark.engine
def test_all_tensors_of_a_right_model_agree(worker: Worker, dense_model: Path) -> None:
    source = dense_model.with_suffix(".onnx")
    found = compare_layers(dense_model, source, worker=worker, input_shapes={"x": [3, 16]})
    assert found.divergence is None
    assert found.shapes == {"x": (3, 16)}
    assert found.program.startswith("ONNX Runtime")
    # Seven operators a layer and one at the end; the converter joins most of them.
    assert found.original_tensors == 7 * LAYERS + 1
    assert found.count("equal") + found.count("shifted") == len(found.rows) >= LAYERS
    names = {row.name for row in found.rows}
    assert {"y", *(f"gelu{index}" for index in range(LAYERS - 1))} <= names
    assert all(row.difference is not None and row.difference < 1e-5 for row in found.rows)


@pytest.mark.engine
@pytest.mark.parametrize("wrong", [0, 2, LAYERS - 1])
def test_a_wrong_weight_is_found_in_its_layer(
    worker: Worker, dense_model: Path, tmp_path: Path, wrong: int
) -> None:
    """The original with another bias in one layer: there the two part, and not before."""
    model = onnx.load(dense_model.with_suffix(".onnx"))
    (bias,) = [one for one in model.graph.initializer if one.name == f"bias{wrong}"]
    changed = numpy_helper.to_array(bias).copy()
    changed[5] += 0.5
    bias.CopyFrom(numpy_helper.from_array(changed, bias.name))
    source = tmp_path / "other.onnx"
    onnx.save(model, source)
    found = compare_layers(dense_model, source, worker=worker)
    assert found.divergence is not None
    assert found.divergence.name in (f"total{wrong}", f"gelu{wrong}")
    assert found.divergence.operator in ("Add", "Mul")
    assert 1e-2 < (found.divergence.difference or 0) < 1
    before = found.rows[: found.rows.index(found.divergence)]
    assert all(row.agrees for row in before)
    assert len({row.name for row in before if row.name.startswith("gelu")}) == wrong
    assert not any(row.agrees for row in found.rows[len(before) :])


@pytest.mark.engine
def test_a_defect_of_the_engine_is_named(worker: Worker, tmp_path: Path) -> None:
    """The engine's `Less` is wrong where both operands are negative."""
    shape = (TensorProto.FLOAT, ["n", 4])
    nodes = [
        helper.make_node("Neg", ["x"], ["negative"]),
        helper.make_node("Less", ["negative", "y"], ["less"]),
        helper.make_node("Cast", ["less"], ["chosen"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["chosen", "x"], ["kept"]),
        helper.make_node("Exp", ["kept"], ["z"]),
    ]
    path = to_mnn(model_of(nodes, {"x": shape, "y": shape}, {"z": shape}), tmp_path)
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.uniform(1, 2, (8, 4)).astype(np.float32),
        "y": rng.uniform(-2, -1, (8, 4)).astype(np.float32),
    }
    found = compare_layers(path, path.with_suffix(".onnx"), data=arrays, worker=worker)
    assert found.divergence is not None
    assert found.divergence.name in ("less", "chosen")
    (negative,) = [row for row in found.rows if row.name == "negative"]
    assert negative.status == "equal"


@pytest.mark.engine
def test_types_and_layouts_of_inner_tensors(worker: Worker, tmp_path: Path) -> None:
    path = to_mnn(mixed(), tmp_path)
    found = compare_layers(path, path.with_suffix(".onnx"), worker=worker)
    rows = {row.name: row for row in found.rows}
    # Six channels in blocks of four; truth values and wide integers as int32.
    assert rows["relu"].status == rows["inverse"].status == rows["doubled"].status == "equal"
    assert rows["relu"].shape[1] == 6
    assert found.divergence is None


@pytest.mark.engine
def test_a_source_that_does_not_belong(worker: Worker, dense_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.onnx"
    onnx.save(mixed(), other)
    with pytest.raises(UsageError, match="takes x, the original image, ids"):
        compare_layers(dense_model, other, worker=worker)
    with pytest.raises(SourceError, match="no such file"):
        compare_layers(dense_model, tmp_path / "absent.onnx")
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(dense_model.with_suffix(".onnx").read_bytes()[:-70])
    with pytest.raises(SourceError):
        compare_layers(dense_model, damaged, worker=worker)


def row(name: str, status: str) -> TensorComparison:
    return TensorComparison(name, "Op", status, name, None, (2,))


def chain(*names: str) -> list[OperatorInfo]:
    return [OperatorInfo(end, 0, (start,), (end,)) for start, end in pairwise(names)]


def test_what_is_right_again_later_was_no_divergence() -> None:
    operators = chain("in", "a", "b", "c", "d")
    rows = [row("a", "differs"), row("b", "equal"), row("c", "differs"), row("d", "differs")]
    assert first_divergence(rows, operators, {"a", "b", "c", "d"}) is rows[2]
    # Equal integers prove nothing about what they came from.
    assert first_divergence(rows, operators, {"a", "c", "d"}) is rows[0]
    assert first_divergence(rows[:2], operators, {"b"}) is None


def test_another_branch_that_agrees_excuses_nothing() -> None:
    operators = [*chain("in", "a", "b"), *chain("in", "c")]
    rows = [row("a", "differs"), row("b", "unmatched"), row("c", "equal")]
    assert first_divergence(rows, operators, {"a", "b", "c"}) is rows[0]
