"""Decode and prefill speed of our bundles beside the upstream exporter's and beside llama.cpp.

All contestants run SmolLM2-135M on the same cores and take turns with short pieces of work, so that
a busy moment of the machine hits those that are compared alike.  They are loaded anew several
times, since where memory happens to lie changes the speed of a process by some percent.  Measured
twice: tokens per second on all threads asked for, and tokens per CPU second on one thread, which
holds on a busy machine too.

- the w4g64 bundle and, with --upstream, the bundle that MNN's exporter makes of the same
  checkpoint at the same bits and block, both in the same engine, with the same settings;
- the bundle with the blocks of the GGUF file carried over (recipe `keep`) and, with
  --llamacpp-python, llama.cpp on that very file.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from common import (
    BENCH,
    Spread,
    finish,
    interleaved,
    measure,
    note,
    parser,
    provenance,
    table,
)
from convert_speed import ours_command, upstream_command
from make_smollm2 import make_smollm2

from mnnsmith.engine import Engine

# Ids of ordinary tokens.
_FIRST_ID, _LAST_ID = 100, 49000
_SHORT_PROMPT_TOKENS = 16
_CONTEXT_TOKENS = 2048
_LLAMACPP = "llama.cpp, Q4_1"
# (ours, theirs): compared load by load.
_PAIRS = (
    ("mnnsmith w4g64, dynamic_option 0", "llmexport.py w4g64, dynamic_option 0"),
    ("mnnsmith w4g64, dynamic_option 2", "llmexport.py w4g64, dynamic_option 2"),
    ("mnnsmith keep, dynamic_option 0", _LLAMACPP),
    ("mnnsmith keep, dynamic_option 2", _LLAMACPP),
)


@dataclass(frozen=True)
class Speed:
    """Tokens per second, or per CPU second: a long prompt, and single tokens after a short one."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class Contestant:
    """A loaded model.

    work(ids, n) feeds a prompt to an empty cache, decodes n tokens, and returns the seconds that
    each of the two took.  pid: the process that computes.
    """

    work: Callable[[list[int], int], tuple[float, float]]
    pid: int


# Loads a contestant with so many threads; the stack ends it.
Loader: TypeAlias = Callable[[ExitStack, int], Contestant]


def load_bundle(bundle: Path, dynamic_option: int, stack: ExitStack, threads: int) -> Contestant:
    """A bundle in `mnnsmith.Engine` at `memory: low`, as a caller sees it."""
    # The exporter's configuration does not tell the context length.
    settings = {"dynamic_option": dynamic_option, "max_position_embeddings": _CONTEXT_TOKENS}
    engine = stack.enter_context(Engine(bundle, memory="low", threads=threads, config=settings))

    def work(ids: list[int], decode: int) -> tuple[float, float]:
        engine.reset()
        tokens = engine.generate(ids, max_new_tokens=decode + 1)
        begin = time.perf_counter()
        next(tokens)
        middle = time.perf_counter()
        produced = sum(1 for _ in tokens)
        end = time.perf_counter()
        assert produced == decode
        return middle - begin, end - middle

    assert engine.pid is not None
    return Contestant(work, engine.pid)


def load_llamacpp(python: Path, gguf: Path, stack: ExitStack, threads: int) -> Contestant:
    """A GGUF file in llama.cpp, in a process of its own."""
    process = stack.enter_context(
        subprocess.Popen(
            [python, BENCH / "llamacpp_child.py", gguf, str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
    )  # fmt: skip
    stack.callback(process.terminate)

    def work(ids: list[int], decode: int) -> tuple[float, float]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"ids": ids, "decode": decode}) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        return answer["prefill_s"], answer["decode_s"]

    return Contestant(work, process.pid)


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process so far, to the nanosecond (Linux)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def wall_speed(contestant: Contestant, prompt: list[int], decode: int, _: int) -> Speed:
    """One turn, by the clock; `_` is the round."""
    prefill_s, _decode_s = contestant.work(prompt, 0)
    _prefill_s, decode_s = contestant.work(prompt[:_SHORT_PROMPT_TOKENS], decode)
    return Speed(len(prompt) / prefill_s, decode / decode_s)


def cpu_speed(contestant: Contestant, prompt: list[int], decode: int, _: int) -> Speed:
    """One turn, by the CPU time of the process; `_` is the round."""
    short = prompt[:_SHORT_PROMPT_TOKENS]
    times = [cpu_s(contestant.pid)]
    for ids, count in ((prompt, 0), (short, 0), (short, decode)):
        contestant.work(ids, count)
        times.append(cpu_s(contestant.pid))
    prefill_s, short_s, decode_s = (b - a for a, b in pairwise(times))
    return Speed(len(prompt) / prefill_s, decode / (decode_s - short_s))


# Turns of one load of every contestant, by name.
Load: TypeAlias = dict[str, list[Speed]]


def measure_loads(
    loaders: Mapping[str, Loader], loads: int, repeats: int, threads: int,
    turn: Callable[..., Speed], prompt: list[int], decode: int,
) -> list[Load]:  # fmt: skip
    """Load all contestants and let them take turns, `loads` times."""
    found = []
    for index in range(loads):
        note(f"load {index + 1} of {loads}, {threads} threads")
        with ExitStack() as stack:
            loaded = {name: load(stack, threads) for name, load in loaders.items()}
            for contestant in loaded.values():
                contestant.work(prompt[:_SHORT_PROMPT_TOKENS], 1)
            turns = {name: partial(turn, c, prompt, decode) for name, c in loaded.items()}
            found.append(interleaved(turns, repeats))
    return found


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=4)
    options.add_argument("--loads", type=int, default=4, help="times that all are loaded anew")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--cpu-only", action="store_true", help="leave out tokens per second")
    options.add_argument("--prefill", type=int, default=256, help="tokens of the long prompt")
    options.add_argument("--decode", type=int, default=32, help="tokens decoded in a turn")
    options.add_argument("--upstream", type=Path, default=None, help="checkout of alibaba/MNN")
    options.add_argument("--upstream-python", type=Path, default=None, help="its interpreter")
    options.add_argument("--llamacpp-python", type=Path, default=None,
                         help="an interpreter with llama-cpp-python")  # fmt: skip
    chosen = options.parse_args()
    facts = provenance(chosen.loads * chosen.repeats, prefill_tokens=chosen.prefill,
                       decode_tokens=chosen.decode)  # fmt: skip
    loaders = _loaders(chosen)
    if chosen.llamacpp_python is not None:
        facts["versions"]["llama-cpp-python"] = _llamacpp_version(chosen.llamacpp_python)
    draw = random.Random(5)
    prompt = [draw.randrange(_FIRST_ID, _LAST_ID) for _ in range(chosen.prefill)]
    passes = {"CPU second, 1 thread": (1, cpu_speed)}
    if not chosen.cpu_only:
        passes[f"second, {chosen.threads} threads"] = (chosen.threads, wall_speed)
    loads = {
        name: measure_loads(loaders, chosen.loads, chosen.repeats, threads, turn, prompt,
                            chosen.decode)
        for name, (threads, turn) in passes.items()
    }  # fmt: skip
    results = {
        unit: {
            "loads": [{n: [vars(s) for s in turns] for n, turns in load.items()} for load in found],
            "ratios": _ratios(found),
        }
        for unit, found in loads.items()
    }
    tables = [text for unit, found in loads.items() for text in _tables(unit, found)]
    finish("speed", facts, results, "\n\n".join(tables), chosen.json)


def _loaders(chosen: argparse.Namespace) -> dict[str, Loader]:
    """Make the bundles that are not there; what is compared stands side by side."""
    gguf, folder = make_smollm2(chosen.work)
    outputs = [chosen.work / f"speed-{name}" for name in ("w4g64", "upstream", "keep")]
    bundles = {"mnnsmith w4g64": (outputs[0], ours_command(folder, outputs[0]))}
    if chosen.upstream is not None:
        command = upstream_command(chosen.upstream_python, chosen.upstream, folder, outputs[1])
        bundles["llmexport.py w4g64"] = (outputs[1], command)
    bundles["mnnsmith keep"] = (outputs[2], ours_command(gguf, outputs[2], "keep"))
    loaders: dict[str, Loader] = {}
    for option in (0, 2):
        for name, (bundle, command) in bundles.items():
            if not (bundle / "config.json").is_file():
                note(f"making the bundle {bundle.name}")
                measure(command, cwd=chosen.work, log=chosen.work / "speed.log")
            loaders[f"{name}, dynamic_option {option}"] = partial(load_bundle, bundle, option)
        if chosen.llamacpp_python is not None and option == 0:
            loaders[_LLAMACPP] = partial(load_llamacpp, chosen.llamacpp_python, gguf)
    return loaders


def _llamacpp_version(python: Path) -> str:
    code = "from importlib.metadata import version; print(version('llama-cpp-python'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def _ratios(loads: list[Load]) -> dict[str, dict[str, Spread]]:
    """Per pair: the ratio of the medians of each load, and its spread over the loads."""

    def median(load: Load, name: str, kind: str) -> float:
        return statistics.median(getattr(speed, kind) for speed in load[name])

    return {
        f"{ours} / {theirs}": {
            kind: Spread.of(median(x, ours, kind) / median(x, theirs, kind) for x in loads)
            for kind in ("decode", "prefill")
        }
        for ours, theirs in _PAIRS
        if ours in loads[0] and theirs in loads[0]
    }


def _tables(unit: str, loads: list[Load]) -> tuple[str, str]:
    """The speeds and the ratios of one pass."""
    rows = []
    for name in loads[0]:
        turns = [speed for load in loads for speed in load[name]]
        decode = Spread.of(speed.decode for speed in turns)
        prefill = Spread.of(speed.prefill for speed in turns)
        rows.append([name, decode.text(), prefill.text(".0f")])
    speeds = table(["tokens per " + unit, "decode", "prefill"], rows)
    ratios = [
        [name, found["decode"].text(".2f"), found["prefill"].text(".2f")]
        for name, found in _ratios(loads).items()
    ]
    return speeds, table(["ratio of tokens per " + unit, "decode", "prefill"], ratios)


if __name__ == "__main__":
    main()
