"""Prepare, run, and read results at the same time: three stages, each busy with another item."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from mnnsmith.engine.module import Feeds, Module, Outputs
from mnnsmith.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")


def pipeline(
    items: Iterable[Item],
    pre: Callable[[Item], Feeds],
    module: Module,
    post: Callable[[Item, Outputs], Result],
    *,
    ahead: int = 4,
    pre_threads: int = 1,
) -> Iterator[Result]:
    """`post(item, module.run(pre(item)))` for each of `items`, in their order.

    pre and post run in threads of their own, the module in its process, so the slowest of the
    three sets the pace.  `pre_threads` are for a pre that lets go of the interpreter lock (numpy,
    decoding of pictures).  At most `ahead` items are on their way beyond the one that is waited
    for, however slow the caller is; `items` is read in the caller's thread.

    An error of any stage is raised in the place of the result that it prevents; what comes after
    is dropped.  To stop early, close the iterator: it waits for the calls at work only.

    Raises UsageError for wrong options at the first item.
    """
    if ahead < 1 or pre_threads < 1:
        raise UsageError(
            f"ahead and pre_threads must be at least 1, found {ahead} and {pre_threads}."
        )
    stages = [ThreadPoolExecutor(threads) for threads in (pre_threads, 1, 1)]

    def begin(item: Item) -> Future[Result]:
        # A stage has its items in order, and waits only for the stage before it.
        prepared = stages[0].submit(pre, item)
        outputs = stages[1].submit(lambda: module.run(prepared.result()))
        return stages[2].submit(lambda: post(item, outputs.result()))

    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(begin(item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for stage in stages:
            stage.shutdown(cancel_futures=True)
