"""Whether a written graph and its weight file belong together, told from the files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mnnsmith.engine.converter import mnn_to_graph_json, operators
from mnnsmith.errors import BundleError
from mnnsmith.files import read_json_object
from mnnsmith.mnn.config_files import (
    MODEL_FILE,
    VISION_MODEL_FILE,
    VISION_WEIGHT_FILE,
    WEIGHT_FILE,
)


def check_structure(folder: Path, vocab_size: int) -> str:
    """Every operator's weights lie inside the weight file, and no two overlap.

    The graphs are read back by the engine's converter.  Returns what was found, in a few words;
    raises `BundleError` that names the operator.
    """
    found = _check_graph(folder, MODEL_FILE, WEIGHT_FILE)
    config = read_json_object(folder / "llm_config.json")
    _check_embedding(config, vocab_size, (folder / WEIGHT_FILE).stat().st_size)
    if config.get("is_visual") is True:
        found += "; vision: " + _check_graph(folder, VISION_MODEL_FILE, VISION_WEIGHT_FILE)
    return found


def _check_graph(folder: Path, graph: str, weights: str) -> str:
    size = (folder / weights).stat().st_size
    spans = []
    found = list(operators(mnn_to_graph_json(folder / graph)))
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
    return f"{len(found)} operators, {len(spans)} with weights"


def _check_embedding(config: dict[str, Any], vocab_size: int, size: int) -> None:
    """The rows and scales that embeddings are read from lie inside the weight file."""
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
