"""The model in ONNX Runtime: a reference that needs no torch.

The float graph is written as ONNX, with its weights, into a folder of its own.  It is our graph
that is computed, so what a model file says wrongly is wrong here, too; the transformers reference
finds that.  This one finds what is wrong with a bundle.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from mnnsmith.conversion.slots import matrix_rows
from mnnsmith.errors import MissingResourceError, UsageError
from mnnsmith.extras import require_packages
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import DType, Value
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.onnx.decoder import draft_decoder
from mnnsmith.onnx.draft import FLOAT, Draft, Port
from mnnsmith.onnx.emit import inner_shape, token_axis
from mnnsmith.onnx.vision import draft_vision
from mnnsmith.onnx.weights import Place
from mnnsmith.onnx_runtime import onnx_runtime
from mnnsmith.sources.checkpoint import Checkpoint
from mnnsmith.verify.references.onnx_pictures import OnnxPictures
from mnnsmith.verify.references.onnx_session import OnnxGraph, our_errors
from mnnsmith.verify.references.reference import F32, IDS, Reference, ReferenceRun
from mnnsmith.verify.stored.checkpoint import HEAD_TENSOR

_HIDDEN = "hidden_states"
# Scores of a router that differ by less, relatively, count as a tie; two programs that compute in
# float32 differ by some 1e-6 to 1e-5.
_TIE = 1e-4


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
            f"No temporary folder can be made: {error.strerror}.",
            "Set TMPDIR to a folder on a disk with room.",
        ) from error
    try:
        return _OnnxReference(checkpoint, model, folder, threads)
    except BaseException:
        folder.cleanup()
        raise


class _OnnxReference:
    """Of a model that sees, the text part takes embeddings, which are looked up here."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: LanguageModel,
        folder: tempfile.TemporaryDirectory[str],
        threads: int | None,
    ) -> None:
        if model.tied and checkpoint.config.get("tie_word_embeddings") is False:
            model = _with_own_head(model)
        self._folder = folder
        self._checkpoint = checkpoint
        self._model = model
        self._threads = threads
        self._graph = model.graph
        draft = draft_decoder(model, kv_cache=False, embedded=model.vision is not None)
        self._decoder = self._open("model", draft)
        self._values = {v.name: v for v in self._graph.values if _comparable(v)}
        self._head = _head_weight(model, self._decoder)
        self._pictures: OnnxPictures | None = None

    def _open(self, name: str, draft: Draft) -> OnnxGraph:
        return OnnxGraph(draft, self._checkpoint, Path(self._folder.name), name, self._threads)

    @property
    def name(self) -> str:
        return f"ONNX Runtime {onnx_runtime().__version__}, float32"

    @property
    def computes(self) -> bool:
        return True

    @property
    def pictures(self) -> OnnxPictures | None:
        """As `Reference.pictures`."""
        if self._pictures is None and self._model.vision is not None:
            self._pictures = OnnxPictures(
                self._model.vision, lambda: self._open("vision", draft_vision(self._model)),
                self._embedded, lambda rows: self._window(rows, [_HIDDEN])[_HIDDEN],
            )  # fmt: skip
        return self._pictures

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
        self._decoder.close()
        if self._pictures is not None:
            self._pictures.close()
        del self._head
        self._folder.cleanup()

    def _windows(self, ids: IDS, names: Sequence[str]) -> Iterator[dict[str, F32]]:
        """The values [n, width] of one window after the other, each from an empty cache."""
        for window in ids:
            own = window.astype(np.int64)
            given = own if self._model.vision is None else self._embedded(own)
            yield self._window(given, names)

    def _window(self, given: IDS | F32, names: Sequence[str]) -> dict[str, F32]:
        """The same of ids [n], or of embeddings [n, width]."""
        ports = {
            name: Port(FLOAT, ("batch", "sequence", *inner_shape(self._values[name])))
            for name in names
        }
        session = self._decoder.giving(ports)
        feeds = {
            "input_ids": given[None],
            "inputs_embeds": given[None],
            "attention_mask": np.ones((1, len(given)), dtype=np.int64),
            "position_ids": np.arange(len(given), dtype=np.int64)[None],
        }
        wanted = {port.name for port in session.get_inputs()}
        with our_errors():
            outputs = session.run(list(names), {n: feeds[n] for n in feeds if n in wanted})
        return {
            name: np.asarray(value, dtype=np.float32).reshape(len(given), -1)
            for name, value in zip(names, outputs, strict=True)
        }

    def _embedded(self, ids: IDS) -> F32:
        """Rows of the embedding, [n, width]."""
        slot = self._model.embedding
        tensor = self._checkpoint.tensors[slot.tensor]
        unique, places = np.unique(ids, return_inverse=True)
        rows = np.concatenate([matrix_rows(slot, tensor, int(i), int(i) + 1) for i in unique])
        found: F32 = rows[places]
        return found


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


def _head_weight(model: LanguageModel, graph: OnnxGraph) -> F32:
    """The head's weight [hidden, vocabulary], mapped from the file."""
    rows, cols = model.head.rows, model.head.cols
    if "embedding" in graph.places and model.tied:
        embedding = _mapped(graph.data, graph.places["embedding"], (rows, cols))
        return np.transpose(embedding)
    return _mapped(graph.data, graph.places["lm_head/weight"], (cols, rows))


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
