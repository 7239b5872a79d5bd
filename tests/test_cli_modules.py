"""`profile` and `verify` for converted ONNX models, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner

from mnnsmith.api import convert_onnx
from mnnsmith.cli.main import app
from mnnsmith.cli.verify_module import one_shape_each
from mnnsmith.errors import UsageError
from tiny_onnx import dense

SIZE, LAYERS = 32, 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "dense.onnx"
    onnx.save(dense(SIZE, LAYERS), path)
    return path


@pytest.fixture(scope="module")
def bundle(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "dense"
    convert_onnx(source, folder)
    return folder


def run(*arguments: Any, code: int = 0) -> str:
    """All that the command writes."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.engine
def test_profile_shows_kinds_operators_and_advice(bundle: Path) -> None:
    text = run("profile", bundle, "--threads", 1, "--repeats", 3)
    assert f"on x 1x{SIZE}" in text
    assert "a run on 1 thread (3 runs" in text
    assert "Convolution" in text and "GFLOP/s" in text and "gelu0" in text
    data = json.loads(
        run("profile", bundle, "--threads", 1, "--repeats", 2, "--json", "--input-shape",
            f"x=5,{SIZE}")
    )  # fmt: skip
    assert data["shapes"] == {"x": [5, SIZE]}
    assert data["run"]["repeats"] == 2
    assert data["run_on_one_thread"] is None
    kinds = {one["kind"]: one for one in data["kinds"]}
    assert kinds["Convolution"]["count"] == LAYERS
    assert sum(one["share"] for one in data["kinds"]) == pytest.approx(1)
    assert sum(one["share"] for one in data["operators"]) == pytest.approx(1)
    assert any("less than 10 µs" in line for line in data["advice"])


@pytest.mark.engine
def test_profile_takes_data_and_refuses_what_does_not_fit(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "inputs.npz"
    np.savez(file, x=np.ones((7, SIZE), np.float32))
    data = json.loads(run("profile", bundle, "--repeats", 1, "--json", "--data", file))
    assert data["shapes"] == {"x": [7, SIZE]}
    for arguments, message in (
        (("--input-shape", "y=1,2"), "no input 'y'"),
        (("--input-shape", "x=1,2,3"), "has the shape (1, 32), found (1, 2, 3)"),
        (("--input-shape", "x"), "not of the form"),
        (("--text", "-"), "--text is not for the times of operators"),
        (("--experts",), "--experts needs a text"),
        (("--experts", "--text", "-", "--data", file), "--data is not for --experts"),
    ):
        assert message in run("profile", bundle, *arguments, code=2)
    manifest = {"format": 1, "recipe": {"name": "w8"}, "source": {}, "files": {}}
    (tmp_path / "mnnsmith.json").write_text(json.dumps(manifest))
    assert "holds a language model" in run("profile", tmp_path, code=2)


@pytest.mark.engine
def test_verify_names_the_tensor_that_differs(bundle: Path, source: Path, tmp_path: Path) -> None:
    text = run("verify", bundle, "--source", source, "--layers")
    assert text.endswith("passed\n")
    assert "ok    gelu1" in text and "holds gelu1" in text
    model = onnx.load(source)
    (bias,) = [one for one in model.graph.initializer if one.name == "bias1"]
    changed = numpy_helper.to_array(bias) + np.float32(0.25)
    bias.CopyFrom(numpy_helper.from_array(changed, bias.name))
    other = tmp_path / "other.onnx"
    onnx.save(model, other)
    result = tmp_path / "result.json"
    text = run("verify", bundle, "--source", other, "--json", result, code=9)
    assert "at tensor 'total1', which Add computes" in text
    data = json.loads(result.read_text())
    assert data["passed"] is False
    assert data["divergence"]["name"] == "total1"
    assert [row["status"] for row in data["rows"] if row["name"] == "gelu0"] == ["equal"]


def test_options_of_the_other_kind_are_refused(tmp_path: Path) -> None:
    text = run("verify", tmp_path, "--source", "model.onnx", "--bisect", code=2)
    assert "--bisect is not for an ONNX model" in text
    text = run("verify", tmp_path, "--source", "folder", "--layers", code=2)
    assert "--layers is not for a language model" in text


def test_shapes_of_one_trial() -> None:
    assert one_shape_each(["x=1,2", "y=3"]) == {"x": (1, 2), "y": (3,)}
    assert one_shape_each([]) == {}
    with pytest.raises(UsageError, match="one shape"):
        one_shape_each(["x=1", "x=2"])
