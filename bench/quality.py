"""What quantization costs: SmolLM2-135M under several recipes and run-time settings.

Each bundle reads the text in bench/text once; its logits at every position are compared with those
of the fp16 bundle at `memory: high`, which the tests prove equal to transformers.  The checkpoint
was itself quantized to Q4_1 (4 bits, blocks of 32 with an offset) before, so recipes with that
block find their levels again and lose next to nothing in the weights.  That is useful here: what
is left is what the run-time settings cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from common import BENCH, finish, measure, note, parser, provenance, table
from convert_speed import ours_command
from make_smollm2 import make_smollm2

from mnnsmith.bundle.bundle import TOKENIZER_JSON
from mnnsmith.engine import Engine
from mnnsmith.text.tokenizer import TextTokenizer

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
TEXT = BENCH / "text" / "sample.txt"
RECIPES = ("fp16", "w8g64", "keep", "w4g32-head8", "w4g64-head8", "w4g64")
# (memory, dynamic_option)
SETTINGS = (("high", 0), ("low", 0), ("low", 2))
REFERENCE = ("fp16", "high", 0)
_MIN_TOKENS = 1500
_ROWS = 64


@dataclass(frozen=True)
class Quality:
    """Distance from the reference over all positions, and perplexity on the text.

    kl_mean, kl_p99: KL divergence from the reference's next-token distribution, in nats.
    top1: how often the best token is the same.
    """

    recipe: str
    memory: str
    dynamic_option: int
    bundle_bytes: int
    kl_mean: float
    kl_p99: float
    top1: float
    perplexity: float


def logits_of(bundle: Path, ids: list[int], memory: str, dynamic_option: int, threads: int) -> F32:
    """float32 [tokens, vocab]."""
    settings = {"dynamic_option": dynamic_option}
    with Engine(bundle, memory=memory, threads=threads, config=settings, all_logits=True) as engine:
        return engine.forward(ids, all_positions=True)


def compare(reference: F32, logits: F32, ids: list[int]) -> dict[str, float]:
    """The figures of `Quality` for logits [tokens, vocab]."""
    divergences, losses, same = [], [], []
    targets = np.array(ids[1:])
    for rows, (p, q) in _log_probabilities(reference, logits):
        divergences.append((np.exp(p) * (p - q)).sum(axis=1))
        same.append(p.argmax(axis=1) == q.argmax(axis=1))
        wanted = targets[rows]
        losses.append(-q[np.arange(wanted.size), wanted])
    kl = np.concatenate(divergences)
    return {
        "kl_mean": float(kl.mean()),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "top1": float(np.concatenate(same).mean()),
        "perplexity": float(np.exp(np.concatenate(losses).mean())),
    }


def _log_probabilities(
    *logits: F32,
) -> Iterator[tuple[slice, tuple[npt.NDArray[np.float64], ...]]]:
    """Rows of log-probabilities, float64, a few at a time."""
    for start in range(0, logits[0].shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        yield rows, tuple(_log_softmax(values[rows].astype(np.float64)) for values in logits)


def _log_softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--recipes", nargs="+", default=list(RECIPES))
    options.set_defaults(repeats=1)  # The engine gives the same bits each time.
    chosen = options.parse_args()
    gguf, folder = make_smollm2(chosen.work)
    bundles = {}
    for recipe in dict.fromkeys([REFERENCE[0], *chosen.recipes]):
        bundle = chosen.work / f"quality-{recipe}"
        if not (bundle / "config.json").is_file():
            source = gguf if recipe == "keep" else folder
            measure(ours_command(source, bundle, recipe), log=chosen.work / "quality.log")
        bundles[recipe] = bundle
    tokenizer = TextTokenizer((bundles["fp16"] / TOKENIZER_JSON).read_text(encoding="utf-8"))
    ids = list(tokenizer.encode(TEXT.read_text(encoding="utf-8")))
    if len(ids) < _MIN_TOKENS:
        raise SystemExit(f"{TEXT} gives {len(ids)} tokens, at least {_MIN_TOKENS} are wanted")
    facts = provenance(1, threads=chosen.threads, tokens=len(ids), text=TEXT.name)
    reference = logits_of(bundles["fp16"], ids, *REFERENCE[1:], chosen.threads)[:-1]
    found = []
    for recipe, bundle in bundles.items():
        size = sum(path.stat().st_size for path in bundle.iterdir())
        for memory, option in SETTINGS:
            if recipe == "fp16" and option == 2:
                continue  # There are no blocks whose activations it could quantize.
            note(f"{recipe}, memory {memory}, dynamic_option {option}")
            logits = logits_of(bundle, ids, memory, option, chosen.threads)[:-1]
            figures = compare(reference, logits, ids)
            found.append(Quality(recipe, memory, option, size, **figures))
    finish("quality", facts, [vars(quality) for quality in found], _table(found), chosen.json)


def _table(found: list[Quality]) -> str:
    head = ["recipe", "MB", "memory", "dynamic_option", "KL mean", "KL p99", "top-1 agreement",
            "perplexity"]  # fmt: skip
    rows = [
        [
            q.recipe, f"{q.bundle_bytes / 1e6:.0f}", q.memory,
            "–" if q.memory == "high" else str(q.dynamic_option),
            f"{q.kl_mean:.2g}", f"{q.kl_p99:.2g}", f"{q.top1:.3f}", f"{q.perplexity:.2f}",
        ]
        for q in found
    ]  # fmt: skip
    return table(head, rows)


if __name__ == "__main__":
    main()
