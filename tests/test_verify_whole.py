"""All checks together, with real references: transformers, ONNX Runtime, and a saved one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mnnsmith import api
from mnnsmith.conversion.convert import convert
from mnnsmith.errors import UsageError
from mnnsmith.verify.gates import Thresholds
from mnnsmith.verify.references import shared as references
from mnnsmith.verify.results import CHECKS, Verification
from text_samples import template_source
from verify_samples import RECIPE, write_model

pytestmark = [pytest.mark.engine, pytest.mark.reference]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("whole")
    write_model(folder / "model", template=template_source("smollm2"))
    return folder / "model", convert(folder / "model", folder / "bundle", recipe=RECIPE).path


def failures(result: Verification) -> list[object]:
    return [check for check in result.checks if check.status != "passed"]


def test_a_right_bundle_passes_every_check_and_saves_its_reference(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, bundle = made
    saved = tmp_path / "model.ref"
    first = api.verify(bundle, model, save_reference=saved, threads=1)
    assert failures(first) == []
    assert [c.name for c in first.checks] == [name for name in CHECKS if name != "vision"]
    assert first.figures.statistical is not None and first.figures.exact is not None
    assert first.figures.statistical.reference.startswith("transformers")
    # Another recipe against the same run, where nothing is installed that could compute it.
    other = convert(model, tmp_path / "other", recipe="w4g32").path
    monkeypatch.setattr(references, "installed_program", lambda: None)
    second = api.verify(other, model, reference=saved, threads=1, baseline=first)
    skipped = {check.name for check in second.checks if check.status == "skipped"}
    assert skipped == {"exact", "layers"}
    found, before = second.figures.statistical, first.figures.statistical
    assert found is not None and found.reference.endswith("saved")
    assert found.text_sha256 == before.text_sha256
    assert found.reference_perplexity == pytest.approx(before.reference_perplexity, rel=1e-6)
    # Four bits are worse than eight, beyond noise.
    assert found.kl.low > before.kl.high
    gates = {gate.name: gate for gate in second.gates}
    assert not gates["baseline KL"].passed
    assert not gates["baseline checks"].passed
    assert {"exact is skipped", "layers is skipped"} <= set(
        gates["baseline checks"].found.split(", ")
    )
    with pytest.raises(UsageError, match="another model"):
        api.verify(
            other, model, reference=saved,
            baseline=replace(first, subject=replace(first.subject, model_type="qwen2")),
        )  # fmt: skip


def test_a_saved_reference_of_the_text_alone_serves_all_checks(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    """The layers' values are in no file: they are computed."""
    model, bundle = made
    saved = tmp_path / "model.ref"
    api.verify(bundle, model, checks=["statistical"], save_reference=saved, threads=1)
    seen: dict[str, tuple[int, int]] = {}
    found = api.verify(
        bundle, model, reference=saved, checks=("weights", "statistical", "layers"), threads=1,
        progress=lambda name, done, total: seen.update({name: (done, total)}),
    )  # fmt: skip
    assert failures(found) == []
    assert found.figures.layers is not None and found.figures.layers.shipped
    assert found.figures.statistical.reference.endswith("saved")
    assert found.figures.weights is not None
    # In units that move: windows and matrices.
    assert all(done == total for done, total in seen.values())
    assert seen["weights"][1] == len(found.figures.weights.matrices)
    assert seen["statistical"][1] > 8


def test_onnx_runtime_tells_the_same(made: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    bundle = Path(shutil.copytree(made[1], tmp_path / "bundle"))
    chosen = ("exact", "statistical", "layers")
    found = api.verify(
        bundle, made[0], checks=chosen, reference="onnx", threads=1, thresholds=Thresholds(max_kl=1)
    )
    assert failures(found) == [] and found.passed
    assert found.figures.exact is not None and "ONNX Runtime" in found.figures.exact.reference
