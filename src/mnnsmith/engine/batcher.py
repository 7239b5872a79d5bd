"""Requests of many threads, run together where their shapes allow it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.engine.module import Feeds, Module, Outputs
from mnnsmith.errors import UsageError

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class BatcherStatistics:
    """What ran so far.  rows: entries along the first axis, of all requests together."""

    requests: int
    rows: int
    batches: int


@dataclass(frozen=True)
class _Request:
    arrays: Arrays
    rows: int
    deadline: float
    future: Future[Outputs] = field(default_factory=Future)


class Batcher:
    """Joins requests along the first axis of every input, and takes their outputs apart again.

    It is for models that treat each entry of the first axis by itself, and have that axis in all
    outputs.  Requests with unequal shapes behind the first axis or unequal `shared` inputs never
    run together.  Any number of threads may use it; the module should have no other user.
    """

    def __init__(
        self,
        module: Module,
        *,
        max_batch: int = 8,
        max_delay_s: float = 0.005,
        shared: Collection[str] = (),
    ) -> None:
        """Start to serve `module`, which stays the caller's to close, after the batcher.

        max_batch: the most rows that run together; a larger request runs alone.
        max_delay_s: how long the first request of a batch waits for others.
        shared: inputs without a batch axis.

        Raises UsageError for wrong options.
        """
        if max_batch < 1 or not 0 <= max_delay_s < float("inf"):
            raise UsageError(
                "max_batch must be at least 1 and max_delay_s not negative, found "
                f"{max_batch} and {max_delay_s}."
            )
        names = {one.name for one in module.inputs}
        if not set(shared) <= names:
            raise UsageError(f"shared inputs {', '.join(shared)}: the model takes {names}.")
        self._module = module
        self._max_batch = max_batch
        self._max_delay_s = max_delay_s
        self._shared = frozenset(shared)
        self._changed = threading.Condition()
        # In the order of each group's oldest request.
        self._groups: dict[Hashable, deque[_Request]] = {}
        self._closing = False
        self._done = BatcherStatistics(0, 0, 0)
        self._thread = threading.Thread(target=self._serve, name="mnnsmith-batcher", daemon=True)
        self._thread.start()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Finish what was submitted, and end; twice is fine."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def statistics(self) -> BatcherStatistics:
        return self._done

    def submit(self, feeds: Feeds) -> Future[Outputs]:
        """Queue a request: `feeds` as for `Module.run`, with a first axis of one or more rows.

        The future gives the outputs, or raises EngineError when the engine fails (the whole batch,
        and all after it), or UsageError when an output does not have the rows of the inputs.

        Raises UsageError at once for inputs that the model does not take, and once closed.
        """
        arrays = self._module.checked(feeds)
        rows, key = self._rows(arrays), self._key(arrays)
        request = _Request(arrays, rows, time.monotonic() + self._max_delay_s)
        with self._changed:
            if self._closing:
                raise UsageError("the batcher is closed.")
            self._groups.setdefault(key, deque()).append(request)
            self._changed.notify()
        return request.future

    def run(self, feeds: Feeds) -> Outputs:
        """`submit`, and wait."""
        return self.submit(feeds).result()

    def _rows(self, arrays: Arrays) -> int:
        sizes = {
            name: array.shape[0] if array.ndim else 0
            for name, array in arrays.items()
            if name not in self._shared
        }
        if len(set(sizes.values())) != 1 or min(sizes.values()) < 1:
            found = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "none"
            raise UsageError(
                f"the inputs of a request need an equal number of rows, found {found}.",
                "Name inputs that have no batch axis in `shared`.",
            )
        return next(iter(sizes.values()))

    def _key(self, arrays: Arrays) -> Hashable:
        """Equal for requests that may run together."""
        return tuple(
            (array.shape, array.tobytes()) if name in self._shared else array.shape[1:]
            for name, array in arrays.items()
        )

    def _serve(self) -> None:
        """Thread: run batch after batch until closed and empty."""
        # In an executor, so that whatever a run raises reaches those who wait for it.
        with ThreadPoolExecutor(1) as executor:
            while (batch := self._next_batch()) is not None:
                batch = [one for one in batch if one.future.set_running_or_notify_cancel()]
                if not batch:
                    continue
                run = executor.submit(self._run, batch)
                error = run.exception()
                for index, request in enumerate(batch):
                    if error is not None:
                        request.future.set_exception(error)
                    else:
                        request.future.set_result(run.result()[index])

    def _next_batch(self) -> list[_Request] | None:
        """Wait for a batch that is full, or whose time is up."""
        with self._changed:
            while True:
                if not self._groups and self._closing:
                    return None
                now = time.monotonic()
                due = [key for key, group in self._groups.items() if self._is_due(group, now)]
                if due:
                    return self._take(min(due, key=lambda key: self._groups[key][0].deadline))
                deadlines = [group[0].deadline for group in self._groups.values()]
                self._changed.wait(min(deadlines) - now if deadlines else None)

    def _is_due(self, group: deque[_Request], now: float) -> bool:
        full = sum(request.rows for request in group) >= self._max_batch
        return full or self._closing or group[0].deadline <= now

    def _take(self, key: Hashable) -> list[_Request]:
        group = self._groups[key]
        batch = [group.popleft()]
        rows = batch[0].rows
        while group and rows + group[0].rows <= self._max_batch:
            batch.append(group.popleft())
            rows += batch[-1].rows
        if not group:
            del self._groups[key]
        return batch

    def _run(self, batch: Sequence[_Request]) -> list[Outputs]:
        rows = [request.rows for request in batch]
        first = batch[0].arrays
        feeds = {
            name: array
            if name in self._shared
            else np.concatenate([request.arrays[name] for request in batch])
            for name, array in first.items()
        }
        outputs = self._module.run(feeds)
        for name, array in outputs.items():
            if array.ndim == 0 or array.shape[0] != sum(rows):
                raise UsageError(
                    f"output {name} has the shape {array.shape} for {sum(rows)} rows of input: "
                    "this model cannot run requests together."
                )
        done = self._done
        self._done = BatcherStatistics(
            done.requests + len(batch), done.rows + sum(rows), done.batches + 1
        )
        ends = np.cumsum(rows)[:-1]
        split = {name: np.split(array, ends) for name, array in outputs.items()}
        return [
            {name: parts[index].copy() for name, parts in split.items()}
            for index in range(len(batch))
        ]
