"""The model in ONNX Runtime: a reference that needs no torch.

The float graph is written as ONNX, with its weights, into a folder of its own.  It is our graph
that is computed, so what a model file says wrongly is wrong here, too; the transformers reference
finds that.  This one finds what is wrong with a bundle.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import EngineError, MissingResourceError, UsageError
from mnnsmith.extras import require_packages
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import DType, Value
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.onnx.decoder import draft_decoder
from mnnsmith.onnx.draft import FLOAT, Draft, Port
from mnnsmith.onnx.emit import inner_shape, token_axis
from mnnsmith.onnx.model import assemble, write_model
from mnnsmith.onnx.weights import Place, lay_out, write_weights
from mnnsmith.sources.checkpoint import Checkpoint
from mnnsmith.verify.reference import F32, IDS, Reference, ReferenceRun
from mnnsmith.verify.stored import HEAD_TENSOR

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

_HIDDEN = "hidden_states"
_MODEL, _DATA = "model.onnx", "weights.data"
# Scores of a router that differ by less, relatively, count as a tie; two programs that compute in
# float32 differ by some 1e-6 to 1e-5.
_TIE = 1e-4
# Errors only: warnings of a library are not for the user of the command line.
_LOG_ERRORS = 3


def open_onnx(
    checkpoint: Checkpoint, model: LanguageModel, *, threads: int | None = None
) -> Reference:
    """`model` with the weights of `checkpoint` in ONNX Runtime, float32.

    checkpoint: the original, or a bundle's weights (`verify.stored`).  The weights are written to a
    temporary folder, which goes when the reference is closed.  Raises `MissingResourceError` where
    the extra is not installed.
    """
    require_packages("onnx", "onnxruntime")
    try:
        folder = tempfile.TemporaryDirectory(prefix="mnnsmith-onnx-")
    except OSError as error:
        raise MissingResourceError(
            f"No temporary folder can be made: {error.strerror}.", "Free some disk space."
        ) from error
    try:
        return _OnnxReference(checkpoint, model, folder, threads)
    except BaseException:
        folder.cleanup()
        raise


class _OnnxReference:
    """A session over a file of weights, made anew when other values are asked for.

    There is one at a time, since each holds the weights, in its own order; it gives all values that
    were ever asked for, so that it is seldom made.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: LanguageModel,
        folder: tempfile.TemporaryDirectory[str],
        threads: int | None,
    ) -> None:
        import onnxruntime

        onnxruntime.disable_telemetry_events()
        # Of the library as a whole, which looks for devices; sessions have a level of their own.
        onnxruntime.set_default_logger_severity(_LOG_ERRORS)
        if model.tied and checkpoint.config.get("tie_word_embeddings") is False:
            model = _with_own_head(model)
        self._folder = folder
        self._path = Path(folder.name)
        self._threads = threads
        self._graph = model.graph
        self._draft: Draft = draft_decoder(model, kv_cache=False)
        self._places, _ = lay_out(self._draft.weights)
        write_weights(
            self._draft.weights, self._places, checkpoint, self._path / _DATA,
            lambda done, total: None,
        )  # fmt: skip
        self._values = {v.name: v for v in self._graph.values if _comparable(v)}
        self._head = _head_weight(model, self._places, self._path / _DATA)
        self._given: frozenset[str] = frozenset()
        self._session: InferenceSession | None = None

    @property
    def name(self) -> str:
        import onnxruntime

        return f"ONNX Runtime {onnxruntime.__version__}, float32"

    def available(self) -> Collection[str]:
        return self._values.keys()

    def run(self, ids: IDS, values: Sequence[str] = ()) -> ReferenceRun:
        unknown = sorted(set(values) - set(self._values))
        if unknown:
            raise UsageError(f"{unknown[0]!r:.80} is no value that this reference can give.")
        found: dict[str, list[F32]] = {name: [] for name in (_HIDDEN, *values)}
        for window in self._windows(ids, list(found)):
            for name, value in window.items():
                found[name].append(value)
        joined = {name: np.stack(parts) for name, parts in found.items()}
        return ReferenceRun(ids, joined[_HIDDEN], {name: joined[name] for name in values})

    def decisive(self, ids: IDS) -> npt.NDArray[np.bool_]:
        choices = list(_choices(self._graph))
        if not choices:
            return np.ones(len(ids), dtype=np.bool_)
        names = [name for name, _ in choices]
        return np.array([
            all(_gap(window[name], k) > _TIE for name, k in choices)
            for window in self._windows(ids, names)
        ])  # fmt: skip

    def logits(self, hidden: F32) -> F32:
        found: F32 = hidden @ self._head
        return found

    def __enter__(self) -> Reference:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session = None
        del self._head
        self._folder.cleanup()

    def _windows(self, ids: IDS, names: Sequence[str]) -> Iterator[dict[str, F32]]:
        """The values [n, width] of one window after the other, each from an empty cache."""
        session = self._giving(frozenset(names))
        for window in ids:
            feeds = {
                "input_ids": window[None].astype(np.int64),
                "attention_mask": np.ones((1, len(window)), dtype=np.int64),
                "position_ids": np.arange(len(window), dtype=np.int64)[None],
            }
            wanted = {port.name for port in session.get_inputs()}
            given = {name: feed for name, feed in feeds.items() if name in wanted}
            with _our_errors():
                outputs = session.run(list(names), given)
            yield {
                name: np.asarray(value, dtype=np.float32).reshape(len(window), -1)
                for name, value in zip(names, outputs, strict=True)
            }

    def _giving(self, names: frozenset[str]) -> InferenceSession:
        """A session that gives at least these values."""
        if self._session is not None and names <= self._given:
            return self._session
        import onnxruntime

        self._session = None
        self._given |= names
        outputs = {
            name: Port(FLOAT, ("batch", "sequence", *inner_shape(self._values[name])))
            for name in sorted(self._given)
        }
        file = self._path / _MODEL
        write_model(assemble(self._draft, self._places, _DATA, outputs, {}), file)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _LOG_ERRORS
        if self._threads is not None:
            options.intra_op_num_threads = self._threads
        with _our_errors():
            self._session = onnxruntime.InferenceSession(
                str(file), options, providers=["CPUExecutionProvider"]
            )
        return self._session


@contextmanager
def _our_errors() -> Iterator[None]:
    """What ONNX Runtime raises, such as for too little memory, as our error."""
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

    try:
        yield
    except (Fail, InvalidArgument, RuntimeException) as error:
        raise EngineError(f"ONNX Runtime failed: {str(error).splitlines()[0]:.300}") from error


def _with_own_head(model: LanguageModel) -> LanguageModel:
    """A tied model whose bundle stores head and embedding apart."""
    head = replace(model.head, tensor=HEAD_TENSOR)
    graph = copy.copy(model.graph)
    graph.nodes = [
        replace(node, slots={**node.slots, "weight": head})
        if node.slots.get("weight") == model.head
        else node
        for node in model.graph.nodes
    ]
    return replace(model, graph=graph, head=head)


def _head_weight(model: LanguageModel, places: Mapping[str, Place], data: Path) -> F32:
    """The head's weight [hidden, vocabulary], mapped from the file."""
    rows, cols = model.head.rows, model.head.cols
    if model.tied:
        embedding = _mapped(data, places["embedding"], (rows, cols))
        return np.transpose(embedding)
    return _mapped(data, places["lm_head/weight"], (cols, rows))


def _mapped(data: Path, place: Place, shape: tuple[int, int]) -> F32:
    values: F32 = np.memmap(data, "<f4", "r", place.offset, shape)
    return values


def _comparable(value: Value) -> bool:
    """Whether a value is one of the tokens, in floats, and computed."""
    return (
        value.dtype is DType.FLOAT and token_axis(value) is not None and value.name != "input_ids"
    )


def _choices(graph: Graph) -> Iterator[tuple[str, int]]:
    """What routers choose from, and how many: experts, and groups of them."""
    read = {value.index for node in graph.nodes for value in node.inputs}
    for node in graph.nodes:
        # Of a group's two best only the sum is read, which is the same whichever came first.
        if node.kind == "top_k" and node.outputs[1].index in read:
            k = node.outputs[0].shape[-1]
            assert isinstance(k, int)
            yield node.inputs[0].name, k


def _gap(scores: F32, k: int) -> float:
    """The smallest relative difference between the last chosen score and the first that is not."""
    if k == scores.shape[-1]:
        return np.inf
    ordered = np.sort(scores, axis=-1)
    last, first = ordered[:, -k], ordered[:, -k - 1]
    size = np.maximum(np.abs(last), np.abs(first))
    return float(((last - first) / np.maximum(size, np.finfo(np.float32).tiny)).min())
