"""Bundles on disk: what is written is read back, what is damaged is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fuzz_targets import make_bundle
from mnnsmith.bundle import open_bundle
from mnnsmith.bundle.manifest import read_manifest, write_manifest
from mnnsmith.errors import BundleError


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "bundle")


def change(bundle: Path, *path: str, to: Any = None, drop: bool = False) -> None:
    data = json.loads((bundle / "mnnsmith.json").read_text())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    if drop:
        del inner[path[-1]]
    (bundle / "mnnsmith.json").write_text(json.dumps(data))


def test_what_is_written_is_read(bundle: Path) -> None:
    opened = open_bundle(bundle)
    assert (opened.max_context, opened.vocab_size, opened.stop_ids) == (128, 260, (1,))
    assert (opened.bos_token, opened.eos_token) == ("<s>", "</s>")
    assert opened.manifest.recipe == "fp16"
    assert opened.manifest.generation == {"temperature": 0.5, "top_k": 5}
    assert opened.size_bytes == sum(
        f.stat().st_size for f in bundle.iterdir() if f.name != "mnnsmith.json"
    )
    assert json.loads(opened.tokenizer_json())["version"] == "1.0"


def test_equal_contents_are_equal_bytes(tmp_path: Path) -> None:
    written = []
    for data in ({"a": 1, "b": {"y": "é", "x": [2]}}, {"b": {"x": [2], "y": "é"}, "a": 1}):
        write_manifest(tmp_path, data)
        written.append((tmp_path / "mnnsmith.json").read_bytes())
    assert written[0] == written[1] and "é".encode() in written[0]


@pytest.mark.parametrize(
    ("path", "to", "part"),
    [
        (("format",), 2, "format 2, this version reads 1"),
        (("format",), None, "format None"),
        (("model",), [], "model is missing or no object"),
        (("recipe",), {"name": 3}, "recipe.name"),
        (("generation",), None, "generation is missing"),
        (("generation", "top_k"), "50", "generation.top_k must be a number, not '50'"),
        (("generation", "temperature"), float("nan"), "must be a number, not nan"),
        (("generation", "top_k"), float("inf"), "must be a number, not inf"),
        (("generation", "top_k"), True, "must be a number, not True"),
        (("model", "max_context"), 0, "model.max_context must be a whole number above zero"),
        (("model", "vocab_size"), 2.0, "model.vocab_size"),
        (("model", "layers"), True, "model.layers"),
        (("model", "model_type"), None, "model.model_type must be a string"),
        (("model", "stop_ids"), [260], "model.stop_ids must be token ids"),
        (("model", "stop_ids"), [-1], "model.stop_ids"),
        (("model", "stop_ids"), [True], "model.stop_ids"),
        (("tokens", "bos"), 1, "tokens.bos of the manifest must be a string"),
        (("files", "../x"), {"sha256": "", "bytes": 1}, "'../x' is not a plain file name"),
        (("files", ".."), {"sha256": "", "bytes": 1}, "'..' is not a plain file name"),
        (("files", "/etc/passwd"), {"sha256": "", "bytes": 1}, "is not a plain file name"),
        (("files", "a\0b"), {"sha256": "", "bytes": 1}, "is not a plain file name"),
        (("files", "a\x1b[2Jb"), {"sha256": "", "bytes": 1}, "is not a plain file name"),
        (("files", "a\nok b"), {"sha256": "", "bytes": 1}, "is not a plain file name"),
        (("files", "x" * 300), {"sha256": "", "bytes": 1}, "is missing from the bundle"),
        (("files", "absent"), {"sha256": "", "bytes": 1}, "absent: is missing from the bundle"),
        (("files", "llm.mnn"), 64, "files.llm.mnn must give sha256 and bytes"),
        (("files", "llm.mnn"), {"sha256": "", "bytes": 63}, "has 64 bytes, expected 63"),
    ],
)
def test_damaged_manifests(bundle: Path, path: tuple[str, ...], to: Any, part: str) -> None:
    change(bundle, *path, to=to)
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle)
    assert part in str(caught.value) and str(bundle) in str(caught.value)


@pytest.mark.parametrize("key", ["format", "model", "recipe", "generation", "source", "files"])
def test_keys_that_must_be_there(bundle: Path, key: str) -> None:
    change(bundle, key, drop=True)
    with pytest.raises(BundleError, match=key):
        open_bundle(bundle)


def test_what_is_no_bundle(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such folder"):
        open_bundle(tmp_path / "absent")
    with pytest.raises(BundleError, match="is a file, not a bundle"):
        open_bundle(bundle / "llm.mnn")
    (bundle / "mnnsmith.json").write_text("{")
    with pytest.raises(BundleError, match="not valid JSON"):
        read_manifest(bundle)
    (bundle / "mnnsmith.json").unlink()
    with pytest.raises(BundleError, match=r"there is no mnnsmith.json"):
        open_bundle(bundle)


@pytest.mark.parametrize("name", ["llm.mnn", "tokenizer.mtok", "llm_config.json", "tokenizer.json"])
def test_files_missing_or_cut_short(bundle: Path, name: str) -> None:
    kept = bundle.parent / "kept"
    shutil.copy(bundle / name, kept)
    (bundle / name).write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(BundleError, match=f"{name}: has .* bytes, expected"):
        open_bundle(bundle)
    (bundle / name).unlink()
    with pytest.raises(BundleError, match=f"{name}: is missing"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    ("jinja", "part"), [("x", "jinja.chat_template"), ({}, "jinja.chat_template"), (None, None)]
)
def test_templates(bundle: Path, jinja: Any, part: str | None) -> None:
    config = json.loads((bundle / "llm_config.json").read_text())
    text = json.dumps({**config, "jinja": jinja})
    (bundle / "llm_config.json").write_text(text)
    change(bundle, "files", "llm_config.json", "bytes", to=len(text))
    if part is None:
        assert open_bundle(bundle).chat_template is None
    else:
        with pytest.raises(BundleError, match=part):
            open_bundle(bundle)
