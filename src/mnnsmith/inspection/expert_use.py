"""Which experts a text uses: every router's choice for every token, counted.

A bundle's graph holds the choices as a value that is no output, so that the engine never computes
it.  Here it changes names with the logits in a copy of the graph: the engine, with its cache, then
gives the choices.  The weight file and every operator before are those of the bundle itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mnnsmith.bundle import Bundle, open_bundle
from mnnsmith.engine import Engine
from mnnsmith.engine.mapped import clear_unused
from mnnsmith.errors import BundleError, EngineError, UnsupportedError, UsageError
from mnnsmith.mnn.config_files import MODEL_FILE
from mnnsmith.models.moe import CHOICES
from mnnsmith.text.tokenizer import TextTokenizer

_LOGITS = "logits"
# Tokens to a call: bounds the memory for rows as wide as the vocabulary.
_PIECE_TOKENS = 256

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LayerUse:
    """One layer: how many tokens chose each expert (each token chooses `chosen` of them)."""

    layer: int
    counts: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Of all choices, by expert."""
        total = sum(self.counts)
        return tuple(count / total for count in self.counts)

    @property
    def entropy_bits(self) -> float:
        """Of the choices: log2(experts) if all are chosen alike, 0 if it is always the same one."""
        shares = np.array([share for share in self.shares if share])
        return float(-(shares * np.log2(shares)).sum()) + 0.0

    @property
    def unused(self) -> int:
        """Experts that no token chose."""
        return self.counts.count(0)

    def top(self, count: int) -> tuple[tuple[int, float], ...]:
        """The experts chosen most, with their share of the choices."""
        order = np.argsort(-np.array(self.counts), kind="stable")[:count]
        return tuple((int(i), self.shares[i]) for i in order)

    def covering(self, part: float) -> int:
        """The least number of experts that together have `part` of the choices."""
        falling = np.cumsum(sorted(self.counts, reverse=True))
        # In whole choices: the rounding of a product must not ask for one more.
        wanted = part * falling[-1] - 1e-6
        return int(np.searchsorted(falling, wanted) + 1)


@dataclass(frozen=True)
class ExpertUse:
    """What `profile` returns.

    model: the bundle's source.  tokens: of the text.  chosen: experts for each token and layer.
    """

    model: str
    tokens: int
    experts: int
    chosen: int
    layers: tuple[LayerUse, ...]

    def covering(self, part: float) -> float:
        """The share of a layer's experts that have `part` of its choices; mean over layers."""
        return float(np.mean([layer.covering(part) for layer in self.layers])) / self.experts


def profile_experts(
    bundle: Bundle | Path | str,
    text: str,
    *,
    threads: int | None = None,
    memory: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExpertUse:
    """Run `text` through the model and count which experts each layer chooses.

    A text longer than the context is cut in pieces that start anew.  threads, memory: as for
    `Engine`.  progress: tokens done, tokens in all.

    Raises UnsupportedError for a model without experts, UsageError for an empty text, BundleError
    or EngineError for a damaged bundle.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    ids = TextTokenizer(opened.tokenizer_json()).encode(text, add_special_tokens=True)
    if not ids:
        raise UsageError("the text has no tokens: there is nothing to count.")
    return count_choices(opened, ids, threads=threads, memory=memory, progress=progress)


def count_choices(
    bundle: Bundle,
    ids: Sequence[int],
    *,
    threads: int | None = None,
    memory: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExpertUse:
    """As `profile_experts`, for token ids."""
    layers, experts, chosen = _experts(bundle)
    counts = np.zeros((len(layers), experts), dtype=np.int64)
    with tempfile.TemporaryDirectory(prefix="mnnsmith-profile-") as folder:
        twin = Path(folder) / "bundle"
        write_twin(bundle, twin)
        with Engine(twin, threads=threads, memory=memory, all_logits=True) as engine:
            step = min(_PIECE_TOKENS, engine.context_limit)
            for start in range(0, len(ids), step):
                piece = ids[start : start + step]
                if engine.position + len(piece) > engine.context_limit:
                    engine.reset()
                rows = engine.forward(piece, all_positions=True)
                _count(counts, rows[:, : len(layers) * chosen], chosen)
                if progress is not None:
                    progress(start + len(piece), len(ids))
    # The twin's mapped weights serve nobody else.
    clear_unused()
    uses = (LayerUse(n, tuple(row.tolist())) for n, row in zip(layers, counts, strict=True))
    name = str(bundle.manifest.data["source"].get("name"))
    return ExpertUse(name, len(ids), experts, chosen, tuple(uses))


def write_twin(bundle: Bundle, folder: Path) -> None:
    """A folder like the bundle's, whose graph gives every router's choices in place of logits.

    [n, vocabulary]: numbers of experts as floats, layer after layer, then zeros.  All files but the
    graph are links.  Raises BundleError for a graph without these values.
    """
    graph = (bundle.path / MODEL_FILE).read_bytes()
    logits, choices = (_flat_string(name) for name in (_LOGITS, CHOICES))
    if choices not in graph or logits not in graph:
        raise BundleError(
            f"{bundle.path}: the graph does not hold what its routers choose.",
            "Convert the model again with this version of mnnsmith.",
        )
    # Both names have one length, so that no other byte moves.
    parts = [part.replace(choices, logits) for part in graph.split(logits)]
    folder.mkdir()
    (folder / MODEL_FILE).write_bytes(choices.join(parts))
    for path in bundle.path.iterdir():
        if path.name != MODEL_FILE:
            os.symlink(path.resolve(), folder / path.name)


def _flat_string(name: str) -> bytes:
    """A text as flatbuffers store it: length in 4 bytes, the bytes, a zero."""
    data = name.encode("ascii")
    return len(data).to_bytes(4, "little") + data + b"\0"


def _experts(bundle: Bundle) -> tuple[tuple[int, ...], int, int]:
    """Numbers of the layers with experts, experts in each, and how many a token uses."""
    told = bundle.manifest.model.get("experts")
    if told is None:
        raise UnsupportedError(
            f"{bundle.path}: {bundle.manifest.model['model_type']} has no experts to profile.",
            "Mixtures of experts have them: deepseek_v2, deepseek_v3, qwen3_moe, mixtral, ...",
        )
    where = f"{bundle.path}: model.experts of the manifest"
    if not isinstance(told, dict):
        raise BundleError(f"{where} must be an object.")
    layers, experts, chosen = (told.get(key) for key in ("layers", "per_layer", "chosen"))
    vocabulary = bundle.vocab_size
    if (
        not isinstance(layers, list)
        or not layers
        or not all(type(n) is int and n >= 0 for n in layers)
        or type(experts) is not int
        or type(chosen) is not int
        or not 1 <= chosen <= experts <= 1 << 20
        or len(layers) * chosen > vocabulary
    ):
        raise BundleError(f"{where} must give layers, per_layer and chosen.")
    return tuple(layers), experts, chosen


def _count(counts: Counts, rows: npt.NDArray[np.float32], chosen: int) -> None:
    """Add the choices of rows [n, layers * chosen] to counts [layers, experts]."""
    layers, experts = counts.shape
    ids = np.rint(rows).astype(np.int64)
    if not np.array_equal(ids, rows) or ids.min() < 0 or ids.max() >= experts:
        raise EngineError("the routers' choices are no numbers of experts.")
    for layer in range(layers):
        part = ids[:, layer * chosen : (layer + 1) * chosen]
        counts[layer] += np.bincount(part.reshape(-1), minlength=experts)
