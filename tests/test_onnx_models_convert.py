"""ONNX models that failed for people: right, or refused by name, and never a crash of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from mnnsmith.bundle.bundle import open_bundle
from mnnsmith.cli.main import main
from mnnsmith.engine.module import Module
from mnnsmith.errors import (
    BundleError,
    MnnsmithError,
    RecipeError,
    SourceError,
    UnsupportedError,
    UsageError,
    VerificationError,
)
from mnnsmith.onnx_models.convert import ConvertedModule, convert_onnx
from mnnsmith.onnx_models.tasks import Worker
from test_onnx_models_rules import node, save, signed

pytestmark = pytest.mark.engine
F = T.FLOAT


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(tmp_path_factory.mktemp("worker"), timeout_s=60) as one:
        yield one


@pytest.fixture
def convert(worker: Worker, tmp_path: Path) -> Any:
    def run(path: Path, **options: Any) -> ConvertedModule:
        return convert_onnx(path, tmp_path / "out", worker=worker, **options)

    return run


def test_wide_integer_constant_is_refused_by_name(tmp_path: Path, convert: Any) -> None:
    x = {"x": np.array([1, 2])}
    path = save(tmp_path, [node("Add", "x k", "y")], x, {"y": T.INT64}, {"k": np.int64(3e9)})
    with pytest.raises(UnsupportedError, match="beyond 32 bits"):
        convert(path)


@pytest.mark.parametrize("op", ["ScatterND", "ScatterElements"])
def test_scatter_with_reduction_is_refused_by_name(op: str, tmp_path: Path, convert: Any) -> None:
    feeds = {"x": signed(4, 2), "u": signed(2, 2)}
    indices = np.array([[0], [1]]) if op == "ScatterND" else np.array([[0, 1], [1, 1]])
    nodes = [node(op, "x i u", "y", reduction="add")]
    path = save(tmp_path, nodes, feeds, {"y": F}, {"i": indices})
    with pytest.raises(UnsupportedError, match="reduction"):
        convert(path)


Q = {name: signed(1, 2, 4, 8) for name in "qkv"}
# Name: nodes, inputs, outputs, constants, operator set.
RIGHT: dict[str, tuple[Any, ...]] = {
    "rms normalization": (
        [node("RMSNormalization", "x s", "y")], {"x": signed(3, 8)}, {"y": F}, {"s": signed(8)}, 23,
    ),
    "attention": ([node("Attention", "q k v", "y")], Q, {"y": F}, {}, 23),
    "int4 by blocks": (
        [node("DequantizeLinear", "w s", "f", axis=0, block_size=4), node("MatMul", "x f", "y")],
        {"x": signed(2, 8)}, {"y": F},
        {"w": np.arange(24).reshape(8, 3).astype(ml_dtypes.int4), "s": np.abs(signed(2, 3))}, 21,
    ),
    "grouped transposed convolution": (
        [node("ConvTranspose", "x w", "c", group=2, strides=[2, 2]),
         node("BatchNormalization", "c s b m v", "y")],
        {"x": signed(1, 4, 5, 5)}, {"y": F},
        {"w": signed(4, 3, 3, 3), "s": signed(6), "b": signed(6), "m": signed(6),
         "v": np.abs(signed(6))}, 18,
    ),
    "vector product": (
        [node("MatMul", "x w", "y")], {"x": signed(5)}, {"y": F}, {"w": signed(5)}, 18,
    ),
    "clip without minimum": (
        [node("Clip", "x - h", "y")], {"x": signed(9)}, {"y": F}, {"h": np.float32(1)}, 18,
    ),
    "input passed on": ([node("Neg", "x", "y")], {"x": signed(3)}, {"x": F, "y": F}, {}, 18),
    "layer normalization": (
        [node("LayerNormalization", "x s b", "y")], {"x": signed(3, 8)}, {"y": F},
        {"s": signed(8), "b": signed(8)}, 17,
    ),
    "reversed running sum": (
        [node("CumSum", "x a", "y", reverse=1)], {"x": signed(3, 5)}, {"y": F},
        {"a": np.int64(1)}, 18,
    ),
    "negative gather": (
        [node("Gather", "x i", "y")], {"x": signed(5, 2)}, {"y": F}, {"i": np.array([-1, 0])}, 18,
    ),
    "largest few": (
        [node("TopK", "x k", "y i")], {"x": signed(7), "k": np.array([3])},
        {"y": F, "i": T.INT64}, {}, 18,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_right(name: str, tmp_path: Path, convert: Any) -> None:
    nodes, feeds, outputs, constants, opset = RIGHT[name]
    path = save(tmp_path, nodes, feeds, outputs, constants, opset)
    assert convert(path, data=[feeds]).differences[0] < 1e-4


def dense(tmp_path: Path, external: str | None = None) -> Path:
    """y = x w, x of any number of rows; the weight may lie in a file of its own."""
    weight = numpy_helper.from_array(signed(6, 4), "w")
    graph = helper.make_graph(
        [node("MatMul", "x w", "y")], "g",
        [helper.make_tensor_value_info("x", F, ["n", 6])],
        [helper.make_tensor_value_info("y", F, ["n", 4])], [weight],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    if external is not None:
        (folder / "w.bin").write_bytes(weight.raw_data)
        (tmp_path / "w.bin").write_bytes(weight.raw_data)
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = T.EXTERNAL
        tensor.external_data.add(key="location", value=external)
    path.write_bytes(model.SerializeToString())
    return path


def test_dynamic_rows_run_at_three_sizes_and_beyond(tmp_path: Path, convert: Any) -> None:
    told = convert(dense(tmp_path))
    assert [trial["x"] for trial in told.trials] == [[1, 6], [2, 6], [3, 6]]
    with Module(told.path, threads=1) as module:
        assert module.run({"x": signed(7, 6)})["y"].shape == (7, 4)


def test_external_data_beside_the_model_are_read(tmp_path: Path, convert: Any) -> None:
    assert max(convert(dense(tmp_path, "w.bin")).differences) < 1e-5


@pytest.mark.parametrize("location", ["../w.bin", "/etc/passwd", "a/../../w.bin", ""])
def test_external_data_elsewhere_are_refused(location: str, tmp_path: Path, convert: Any) -> None:
    with pytest.raises(SourceError, match="outside"):
        convert(dense(tmp_path, location))


def test_external_data_behind_a_link_are_refused(tmp_path: Path, convert: Any) -> None:
    path = dense(tmp_path, "w.bin")
    (path.parent / "w.bin").unlink()
    (path.parent / "w.bin").symlink_to(tmp_path / "w.bin")
    with pytest.raises(SourceError, match="outside"):
        convert(path)


def test_short_external_data_are_refused(tmp_path: Path, convert: Any) -> None:
    path = dense(tmp_path, "w.bin")
    (path.parent / "w.bin").write_bytes(b"1234")
    with pytest.raises(SourceError, match="96 bytes"):
        convert(path)


def test_more_weights_than_the_converter_takes_are_refused(tmp_path: Path, convert: Any) -> None:
    path = dense(tmp_path, "w.bin")
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].dims[:] = [6, 100_000_000]
    path.write_bytes(model.SerializeToString())
    with open(path.parent / "w.bin", "r+b") as file:
        file.truncate(2_400_000_000)
    with pytest.raises(UnsupportedError, match="2 GB"):
        convert(path)


def branch(value: float, rows: int) -> onnx.GraphProto:
    constant = numpy_helper.from_array(np.full((rows, 2), value, np.float32), f"c{rows}")
    return helper.make_graph(
        [helper.make_node("Identity", [f"c{rows}"], [f"b{rows}"])], f"g{rows}", [],
        [helper.make_tensor_value_info(f"b{rows}", F, [rows, 2])], [constant],
    )  # fmt: skip


def test_branches_of_unlike_shapes(tmp_path: Path, convert: Any) -> None:
    both = helper.make_node("If", ["x"], ["y"], then_branch=branch(1, 2), else_branch=branch(2, 3))
    feeds = [{"x": np.array(True)}, {"x": np.array(False)}]
    path = save(tmp_path, [both], feeds[0], {"y": F})
    assert convert(path, data=feeds).differences == (0.0, 0.0)


def test_unknown_operator_is_named_with_its_node_and_shapes(tmp_path: Path, convert: Any) -> None:
    nodes = [helper.make_node("BitwiseAnd", ["x", "z"], ["y"], name="mask")]
    feeds = {"x": np.arange(6, dtype=np.int32), "z": np.arange(6, dtype=np.int32)}
    path = save(tmp_path, nodes, feeds, {"y": T.INT32})
    with pytest.raises(UnsupportedError, match="BitwiseAnd \\(node 'mask' of 6, 6\\)"):
        convert(path)


def test_truncated_and_fuzzed_files_give_our_errors(tmp_path: Path, convert: Any) -> None:
    data = dense(tmp_path).read_bytes()
    path = tmp_path / "damaged.onnx"
    generator = np.random.default_rng(1)
    damaged = [data[:size] for size in range(0, len(data), 23)]
    for _ in range(40):
        fuzzed = bytearray(data)
        for place in generator.integers(0, len(data), 3):
            fuzzed[place] = generator.integers(0, 256)
        damaged.append(bytes(fuzzed))
    refused = 0
    for one in damaged:
        path.write_bytes(one)
        try:
            convert(path, force=True)
        except MnnsmithError:
            refused += 1
    # A changed weight, or a changed name, is another whole model.
    assert refused > len(damaged) // 2


def test_a_model_that_differs_is_not_written(tmp_path: Path, convert: Any) -> None:
    path = dense(tmp_path)
    with pytest.raises(VerificationError, match="differs"):
        convert(path, recipe="w2", tolerance=1e-6)
    assert not (tmp_path / "out").exists()


def test_options_are_checked_before_work(tmp_path: Path, convert: Any) -> None:
    path = dense(tmp_path)
    with pytest.raises(UsageError, match="no input 'z'"):
        convert(path, input_shapes=[{"z": (1, 6)}])
    with pytest.raises(UsageError, match="2 axes"):
        convert(path, input_shapes=[{"x": (1, 6, 1)}])
    with pytest.raises(RecipeError):
        convert(path, recipe="w99")
    with pytest.raises(UnsupportedError, match="calibration"):
        convert(path, recipe="int8")
    with pytest.raises(UsageError, match="tolerance"):
        convert(path, tolerance=2)
    with pytest.raises(UsageError, match="takes x"):
        convert(path, data=[{"q": signed(1, 6)}])


def test_half_and_eight_bits_are_smaller_and_agree(tmp_path: Path, convert: Any) -> None:
    path = save(tmp_path, [node("MatMul", "x w", "y")], {"x": signed(4, 256)}, {"y": F},
                {"w": signed(256, 256)})  # fmt: skip
    sizes = [
        convert(path, recipe=recipe, force=True).size_bytes for recipe in ("fp32", "fp16", "w8")
    ]
    assert sizes[0] > 1.8 * sizes[1] > 1.8 * 1.5 * sizes[2]


def test_command_line_and_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = dense(tmp_path), tmp_path / "out"

    def status(*options: str) -> Any:
        monkeypatch.setattr(
            "sys.argv", ["mnnsmith", "convert", str(path), "-o", str(out), *options]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    assert not status("--json", "--input-shape", "x=5,6")
    told = json.loads(capsys.readouterr().out)
    assert told["trials"] == [{"x": [5, 6]}] and told["reference"].startswith("ONNX Runtime")
    manifest = json.loads((out / "mnnsmith.json").read_text())
    assert manifest["kind"] == "module" and manifest["verification"]["verified"] is True
    with pytest.raises(BundleError, match="no language model"):
        open_bundle(out)
    assert status("--max-context", "9") == 2
