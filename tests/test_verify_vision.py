"""The check of what a model sees: sound bundles pass with margin, and each fault is placed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from mnnsmith import api
from mnnsmith.api import Engine, convert, open_bundle, prepare
from mnnsmith.errors import SourceError
from mnnsmith.models import siglip
from mnnsmith.verify.checks.vision import MAX_KL, check_vision
from mnnsmith.verify.context import Context
from mnnsmith.verify.references.onnx_reference import open_onnx
from mnnsmith.verify.references.transformers_reference import open_transformers
from mnnsmith.verify.results import Finding, Outcome, VisionFigures
from mnnsmith.verify.stored.checkpoint import stored_checkpoint
from mnnsmith.vision import processor, prompt
from picture_samples import photo
from smolvlm_checkpoint import write_small
from tiny_checkpoint import write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.reference]

TOWER = "model.vision_model"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Few tiles: a picture cut in 4 x 1, and one in 4 x 2."""
    folder = tmp_path_factory.mktemp("images")
    made = []
    for i, (width, height) in enumerate(((200, 40), (60, 120))):
        made.append(folder / f"{i}.png")
        Image.fromarray(photo(width, height, i)).save(made[-1])
    return tuple(made)


def check(
    bundle: Path, original: Path, images: tuple[Path, ...], *, recipe: str, stored: bool = True,
    program: Callable[..., Any] = open_transformers,
) -> Outcome[VisionFigures]:  # fmt: skip
    """stored: whether the reference is to be told of the weights that the bundle holds."""
    ready, opened = prepare(original, recipe=recipe), open_bundle(bundle, whole=False)

    def reference(weights: str) -> Any:
        told = stored and weights == "stored"
        return program(
            stored_checkpoint(opened, ready) if told else ready.checkpoint, ready.model, threads=1
        )

    return check_vision(
        Context(opened, ready, "quick", Engine, reference, threads=1, images=images)
    )


SHAPES: dict[str, tuple[dict[str, int], str, Callable[..., Any]]] = {
    "smolvlm-canvas": ({}, "w8g32-vision8", open_onnx),
    "smolvlm": ({}, "w8g32-vision8", open_transformers),
    "idefics3": (
        {"image_size": 90, "patch_size": 14, "scale_factor": 3, "hidden_size": 160,
         "num_attention_heads": 2},
        "w4g32-head8", open_onnx,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_sound_bundle_passes_with_margin(
    name: str, images: tuple[Path, ...], tmp_path: Path
) -> None:
    shape, recipe, program = SHAPES[name]
    family, _, profile = name.partition("-")
    write_small(tmp_path / "model", family, **shape)
    convert(tmp_path / "model", tmp_path / "bundle", recipe=recipe, vision=profile or "standard")
    outcome = check(tmp_path / "bundle", tmp_path / "model", images, recipe=recipe,
                    program=program)  # fmt: skip
    figures = outcome.figures
    severe = [f for f in outcome.findings if f.severity != "warning"]
    assert not severe and figures.first is None and not figures.bisected
    assert (figures.pictures, figures.pictures_different, figures.tiles) == (4, 0, 2)
    assert [v.layer for v in figures.exact] == [-1, *[0] * 3, *[1] * 3, None]
    assert [v.kind for v in figures.exact[:4]] == ["residual", "attention", "mlp", "residual"]
    for value in figures.exact:
        assert value.allowed is not None and value.error < value.allowed / 4, value
    assert [case.name for case in figures.cases] == [
        "one picture", "two pictures", "split", "decode",
    ]  # fmt: skip
    assert all(case.passed for case in figures.cases) and figures.max_kl < MAX_KL / 10
    assert figures.kl is not None and figures.top1 is not None
    assert figures.kl.low <= figures.kl.mean <= figures.kl.high
    assert figures.text_tokens == 256 and figures.kl.mean > 100 * figures.max_kl
    errors = [value.error for value in figures.shipped]
    quantized = "vision8" in recipe
    assert (max(errors) > 1e-3) is quantized and all(v.allowed is None for v in figures.shipped)


# ------------------------------------------------------------------ faults


def tensor(model: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def swap_rows(w: np.ndarray) -> np.ndarray:
    w[[3, 41]] = w[[41, 3]]
    return w


def turn_squares(w: np.ndarray) -> np.ndarray:
    """The four patches of a square column by column."""
    return w.reshape(len(w), 2, 2, -1).transpose(0, 2, 1, 3).reshape(w.shape)


def gelu_without_tanh(patch: pytest.MonkeyPatch) -> None:
    """x sigmoid(1.702 x), the other approximation."""

    def factors(g: Any) -> Any:
        return (
            g.table("gelu/cubic", np.array([0.0], np.float32)),
            g.table("gelu/linear", np.array([1.702], np.float32)),
        )

    patch.setattr(siglip, "_gelu_factors", factors)


def tiles_by_column(patch: pytest.MonkeyPatch) -> None:
    right = processor.cut

    def cut(*arguments: Any) -> Any:
        picture = right(*arguments)
        order = list(range(len(picture.tiles)))
        order[:2] = [1, 0]
        return replace(picture, tiles=picture.tiles[order])

    patch.setattr("mnnsmith.verify.texts.pictures.cut", cut)


def rows_for_columns(patch: pytest.MonkeyPatch) -> None:
    right = prompt.picture_text

    def text(rows: int, cols: int, length: int) -> str:
        lines = right(rows, cols, length)
        for r in range(1, rows + 1):
            for c in range(1, cols + 1):
                lines = lines.replace(f"<row_{r}_col_{c}>", f"<ROW_{c}_col_{r}>")
        return lines.replace("ROW", "row")

    patch.setattr(prompt, "picture_text", text)


@dataclass(frozen=True)
class Fault:
    """What is done to the checkpoint or to the program that converts it, to the bundle, or to the
    program that verifies; the first value that differs, inside too; where it is found, and what is
    said."""

    first: str | None
    inside: str | None
    where: str
    says: str
    model: Callable[[Path], None] | None = None
    converter: Callable[[pytest.MonkeyPatch], None] | None = None
    bundle: Callable[[Path], None] | None = None
    checker: Callable[[pytest.MonkeyPatch], None] | None = None


FAULTS = {
    "positions shifted": Fault(
        "embeddings", "embeddings", "embeddings of patches",
        "patch 0 has that of patch 15, patch 1 has that of patch 0",
        model=lambda m: tensor(
            m, f"{TOWER}.embeddings.position_embedding.weight", lambda w: np.roll(w, 1, 0)
        ),
    ),
    "colors exchanged": Fault(
        "embeddings", "embeddings", "embeddings of patches", "differs from tile to tile",
        model=lambda m: tensor(
            m, f"{TOWER}.embeddings.patch_embedding.weight", lambda w: w[:, ::-1]
        ),
    ),
    "rows swapped": Fault(
        "layer1/mlp/fc2", "layer1/mlp/fc1", "vision layer 1, mlp", "these differ: rows 3, 41",
        model=lambda m: tensor(m, f"{TOWER}.encoder.layers.1.mlp.fc1.weight", swap_rows),
    ),
    "pixel shuffle": Fault(
        "connector", "connector", "connector", "(pixel shuffle)",
        model=lambda m: tensor(
            m, "model.connector.modality_projection.proj.weight", turn_squares
        ),
    ),
    "epsilon": Fault(
        "layer0/attention/out", "layer0/attention_norm", "vision layer 0, attention", "the epsilon",
        model=lambda m: edit(
            m / "config.json", lambda c: c["vision_config"].update(layer_norm_eps=0.05)
        ),
    ),
    "gelu": Fault(
        "layer0/mlp/fc2", "layer0/mlp/act", "vision layer 0, mlp", "the activation",
        converter=gelu_without_tanh,
    ),
    "mean": Fault(
        None, None, "llm_config.json", "By it the engine takes pictures in",
        bundle=lambda b: edit(
            b / "llm_config.json", lambda c: c.update(image_mean=[124.0, 127.5, 127.5])
        ),
    ),
    "order of tiles": Fault(
        None, None, "processor, ", "order of the tiles", checker=tiles_by_column
    ),
    "rows for columns": Fault(None, None, "ids, ", "rows and columns", checker=rows_for_columns),
}  # fmt: skip
QUICK = ("positions shifted", "epsilon", "mean", "order of tiles")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in FAULTS
    ],
)  # fmt: skip
def test_a_fault_is_placed(
    name: str, images: tuple[Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    write_small(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "broken")
    if fault.model:
        fault.model(tmp_path / "broken")
    with monkeypatch.context() as patch:
        if fault.converter:
            fault.converter(patch)
        convert(tmp_path / "broken", tmp_path / "bundle", recipe="fp16")
    if fault.bundle:
        fault.bundle(tmp_path / "bundle")
    if fault.checker:
        fault.checker(monkeypatch)
    # The weights are right as far as the check knows: it is to find what it was not told.
    outcome = check(tmp_path / "bundle", tmp_path / "model", images, recipe="fp16", stored=False)
    figures = outcome.figures
    assert figures.first == fault.first
    bad = [v.name for v in figures.bisected if v.allowed is None or v.error > v.allowed]
    assert bad[:1] == ([] if fault.inside is None else [fault.inside])
    found = [f for f in outcome.findings if f.severity == "error" and fault.where in f.where]
    assert found and fault.says in str(found[0].hint), outcome.findings
    logits = [f for f in outcome.findings if f.where.startswith("logits")]
    # Tiles and ids as the bundle's own program makes them are the reference's, too.
    assert bool(logits) == (fault.checker is None)
    assert all(case.passed for case in figures.cases) == (fault.checker is not None)
    if name == "order of tiles":
        assert "tile 0 is its tile 1, tile 1 is its tile 0" in found[0].message


# ------------------------------------------------------------------ the whole


def test_a_context_that_holds_one_picture(images: tuple[Path, ...], tmp_path: Path) -> None:
    write_small(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "bundle", recipe="fp16", max_context=120)
    ready = prepare(tmp_path / "model", recipe="fp16", max_context=120)
    with open_onnx(ready.checkpoint, ready.model, threads=1) as reference:
        outcome = check_vision(
            Context(
                open_bundle(tmp_path / "bundle"), ready, "quick", Engine,
                lambda _: nullcontext(reference), threads=1, images=images,  # type: ignore
            )
        )  # fmt: skip
    assert [case.name for case in outcome.figures.cases] == ["one picture"]
    assert [f.where for f in outcome.findings if f.severity == "note"] == ["logits"]


def test_verify_checks_what_sees_and_nothing_else(images: tuple[Path, ...], tmp_path: Path) -> None:
    write_small(tmp_path / "model")
    recipe = "w8g32-vision8"
    convert(tmp_path / "model", tmp_path / "bundle", recipe=recipe)
    found = api.verify(
        tmp_path / "bundle", tmp_path / "model", images=images, reference="onnx", threads=1,
        checks=("files", "weights", "template", "exact", "layers", "vision"),
    )  # fmt: skip
    assert [(c.name, c.status) for c in found.checks] == [
        (name, "passed") for name in ("files", "weights", "template", "exact", "layers", "vision")
    ]
    assert found.figures.vision is not None and found.figures.weights is not None
    vision = [m for m in found.figures.weights.matrices if m.operator.startswith("visual/")]
    assert len(vision) == 14 and {m.role for m in vision} == {"vision", "patch"}
    with pytest.raises(SourceError, match=r"none\.png"):
        api.verify(tmp_path / "bundle", tmp_path / "model", images=["none.png"])


def test_a_model_of_text_has_no_such_check(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "bundle", recipe="w8g32")
    found = api.verify(tmp_path / "bundle", tmp_path / "model", checks=["files", "vision"])
    assert [(c.name, c.status) for c in found.checks] == [
        ("files", "passed"),
        ("vision", "skipped"),
    ]
    assert found.checks[1].summary == "the model sees no pictures"


def damaged(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def test_a_damaged_weight_of_the_tower_is_named(tmp_path: Path) -> None:
    write_small(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "bundle", recipe="w8g32")
    size = (tmp_path / "bundle" / "visual.mnn.weight").stat().st_size
    messages: list[Finding] = []
    for at in (size - 3, size // 2 + 1):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "bundle", tmp_path / "copy")
        damaged(tmp_path / "copy" / "visual.mnn.weight", at)
        found = api.verify(tmp_path / "copy", tmp_path / "model", checks=["weights"])
        assert [c.status for c in found.checks] == ["failed"]
        messages += found.checks[0].findings
    assert all(finding.where.startswith("visual/") for finding in messages)
