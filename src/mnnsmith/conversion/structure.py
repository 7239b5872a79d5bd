"""Whether a written graph and its weight file belong together, told from the files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mnnsmith.engine.converter import mnn_to_graph_json, operators
from mnnsmith.errors import BundleError
from mnnsmith.files import read_json_object
from mnnsmith.mnn.config_files import MODEL_FILE, WEIGHT_FILE


def check_structure(folder: Path, vocab_size: int) -> str:
    """Every operator's weights lie inside the weight file, and no two overlap.

    The graph is read back by the engine's converter.  Returns what was found, in a few words;
    raises `BundleError` that names the operator.
    """
    size = (folder / WEIGHT_FILE).stat().st_size
    spans = []
    found = list(operators(mnn_to_graph_json(folder / MODEL_FILE)))
    for operator in found:
        main = operator.get("main") if isinstance(operator, dict) else None
        external = main.get("external") if isinstance(main, dict) else None
        if external:
            _check_integers(external, f"{operator.get('name')}: external")
            stop = external[0] + sum(external[1:4])
            spans.append((external[0], stop, str(operator.get("name"))))
    end, last = 0, ""
    for start, stop, name in sorted(spans):
        if start < end or stop > size:
            raise BundleError(
                f"{name}: weights at {start}..{stop} "
                + (f"overlap those of {last}" if start < end else f"end beyond {size}")
            )
        end, last = stop, name
    _check_embedding(folder, vocab_size, size)
    return f"{len(found)} operators, {len(spans)} with weights"


def _check_embedding(folder: Path, vocab_size: int, size: int) -> None:
    """The rows and scales that embeddings are read from lie inside the weight file."""
    config = read_json_object(folder / "llm_config.json")
    tie, hidden = config.get("tie_embeddings"), config.get("hidden_size")
    if not isinstance(tie, dict):
        raise BundleError("llm_config.json: tie_embeddings must be an object")
    keys = ("weight_offset", "alpha_offset", "alpha_size", "quant_bit")
    _check_integers([hidden, *(tie.get(key) for key in keys)], "llm_config.json: tie_embeddings")
    assert isinstance(hidden, int)
    codes_end = tie["weight_offset"] + vocab_size * hidden * tie["quant_bit"] // 8
    if max(codes_end, tie["alpha_offset"] + tie["alpha_size"]) > size:
        raise BundleError(f"tie_embeddings: the embedding ends beyond the weight file ({size})")


def _check_integers(values: list[Any], what: str) -> None:
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise BundleError(f"{what}: expected whole numbers, found {values!r:.80}")
