"""The converter child: right results, and our error for everything that goes wrong in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mnnsmith import files
from mnnsmith.engine import converter, graph_json_to_mnn
from mnnsmith.engine.converter import mnn_to_graph_json
from mnnsmith.errors import BundleError, ConversionError, MissingResourceError

pytestmark = pytest.mark.engine


def square_graph(**changes: Any) -> str:
    operator = {"type": "UnaryOp", "name": "y", "inputIndexes": [0], "outputIndexes": [1],
                "main_type": "UnaryOp", "main": {"opType": "SQUARE", "T": "DT_FLOAT"}}  # fmt: skip
    source = {"type": "Input", "name": "x", "outputIndexes": [0], "main_type": "Input",
              "main": {"dims": [-1, 4], "dtype": "DT_FLOAT", "dformat": "NCHW"}}  # fmt: skip
    net = {"bizCode": "MNN", "oplists": [source, operator | changes], "outputName": ["y"],
           "tensorName": ["x", "y"], "tensorNumber": 2, "sourceType": "ONNX"}  # fmt: skip
    return json.dumps(net)


def write(folder: Path, text: str) -> Path:
    path = folder / "graph.json"
    path.write_text(text)
    return path


def test_any_path_gives_the_same_bytes_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain.mnn"
    graph_json_to_mnn(write(tmp_path, square_graph()), plain)
    odd = tmp_path / "mit Leerzeichen und Ümläuten 模型"
    odd.mkdir()
    graph_json_to_mnn(write(odd, square_graph()), odd / "ausgabe ß.mnn")
    assert (odd / "ausgabe ß.mnn").read_bytes() == plain.read_bytes()
    assert b"x" in plain.read_bytes()
    assert sorted(p.name for p in odd.iterdir()) == ["ausgabe ß.mnn", "graph.json"]
    assert capfd.readouterr() == ("", "")


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graph_json_to_mnn(write(Path(), square_graph()), Path("relative.mnn"))
    assert (tmp_path / "relative.mnn").stat().st_size > 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{no json", "wrote nothing"),
        (square_graph(main_type="NoSuchParameter"), "crashed with SIGSEGV"),
    ],
)
def test_bad_graphs_are_errors_and_keep_the_old_file(
    tmp_path: Path, text: str, expected: str
) -> None:
    output = tmp_path / "old.mnn"
    output.write_bytes(b"old")
    with pytest.raises(ConversionError, match=expected):
        graph_json_to_mnn(write(tmp_path, text), output)
    assert output.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph.json", "old.mnn"]


def test_missing_input(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"nowhere\.json"):
        graph_json_to_mnn(tmp_path / "nowhere.json", tmp_path / "out.mnn")


def test_time_limit(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="within"):
        graph_json_to_mnn(write(tmp_path, square_graph()), tmp_path / "o.mnn", timeout_s=0.001)
    assert not (tmp_path / "o.mnn").exists()


def test_memory_limit(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="converter"):
        graph_json_to_mnn(
            write(tmp_path, square_graph()), tmp_path / "o.mnn", memory_limit_bytes=16 << 20
        )


def test_a_graph_reads_back(tmp_path: Path) -> None:
    graph_json_to_mnn(write(tmp_path, square_graph()), tmp_path / "o.mnn")
    operators = mnn_to_graph_json(tmp_path / "o.mnn")["oplists"]
    assert [operator["name"] for operator in operators] == ["x", "y"]
    (tmp_path / "o.mnn").write_bytes(b"no graph")
    with pytest.raises(BundleError, match=r"o\.mnn"):
        mnn_to_graph_json(tmp_path / "o.mnn")


def test_what_is_read_back_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the child, by the system; and where that has no such limit, before it is parsed."""
    graph_json_to_mnn(write(tmp_path, square_graph()), tmp_path / "o.mnn")
    with pytest.raises(BundleError, match="more than 200 bytes of JSON"):
        mnn_to_graph_json(tmp_path / "o.mnn", output_limit_bytes=200)
    monkeypatch.setattr(files, "_MAX_CONTAINERS", 5)
    with pytest.raises(BundleError, match=r"o\.mnn: holds more lists"):
        mnn_to_graph_json(tmp_path / "o.mnn")

    def unlimited(work: Path, *_: object) -> int:
        (work / "graph.json").write_text("[" * 300)
        return 0

    monkeypatch.setattr(converter, "_run_child", unlimited)
    with pytest.raises(BundleError, match="more than 200 bytes of JSON"):
        mnn_to_graph_json(tmp_path / "o.mnn", output_limit_bytes=200)


def test_the_converted_graph_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converter, "GRAPH_LIMIT_BYTES", 100)
    with pytest.raises(ConversionError, match="SIGXFSZ"):
        graph_json_to_mnn(write(tmp_path, square_graph()), tmp_path / "o.mnn")
    assert not (tmp_path / "o.mnn").exists()


def test_output_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(MissingResourceError, match="cannot write"):
        graph_json_to_mnn(write(tmp_path, square_graph()), tmp_path / "none" / "o.mnn")


def test_the_working_directory_stays(tmp_path: Path) -> None:
    before = os.getcwd()
    graph_json_to_mnn(write(tmp_path, square_graph()), tmp_path / "o.mnn")
    assert os.getcwd() == before
