"""Any model at work: named arrays in, named arrays out.  It runs in a child process."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.engine.client import Header, Runner, RunnerRefusedError
from mnnsmith.engine.device import Device, LocalDevice
from mnnsmith.engine.engine import CALL_TIMEOUT_S, LEVELS, LOAD_TIMEOUT_S
from mnnsmith.engine.machine import usable_processors
from mnnsmith.engine.module_graph import OperatorInfo, operators
from mnnsmith.engine.runner import Arrays
from mnnsmith.engine.weight_extent import required_weight_bytes
from mnnsmith.errors import EngineError, UsageError

MODULE_RUNNER = Path(__file__).with_name("module_runner.py")
MODEL_FILE = "model.mnn"
# Offsets in a flatbuffer are signed and of 32 bits.
MODEL_LIMIT_BYTES = 1 << 31
Feeds = Mapping[str, npt.ArrayLike]
Outputs = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class TensorInfo:
    """An input as the model declares it.

    dtype: "float32", "int32", "uint8" or "int8"; truth values are int32 to the engine.
    shape: None where any size will do.  MNN's converter writes 1 for a leading axis that is
    dynamic, so a leading 1 admits any size, too.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class ModuleStatistics:
    """What a module did since it was loaded; warm-ups are not counted.

    load_s, run_s: wall-clock seconds inside the child process, run_s of all `runs` together.
    peak_rss_bytes: the most memory that the child process held.
    """

    load_s: float
    runs: int
    run_s: float
    peak_rss_bytes: int


class Module:
    """One loaded model without state: every run stands for itself.

    The model runs in a child process of its own.  A damaged file, a crash or a hang gives an
    EngineError and ends the child, never this process.  Threads may share a module: a run waits
    for the one before it.  Close it, or use it in a `with` block.

    inputs: what it takes, in the model's order.  outputs: the names of what it gives.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        threads: int | None = None,
        precision: str = "normal",
        memory: str = "normal",
        device: Device | None = None,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Load the `.mnn` file `path`, or `model.mnn` in the folder `path`.

        inputs: names of all inputs that the outputs need; None is what the model declares.
        outputs: tensors to give; None is what the model declares.  Any tensor that an operator of
            the graph computes will do; but where MNN's converter joined operators, a name of the
            original may have stayed with a later value.
        threads: None is every processor that is usable.
        precision, memory: "low", "normal" or "high".  Low memory keeps quantized weights quantized
            and quantizes activations at run time.
        device: where it runs, None is this machine.  The folder of `path` is copied there.
        load_timeout_s, call_timeout_s: the longest time that each may take.

        Raises UsageError for wrong options or unknown tensors, EngineError when the file is damaged
        or the engine does not load it, MissingResourceError when the device lacks something.
        """
        path = Path(path).absolute()
        self.path = path / MODEL_FILE if path.is_dir() else path
        self.device: Device = device or LocalDevice()
        self.options: Mapping[str, Any] = {
            "threads": _checked_threads(threads),
            "precision": _checked_level("precision", precision),
            "memory": _checked_level("memory", memory),
        }
        self.operators = _checked_graph(self.path)
        _check_outputs(self.path, outputs, self.operators)
        self._call_timeout_s = call_timeout_s * self.device.time_factor
        self._lock = threading.RLock()
        launch = self.device.launch(MODULE_RUNNER)
        folder = self.device.send(self.path.parent)
        self._runner = Runner(launch)
        request = {
            "path": f"{folder}/{self.path.name}",
            "inputs": list(inputs or ()),
            "outputs": list(outputs or ()),
        }
        header = self._load(request, load_timeout_s * self.device.time_factor)
        self.inputs = tuple(
            TensorInfo(
                one["name"], one["dtype"], tuple(n if n >= 0 else None for n in one["shape"])
            )
            for one in header["inputs"]
        )
        self.outputs: tuple[str, ...] = tuple(header["outputs"])

    def _load(self, request: Mapping[str, Any], timeout_s: float) -> Header:
        try:
            header, _ = self._runner.call("load", silence_s=timeout_s, **request, **self.options)
        except EngineError as error:
            self._runner.kill()
            raise EngineError(
                f"{self.path}: the model does not load: {error.message}", error.hint
            ) from error
        except BaseException:
            self._runner.kill()
            raise
        return header

    def __enter__(self) -> Module:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child process and free everything; twice is fine."""
        with self._lock:
            self._runner.close()

    @property
    def closed(self) -> bool:
        """True after `close`, and after any failure of the engine."""
        return self._runner.closed

    @property
    def pid(self) -> int | None:
        """The child process."""
        return self._runner.pid

    @property
    def statistics(self) -> ModuleStatistics:
        header, _ = self.call("statistics", {})
        return ModuleStatistics(
            **{name: header[name] for name in ModuleStatistics.__dataclass_fields__}
        )

    def run(self, feeds: Feeds) -> Outputs:
        """The outputs for the arrays `feeds`, one for each input; shapes may change between runs.

        Integers and truth values of any type are taken for an integer input when they fit,
        float16 and float32 for a float input.  Outputs are float32, int32, uint8 or int8, with
        channels as the second axis.

        Raises UsageError for inputs that the model does not take, EngineError when the engine
        fails; the module is then closed.
        """
        _, results = self.call("run", self.checked(feeds))
        return {name: np.array(results[name]) for name in self.outputs}

    def warm_up(self, feeds: Feeds, runs: int = 1) -> None:
        """Run without giving or counting anything: the first run of a shape takes longer."""
        arrays = self.checked(feeds)
        for _ in range(runs):
            self.call("warm_up", arrays)

    def checked(self, feeds: Feeds) -> dict[str, npt.NDArray[Any]]:
        """`feeds` as the model takes them; raises UsageError as `run`."""
        known = [one.name for one in self.inputs]
        missing = [name for name in known if name not in feeds]
        unknown = [name for name in feeds if name not in known]
        if missing or unknown:
            given = ", ".join(feeds) or "none"
            raise UsageError(
                f"{self.path.name}: inputs {given} were given, the model takes {', '.join(known)}."
            )
        return {one.name: _fitting(self.path.name, one, feeds[one.name]) for one in self.inputs}

    def call(self, op: str, arrays: Arrays, **fields: Any) -> tuple[Header, Arrays]:
        """A request to the child process, as `module_runner.py` lists them; raises as `run`."""
        with self._lock:
            try:
                return self._runner.call(op, arrays, silence_s=self._call_timeout_s, **fields)
            except RunnerRefusedError as error:
                raise UsageError(f"{self.path.name}: {error}") from error
            except EngineError as error:
                raise EngineError(f"{self.path}: {error.message}", error.hint) from error


def _checked_threads(threads: int | None) -> int:
    if threads is None:
        return usable_processors()
    if not 1 <= threads <= 1024:
        raise UsageError(f"threads must be from 1 to 1024, found {threads}.")
    return threads


def _checked_level(name: str, value: str) -> str:
    if value not in LEVELS:
        raise UsageError(f"{name} must be one of {', '.join(LEVELS)}, found {value!r}.")
    return value


def _checked_graph(path: Path) -> tuple[OperatorInfo, ...]:
    """What can be seen without the engine: files missing or cut short.  Gives the operators."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes >= MODEL_LIMIT_BYTES:
            raise EngineError(f"{size_bytes} bytes; no model has 2 GB or more.")
        graph = path.read_bytes()
        required = required_weight_bytes(graph)
        weights = path.with_name(path.name + ".weight")
        found = weights.stat().st_size if required else 0
        result = operators(graph)
    except EngineError as error:
        raise EngineError(f"{path}: {error.message}", error.hint) from error
    except OSError as error:
        raise EngineError(f"{error.filename}: cannot be read: {error.strerror}.") from error
    if found < required:
        raise EngineError(f"{weights}: {found} bytes, the graph reads {required}.")
    return result


def _check_outputs(
    path: Path, outputs: Sequence[str] | None, operators: Sequence[OperatorInfo]
) -> None:
    if not outputs:
        return
    known = {name for operator in operators for name in operator.outputs}
    for name in outputs:
        if name not in known:
            raise UsageError(
                f"{path.name}: no operator computes a tensor {name!r}.",
                "Names of the original are lost where the converter fuses operators.",
            )


def _fitting(model: str, info: TensorInfo, value: npt.ArrayLike) -> npt.NDArray[Any]:
    """`value` as an array of the declared type.  Raises UsageError."""
    array = np.asarray(value)
    where = f"{model}: input {info.name}"
    wanted = np.dtype(info.dtype)
    if wanted.kind == "f":
        if array.dtype.kind != "f" or array.dtype.itemsize > wanted.itemsize:
            raise UsageError(
                f"{where} takes {wanted}, found {array.dtype}.", "Use .astype(numpy.float32)."
            )
    elif array.dtype.kind not in "iub":
        raise UsageError(f"{where} takes {wanted}, found {array.dtype}.")
    elif array.size:
        limits = np.iinfo(wanted)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise UsageError(
                f"{where} takes {wanted}, values from {limits.min} to {limits.max}; found values "
                f"from {low} to {high}."
            )
    if not _fits(info.shape, array.shape):
        sizes = ", ".join("any" if size is None else str(size) for size in info.shape)
        raise UsageError(f"{where} has the shape ({sizes}), found {array.shape}.")
    return np.ascontiguousarray(array, dtype=wanted).reshape(array.shape)


def _fits(declared: tuple[int | None, ...], shape: tuple[int, ...]) -> bool:
    if len(declared) != len(shape):
        return False
    return all(
        size is None or size == found or (axis == 0 and size == 1)
        for axis, (size, found) in enumerate(zip(declared, shape, strict=True))
    )
