"""The process in which any other model runs: this file, `runner.py` beside it, numpy and MNN.

It speaks the protocol of `runner.py`.  Requests: `load`, `run` (the inputs as arrays by name, the
outputs as arrays by name), `warm_up` (a run whose outputs are dropped), `statistics`, `profile`
(what each operator takes).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mnnsmith.engine import runner
else:
    # Copied to another machine, the two files are alone: nothing of the package is there.  They may
    # be links, side by side, to files elsewhere; Python begins its path with where those are.
    sys.path[0] = os.path.dirname(os.path.abspath(__file__))
    import runner

# The engine's numbers of the levels (`BackendConfig` in include/MNN/MNNForwardType.h).
LEVELS = {"normal": 0, "high": 1, "low": 2}


def session_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a `load` request asks for, in the engine's terms."""
    return {
        "backend": "CPU",
        "numThread": request["threads"],
        "precision": LEVELS[request["precision"]],
        "memory": LEVELS[request["memory"]],
    }


class Model:
    """One loaded module."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        import MNN.expr as expr
        import MNN.nn as nn

        started = time.perf_counter()
        self.request = request
        manager = nn.create_runtime_manager((session_options(request),))
        try:
            self.module = nn.load_module_from_file(
                request["path"], request["inputs"], request["outputs"], runtime_manager=manager
            )
        except SystemError as error:
            # What the binding makes of a null pointer; the reason is in the log.
            raise runner.FailedError("the engine could not load this model.") from error
        info = self.module.get_info()
        self.outputs: list[str] = info["outputNames"]
        self.dtypes: dict[Any, np.dtype[Any]] = {
            expr.float: np.dtype(np.float32),
            expr.int: np.dtype(np.int32),
            expr.uint8: np.dtype(np.uint8),
            expr.int8: np.dtype(np.int8),
        }
        self.inputs = dict(zip(info["inputNames"], info["inputs"], strict=True))
        for name, declared in self.inputs.items():
            if declared.dtype not in self.dtypes:
                raise runner.FailedError(f"input {name} is of {declared.dtype}.")
        self.runs = 0
        self.run_s = self.last_s = 0.0
        self.load_s = time.perf_counter() - started

    def declared_inputs(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "dtype": self.dtypes[var.dtype].name, "shape": list(var.shape)}
            for name, var in self.inputs.items()
        ]

    def run(self, arrays: runner.Arrays) -> dict[str, npt.NDArray[Any]]:
        variables = [self._variable(var, arrays[name]) for name, var in self.inputs.items()]
        began = time.perf_counter()
        results = self.module.onForward(variables)
        if len(results) != len(self.outputs):
            raise runner.FailedError("the engine could not run the model on these inputs.")
        # The native arrays must be gone before the next run: copied here.
        values = {name: self._values(var) for name, var in zip(self.outputs, results, strict=True)}
        self.last_s = time.perf_counter() - began
        return values

    def _variable(self, declared: Any, array: npt.NDArray[Any]) -> Any:
        """`array` as the engine takes it, in the layout that the model declares."""
        import MNN.expr as expr

        blocked = declared.data_format == expr.NC4HW4
        order = expr.NCHW if blocked else declared.data_format
        # The engine writes no int8 from outside, but casts to it.
        small = declared.dtype == expr.int8
        variable = expr.placeholder(list(array.shape), order, expr.int if small else declared.dtype)
        if array.size:
            variable.write(array.astype(np.int32) if small else array)
        if small:
            variable = expr.cast(variable, expr.int8)
        return expr.convert(variable, expr.NC4HW4) if blocked and array.ndim > 1 else variable

    def _values(self, variable: Any) -> npt.NDArray[Any]:
        """An output as a plain array, channels second."""
        import MNN.expr as expr

        if variable.data_format == expr.NC4HW4:
            variable = expr.convert(variable, expr.NCHW)
        shape = tuple(variable.shape)
        dtype = self.dtypes[variable.dtype]
        if 0 in shape:
            return np.empty(shape, dtype=dtype)
        return np.array(variable.read(), dtype=dtype).reshape(shape)


class Profiler:
    """The model once more, in the engine's older interface: it alone tells one operator's time."""

    def __init__(self, request: Mapping[str, Any], arrays: runner.Arrays) -> None:
        """Load the model of a `load` request, and give it its inputs."""
        import MNN

        self.interpreter = MNN.Interpreter(request["path"])
        self.session = self.interpreter.createSession(session_options(request))
        inputs = self.interpreter.getSessionInputAll(self.session)
        for name, array in arrays.items():
            self.interpreter.resizeTensor(inputs[name], array.shape)
        self.interpreter.resizeSession(self.session)
        types = {
            "float32": MNN.Halide_Type_Float,
            "int32": MNN.Halide_Type_Int,
            "uint8": MNN.Halide_Type_Uint8,
        }
        for name, array in arrays.items():
            if array.dtype.name not in types:
                raise runner.RefusedError(f"input {name}: {array.dtype} cannot be timed.")
            layout = MNN.Tensor_DimensionType_Caffe
            source = MNN.Tensor(array.shape, types[array.dtype.name], array, layout)
            inputs[name].copyFrom(source)
        self.operators: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        self.began = 0.0

    @property
    def memory_mb(self) -> float:
        """What weights and work buffers of the session take, by the engine's own account."""
        memory_code = 0
        size: float = self.interpreter.getSessionInfo(self.session, memory_code)
        return size

    def run(self) -> list[float]:
        """Seconds of each operator, in the order of `operators`, which this fills."""
        self.operators, self.seconds = [], []
        status = self.interpreter.runSessionWithCallBackInfo(self.session, self._begin, self._end)
        if status != 0 or not self.operators:
            raise runner.FailedError("the engine could not run the model operator by operator.")
        return self.seconds

    def _begin(self, tensors: Any, operator: Any) -> int:
        self.began = time.perf_counter()
        return 1

    def _end(self, tensors: Any, operator: Any) -> int:
        self.seconds.append(time.perf_counter() - self.began)
        self.operators.append({
            "name": operator.getName(),
            "kind": operator.getType(),
            "mega_operations": operator.getFlops(),
            "shape": list(tensors[0].getShape()) if tensors else [],
        })  # fmt: skip
        return 1


class ModuleServer(runner.Server):
    """Answers requests about one module until stdin ends."""

    module: Model | None = None

    def answer(
        self, request: Mapping[str, Any], arrays: runner.Arrays
    ) -> tuple[dict[str, Any], runner.Arrays]:
        op = request["op"]
        if op == "status":
            return {}, {}
        if op == "load":
            self.module = module = Model(request)
            return {"inputs": module.declared_inputs(), "outputs": module.outputs}, {}
        if self.module is None:
            raise runner.RefusedError("no model is loaded.")
        module = self.module
        if op == "run":
            results = module.run(arrays)
            module.runs += 1
            module.run_s += module.last_s
            return {"run_s": module.last_s}, results
        if op == "warm_up":
            module.run(arrays)
            return {"run_s": module.last_s}, {}
        if op == "statistics":
            return {
                "load_s": module.load_s,
                "runs": module.runs,
                "run_s": module.run_s,
                "peak_rss_bytes": runner.peak_rss_bytes(),
            }, {}
        if op == "profile":
            return self.profile(module, request, arrays)
        raise runner.RefusedError(f"unknown operation {op!r}.")

    def profile(
        self, module: Model, request: Mapping[str, Any], arrays: runner.Arrays
    ) -> tuple[dict[str, Any], runner.Arrays]:
        plain_s = list(self.repeated(request, lambda: self.timed(module, arrays)))
        reply = {"peak_rss_bytes": runner.peak_rss_bytes(), "operators": [], "memory_mb": None}
        results = {"plain_s": np.array(plain_s)}
        if request["by_operator"]:
            profiler = Profiler(module.request, arrays)
            times = list(self.repeated(request, profiler.run))
            if len({len(one) for one in times}) != 1:
                raise runner.FailedError("the model did not run the same operators each time.")
            results["operator_s"] = np.array(times)
            reply["operators"] = profiler.operators
            reply["memory_mb"] = profiler.memory_mb
        return reply, results

    def timed(self, module: Model, arrays: runner.Arrays) -> float:
        module.run(arrays)
        return module.last_s

    def repeated(self, request: Mapping[str, Any], run: Callable[[], Any]) -> Iterator[Any]:
        """What `run` gives each time after the warm-ups; each run is a sign of life."""
        for index in range(request["warm_ups"] + request["repeats"]):
            result = run()
            self.reply({"partial": True}, {})
            if index >= request["warm_ups"]:
                yield result


if __name__ == "__main__":
    runner.main(ModuleServer)
