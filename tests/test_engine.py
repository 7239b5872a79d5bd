"""The engine class on a tiny bundle: values, cache, generation, limits, damage, cancelling."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mnnsmith.engine import Engine, SamplingOptions, client, runner
from mnnsmith.engine.device import RUNNER, Launch
from mnnsmith.errors import ContextLengthError, EngineError, UsageError
from tiny_bundle import VOCAB, TinyLlama, make_model, write_bundle

pytestmark = pytest.mark.engine

Tiny = tuple[Path, TinyLlama]


@pytest.fixture(scope="module")
def shared(tiny_bundle: Tiny) -> Iterator[Engine]:
    with Engine(tiny_bundle[0]) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Engine:
    """A shared engine with an empty cache."""
    shared.reset()
    return shared


def prompt(length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(engine: Engine, ids: list[int], count: int) -> list[int]:
    return list(engine.generate(ids, max_new_tokens=count))


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 17, 300, 640])
def test_logits_equal_the_model_in_numpy(engine: Engine, tiny_bundle: Tiny, length: int) -> None:
    ids = prompt(length)
    expected = tiny_bundle[1].logits(ids)
    found = engine.forward(ids, all_positions=True)
    assert found.shape == (length, VOCAB)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 1e-3 * expected.std()
    engine.reset()
    last = engine.forward(ids)
    assert last.shape == (VOCAB,)
    assert np.abs(last - expected[-1]).max() < 1e-3 * expected.std()


@pytest.mark.parametrize("cuts", [[1], [5, 6, 7], [64], [100, 101, 300], [256, 512]])
def test_a_prompt_in_parts_equals_the_whole(
    engine: Engine, tiny_bundle: Tiny, cuts: list[int]
) -> None:
    ids = prompt(600)
    expected = tiny_bundle[1].logits(ids)
    parts = np.split(np.array(ids), cuts)
    found = np.concatenate([engine.forward(part, all_positions=True) for part in parts])
    assert engine.position == 600
    assert np.abs(found - expected).max() < 1e-3 * expected.std()


def test_pieces_of_any_length_give_the_same(tiny_bundle: Tiny) -> None:
    ids = prompt(300)
    expected = tiny_bundle[1].logits(ids)
    for piece_tokens in (1, 7, 64, 1000):
        with Engine(tiny_bundle[0], piece_tokens=piece_tokens, all_logits=True) as engine:
            found = engine.forward(ids, all_positions=True)
        assert np.abs(found - expected).max() < 1e-3 * expected.std()


def test_greedy_generation_equals_the_model_in_numpy(engine: Engine, tiny_bundle: Tiny) -> None:
    ids = prompt(20)
    expected = list(ids)
    for _ in range(12):
        expected.append(int(tiny_bundle[1].logits(expected)[-1].argmax()))
    assert greedy(engine, ids, 12) == expected[20:]


def test_calls_give_the_same_bits_again(engine: Engine) -> None:
    first = engine.forward(prompt(70))
    engine.reset()
    assert np.array_equal(engine.forward(prompt(70)), first)


# --- the cache ----------------------------------------------------------------------------------


def test_a_second_generation_does_not_see_the_first(engine: Engine, tiny_bundle: Tiny) -> None:
    with Engine(tiny_bundle[0]) as fresh:
        expected = greedy(fresh, prompt(30, seed=2), 10)
        logits = fresh.forward([5])
    greedy(engine, prompt(200), 10)
    engine.reset()
    assert engine.position == 0
    assert engine.tokens == ()
    assert greedy(engine, prompt(30, seed=2), 10) == expected
    assert np.array_equal(engine.forward([5]), logits)


@pytest.mark.parametrize("keep", [0, 1, 63, 64, 100])
def test_rewind_equals_never_having_fed(engine: Engine, keep: int) -> None:
    def rest() -> list[np.ndarray]:
        return [engine.forward([3]), engine.forward(prompt(20, seed=5)), engine.forward([4])]

    ids = prompt(100)[:keep]
    if ids:
        engine.forward(ids)
    expected = rest()
    engine.rewind(keep)
    assert engine.position == keep
    assert engine.tokens == tuple(ids)
    engine.forward(prompt(150, seed=7))
    engine.forward([9])
    engine.rewind(keep + 3)
    engine.rewind(keep)
    for found, wanted in zip(rest(), expected, strict=True):
        assert np.array_equal(found, wanted)


def test_reset_after_rewind(engine: Engine) -> None:
    expected = engine.forward(prompt(40))
    engine.rewind(20)
    engine.reset()
    assert np.array_equal(engine.forward(prompt(40)), expected)


def test_rewind_is_refused_where_it_would_be_wrong(engine: Engine, tiny_bundle: Tiny) -> None:
    engine.forward(prompt(5))
    for position in (-1, 6):
        with pytest.raises(UsageError, match="rewind"):
            engine.rewind(position)
    with Engine(tiny_bundle[0], config={"attention_mode": 9}) as quantized:
        quantized.forward(prompt(5))
        with pytest.raises(UsageError, match="quantized"):
            quantized.rewind(3)
        quantized.rewind(5)
        quantized.rewind(0)
        assert quantized.position == 0


def test_the_cache_after_a_generation_that_was_left(engine: Engine) -> None:
    ids = prompt(10)
    generation = engine.generate(ids)
    given = [next(generation) for _ in range(4)]
    generation.close()
    assert generation.finish_reason == "cancelled"
    assert list(generation) == []
    assert engine.tokens == (*ids, *given[:-1])
    logits = engine.forward(given[-1:])
    engine.reset()
    # The same lengths of calls give the same bits.
    engine.forward(ids)
    for token in given[:-1]:
        engine.forward([token])
    assert np.array_equal(engine.forward(given[-1:]), logits)


def test_two_bundles_at_once(tiny_bundle: Tiny, tmp_path: Path) -> None:
    other_model = write_bundle(tmp_path / "other", make_model(seed=5, context=100))
    ids = prompt(50)
    with Engine(tiny_bundle[0]) as one, Engine(tmp_path / "other") as two:
        assert (one.context_limit, two.context_limit) == (640, 100)
        for engine, model in ((one, tiny_bundle[1]), (two, other_model)):
            expected = model.logits(ids)
            assert np.abs(engine.forward(ids) - expected[-1]).max() < 1e-3 * expected.std()
        first, second = one.generate([1]), two.generate([1])
        mixed = [next(generation) for _ in range(5) for generation in (first, second)]
        one.rewind(50)
        two.rewind(50)
        assert mixed[::2] == greedy(one, [1], 5)
        assert mixed[1::2] == greedy(two, [1], 5)


# --- generation ---------------------------------------------------------------------------------


def test_generation_ends_for_the_reason_it_says(engine: Engine) -> None:
    generation = engine.generate(prompt(10), max_new_tokens=6)
    tokens = list(generation)
    assert len(tokens) == 6
    assert generation.finish_reason == "length"
    engine.reset()
    stop = tokens[3]
    generation = engine.generate(prompt(10), max_new_tokens=6, stop_ids=[stop])
    assert list(generation) == tokens[: tokens.index(stop)]
    assert generation.finish_reason == "stop"
    assert generation.stop_token == stop


def test_generation_at_the_end_of_the_context(engine: Engine) -> None:
    generation = engine.generate(prompt(637))
    # Three more fit into the cache; the token chosen after the last one needs no place.
    assert len(list(generation)) == 4
    assert generation.finish_reason == "context"
    assert engine.position == 640
    with pytest.raises(ContextLengthError, match="640"):
        engine.forward([1])
    with pytest.raises(ContextLengthError, match="640"):
        engine.generate([1])
    engine.reset()
    assert len(greedy(engine, prompt(640), 5)) == 1


def test_prompts_that_are_refused(engine: Engine) -> None:
    engine.forward([1, 2, 3])
    for call in (engine.forward, engine.generate):
        with pytest.raises(ContextLengthError, match="641"):
            call(prompt(641))
        with pytest.raises(UsageError, match="no token ids"):
            call([])
        for wrong in ([VOCAB], [-1], [1, 2**31], [2**40]):
            with pytest.raises(UsageError, match="outside the vocabulary of 260"):
                call(wrong)
        for wrong in ([0.5], [[1, 2]], ["a"]):
            with pytest.raises(UsageError, match="integers"):
                call(wrong)
    with pytest.raises(UsageError, match="max_new_tokens"):
        engine.generate([1], max_new_tokens=0)
    assert engine.tokens == (1, 2, 3)


def test_seeds(engine: Engine) -> None:
    def run(seed: int | None) -> tuple[list[int], int]:
        engine.reset()
        options = SamplingOptions(temperature=1.5, top_p=0.95, seed=seed)
        generation = engine.generate(prompt(5), options, max_new_tokens=30)
        return list(generation), generation.seed

    assert run(1) == run(1)
    assert run(1)[0] != run(2)[0]
    tokens, seed = run(None)
    assert run(seed)[0] == tokens


def test_repetition_penalty_counts_the_prompt_and_the_answer(engine: Engine) -> None:
    options = SamplingOptions(repetition_penalty=100.0)
    ids = prompt(60)
    tokens = list(engine.generate(ids, options, max_new_tokens=60))
    assert len(set(tokens)) == 60
    assert not set(tokens) & set(ids)


def test_another_use_ends_a_generation(engine: Engine) -> None:
    generation = engine.generate([1])
    next(generation)
    engine.forward([2])
    with pytest.raises(UsageError, match="something else"):
        next(generation)


def test_threads_take_turns(engine: Engine) -> None:
    def work(seed: int) -> None:
        try:
            for _ in range(20):
                engine.forward(prompt(3, seed))
        except EngineError as error:
            failures.append(error)

    failures: list[EngineError] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    tokens = engine.tokens
    calls = {tuple(prompt(3, seed)) for seed in range(4)}
    assert len(tokens) == 240
    assert {tokens[i : i + 3] for i in range(0, 240, 3)} == calls


# --- the engine's own text ----------------------------------------------------------------------


def test_engine_text(engine: Engine) -> None:
    ids = engine.engine_tokenize("é <|user|>")
    assert ids == [0xC3, 0xA9, 0x20, 258]
    assert engine.engine_detokenize(ids) == "é <|user|>".encode()
    # Half a character comes back as the byte that it is.
    assert engine.engine_detokenize([0xC3]) == b"\xc3"
    messages = [{"role": "user", "content": "Hé?"}]
    assert engine.engine_apply_template(messages) == "<|user|>Hé?<|assistant|>"
    for text in ("a\0b", "\ud800"):
        with pytest.raises(UsageError):
            engine.engine_tokenize(text)
    with pytest.raises(UsageError, match="outside"):
        engine.engine_detokenize([VOCAB])
    assert engine.engine_tokenize("") == []
    assert engine.engine_detokenize([]) == b""


# --- statistics, settings, output ---------------------------------------------------------------


def test_statistics_count_what_was_done(tiny_bundle: Tiny) -> None:
    with Engine(tiny_bundle[0]) as engine:
        before = engine.statistics
        assert (before.prefill_tokens, before.decode_tokens) == (0, 0)
        assert 0 < before.load_s < 60
        engine.forward(prompt(300))
        greedy(engine, [1], 5)
        after = engine.statistics
        assert (after.prefill_tokens, after.decode_tokens) == (300, 5)
        assert after.prefill_tokens_per_s == pytest.approx(300 / after.prefill_s)
        child = psutil.Process(engine.pid).memory_info().rss
        assert child * 0.9 <= after.peak_rss_bytes < child + (200 << 20)


def test_settings(tiny_bundle: Tiny) -> None:
    with Engine(tiny_bundle[0], memory="low", precision="high", threads=1) as engine:
        assert engine.settings["memory"] == "low"
        assert engine.settings["precision"] == "high"
        assert engine.settings["thread_num"] == 1
    options: dict[str, Any]
    for options in ({"memory": "lots"}, {"precision": "x"}, {"threads": 0}, {"piece_tokens": 0},
                    {"config": {"x": object()}}, {"config": {"memory": 3}}):  # fmt: skip
        with pytest.raises(UsageError):
            Engine(tiny_bundle[0], **options)


@pytest.mark.parametrize("option", ["use_mmap", "kvcache_mmap"])
def test_mapped_files_lie_in_the_engines_own_folder(
    tiny_bundle: Tiny, tmp_path: Path, option: str
) -> None:
    ids = prompt(200)
    with Engine(tiny_bundle[0]) as plain:
        expected = greedy(plain, ids, 5)
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle[0], folder)
    names = sorted(path.name for path in folder.iterdir())
    for _ in range(2):
        with Engine(folder, config={option: True}) as engine:
            assert greedy(engine, ids, 5) == expected
    config("config.json", **{option: True, "tmp_path": str(tmp_path)})(folder)
    with Engine(folder) as engine:
        assert greedy(engine, ids, 5) == expected
    assert sorted(path.name for path in folder.iterdir()) == names
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    "settings", [{"chunk": 7}, {"chunk_limits": [16, 1]}, {"speculative_type": "lookahead"}]
)
def test_settings_that_would_change_what_logits_come_back(
    tiny_bundle: Tiny, tmp_path: Path, settings: dict[str, Any]
) -> None:
    ids = prompt(40)
    shutil.copytree(tiny_bundle[0], tmp_path / "bundle")
    config("config.json", **settings)(tmp_path / "bundle")
    expected = tiny_bundle[1].logits([*ids, 3, 4, 5])
    for options in ({}, {"config": settings}):
        with Engine(tmp_path / "bundle", **options) as engine:
            found = engine.forward(ids, all_positions=True)
            last = [engine.forward([token]) for token in (3, 4, 5)]
        found = np.concatenate([found, last])
        assert np.abs(found - expected).max() < 1e-3 * expected.std()


def test_the_runner_works_alone(tiny_bundle: Tiny, tmp_path: Path) -> None:
    """One file, no package around it: as it runs on another machine."""
    copy = tmp_path / "somewhere" / "runner.py"
    copy.parent.mkdir()
    shutil.copy(RUNNER, copy)
    hide = "import sys; sys.modules['mnnsmith'] = None; import runpy; sys.argv = sys.argv[1:]; "
    start = [sys.executable, "-c", hide + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    alone = client.Runner(Launch((*start, str(copy))))
    tested, _ = alone.call("self_test", silence_s=60)
    assert 0 <= tested["largest_error"] < 1e-5
    loaded, _ = alone.call(
        "load", silence_s=60, bundle=str(tiny_bundle[0]), config={}, piece_tokens=256
    )
    assert loaded["vocab_size"] == VOCAB
    ids = np.array(prompt(5), dtype=np.int32)
    _, arrays = alone.call("forward", {"ids": ids}, silence_s=60, all_positions=False)
    expected = tiny_bundle[1].logits(prompt(5))
    assert np.abs(arrays["logits"] - expected[-1]).max() < 1e-3 * expected.std()
    alone.close()


def test_a_fork_does_not_end_the_child(tiny_bundle: Tiny) -> None:
    code = """
import gc, os, sys
from mnnsmith.engine import Engine
engine = Engine(sys.argv[1])
if os.fork() == 0:
    del engine
    gc.collect()
    os._exit(0)
os.wait()
engine.forward([1])
sys.exit(engine._runner.log_tail() == "(none)")
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tiny_bundle[0])]
    assert subprocess.run(command, timeout=60).returncode == 0


def test_nothing_is_printed_or_left(
    tiny_bundle: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with Engine(tiny_bundle[0]) as engine:
        engine.forward(prompt(50), all_positions=True)
        greedy(engine, [1], 5)
        engine.engine_apply_template([{"role": "user", "content": "x"}])
        assert len(list(tmp_path.iterdir())) == 1
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_importing_the_engine_does_not_load_mnn() -> None:
    code = "import sys, mnnsmith.engine; sys.exit('MNN' in sys.modules or '_tools' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- damage -------------------------------------------------------------------------------------


def cut(name: str, size: int) -> Callable[[Path], None]:
    """Cut a file to `size` bytes, or by as many where negative."""
    return lambda folder: os.truncate(
        folder / name, size if size >= 0 else (folder / name).stat().st_size + size
    )


def garbage(name: str) -> Callable[[Path], None]:
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    return lambda folder: (folder / name).write_bytes(data) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def config(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps(values))

    return change


DAMAGE = {
    "no graph": remove("llm.mnn"),
    "garbage graph": garbage("llm.mnn"),
    "half a graph": cut("llm.mnn", 3000),
    "empty graph": cut("llm.mnn", 0),
    "no weights": remove("llm.mnn.weight"),
    "weights without the last byte": cut("llm.mnn.weight", -1),
    "half of the weights": cut("llm.mnn.weight", 100_000),
    "no tokenizer": remove("tokenizer.mtok"),
    "garbage tokenizer": garbage("tokenizer.mtok"),
    "no config": remove("config.json"),
    "garbage config": garbage("config.json"),
    "a list as config": lambda folder: (folder / "config.json").write_text("[]") and None,
    "deep config": lambda folder: (folder / "config.json").write_text("[" * 10**6) and None,
    "no llm_config": remove("llm_config.json"),
    "other width": config("llm_config.json", hidden_size=32),
    "huge width": config("llm_config.json", hidden_size=1 << 30),
    "text as width": config("llm_config.json", hidden_size="64"),
    "no context": config("llm_config.json", max_position_embeddings=None),
    "glm mask": config("llm_config.json", attention_mask="glm"),
    "foreign base": config("config.json", base_dir="/tmp/"),
    "foreign base in the other file": config("llm_config.json", base_dir="/tmp/"),
    "foreign file": config("config.json", llm_model="../x/llm.mnn"),
    "foreign file in the other file": config("llm_config.json", llm_model="../x/llm.mnn"),
    "foreign context": config("config.json", context_file="/etc/passwd"),
    "foreign folder": config("llm_config.json", npu_model_dir="/etc/"),
    "foreign prefix": config("config.json", prefix_cache_path="/tmp/prefix"),
    "a list as file": config("config.json", mtp_model=["mtp.mnn"]),
    "a key twice": lambda folder: (
        (folder / "config.json").write_text(
            '{"llm_model": "../x/llm.mnn", ' + (folder / "config.json").read_text().lstrip(" {\n")
        )
        and None
    ),
    "no embeddings": config("llm_config.json", tie_embeddings=None),
    "wrong threads": config("config.json", thread_num=10**9),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_bundles_are_errors(
    tiny_bundle: Tiny, tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle[0], folder)
    DAMAGE[damage](folder)
    with pytest.raises(EngineError, match="does not load"):
        Engine(folder, load_timeout_s=60)
    assert capfd.readouterr() == ("", "")


def test_a_graph_of_any_size_is_not_read_into_memory(tiny_bundle: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle[0], folder)
    os.truncate(folder / "llm.mnn", 1 << 42)
    with pytest.raises(EngineError, match=rf"llm\.mnn has {1 << 42} bytes, more than"):
        Engine(folder, load_timeout_s=60)


def test_the_process_is_there_before_anyone_looks_for_it(tmp_path: Path) -> None:
    """A request that found none would never be sent, and the process never ended."""

    class Started(threading.Event):
        def set(self) -> None:
            seen.append(process.popen is not None)
            super().set()

    for command, expected in ([[sys.executable, "-c", ""], True], [["/no/such/program"], False]):
        seen: list[bool] = []
        process = client._Process(Launch(tuple(command)), tmp_path, started=Started())
        client._read(process)
        client._write(process)
        assert seen == [expected]
        assert isinstance(process.replies.get(timeout=1), str)


@pytest.mark.parametrize("key", runner.PATH_KEYS)
def test_no_setting_leads_out_of_the_bundle(tiny_bundle: Tiny, tmp_path: Path, key: str) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_bundle[0], folder)
    for name in ("config.json", "llm_config.json"):
        for value in ("/etc/passwd", "../x", "a/b", "..", "a\0b", 3, None):
            kept = (folder / name).read_bytes()
            config(name, **{key: value})(folder)
            with pytest.raises(runner.RefusedError, match=f"{key} must be a plain file name"):
                runner.bundle_config(str(folder), {})
            (folder / name).write_bytes(kept)
    with pytest.raises(runner.RefusedError, match=f"{key} must be a plain file name"):
        runner.bundle_config(str(folder), {key: "/etc/passwd"})
    for value in ("", "plain.mnn"):
        assert runner.bundle_config(str(folder), {key: value})[key] == value


def test_the_callers_settings_do_not_lead_elsewhere_but_for_temporary_files(
    tiny_bundle: Tiny, tmp_path: Path
) -> None:
    folder = str(tiny_bundle[0])
    for setting in ({"base_dir": "/tmp/"}, {"llm_weight": "../w"}, {"llm_config": "/x.json"}):
        with pytest.raises(EngineError, match=r"base_dir|plain file name"):
            Engine(folder, config=setting)
    found = runner.bundle_config(folder, {"tmp_path": str(tmp_path)})
    assert found["tmp_path"] == str(tmp_path)
    copy = tmp_path / "bundle"
    shutil.copytree(folder, copy)
    config("llm_config.json", tmp_path="/root/")(copy)
    assert "tmp_path" not in runner.bundle_config(str(copy), {})


def test_separate_embeddings_cut_short(tmp_path: Path) -> None:
    model = write_bundle(tmp_path / "b")
    path = tmp_path / "b" / "llm_config.json"
    values = json.loads(path.read_text())
    del values["tie_embeddings"]
    path.write_text(json.dumps(values))
    embeddings = (model.weights["embed"].view(np.uint32) >> 16).astype(np.uint16).tobytes()
    (tmp_path / "b" / "embeddings_bf16.bin").write_bytes(embeddings)
    with Engine(tmp_path / "b") as engine:
        engine.forward([255])
    (tmp_path / "b" / "embeddings_bf16.bin").write_bytes(embeddings[:-1])
    with pytest.raises(EngineError, match="embeddings_bf16"):
        Engine(tmp_path / "b")


def test_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no such folder"):
        Engine(tmp_path / "nothing")


def test_any_path_will_do(tiny_bundle: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "mit Leerzeichen und Ümläuten 模型"
    shutil.copytree(tiny_bundle[0], folder)
    with Engine(folder) as engine:
        assert len(greedy(engine, [1], 2)) == 2


# --- crashes, hangs, interrupts -----------------------------------------------------------------


def test_a_killed_child_is_an_error_and_a_new_engine_works(tiny_bundle: Tiny) -> None:
    engine = Engine(tiny_bundle[0])
    generation = engine.generate([1])
    next(generation)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="SIGKILL"):
        next(generation)
    assert engine.closed
    with pytest.raises(EngineError, match="closed"):
        engine.forward([1])
    engine.close()
    with Engine(tiny_bundle[0]) as fresh:
        fresh.forward([1])


def test_a_hanging_child_is_ended(tiny_bundle: Tiny) -> None:
    # No call is made before the child is held up, so the limit is never met for being slow.
    engine = Engine(tiny_bundle[0], call_timeout_s=0.3)
    assert engine.pid is not None
    child = psutil.Process(engine.pid)
    child.suspend()
    with pytest.raises(EngineError, match=r"no sign of life for 0\.3 s"):
        engine.forward([1])
    assert engine.closed
    assert not child.is_running()


def test_a_load_that_takes_too_long(tiny_bundle: Tiny) -> None:
    with pytest.raises(EngineError, match="sign of life"):
        Engine(tiny_bundle[0], load_timeout_s=0.0001)


def test_closing_ends_the_child(tiny_bundle: Tiny) -> None:
    engine = Engine(tiny_bundle[0])
    child = psutil.Process(engine.pid)
    engine.close()
    engine.close()
    assert not child.is_running()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([1])


def test_a_lost_engine_is_ended(tiny_bundle: Tiny) -> None:
    engine = Engine(tiny_bundle[0])
    child = psutil.Process(engine.pid)
    del engine
    assert not child.is_running()


def press_ctrl_c() -> None:
    """As the terminal does it: the kernel gives the signal to the main thread."""
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_takes_the_cache_back(tiny_bundle: Tiny) -> None:
    with Engine(tiny_bundle[0], piece_tokens=1) as engine:
        expected = engine.forward(prompt(50))
        timer = threading.Timer(0.02, press_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                engine.forward(prompt(500), all_positions=True)
                engine.rewind(50)
        timer.join()
        # The interrupt may have met any of the calls above; each leaves a known cache.
        assert engine.position in (50, 550)
        engine.rewind(50)
        assert engine.tokens == tuple(prompt(50))
        engine.reset()
        assert np.array_equal(engine.forward(prompt(50)), expected)


def test_an_interrupt_stops_the_work_and_the_cache_is_known(tiny_bundle: Tiny) -> None:
    def interrupted_forward(ids: list[int]) -> None:
        """The call is interrupted while the child, held up, has not begun its work."""
        child = psutil.Process(engine.pid)
        runner = engine._runner
        receive = runner._receive

        def interrupted(op: str, silence_s: float) -> tuple[client.Header, Any]:
            # The request is on its way by now, however busy the machine is.
            press_ctrl_c()
            return receive(op, silence_s)

        child.suspend()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(runner, "_receive", interrupted)
            engine.forward(ids)
        child.resume()

    with Engine(tiny_bundle[0], piece_tokens=1) as engine:
        engine.forward(prompt(50))
        interrupted_forward(prompt(500))
        # Time enough to finish, had it not been told.
        time.sleep(0.5)
        assert engine.position == 50
        # A call of a single piece has no place to stop at.
        interrupted_forward([7])
        assert engine.position == 51
        assert engine.tokens == (*prompt(50), 7)


def test_lengths_do_not_pile_up_in_the_engine(tiny_bundle: Tiny) -> None:
    """The engine copies its graph for each new length of what it takes for a decode."""
    with Engine(tiny_bundle[0]) as engine:
        for length in (5, 1, 9, 17, 1, 33, 2):
            engine.forward(prompt(length))
        assert "clone" not in engine._runner.log_tail()
        for length in (5, 1, 9, 17, 1, 33, 2):
            engine.forward(prompt(length), all_positions=True)
        assert engine._runner.log_tail().count("clone") <= 2  # one line of two


PARENT = """
import sys, time
from mnnsmith.engine import Engine
engine = Engine(sys.argv[1])
print(engine.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_child_does_not_outlive_its_parent(tiny_bundle: Tiny, end: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, str(tiny_bundle[0])]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(end)
        parent.wait(60)
    deadline = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_thread_that_opened_an_engine_may_end(tiny_bundle: Tiny) -> None:
    opened: list[Engine] = []
    thread = threading.Thread(target=lambda: opened.append(Engine(tiny_bundle[0])))
    thread.start()
    thread.join()
    time.sleep(0.1)
    with opened[0] as engine:
        assert len(greedy(engine, [1], 3)) == 3
