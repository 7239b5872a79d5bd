"""The reference in its three ways: by transformers' own reader, filled by us, and streamed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exact import prompt
from mnnsmith.api import Engine, convert, prepare
from mnnsmith.conversion.prepare import Prepared
from mnnsmith.verify.probe import Probe, readable
from mnnsmith.verify.stored import stored_checkpoint
from mnnsmith.verify.transformers_reference import open_transformers
from peaky import CASES, MIXTURES, make_checkpoint
from routing_probe import routing_is_decisive

pytestmark = [pytest.mark.reference]

ALL = {**CASES, **MIXTURES}
IDS = np.array([prompt(60, seed) for seed in range(3)])


def plain(model: Any, ids: np.ndarray, modules: dict[str, str]) -> tuple[np.ndarray, dict]:
    """Logits of transformers itself, window after window, and what these modules give."""
    import torch

    kept: dict[str, list[np.ndarray]] = {name: [] for name in modules}
    named = dict(model.named_modules())
    handles = []
    for name, module in modules.items():

        def hook(_: Any, __: Any, output: Any, name: str = name) -> None:
            kept[name].append((output[0] if isinstance(output, tuple) else output).numpy().copy())

        handles.append(named[module].register_forward_hook(hook))
    with torch.no_grad():
        logits = np.concatenate([model(torch.from_numpy(row[None])).logits.numpy() for row in ids])
    for handle in handles:
        handle.remove()
    return logits, {name: np.concatenate(parts) for name, parts in kept.items()}


def assert_close(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    error = np.abs(found.astype(np.float64) - expected).max() / expected.std()
    assert found.dtype == np.float32 and error < 2e-4, f"{what}: {error:.3g} of the spread"


def ours(ready: Prepared) -> Prepared:
    """The same with tensors that transformers' reader is not offered."""
    return replace(ready, checkpoint=replace(ready.checkpoint, files=()))


@pytest.mark.parametrize("name", ALL)
def test_every_way_equals_transformers(name: str, tmp_path: Path) -> None:
    model = make_checkpoint(ALL[name], tmp_path)
    ready = prepare(tmp_path, recipe="fp16")
    marks = {mark.value.name: mark.module for mark in ready.model.graph.landmarks}
    logits, values = plain(model, IDS, marks)
    names = set()
    for source, streamed in ((ready, False), (ours(ready), False), (ours(ready), True)):
        opened = open_transformers(source.checkpoint, source.model, streamed=streamed, threads=1)
        with opened as reference:
            names.add(reference.name)
            assert set(marks) <= set(reference.available())
            run = reference.run(IDS, list(marks))
            flat = reference.logits(run.hidden.reshape(-1, run.hidden.shape[-1]))
            assert_close(flat.reshape(logits.shape), logits, f"{reference.name}: logits")
            for value, expected in values.items():
                assert_close(run.values[value], expected, f"{reference.name}: {value}")
            sure = [routing_is_decisive(model, row.tolist()) for row in IDS]
            found = reference.decisive(IDS)
            assert found.shape == (3,) and found.dtype == np.bool_
            if all(sure):
                assert found.all()
            # Streamed weights are read anew; nothing of the first run is left.
            again = reference.run(IDS[:1, :17])
            assert_close(again.hidden, run.hidden[:1, :17], f"{reference.name}: again")
    assert len(names) == 3


INNER = (
    ("llama-bias", "w4g32"),
    ("phi3-longrope", "w8g64"),
    ("gemma3_text", "w8g32-sym"),
    ("qwen2_moe", "w4g32-sym"),
    ("mixtral", "w8g32"),
    ("deepseek_v2-grouped", "w4g32-head8"),
    ("deepseek_v3-yarn", "w8g32-sym-latent"),
)


@pytest.mark.engine
@pytest.mark.parametrize(("name", "recipe"), INNER)
def test_inner_values_are_those_of_the_engine(name: str, recipe: str, tmp_path: Path) -> None:
    """Every value that the reference offers, with the weights that the bundle stores."""
    model = make_checkpoint(ALL[name], tmp_path / "source")
    bundle = convert(tmp_path / "source", tmp_path / "bundle", recipe=recipe)
    ready = prepare(tmp_path / "source", recipe=recipe)
    stored = stored_checkpoint(bundle, ready)
    drawn = (prompt(60, seed) for seed in range(40))
    ids = next(row for row in drawn if routing_is_decisive(model, row))
    with open_transformers(stored, ready.model, streamed=True, threads=1) as reference:
        names = [v.name for v in readable(ready.model.graph) if v.name in reference.available()]
        assert set(names) == set(reference.available())
        assert reference.decisive(np.array([ids])).all()
        run = reference.run(np.array([ids]), names)
    with Probe(bundle, ready.model.graph, names, engine_at_high) as probe:
        found = probe.run(ids)
    for value in names:
        assert_close(found[value], run.values[value][0], value)
    kinds = Counter(node.kind for node in ready.model.graph.nodes)
    # Of every linear layer but the head the output or, in latent attention, at least o's input.
    latent = recipe.endswith("latent")
    assert len(names) > (kinds["linear"] - 1 if not latent else 8 * ready.model.layers)


def engine_at_high(folder: Path, **options: Any) -> Engine:
    return Engine(folder, memory="high", precision="high", **options)
