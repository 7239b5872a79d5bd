"""Decode and prefill speed of our bundles beside the upstream exporter's and beside llama.cpp.

All contestants run SmolLM2-135M on the same cores.  They are loaded once and take turns with short
pieces of work, so that a busy moment of the machine hits those that are compared alike:

- the w4g64 bundle and, with --upstream, the bundle that MNN's exporter makes of the same
  checkpoint at the same bits and block, both in the same engine, with the same settings;
- the bundle with the blocks of the GGUF file carried over (recipe `keep`) and, with
  --llamacpp-python, llama.cpp on that very file.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from common import (
    BENCH,
    Spread,
    finish,
    interleaved,
    measure,
    note,
    paired_ratio,
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
# (ours, theirs): compared round by round.
_PAIRS = (
    ("mnnsmith w4g64, dynamic_option 0", "llmexport.py w4g64, dynamic_option 0"),
    ("mnnsmith w4g64, dynamic_option 2", "llmexport.py w4g64, dynamic_option 2"),
    ("mnnsmith keep, dynamic_option 0", _LLAMACPP),
    ("mnnsmith keep, dynamic_option 2", _LLAMACPP),
)


@dataclass(frozen=True)
class Speed:
    """Tokens per second: a long prompt, and single tokens after a short one."""

    prefill: float
    decode: float


# Feeds a prompt to an empty cache, decodes so many tokens; seconds for each of the two.
Work: TypeAlias = Callable[[list[int], int], tuple[float, float]]


def engine_work(stack: ExitStack, bundle: Path, threads: int, dynamic_option: int) -> Work:
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

    return work


def llamacpp_work(stack: ExitStack, python: Path, gguf: Path, threads: int) -> Work:
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

    return work


def speed_of(work: Work, prompt: list[int], decode: int, _: int) -> Speed:
    """One turn; `_` is the round."""
    prefill_s, _decode_s = work(prompt, 0)
    _prefill_s, decode_s = work(prompt[:_SHORT_PROMPT_TOKENS], decode)
    return Speed(len(prompt) / prefill_s, decode / decode_s)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--prefill", type=int, default=512, help="tokens of the long prompt")
    options.add_argument("--decode", type=int, default=64, help="tokens decoded in a turn")
    options.add_argument("--upstream", type=Path, default=None, help="checkout of alibaba/MNN")
    options.add_argument("--upstream-python", type=Path, default=None, help="its interpreter")
    options.add_argument("--llamacpp-python", type=Path, default=None,
                         help="an interpreter with llama-cpp-python")  # fmt: skip
    chosen = options.parse_args()
    gguf, folder = make_smollm2(chosen.work)
    outputs = [chosen.work / f"speed-{name}" for name in ("w4g64", "upstream", "keep")]
    bundles = {"mnnsmith w4g64": (outputs[0], ours_command(folder, outputs[0]))}
    if chosen.upstream is not None:
        command = upstream_command(chosen.upstream_python, chosen.upstream, folder, outputs[1])
        bundles["llmexport.py w4g64"] = (outputs[1], command)
    bundles["mnnsmith keep"] = (outputs[2], ours_command(gguf, outputs[2], "keep"))
    for bundle, command in bundles.values():
        if not (bundle / "config.json").is_file():
            note(f"making the bundle {bundle.name}")
            measure(command, cwd=chosen.work, log=chosen.work / "speed.log")
    facts = provenance(chosen.repeats, threads=chosen.threads, prefill_tokens=chosen.prefill,
                       decode_tokens=chosen.decode)  # fmt: skip
    draw = random.Random(5)
    prompt = [draw.randrange(_FIRST_ID, _LAST_ID) for _ in range(chosen.prefill)]
    with ExitStack() as stack:
        works: dict[str, Work] = {}
        for option in (0, 2):
            for name, (bundle, _) in bundles.items():
                work = engine_work(stack, bundle, chosen.threads, option)
                works[f"{name}, dynamic_option {option}"] = work
            if chosen.llamacpp_python is not None and not option:
                facts["llamacpp_version"] = _llamacpp_version(chosen.llamacpp_python)
                python = chosen.llamacpp_python
                works[_LLAMACPP] = llamacpp_work(stack, python, gguf, chosen.threads)
        for work in works.values():
            work(prompt[:_SHORT_PROMPT_TOKENS], 1)
        turns = {name: partial(speed_of, w, prompt, chosen.decode) for name, w in works.items()}
        runs = interleaved(turns, chosen.repeats)
    plain = {name: [vars(run) for run in found] for name, found in runs.items()}
    results = {"runs": plain, "ratios": _ratios(runs)}
    finish("speed", facts, results, _tables(runs), chosen.json)


def _llamacpp_version(python: Path) -> str:
    code = "from importlib.metadata import version; print(version('llama-cpp-python'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def _ratios(runs: dict[str, list[Speed]]) -> dict[str, dict[str, Spread | float]]:
    """Per pair and kind: the ratios of the rounds, and the ratio of the best turns.

    A busy machine only ever slows a turn down, so the best turns are what the contestants can do.
    """
    result: dict[str, dict[str, Spread | float]] = {}
    for ours, theirs in _PAIRS:
        if ours not in runs or theirs not in runs:
            continue
        found: dict[str, Spread | float] = {}
        for kind in ("decode", "prefill"):
            a = [getattr(run, kind) for run in runs[ours]]
            b = [getattr(run, kind) for run in runs[theirs]]
            found[kind] = paired_ratio(a, b)
            found[f"{kind}_best"] = max(a) / max(b)
        result[f"{ours} / {theirs}"] = found
    return result


def _both(ratios: dict[str, Spread | float], kind: str) -> str:
    rounds = ratios[kind]
    assert isinstance(rounds, Spread)
    return f"{ratios[f'{kind}_best']:.2f}; {rounds.text('.2f')}"


def _tables(runs: dict[str, list[Speed]]) -> str:
    speeds = table(
        ["SmolLM2-135M", "decode (tokens/s)", "prefill (tokens/s)"],
        [
            [
                name,
                Spread.of(run.decode for run in found).text(),
                Spread.of(run.prefill for run in found).text(".0f"),
            ]
            for name, found in runs.items()
        ],
    )
    rows = [
        [name, *(_both(found, kind) for kind in ("decode", "prefill"))]
        for name, found in _ratios(runs).items()
    ]
    ratios = table(["ratio: of the best turns; per round", "decode", "prefill"], rows)
    return f"{speeds}\n\n{ratios}"


if __name__ == "__main__":
    main()
