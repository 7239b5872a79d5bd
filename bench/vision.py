"""SmolVLM-256M's shape at work: the tower beside ONNX Runtime and torch, and a whole question.

The checkpoint has the true shapes and the real text weights of SmolLM2-135M; tower and connector
are random but seeded, so times and sizes are those of the model, and what it says is not.

- Per tile, in turns: wall and CPU seconds and the most memory held, at several batch sizes, of our
  bundle's tower, ONNX Runtime and torch, each in a process of its own.
- The time to the first token for a 4:3 picture and a question, and how far the text logits after
  the picture are from transformers': fed tile by tile as `mnnsmith run` does, and as a path in the
  text, which is how bundles of MNN's exporter are asked.
- Size, latency and memory of each form of the tower.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    BENCH,
    ROOT,
    Spread,
    finish,
    interleaved,
    megabytes,
    note,
    paired_ratio,
    parser,
    provenance,
    table,
)
from make_smollm2 import make_smollm2

sys.path.insert(0, str(ROOT / "tests"))
CHILD = BENCH / "vision_child.py"
RECIPES = ("fp16", "w4g32-head8", "w4g32-head8-vision8")
SIZE = (640, 480)
QUESTION = "What do you see?"
MNN, ORT, TORCH = "mnnsmith, fp16 weights", "ONNX Runtime, fp32", "torch, fp32"


@dataclass(frozen=True)
class Made:
    """What is measured: the checkpoint, its tower as ONNX, bundles by recipe, a picture."""

    model: Path
    onnx: Path
    bundles: Mapping[str, Path]
    picture: Path


def make(work: Path) -> Made:
    """Make what is not there."""
    from PIL import Image
    from siglip_onnx import write_tower

    import picture_samples
    import smolvlm_checkpoint
    from mnnsmith.api import convert

    work.mkdir(parents=True, exist_ok=True)
    model, onnx, picture = (work / f"smolvlm-256m{end}" for end in ("", ".onnx", ".png"))
    if not (model / "model.safetensors").is_file():
        note("making the checkpoint")
        smolvlm_checkpoint.write_256m(model, make_smollm2(work)[0])
    if not onnx.is_file():
        write_tower(model, onnx)
    Image.fromarray(picture_samples.photo(*SIZE)).save(picture)
    bundles = {recipe: work / f"smolvlm-256m-{recipe}" for recipe in RECIPES}
    for recipe, bundle in bundles.items():
        if not (bundle / "config.json").is_file():
            note(f"making the bundle {bundle.name}")
            convert(model, bundle, recipe=recipe)
    return Made(model, onnx, bundles, picture)


@dataclass(frozen=True)
class Tile:
    """What one tile took, in a batch; peak_rss_bytes is of the whole process so far."""

    wall_s: float
    cpu_s: float
    peak_rss_bytes: float


class Tower:
    """A runtime in a process of its own, which computes batches when asked."""

    def __init__(self, kind: str, model: Path, threads: int, stack: ExitStack) -> None:
        self._process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, CHILD, "tower", kind, model, str(threads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        stack.callback(self._process.terminate)

    def run(self, batch: int, _: int) -> Tile:
        """One batch; `_` is the round."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"batch": batch}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if not answer.pop("finite"):
            raise SystemExit("the tower gave values that are not finite")
        return Tile(**answer)


Tiles = dict[int, dict[str, list[Tile]]]


def measure_towers(
    kinds: Mapping[str, tuple[str, Path]], batches: Sequence[int], repeats: int, threads: int
) -> Tiles:
    """Rounds of every runtime at every batch size, smallest first: its peak is then its own."""
    found: Tiles = {}
    with ExitStack() as stack:
        towers = {n: Tower(kind, path, threads, stack) for n, (kind, path) in kinds.items()}
        for batch in sorted(batches):
            note(f"batches of {batch}")
            turns = {name: partial(tower.run, batch) for name, tower in towers.items()}
            found[batch] = interleaved(turns, repeats)
    return found


@dataclass(frozen=True)
class Asked:
    """A whole question: seconds to the first token, tokens of the prompt, memory, text logits."""

    first_token_s: float
    tokens: int
    peak_rss_bytes: float
    # Of the first round; they do not change.
    logits: Any = None


def ask_child(work: Path, threads: int, kind: str, model: Path, picture: Path, _: int) -> Asked:
    """transformers, or the engine's own way, in a new process."""
    import numpy as np

    result = work / f"vision-{kind}.npz"
    command = [sys.executable, CHILD, kind, model, picture, QUESTION, str(threads), result]
    with (work / "vision.log").open("wb") as log:
        subprocess.run(list(map(str, command)), check=True, stdout=log, stderr=log)
    with np.load(result) as found:
        return Asked(
            float(found["first_token_s"]), len(found["ids"]), float(found["peak_rss_bytes"]),
            found["logits"],
        )  # fmt: skip


def ask_session(bundle: Path, threads: int, memory: str, picture: Path, index: int) -> Asked:
    """Our way: cut, encoded tile by tile, fed with our ids."""
    from mnnsmith.engine import Engine
    from mnnsmith.session import AnswerOptions, open_session

    content = [{"type": "image", "path": str(picture)}, {"type": "text", "text": QUESTION}]
    options = AnswerOptions(max_tokens=1)
    with open_session(bundle, options=options, threads=threads, memory=memory) as session:
        reply = session.reply([{"role": "user", "content": content}])
        list(reply)
        assert isinstance(session.engine, Engine)
        peak = session.engine.statistics.peak_rss_bytes
        answer = reply.answer
        if index:
            return Asked(answer.first_token_s, answer.prompt_tokens, float(peak))
        # The logits cost time and memory of their own, so they come after.
        prompt = session.prompt([{"role": "user", "content": content}])
        session.engine.reset()
        tiles = [run.tile for run in prompt.tiles]
        logits = session.engine.forward(prompt.ids, all_positions=True, tiles=tiles)
        text = logits[prompt.tiles[-1].stop + 1 :]
    return Asked(answer.first_token_s, answer.prompt_tokens, float(peak), text)


def distance(expected: Any, actual: Any) -> tuple[float, float]:
    """Mean KL in nats over the text after the picture, and the part of equal best tokens."""
    import numpy as np

    from exact import log_softmax

    p, q = log_softmax(expected.astype("f8")), log_softmax(actual.astype("f8"))
    kl = float((np.exp(p) * (p - q)).sum(-1).mean())
    return kl, float((expected.argmax(-1) == actual.argmax(-1)).mean())


def tower_table(found: Tiles) -> str:
    rows = []
    for batch, by_name in found.items():
        for name, tiles in by_name.items():
            reference = [tile.cpu_s for tile in by_name[ORT]]
            ratio = paired_ratio([tile.cpu_s for tile in tiles], reference)
            rows.append([
                f"{name}, batch {batch}", Spread.of(t.wall_s for t in tiles).text(".2f"),
                Spread.of(t.cpu_s for t in tiles).text(".2f"), ratio.text(".2f"),
                megabytes(Spread.of(t.peak_rss_bytes for t in tiles)),
            ])  # fmt: skip
    head = ["a tile of 512 x 512", "seconds", "CPU seconds", "CPU, to ONNX Runtime", "peak MB"]
    return table(head, rows)


def question_table(asked: Mapping[str, list[Asked]], reference: str) -> str:
    expected = asked[reference][0].logits
    rows = []
    for name, runs in asked.items():
        kl, equal = distance(expected, runs[0].logits)
        rows.append([
            name, str(runs[0].tokens), Spread.of(run.first_token_s for run in runs).text(),
            megabytes(Spread.of(run.peak_rss_bytes for run in runs)), f"{kl:.2g}", f"{equal:.2f}",
        ])  # fmt: skip
    head = [f"a picture of {SIZE[0]} x {SIZE[1]} and a question", "prompt tokens",
            "seconds to the first token", "peak MB", "mean KL", "same best token"]  # fmt: skip
    return table(head, rows)


def size_table(made: Made, found: Tiles, question: Mapping[str, list[Asked]]) -> str:
    """The tower alone by its files, and the whole model by all of them."""
    batch = min(found)
    towers = {
        TORCH: _tower_bytes(made.model), ORT: made.onnx.stat().st_size,
        **{name: sum((made.bundles[recipe] / f"visual.mnn{end}").stat().st_size
                     for end in ("", ".weight"))
           for name, recipe in _MNN_TOWERS.items()},
    }  # fmt: skip
    rows = [
        [f"tower: {name}", f"{size / 1e6:.0f}",
         Spread.of(tile.wall_s for tile in found[batch][name]).text(".2f"),
         megabytes(Spread.of(tile.peak_rss_bytes for tile in found[batch][name]))]
        for name, size in towers.items()
    ]  # fmt: skip
    wholes = {ORIGINAL: _bytes(made.model)} | {
        name: _bytes(made.bundles[recipe]) for name, recipe in _QUESTIONS.items()
    }
    rows += [
        [f"whole: {name}", f"{size / 1e6:.0f}",
         Spread.of(run.first_token_s for run in question[name]).text(),
         megabytes(Spread.of(run.peak_rss_bytes for run in question[name]))]
        for name, size in wholes.items()
    ]  # fmt: skip
    return table(["", "MB on disk", "seconds (a tile; the first token)", "peak MB"], rows)


ORIGINAL = "transformers, fp32"
_MNN_TOWERS = {MNN: "fp16", "mnnsmith, w8g32": "w4g32-head8-vision8"}
_QUESTIONS = {
    "mnnsmith fp16": "fp16", "mnnsmith w4g32-head8": "w4g32-head8",
    "mnnsmith w4g32-head8-vision8": "w4g32-head8-vision8",
}  # fmt: skip
_EXACT, _PLAIN = "mnnsmith fp16, memory high", "fp16, the path in the text"


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _tower_bytes(model: Path) -> int:
    """In float32, as torch holds it."""
    from mnnsmith.sources.open import open_checkpoint

    tensors = open_checkpoint(model).tensors
    sizes = (t.shape for n, t in tensors.items() if "vision_model" in n or "connector" in n)
    total = 0
    for shape in sizes:
        count = 4
        for side in shape:
            count *= side
        total += count
    return total


def ways_of_asking(made: Made, work: Path, threads: int) -> dict[str, Callable[[int], Asked]]:
    picture, fp16 = made.picture, made.bundles["fp16"]
    child = partial(ask_child, work, threads)
    return {
        ORIGINAL: partial(child, "original", made.model, picture),
        _EXACT: partial(ask_session, fp16, threads, "high", picture),
        **{name: partial(ask_session, made.bundles[recipe], threads, "low", picture)
           for name, recipe in _QUESTIONS.items()},
        _PLAIN: partial(child, "plain", fp16, picture),
    }  # fmt: skip


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 4, 12])
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    chosen = options.parse_args()
    work = chosen.work.resolve()
    facts = provenance(chosen.repeats, model="the shapes of SmolVLM-256M", threads=chosen.threads)
    made = make(work)
    kinds = {
        **{name: ("mnn", made.bundles[recipe]) for name, recipe in _MNN_TOWERS.items()},
        ORT: ("onnxruntime", made.onnx), TORCH: ("torch", made.model),
    }  # fmt: skip
    began = time.monotonic()
    tiles = measure_towers(kinds, chosen.batches, chosen.repeats, chosen.threads)
    asked = interleaved(ways_of_asking(made, work, chosen.threads), chosen.repeats)
    facts["measured_s"] = round(time.monotonic() - began)
    tables = [
        tower_table(tiles), question_table(asked, ORIGINAL), size_table(made, tiles, asked),
    ]  # fmt: skip
    results = {
        "tiles": {
            str(batch): {name: [vars(t) for t in found] for name, found in by_name.items()}
            for batch, by_name in tiles.items()
        },
        "questions": {
            name: [{k: v for k, v in vars(run).items() if k != "logits"} for run in runs]
            for name, runs in asked.items()
        },
    }
    finish("vision", facts, results, "\n\n".join(tables), chosen.json)


if __name__ == "__main__":
    main()
