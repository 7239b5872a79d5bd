"""Exporting as people do it: files, options, errors; the arithmetic is in test_onnx_exact."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gguf_samples import write_llama
from mnnsmith.api import Engine, convert, export_onnx, prepare
from mnnsmith.conversion import stream
from mnnsmith.errors import (
    ConversionError,
    MissingResourceError,
    SourceError,
    UnsupportedError,
    UsageError,
)
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.weights import HeadRows, MatrixSlot, Role
from mnnsmith.mnn import graph_json
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.onnx import decoder, export, vision, weights
from mnnsmith.onnx.draft import FLOAT, FLOAT16, Weight
from mnnsmith.sources.checkpoint import Checkpoint, TokenizerFiles
from mnnsmith.verify.references.onnx_reference import open_onnx
from onnx_runs import OnnxModel
from tiny_checkpoint import (
    logits,
    make_config,
    shapes,
    write_checkpoint,
    write_raw_safetensors,
)
from tiny_mixture import write_mixture

IDS = list(range(20, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "größe model"
    write_checkpoint(path, num_hidden_layers=2)
    return path


def test_an_export_equals_the_model_in_numpy(folder: Path, tmp_path: Path) -> None:
    import onnx

    seen: list[tuple[str, int, int]] = []
    exported = export_onnx(
        folder, tmp_path / "model.onnx", progress=lambda *step: seen.append(step)
    )
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]
    assert seen[-1][0] == "weights" and seen[-1][1] == seen[-1][2] <= exported.size_bytes
    config = make_config(num_hidden_layers=2)
    tensors = write_checkpoint(tmp_path / "again", num_hidden_layers=2)
    expected = logits(config, tensors, IDS)
    found = OnnxModel(exported.path).start([IDS])[0]
    assert np.abs(found - expected).max() < 1e-4 * expected.std()
    model = onnx.load(str(exported.path), load_external_data=False)
    assert model.producer_name == "mnnsmith"
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert facts["model_type"] == "llama" and facts["source"] == folder.name
    assert [i.name for i in model.graph.input] == [
        "input_ids", "attention_mask", "position_ids",
        *(f"past_key_values.{i}.{part}" for i in range(2) for part in ("key", "value")),
    ]  # fmt: skip
    assert {domain.domain for domain in model.opset_import} == {""}


def test_equal_inputs_give_equal_bytes(folder: Path, tmp_path: Path) -> None:
    a, b = (export_onnx(folder, tmp_path / part / "model.onnx") for part in "ab")
    assert a.path.read_bytes() == b.path.read_bytes()
    assert a.data.read_bytes() == b.data.read_bytes()


def test_a_gguf_file_is_dequantized(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf")
    exported = export_onnx(tmp_path / "model.gguf", tmp_path / "model.onnx")
    ready = prepare(tmp_path / "model.gguf")
    found = OnnxModel(exported.path).start([IDS])[0]
    with open_onnx(ready.checkpoint, ready.model, threads=1) as reference:
        expected = reference.logits(reference.run(np.array([IDS])).hidden[0])
    assert found.std() > 0
    np.testing.assert_allclose(found, expected, atol=1e-4 * expected.std())


def test_every_operator_of_a_bundle_can_be_written() -> None:
    # Only canvases repeat a part, and they are not exported: vision is, tile by tile.
    assert set(graph_json._EMIT) - {"repeat"} <= {*decoder._OPERATORS, *vision.OPERATORS}


# --- options and damaged inputs ------------------------------------------------------------------


def refused(folder: Path, output: Path, **options: object) -> str:
    with pytest.raises(UsageError) as caught:
        export_onnx(folder, output, **options)
    assert not list(output.parent.glob("*"))
    return caught.value.message


def test_options_out_of_their_range(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "model.onnx"
    assert "13 to 23" in refused(folder, output, opset=12)
    assert "13 to 23" in refused(folder, output, opset=99)
    assert "fp32, fp16, fp16-weights" in refused(folder, output, dtype="int8")
    assert "expanded, latent" in refused(folder, output, mla="flat")
    assert "1 to 128" in refused(folder, output, max_context=129)


def test_what_leaves_the_range_of_fp16(folder: Path, tmp_path: Path) -> None:
    """A family whose activations do, and a weight that does."""
    ready = prepare(folder, recipe="fp16").model
    wide = LanguageModel(
        Graph(), ready.embedding, ready.head, 64, 2, ready.attention, 128, fits_fp16=False
    )
    with pytest.raises(UsageError, match="range of fp16"):
        decoder.draft_decoder(wide, dtype="fp16")
    tensors = write_checkpoint(tmp_path / "model")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = 1e5
    write_checkpoint(tmp_path / "model", tensors=tensors, dtype="F32")
    output = tmp_path / "out" / "model.onnx"
    export_onnx(tmp_path / "model", output)
    before = output.read_bytes()
    with pytest.raises(ConversionError, match=r"up_proj.*100000.*fp16"):
        export_onnx(tmp_path / "model", output, dtype="fp16", force=True)
    assert output.read_bytes() == before and len(os.listdir(output.parent)) == 2


def test_damaged_and_unknown_checkpoints(tmp_path: Path) -> None:
    output = tmp_path / "out" / "model.onnx"
    tensors = write_checkpoint(tmp_path / "nan")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = np.nan
    write_checkpoint(tmp_path / "nan", tensors=tensors)
    with pytest.raises(ConversionError, match="not finite"):
        export_onnx(tmp_path / "nan", output)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    write_checkpoint(tmp_path / "less", tensors=tensors)
    with pytest.raises(SourceError, match="up_proj"):
        export_onnx(tmp_path / "less", output)
    write_checkpoint(tmp_path / "other", model_type="mamba")
    with pytest.raises(UnsupportedError, match="mamba"):
        export_onnx(tmp_path / "other", output)
    with pytest.raises(SourceError):
        export_onnx(tmp_path / "absent", output)
    assert not output.parent.exists() or not os.listdir(output.parent)


# --- files ---------------------------------------------------------------------------------------


def test_existing_files_are_replaced_on_demand_only(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "model.onnx"
    (tmp_path / "model.onnx.data").write_text("mine")
    with pytest.raises(UsageError, match=r"model\.onnx\.data: exists already"):
        export_onnx(folder, output)
    export_onnx(folder, output, force=True)
    with pytest.raises(UsageError, match=r"model\.onnx: exists already"):
        export_onnx(folder, output)
    half = export_onnx(folder, output, dtype="fp16-weights", force=True)
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]
    OnnxModel(half.path).start([IDS])
    with pytest.raises(UsageError, match="is a folder"):
        export_onnx(folder, tmp_path, force=True)
    # A stand-in for a device such as /dev/null, which must stay what it is.
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="no regular file"):
        export_onnx(folder, tmp_path / "pipe", force=True)
    assert (tmp_path / "pipe").is_fifo()


def test_places_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingResourceError, match="cannot be written"):
        export_onnx(folder, tmp_path / "file" / "model.onnx")
    with pytest.raises(UsageError, match="not UTF-8"):
        export_onnx(folder, tmp_path / os.fsdecode(b"mod\xffel.onnx"))
    assert os.listdir(tmp_path) == ["file"]


def test_the_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf")
    before = (tmp_path / "model.gguf").read_bytes()
    with pytest.raises(UsageError, match="is to be exported"):
        export_onnx(tmp_path / "model.gguf", tmp_path / "model.gguf", force=True)
    assert (tmp_path / "model.gguf").read_bytes() == before


def test_a_full_disk_leaves_what_was_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = export_onnx(folder, tmp_path / "model.onnx").path
    before = output.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for module, name in ((stream.os, "posix_fallocate"), (export, "sync_files")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(MissingResourceError, match="No space left"):
                export_onnx(folder, output, force=True)
        assert output.read_bytes() == before and len(os.listdir(tmp_path)) == 2
    OnnxModel(output).start([IDS])


def test_what_a_killed_export_left_is_cleared(folder: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from mnnsmith.onnx import export;"
        "export._install = lambda *_: os.kill(os.getpid(), signal.SIGKILL);"
        "export.export_onnx(sys.argv[1], sys.argv[2])"
    )
    done = subprocess.run([sys.executable, "-c", code, folder, tmp_path / "model.onnx"], timeout=60)
    assert done.returncode == -9
    left = os.listdir(tmp_path)
    assert left and "model.onnx" not in left and "model.onnx.data" not in left
    export_onnx(folder, tmp_path / "model.onnx")
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]


def test_the_extra_is_missing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingResourceError) as caught:
        export_onnx(folder, tmp_path / "model.onnx")
    assert 'pip install "mnnsmith[onnx]"' in str(caught.value)


# --- weights -------------------------------------------------------------------------------------


class _Tensor:
    """A tensor that counts how many rows are asked for at once."""

    name, dtype, nbytes, block_format = "w", "F32", 0, None

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape, self.most = values, values.shape, 0

    def rows(self, start: int, stop: int) -> np.ndarray:
        self.most = max(self.most, stop - start)
        return self.values[start:stop]


@pytest.mark.parametrize("elem", [FLOAT, FLOAT16])
def test_matrices_of_several_blocks(elem: int, tmp_path: Path) -> None:
    """Turned, straight, parts of heads, and a part that the checkpoint holds turned."""
    rows, cols = 9000, 1024
    values = np.random.default_rng(0).standard_normal((rows, cols)).astype(np.float16)
    tensor = _Tensor(values.astype(np.float32))
    heads = HeadRows(heads=3, stride=3000, start=100, count=2000, interleaved=True)
    slots = {
        "turned": (MatrixSlot("w", rows, cols, Role.MLP), True),
        "straight": (MatrixSlot("w", rows, cols, Role.EMBEDDING), False),
        "heads": (MatrixSlot("w", 6000, cols, Role.ATTENTION, heads=heads), True),
        "part": (MatrixSlot("w", cols, 64, Role.ATTENTION, first_row=7, transposed=True), True),
    }
    wanted = {
        name: Weight(slot, (slot.cols, slot.rows) if turned else (rows, cols), elem, turned)
        for name, (slot, turned) in slots.items()
    }
    places, size = weights.lay_out(wanted)
    checkpoint = Checkpoint("test", "test", {}, {"w": tensor}, TokenizerFiles("{}"), ())
    file = tmp_path / "data"
    weights.write_weights(wanted, places, checkpoint, file, lambda done, total: None)
    assert file.stat().st_size == size and tensor.most < rows
    dtype = "<f2" if elem == FLOAT16 else "<f4"
    expected = {
        "turned": values.T,
        "straight": values,
        "heads": values[heads.indices()].T,
        "part": values[7:71],
    }
    for name, weight in wanted.items():
        found = np.fromfile(file, dtype, values.size if name != "part" else 64 * cols,
                            offset=places[name].offset)[: np.prod(weight.shape)]  # fmt: skip
        np.testing.assert_array_equal(found.reshape(weight.shape), expected[name], name)


def test_memory_stays_at_a_block(tmp_path: Path) -> None:
    """A model of 440 MB of float32, all zeros, is exported in far less."""
    config = make_config(hidden_size=1024, intermediate_size=8192, num_hidden_layers=4)
    header, end = {}, 0
    for name, shape in shapes(config).items():
        span = [end, end + 2 * int(np.prod(shape))]
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": span}
        end = span[1]
    model = tmp_path / "model"
    write_checkpoint(model)
    (model / "config.json").write_text(json.dumps(config))
    file = model / "model.safetensors"
    write_raw_safetensors(file, json.dumps(header).encode())
    os.truncate(file, file.stat().st_size + end)
    code = (
        "import sys; from mnnsmith.onnx.export import export_onnx;"
        "export_onnx(sys.argv[1], sys.argv[2]);"
        "print([l for l in open('/proc/self/status') if l.startswith('VmHWM')][0].split()[1])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, model, tmp_path / "model.onnx"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert (tmp_path / "model.onnx.data").stat().st_size > 440e6
    assert int(found.stdout) * 1024 < 200e6, f"{int(found.stdout) / 1024:.0f} MiB"


# --- the reference -------------------------------------------------------------------------------


def test_every_available_value_is_given(tmp_path: Path) -> None:
    write_mixture(tmp_path)
    ready = prepare(tmp_path, recipe="fp16")
    windows = np.array([IDS[:17], IDS[17:34]])
    with open_onnx(ready.checkpoint, ready.model, threads=1) as reference:
        names = list(reference.available())
        run = reference.run(windows, names)
        assert set(run.values) == set(names)
        assert all(v.dtype == np.float32 and v.shape[:2] == (2, 17) for v in run.values.values())
        assert {mark.value.name for mark in ready.model.graph.landmarks} <= set(names)
        np.testing.assert_array_equal(run.values["hidden_states"], run.hidden)
        given = reference.logits(run.hidden[1])
        error = np.abs(run.values["logits"][1] - given).max() / given.std()
        assert error < 1e-5
        # Alone and with others a value is the same, and windows do not see each other.
        again = reference.run(windows[1:], ["layer1/mlp/routed"])
        other = run.values["layer1/mlp/routed"][1]
        assert np.abs(again.values["layer1/mlp/routed"][0] - other).max() < 1e-5 * other.std()
        with pytest.raises(UsageError, match="'layer9'"):
            reference.run(windows, ["layer9"])


def test_a_clip_is_computed_as_well(folder: Path) -> None:
    ready = prepare(folder, recipe="fp16")
    with open_onnx(ready.checkpoint, ready.model, threads=1) as reference:
        free = reference.run(np.array([IDS])).hidden
    value = next(v for v in ready.model.graph.values if v.name == "layer0/mlp/down")
    ready.model.graph.clip(value, 0.5)
    with open_onnx(ready.checkpoint, ready.model, threads=1) as reference:
        run = reference.run(np.array([IDS]), [value.name, f"{value.name}/clip"])
    before, after = run.values[value.name], run.values[f"{value.name}/clip"]
    assert np.abs(before).max() > 1
    np.testing.assert_array_equal(after, before.clip(-0.5, 0.5))
    assert np.abs(run.hidden - free).max() > 0.1


def test_near_ties_of_a_router_are_told_by_window(tmp_path: Path) -> None:
    """Two experts with one router row tie wherever both are at the edge of the chosen ones."""
    tensors = write_mixture(tmp_path / "decisive")
    gate = "model.layers.1.block_sparse_moe.gate.weight"
    tensors[gate][4] = tensors[gate][1]
    fields = json.loads((tmp_path / "decisive" / "config.json").read_text())
    write_checkpoint(tmp_path / "tied", tensors=tensors, **fields)
    windows = np.array([IDS[:20], IDS[20:40]])
    for name, expected in (("decisive", True), ("tied", False)):
        ready = prepare(tmp_path / name, recipe="fp16")
        with open_onnx(ready.checkpoint, ready.model, threads=1) as reference:
            scores = reference.run(windows, ["layer1/mlp/router/scores"]).values
            found = reference.decisive(windows)
        last_two = np.sort(scores["layer1/mlp/router/scores"])[..., -3:-1]
        tie = (np.diff(last_two)[..., 0] / last_two[..., 1] < 1e-4).any(-1)
        assert found.tolist() == (~tie).tolist() == [expected] * 2


def test_a_model_without_routers_is_decisive(folder: Path) -> None:
    ready = prepare(folder, recipe="fp16")
    with open_onnx(ready.checkpoint, ready.model, threads=1) as reference:
        assert reference.decisive(np.array([IDS, IDS])).tolist() == [True, True]
        assert reference.name.startswith("ONNX Runtime 1.")


# --- the program, and a real model ---------------------------------------------------------------


def test_the_command(folder: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "mnnsmith.cli", "export", folder, "-o"]
    output = tmp_path / "model.onnx"
    found = subprocess.run(
        [*program, output, "--no-kv-cache", "--opset", "20", "--json"], capture_output=True,
        timeout=60,
    )  # fmt: skip
    assert found.returncode == 0 and found.stderr == b"", found.stderr
    facts = json.loads(found.stdout)
    assert facts["model"] == str(output) and facts["opset"] == 20 and facts["dtype"] == "fp32"
    assert facts["bytes"] == output.stat().st_size + Path(facts["weights"]).stat().st_size
    assert len(OnnxModel(output).session.get_inputs()) == 3
    again = subprocess.run([*program, output], capture_output=True, timeout=60)
    assert again.returncode == 2 and b"--force" in again.stderr
    wrong = subprocess.run([*program, output, "--opset", "5"], capture_output=True, timeout=60)
    assert wrong.returncode == 2


@pytest.mark.slow
@pytest.mark.engine
def test_smollm2_says_the_same_as_in_the_engine(smollm2_gguf: Path, tmp_path: Path) -> None:
    bundle = convert(smollm2_gguf, tmp_path / "bundle", recipe="keep")
    exported = export_onnx(smollm2_gguf, tmp_path / "model.onnx")
    ids = [504, 7002, 18302, 20150, 260, 6189, 1961, 357]
    with Engine(bundle.path, memory="high", precision="high") as engine:
        expected = list(engine.generate(ids, max_new_tokens=32))
    model = OnnxModel(exported.path)
    found = [int(model.start([ids])[0, -1].argmax())]
    while len(found) < len(expected):
        found.append(int(model.go_on([[found[-1]]])[0, -1].argmax()))
    assert found == expected and len(set(found)) > 8
