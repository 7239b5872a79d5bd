"""Any model in its child process, against ONNX Runtime on the same arrays."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from mnnsmith.engine import Module, TensorInfo
from mnnsmith.engine.device import Launch, LocalDevice
from mnnsmith.engine.module import MODULE_RUNNER
from mnnsmith.engine.module_profile import profile
from mnnsmith.engine.runner import peak_rss_bytes
from mnnsmith.errors import EngineError, UsageError
from mnnsmith.onnx_runtime import onnx_runtime
from tiny_onnx import dense, mixed, model_of, to_mnn

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def mixed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_mnn(mixed(), tmp_path_factory.mktemp("mixed"))


def feeds(batch: int = 2, height: int = 5, width: int = 7) -> dict[str, Any]:
    rng = np.random.default_rng(batch)
    return {
        "image": rng.standard_normal((batch, 3, height, width), dtype=np.float32),
        "ids": np.arange(5 * batch, dtype=np.int64).reshape(batch, 5) - 3,
        "mask": np.array([True, False, True, True, False]),
        "bytes": np.array([[0, 1], [144, 255]], dtype=np.uint8),
        "scale": np.array(-2.0, dtype=np.float32),
    }


def expected(path: Path, arrays: dict[str, Any]) -> dict[str, Any]:
    session = onnx_runtime().InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, arrays), strict=True))


def test_every_type_and_shape_agrees_with_onnx_runtime(mixed_model: Path) -> None:
    with Module(mixed_model, threads=1) as module:
        # Larger, smaller and larger again: a shape is nothing that a module keeps.
        for size in ((2, 5, 7), (1, 3, 3), (3, 8, 4), (2, 5, 7)):
            arrays = feeds(*size)
            found = module.run(arrays)
            wanted = expected(mixed_model.with_suffix(".onnx"), arrays)
            assert list(found) == list(wanted) == list(module.outputs)
            for name, value in wanted.items():
                assert found[name].shape == value.shape
                np.testing.assert_allclose(found[name], value, atol=1e-5)
            assert found["scaled"].dtype == np.float32
            assert found["doubled"].dtype == found["inverse"].dtype == np.int32


def test_what_the_model_declares(mixed_model: Path) -> None:
    with Module(mixed_model, threads=1) as module:
        assert module.inputs == (
            TensorInfo("image", "float32", (1, 3, None, None)),
            TensorInfo("ids", "int32", (1, 5)),
            TensorInfo("mask", "int32", (5,)),
            TensorInfo("bytes", "uint8", (2, 2)),
            TensorInfo("scale", "float32", ()),
        )
        assert module.outputs == ("scaled", "doubled", "inverse", "root")


def test_a_tensor_from_inside_comes_with_channels_second(mixed_model: Path) -> None:
    """The engine keeps the result of a convolution in blocks of four channels; six do not fill."""
    arrays = feeds()
    with Module(mixed_model, inputs=["image", "scale"], outputs=["relu", "scaled"]) as module:
        found = module.run({name: arrays[name] for name in ("image", "scale")})
    assert found["relu"].shape == (2, 6, 5, 7)
    np.testing.assert_array_equal(-2 * found["relu"], found["scaled"])
    wanted = expected(mixed_model.with_suffix(".onnx"), arrays)["scaled"]
    np.testing.assert_allclose(found["relu"], wanted / -2, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("image", np.zeros((3, 5, 7), np.float32), "(1, 3, any, any), found (3, 5, 7)"),
        ("image", np.zeros((2, 4, 5, 7), np.float32), "(1, 3, any, any), found (2, 4, 5, 7)"),
        ("image", np.zeros((2, 3, 5, 7)), "takes float32, found float64"),
        ("image", np.zeros((2, 3, 5, 7), int), "takes float32, found int64"),
        ("ids", np.full((2, 5), 2**31), "from -2147483648 to 2147483647; found values from"),
        ("ids", np.zeros((2, 5)), "takes int32, found float64"),
        ("bytes", np.full((2, 2), -1), "values from 0 to 255; found values from -1"),
        ("mask", np.array(["a"] * 5), "takes int32, found <U1"),
        ("other", 1, "inputs image, ids, mask, bytes, scale, other were given"),
    ],
)
def test_a_wrong_input_is_refused_and_the_module_lives_on(
    mixed_model: Path, name: str, value: Any, message: str
) -> None:
    with Module(mixed_model, threads=1) as module:
        with pytest.raises(UsageError) as error:
            module.run({**feeds(), name: value})
        assert message in error.value.message
        assert not module.closed
    with Module(mixed_model, threads=1) as module, pytest.raises(UsageError, match="inputs none"):
        module.run({})


def test_wrong_options_are_refused_before_a_process_starts(mixed_model: Path) -> None:
    for options in ({"threads": 0}, {"precision": "best"}, {"memory": "small"}):
        with pytest.raises(UsageError):
            Module(mixed_model, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no operator computes a tensor 'conv'"):
        Module(mixed_model, outputs=["relu", "conv"])


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"not a graph" * 99])
def test_garbage_is_an_engine_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.mnn"
    path.write_bytes(content)
    with pytest.raises(EngineError, match=r"model\.mnn"):
        Module(path)
    with pytest.raises(EngineError, match="cannot be read"):
        Module(tmp_path / "absent.mnn")
    with open(path, "wb") as file:
        file.truncate(1 << 31)
    with pytest.raises(EngineError, match="2147483648 bytes"):
        Module(path)


def test_a_cut_or_changed_file_never_hurts_us(mixed_model: Path, tmp_path: Path) -> None:
    whole = mixed_model.read_bytes()
    rng = np.random.default_rng(5)
    path = tmp_path / "model.mnn"
    refused = 0
    for trial in range(12):
        data = bytearray(whole)
        if trial < 4:
            data = data[: len(data) * trial // 4]
        else:
            # In the operators, which come after the numbers of the root table.
            for place in rng.integers(0, len(data), 20):
                data[place] = rng.integers(0, 256)
        path.write_bytes(data)
        try:
            with Module(path, threads=1, load_timeout_s=10, call_timeout_s=10) as module:
                module.run(feeds())
        except (EngineError, UsageError):
            refused += 1
    assert refused >= 4


def test_weights_beside_the_model(tmp_path: Path) -> None:
    path = to_mnn(dense(64, 2), tmp_path, options=("--saveExternalData=1",))
    weights = path.with_name("model.mnn.weight")
    assert weights.stat().st_size > 2 * 64 * 64 * 4
    arrays = {"x": np.ones((2, 64), np.float32)}
    with Module(path, threads=1) as module:
        found = module.run(arrays)["y"]
    np.testing.assert_allclose(found, expected(path.with_suffix(".onnx"), arrays)["y"], atol=1e-5)
    assert profile(path, arrays, repeats=1, threads=1).operators
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(EngineError, match=r"model\.mnn\.weight: \d+ bytes, the graph reads"):
        Module(path)
    weights.unlink()
    with pytest.raises(EngineError, match=r"model\.mnn\.weight: cannot be read"):
        Module(path)


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    """Columns that do not match rows: the engine gives no outputs, and prints the reason."""
    shapes = {"a": ["n", "k"], "b": ["l", "m"]}
    model = model_of(
        [helper.make_node("MatMul", ["a", "b"], ["c"])],
        {name: (TensorProto.FLOAT, shape) for name, shape in shapes.items()},
        {"c": (TensorProto.FLOAT, ["n", "m"])},
    )
    with Module(to_mnn(model, tmp_path), threads=1) as module:
        arrays = {"a": np.ones((2, 3), np.float32), "b": np.ones((4, 5), np.float32)}
        with pytest.raises(EngineError) as error:
            module.run(arrays)
        assert "could not run the model" in error.value.message
        assert "last output:\n(none)" not in error.value.message
        assert module.closed


def test_a_killed_child_is_an_engine_error(mixed_model: Path) -> None:
    module = Module(mixed_model, threads=1)
    assert module.pid is not None
    os.kill(module.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="SIGKILL"):
        module.run(feeds())
    assert module.closed
    with pytest.raises(EngineError, match="closed"):
        module.run(feeds())
    module.close()


def test_a_hang_ends_in_time(mixed_model: Path) -> None:
    with Module(mixed_model, threads=1, call_timeout_s=0.5) as module:
        assert module.pid is not None
        os.kill(module.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(EngineError, match="no sign of life"):
            module.run(feeds())
        assert time.monotonic() - began < 10
        assert module.closed


def test_threads_share_a_module(mixed_model: Path) -> None:
    wrong: list[int] = []
    with Module(mixed_model, threads=1) as module:

        def use(batch: int) -> None:
            arrays = feeds(batch)
            results = [module.run(arrays)["doubled"] for _ in range(5)]
            wrong.extend(batch for found in results if not np.array_equal(found, 2 * arrays["ids"]))

        users = [threading.Thread(target=use, args=(batch,)) for batch in range(1, 5)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        assert wrong == []
        assert module.statistics.runs == 20


def test_warm_ups_do_not_count(mixed_model: Path) -> None:
    with Module(mixed_model, threads=1) as module:
        module.warm_up(feeds(), runs=3)
        assert module.statistics.runs == 0
        module.run(feeds())
        statistics = module.statistics
    assert statistics.runs == 1
    assert 0 < statistics.run_s < 10
    assert 0 < statistics.load_s < 10
    assert 10 << 20 < statistics.peak_rss_bytes < max(1 << 30, peak_rss_bytes())


def test_names_that_are_no_plain_words(tmp_path: Path) -> None:
    model = model_of(
        [helper.make_node("Neg", ["größe/0:x y"], ['a"b\\c'])],
        {"größe/0:x y": (TensorProto.FLOAT, ["n", 2])},
        {'a"b\\c': (TensorProto.FLOAT, ["n", 2])},
    )
    folder = tmp_path / "a folder, with ü"
    folder.mkdir()
    path = folder / "model.mnn"
    shutil.move(to_mnn(model, tmp_path), path)
    with Module(folder, threads=1) as module:
        assert module.path == path
        found = module.run({"größe/0:x y": np.ones((3, 2), np.float16)})
    np.testing.assert_array_equal(found['a"b\\c'], -np.ones((3, 2)))


def test_an_empty_batch_gives_empty_outputs(mixed_model: Path) -> None:
    with Module(mixed_model, threads=1) as module:
        found = module.run(feeds(batch=0))
    assert found["scaled"].shape == (0, 6, 5, 7)
    assert found["doubled"].shape == (0, 5)


def test_the_two_files_of_the_runner_need_nothing_else(tmp_path: Path, mixed_model: Path) -> None:
    """As on a device: a folder with the two scripts, where our package cannot be imported."""
    for script in (MODULE_RUNNER, MODULE_RUNNER.with_name("runner.py")):
        shutil.copy(script, tmp_path)
    (tmp_path / "mnnsmith.py").write_text("raise ImportError('there is none')")

    class Elsewhere(LocalDevice):
        def launch(self, script: Path = MODULE_RUNNER) -> Launch:
            launch = super().launch(tmp_path / script.name)
            return Launch(launch.command, {"PATH": os.defpath})

    with Module(mixed_model, threads=1, device=Elsewhere()) as module:
        assert module.run(feeds())["doubled"].shape == (2, 5)


def test_low_precision_stays_close_and_threads_change_nothing(tmp_path: Path) -> None:
    path = to_mnn(dense(), tmp_path)
    arrays = {"x": np.random.default_rng(3).standard_normal((4, 16), dtype=np.float32)}
    wanted = expected(path.with_suffix(".onnx"), arrays)["y"]
    for options in ({"threads": 2}, {"precision": "high"}, {"precision": "low", "memory": "low"}):
        with Module(path, **options) as module:  # type: ignore[arg-type]
            np.testing.assert_allclose(module.run(arrays)["y"], wanted, atol=1e-4)
