"""The checks on text alone, of models that see: references in every way, prompts, templates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnnsmith import api
from mnnsmith.api import convert, open_bundle, prepare
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.verify.checks.template import check_template
from mnnsmith.verify.context import Context
from mnnsmith.verify.references.onnx_reference import open_onnx
from mnnsmith.verify.references.transformers_reference import open_transformers
from mnnsmith.verify.stored.checkpoint import stored_checkpoint
from mnnsmith.verify.texts.exact_prompts import decisive_prompts
from smolvlm_checkpoint import IMAGE_ID, write_small

pytestmark = [pytest.mark.engine, pytest.mark.reference]
RECIPE = "w8g32-vision8"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sees")
    write_small(folder / "model")
    return folder / "model", convert(folder / "model", folder / "bundle", recipe=RECIPE).path


def near(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-4 * expected.std()


def test_every_reference_sees_what_transformers_sees(made: tuple[Path, Path]) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    ready = prepare(made[0], recipe=RECIPE)
    assert ready.model.vision is not None
    plain = replace(ready.checkpoint, files=())
    model: Any = AutoModelForImageTextToText.from_pretrained(made[0], dtype=torch.float32).eval()
    pixels = np.random.default_rng(1).standard_normal((2, 3, 64, 64)).astype(np.float32)
    run = [IMAGE_ID] * ready.model.vision.tile_tokens
    ids = np.array([30, 31, *run, 40, 41, *run, 50, 60])
    with torch.no_grad():
        given = torch.from_numpy(ids)[None]
        seen = model(input_ids=given, pixel_values=torch.from_numpy(pixels)[None]).logits[0]
        text = model(input_ids=given[:, :2]).logits[0].numpy()
    names = ["embeddings", "layer1/attention/out", "layer1/mlp/act", "post_norm", "connector"]
    values: list[np.ndarray] = []
    for opened in (
        open_transformers(ready.checkpoint, ready.model, streamed=False, threads=1),
        open_transformers(plain, ready.model, streamed=False, threads=1),
        open_transformers(plain, ready.model, streamed=True, threads=1),
        open_onnx(ready.checkpoint, ready.model, threads=1),
    ):
        with opened as reference:
            pictures = reference.pictures
            assert pictures is not None and set(names) <= set(pictures.available())
            found = pictures.see(pixels, names)
            hidden = pictures.run(ids, found.embeddings)
            near(reference.logits(hidden), seen.numpy())
            near(reference.logits(reference.run(ids[None, :2]).hidden[0]), text)
            values.append(np.concatenate([found.values[n].ravel() for n in names]))
    for other in values[1:]:
        near(other, values[0])


def test_stored_weights_of_the_tower_are_those_of_the_bundle(made: tuple[Path, Path]) -> None:
    ready = prepare(made[0], recipe=RECIPE)
    stored = stored_checkpoint(open_bundle(made[1]), ready)
    tower = [name for name in stored.tensors if ".vision_model." in name or "connector" in name]
    assert len(tower) == 38
    for name in tower:
        own, original = stored.tensors[name], ready.checkpoint.tensors[name]
        rows = own.rows(1, original.shape[0]), original.rows(1, original.shape[0])
        assert own.shape == original.shape and rows[0].shape == rows[1].shape, name
        exact = own.name.endswith(".bias") or "norm" in name or "embedding" in name
        assert np.array_equal(*rows) is exact, name
        np.testing.assert_allclose(*rows, atol=0.02)


def test_prompts_of_text_hold_no_image_token(made: tuple[Path, Path]) -> None:
    ready = prepare(made[0], recipe=RECIPE)

    class Decisive:
        def decisive(self, ids: np.ndarray) -> np.ndarray:
            return np.ones(len(ids), dtype=np.bool_)

    bundle = open_bundle(made[1])
    given = Context(bundle, ready, "full", api.Engine, lambda _: Decisive())  # type: ignore
    tokenizer = TextTokenizer(bundle.tokenizer_json())
    prompts = decisive_prompts(given, tokenizer, Decisive())  # type: ignore[arg-type]
    assert len(prompts) == 6 and all(IMAGE_ID not in prompt.ids for prompt in prompts)
    # The premise: other control tokens are among them.
    assert any(np.isin(prompt.ids, list(tokenizer.special_ids)).any() for prompt in prompts)


def test_templates_are_compared_with_pictures(made: tuple[Path, Path]) -> None:
    def no_reference(weights: str) -> Any:
        raise AssertionError(weights)

    given = Context(open_bundle(made[1]), prepare(made[0], recipe=RECIPE), "quick", api.Engine,
                    no_reference)  # fmt: skip
    outcome = check_template(given)
    assert outcome.figures.texts == 27 and outcome.figures.different == 0
    assert not [finding for finding in outcome.findings if finding.severity != "warning"]


@pytest.mark.parametrize(
    "program", ["onnx", pytest.param("transformers", marks=pytest.mark.slow)]
)  # fmt: skip
def test_the_checks_on_text_pass(program: str, made: tuple[Path, Path]) -> None:
    found = api.verify(
        made[1], made[0], reference=program, threads=1, recorded=False,
        checks=("files", "weights", "exact", "statistical", "layers", "ranges"),
    )  # fmt: skip
    assert {c.name: c.status for c in found.checks if c.name != "statistical"} == dict.fromkeys(
        ("files", "weights", "exact", "layers", "ranges"), "passed"
    )
    assert found.figures.layers is not None and len(found.figures.layers.exact) == 6
