"""transformers as the reference: whole in memory, or block by block with streamed weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.engine.machine import free_memory_bytes, usable_processors
from mnnsmith.errors import BundleError, EngineError, SourceError, UsageError
from mnnsmith.graph.weights import MatrixSlot, Role
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.sources.checkpoint import Checkpoint, row_ranges
from mnnsmith.verify.references.module_values import module_values
from mnnsmith.verify.references.reference import F32, IDS, ReferenceRun
from mnnsmith.verify.references.streaming import StreamedModel
from mnnsmith.verify.references.torch_model import (
    build,
    decoder_of,
    load_folder,
    own_folder,
    quiet,
    torch_and_transformers,
)
from mnnsmith.verify.references.torch_watch import RouterWatch, ValueWatch
from mnnsmith.verify.references.transformers_pictures import TransformersPictures
from mnnsmith.verify.stored.checkpoint import BUNDLE_FORMAT, head_tensor

# Working memory of one block on a batch of windows.
_ACTIVATIONS_BYTES = 512 << 20
# A head up to this size stays in memory when weights are streamed.
_RESIDENT_HEAD_BYTES = 1 << 30
_HEAD_ROWS_BYTES = 64 << 20
# What torch and transformers take, and what other programs may want.
_OVERHEAD_BYTES = 2 << 30


def open_transformers(
    checkpoint: Checkpoint,
    model: LanguageModel,
    *,
    streamed: bool | None = None,
    threads: int | None = None,
) -> TransformersReference:
    """A reference with the weights of `checkpoint`, in float32 on the processor.

    model: what we make of the same checkpoint; it names the values that `run` can give.
    streamed: weights are read block by block on every run, so that memory holds one block; None
    decides by the free memory.  threads: of torch, by default all processors.

    A Hugging Face folder of floats that fits into memory is loaded by transformers itself, so that
    nothing of how we read weights is shared; anything else is filled in from our tensors.

    Raises `MissingResourceError` without the extra `reference`, `UnsupportedError` where
    transformers does not know the model, `SourceError` for tensors that do not fit it.
    """
    _, transformers = torch_and_transformers()
    if streamed is None:
        parameters = sum(int(np.prod(tensor.shape)) for tensor in checkpoint.tensors.values())
        streamed = 4 * parameters + _OVERHEAD_BYTES > free_memory_bytes()
    name = f"transformers {transformers.__version__}, float32"
    folder = own_folder(checkpoint)
    threads = threads or usable_processors()
    pool = ThreadPoolExecutor(threads)
    try:
        if streamed:
            torch_model = build(checkpoint)
            streaming = StreamedModel(torch_model, checkpoint, pool)
            return TransformersReference(
                f"{name}, weights streamed",
                torch_model,
                model,
                checkpoint,
                pool,
                threads,
                streaming,
            )
        if folder is not None:
            torch_model = load_folder(folder, checkpoint)
            name = f"{name}, weights read by transformers"
        else:
            torch_model = build(checkpoint)
            StreamedModel(torch_model, checkpoint, pool).load_all()
        return TransformersReference(name, torch_model, model, checkpoint, pool, threads, None)
    except BaseException:
        pool.shutdown()
        raise


class TransformersReference:
    """`Reference` on a model of transformers; see `open_transformers`."""

    def __init__(
        self,
        name: str,
        torch_model: Any,
        model: LanguageModel,
        checkpoint: Checkpoint,
        pool: ThreadPoolExecutor,
        threads: int,
        streaming: StreamedModel | None,
    ) -> None:
        self._name = name
        self._torch_model = torch_model
        self._model = model
        self._head = head_tensor(model, checkpoint)
        self._head_values: Any = None
        self._of_bundle = checkpoint.format == BUNDLE_FORMAT
        self._pool = pool
        self._threads = threads
        self._streaming = streaming
        self._values = module_values(model.graph, {n for n, _ in torch_model.named_modules()})
        self._decisive: dict[tuple[int, bytes], npt.NDArray[np.bool_]] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def pictures(self) -> TransformersPictures | None:
        """As `Reference.pictures`."""
        if self._model.vision is None:
            return None
        return TransformersPictures(
            self._torch_model, self._model.vision, self._streaming, self._computing
        )

    @property
    def computes(self) -> bool:
        return True

    def available(self) -> Collection[str]:
        return self._values.keys()

    def run(self, ids: IDS, values: Sequence[str] = ()) -> ReferenceRun:
        """As `Reference.run`.

        Raises `UsageError` for ids or names of values that there are not, `SourceError` where the
        original itself computes what is not finite, `BundleError` where it does so with a bundle's
        weights, `EngineError` where memory does not suffice.
        """
        ids = self._checked(ids)
        unknown = sorted(set(values) - self._values.keys())
        if unknown:
            raise UsageError(f"{self._name} has no value {unknown[0]!r:.80}.")
        with ExitStack() as stack:
            stack.enter_context(self._computing())
            stack.enter_context(self._in_batches(*ids.shape))
            watch = stack.enter_context(ValueWatch(self._torch_model, self._values, values))
            routers = stack.enter_context(
                RouterWatch(self._torch_model, *ids.shape, expected=bool(self._model.mixture))
            )
            hidden = self._hidden(stack, ids).numpy()
        _check_finite(self._name, ids, hidden, of_bundle=self._of_bundle)
        if self._model.mixture:
            self._decisive[len(ids), ids.tobytes()] = routers.decisive
        return ReferenceRun(ids, hidden, watch.values(*ids.shape))

    def decisive(self, ids: IDS) -> npt.NDArray[np.bool_]:
        """As `Reference.decisive`; ids that were run already cost nothing."""
        ids = self._checked(ids)
        if not self._model.mixture:
            return np.ones(len(ids), dtype=np.bool_)
        key = len(ids), ids.tobytes()
        if key not in self._decisive:
            self.run(ids)
        return self._decisive[key]

    def logits(self, hidden: F32) -> F32:
        """As `Reference.logits`."""
        torch, _ = torch_and_transformers()
        rows, width = self._head.shape
        with self._computing():
            x = torch.from_numpy(np.ascontiguousarray(hidden, dtype=np.float32))
            if self._streaming is None:
                found: F32 = self._torch_model.get_output_embeddings()(x).numpy()
                return found
            if 4 * rows * width <= _RESIDENT_HEAD_BYTES:
                if self._head_values is None:
                    self._head_values = torch.from_numpy(self._head.rows(0, rows))
                resident: F32 = (x @ self._head_values.T).numpy()
                return resident
            out = np.empty((len(hidden), rows), dtype=np.float32)
            for start, stop in row_ranges(rows, width, _HEAD_ROWS_BYTES):
                part = torch.from_numpy(self._head.rows(start, stop))
                out[:, start:stop] = (x @ part.T).numpy()
            return out

    def __enter__(self) -> TransformersReference:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        self._torch_model = self._streaming = self._head_values = None

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Without gradients and chatter, on as many threads as were asked for."""
        torch, _ = torch_and_transformers()
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            with torch.no_grad(), quiet(), _our_errors():
                yield
        finally:
            torch.set_num_threads(before)

    def _hidden(self, stack: ExitStack, ids: IDS) -> Any:
        torch, _ = torch_and_transformers()
        fed = ids
        if self._streaming is not None:
            fed = stack.enter_context(self._streaming.running(ids))
        decoder = decoder_of(self._torch_model)
        return decoder(input_ids=torch.from_numpy(fed), use_cache=False).last_hidden_state

    @contextmanager
    def _in_batches(self, windows: int, n: int) -> Iterator[None]:
        """Have every block work on as many windows at a time as memory allows."""
        floats = _floats_per_token(self._model, n)
        size = max(1, _ACTIVATIONS_BYTES // (4 * floats * n))
        layers = list(decoder_of(self._torch_model).layers)
        if size >= windows:
            yield
            return
        for layer in layers:
            layer.forward = _batched(type(layer).forward.__get__(layer), windows, size)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def _checked(self, ids: IDS) -> IDS:
        array = np.ascontiguousarray(ids, dtype=np.int64)
        rows = self._model.embedding.rows
        if array.ndim != 2 or not array.size:
            raise UsageError(f"{self._name}: ids must be [windows, n], found {list(array.shape)}.")
        if array.min() < 0 or array.max() >= rows:
            raise UsageError(
                f"{self._name}: ids {array.min()} to {array.max()} are outside of a vocabulary of "
                f"{rows}."
            )
        return array


@contextmanager
def _our_errors() -> Iterator[None]:
    """What torch raises, most often for too little memory, as our error."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise EngineError(
            f"transformers failed: {first:.300}",
            "If memory is short: close other programs, or check less at once (--level quick, one "
            "--check at a time).",
        ) from error


def _floats_per_token(model: LanguageModel, n: int) -> int:
    """About what one block computes for one token, attention's scores included."""
    slots = [node.slots.get("weight") for node in model.graph.all_nodes()]
    matrices = [s for s in slots if isinstance(s, MatrixSlot) and s.role is not Role.HEAD]
    widest = max(slot.rows + slot.cols for slot in matrices)
    mixtures = [node for node in model.graph.nodes if node.kind == "mixture"]
    chosen = max((int(node.attributes["top_k"]) for node in mixtures), default=1)
    return 4 * chosen * widest + 2 * model.attention.heads * n


def _batched(forward: Any, windows: int, size: int) -> Any:
    """`forward` of a block in parts of the first dimension, wherever an argument has it."""
    import torch

    def part(argument: Any, start: int) -> Any:
        if isinstance(argument, torch.Tensor) and argument.dim() and len(argument) == windows:
            return argument[start : start + size]
        if isinstance(argument, tuple):
            return tuple(part(each, start) for each in argument)
        return argument

    def run(*arguments: Any, **named: Any) -> Any:
        outputs = []
        for start in range(0, windows, size):
            out = forward(
                *(part(a, start) for a in arguments),
                **{key: part(value, start) for key, value in named.items()},
            )
            outputs.append(out[0] if isinstance(out, tuple) else out)
        return torch.cat(outputs)

    return run


def _check_finite(name: str, ids: IDS, hidden: F32, *, of_bundle: bool) -> None:
    bad = ~np.isfinite(hidden).all(-1)
    if not bad.any():
        return
    window, position = (int(i) for i in np.argwhere(bad)[0])
    found = (
        f"values that are not finite for {int(bad.sum())} of {bad.size} tokens, the first in "
        f"window {window} at position {position} (id {int(ids[window, position])})."
    )
    if of_bundle:
        raise BundleError(
            f"{name}: with the weights that the bundle holds, the original computes {found}",
            "Are its weights damaged? mnnsmith verify --check weights tells.",
        )
    raise SourceError(
        f"{name}: the original computes {found}",
        "Nothing can be judged by it; are its weights damaged, or was it trained so?",
    )
