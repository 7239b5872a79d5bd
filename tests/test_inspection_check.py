"""What `check` finds in a bundle, and that it ends whatever is wrong with one."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mnnsmith import api
from mnnsmith.bundle import open_bundle
from mnnsmith.conversion import structure
from mnnsmith.conversion.convert import convert
from mnnsmith.errors import BundleError
from mnnsmith.inspection import check as check_module
from mnnsmith.inspection.check import CheckReport
from tiny_checkpoint import write_checkpoint
from tiny_mixture import EXPERTS, LAYERS, write_mixture

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    write_mixture(folder / "model")
    return convert(folder / "model", folder / "bundle", recipe="w4g32").path


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "bundle"))


def failed(report: CheckReport) -> dict[str, str]:
    return {finding.name: finding.detail for finding in report.findings if not finding.passed}


def test_a_whole_bundle_passes_and_its_experts_are_looked_at(bundle: Path) -> None:
    report = api.check(bundle, load=True)
    assert report.passed and failed(report) == {}
    details = {finding.name: finding.detail for finding in report.findings}
    operators, _, with_weights = details["graph fits the weights"].partition(" operators, ")
    # Three matrices of each expert at least.
    assert int(with_weights.split()[0]) > 3 * LAYERS * EXPERTS
    assert int(operators) > 2 * 3 * LAYERS * EXPERTS


@pytest.mark.parametrize("damage", ["overlap", "beyond", "no list"])
def test_weights_of_an_expert_that_lie_wrong(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    real = structure.mnn_to_graph_json

    def damaged(path: Path) -> dict[str, Any]:
        graph = real(path)
        expert = graph["subgraphs"][2]
        places = [node["main"]["external"] for node in expert["nodes"]
                  if "external" in node.get("main", {})]  # fmt: skip
        if damage == "overlap":
            places[1][0] = places[0][0]
        elif damage == "beyond":
            places[1][0] = 1 << 40
        else:
            expert["nodes"] = None
        return graph

    monkeypatch.setattr(structure, "mnn_to_graph_json", damaged)
    found = failed(api.check(bundle))
    assert list(found) == ["graph fits the weights"]
    words = {"overlap": "overlap those of", "beyond": "end beyond", "no list": "sub-graph"}
    assert words[damage] in found["graph fits the weights"]


def test_a_file_that_cannot_be_read_is_a_finding(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = check_module.sha256_of

    def sha256_of(path: Path) -> str:
        if path.name == "llm.mnn.weight":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(check_module, "sha256_of", sha256_of)
    found = failed(api.check(bundle))
    assert list(found) == ["llm.mnn.weight is unchanged"]
    assert found["llm.mnn.weight is unchanged"].endswith(
        "llm.mnn.weight: cannot be read: Input/output error"
    )


def test_other_files_are_named_so_that_they_cannot_steer_a_terminal(bundle: Path) -> None:
    (bundle / "größe").write_text("")
    (bundle / "a\x1b[2J\nok").write_text("")
    (found,) = failed(api.check(bundle)).values()
    assert found == r"not in the manifest: 'a\x1b[2J\nok', größe"


def test_a_changed_file(bundle: Path) -> None:
    config = json.loads((bundle / "llm_config.json").read_text())
    text = json.dumps(config | {"tie_embeddings": None})
    size = (bundle / "llm_config.json").stat().st_size
    (bundle / "llm_config.json").write_text(text + " " * (size - len(text)))
    found = failed(api.check(bundle))
    assert set(found) == {"llm_config.json is unchanged", "graph fits the weights"}
    (bundle / "llm_config.json").write_text("{}")
    assert "llm_config.json is unchanged" in failed(api.check(bundle))
    with pytest.raises(BundleError, match="expected"):
        open_bundle(bundle)


def test_settings_may_be_edited_and_other_files_may_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    bundle = convert(tmp_path / "model", tmp_path / "bundle", recipe="fp16").path
    config = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").write_text(json.dumps({**config, "precision": "normal"}))
    open_bundle(bundle)
    report = api.check(bundle)
    assert report.passed
    assert any("edited" in f.detail for f in report.findings if "config.json" in f.name)
    with (bundle / "tokenizer.mtok").open("ab") as file:
        file.write(b"x")
    failed = [f.name for f in api.check(bundle).findings if not f.passed]
    assert "tokenizer.mtok is unchanged" in failed
    with pytest.raises(BundleError, match=r"tokenizer\.mtok"):
        open_bundle(bundle)
