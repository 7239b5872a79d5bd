"""An ONNX draft in ONNX Runtime: its weights in a file, its outputs as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mnnsmith.errors import EngineError, MissingResourceError
from mnnsmith.onnx.draft import Draft, Port
from mnnsmith.onnx.model import assemble, write_model
from mnnsmith.onnx.weights import Place, lay_out, write_weights
from mnnsmith.onnx_runtime import onnx_runtime
from mnnsmith.sources.checkpoint import Checkpoint

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

_ROOM = "Set TMPDIR to a folder on a disk with room."
# Errors only: warnings of a library are not for the user of the command line.
_LOG_ERRORS = 3


class OnnxGraph:
    """A session over a file of weights, made anew when other values are asked for.

    There is one at a time, since each holds the weights, in its own order; it gives all values that
    were ever asked for, so that it is seldom made.
    """

    def __init__(
        self, draft: Draft, checkpoint: Checkpoint, folder: Path, name: str, threads: int | None
    ) -> None:
        """name: of the two files in `folder`."""
        # Of the library as a whole, which looks for devices; sessions have a level of their own.
        onnx_runtime().set_default_logger_severity(_LOG_ERRORS)
        self._draft = draft
        self._threads = threads
        self._model = folder / f"{name}.onnx"
        self.data = folder / f"{name}.data"
        self.places: Mapping[str, Place]
        self.places, _ = lay_out(draft.weights)
        with _on_disk():
            write_weights(
                draft.weights, self.places, checkpoint, self.data, lambda done, total: None
            )
        self._given: dict[str, Port] = {}
        self._session: InferenceSession | None = None

    def giving(self, outputs: Mapping[str, Port]) -> InferenceSession:
        """A session that gives at least these outputs."""
        if self._session is not None and outputs.keys() <= self._given.keys():
            return self._session
        runtime = onnx_runtime()
        self._session = None
        self._given.update(outputs)
        ordered = dict(sorted(self._given.items()))
        with _on_disk():
            write_model(
                assemble(self._draft, self.places, self.data.name, ordered, {}), self._model
            )
        options = runtime.SessionOptions()
        options.log_severity_level = _LOG_ERRORS
        if self._threads is not None:
            options.intra_op_num_threads = self._threads
        with our_errors():
            self._session = runtime.InferenceSession(
                str(self._model), options, providers=["CPUExecutionProvider"]
            )
        return self._session

    def close(self) -> None:
        """Let go of the session, before its files go."""
        self._session = None


@contextmanager
def our_errors() -> Iterator[None]:
    """What ONNX Runtime raises, such as for too little memory, as our error."""
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

    try:
        yield
    except (Fail, InvalidArgument, RuntimeException) as error:
        raise EngineError(f"ONNX Runtime failed: {str(error).splitlines()[0]:.300}") from error


@contextmanager
def _on_disk() -> Iterator[None]:
    """What the temporary folder refuses, as our error."""
    try:
        yield
    except OSError as error:
        raise MissingResourceError(
            f"The reference's model cannot be written to the temporary folder: {error.strerror}.",
            _ROOM,
        ) from error
    except MissingResourceError as error:
        # The space is claimed before anything is written.
        raise MissingResourceError(error.message, _ROOM) from error
