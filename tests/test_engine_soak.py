"""Hundreds of rounds: memory, file descriptors, processes and threads stay where they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from mnnsmith.engine import Engine
from mnnsmith.engine.client import Runner
from tiny_bundle import TinyLlama

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROUNDS = 200
MARGIN_BYTES = 2 << 20


def test_rounds_of_load_generate_close(
    tiny_bundle: tuple[Path, TinyLlama], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = psutil.Process()

    def held() -> tuple[int, int, int, int]:
        children, threads = len(process.children(recursive=True)), process.num_threads()
        return process.num_fds(), children, threads, len(list(tmp_path.iterdir()))

    for number in range(ROUNDS):
        with Engine(tiny_bundle[0]) as engine:
            assert len(list(engine.generate([1, 2, 3], max_new_tokens=8))) == 8
        if number == 9:
            before, memory = held(), process.memory_info().rss
    assert held() == before
    assert process.memory_info().rss < memory + MARGIN_BYTES


def test_rounds_inside_one_child(tiny_bundle: tuple[Path, TinyLlama]) -> None:
    runner = Runner()
    child = psutil.Process(runner.pid)
    random = np.random.default_rng(0)
    for number in range(ROUNDS):
        runner.call("load", silence_s=60, bundle=str(tiny_bundle[0]), config={}, piece_tokens=256)
        for length in (1, int(random.integers(2, 300)), 300):
            ids = random.integers(0, 256, length).astype(np.int32)
            for all_positions in (False, True):
                runner.call("reset", silence_s=60)
                runner.call("forward", {"ids": ids}, silence_s=60, all_positions=all_positions)
        if number == 19:
            memory, fds = child.memory_info().rss, child.num_fds()
    assert child.memory_info().rss < memory + MARGIN_BYTES
    assert child.num_fds() == fds
    runner.close()
