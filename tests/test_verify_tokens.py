"""A tokenizer that differs from the original's is caught, wherever it differs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tokenizer_samples
from mnnsmith.conversion.convert import convert
from mnnsmith.errors import BundleError, UnsupportedError, UsageError
from mnnsmith.verify.checks.template import check_template
from mnnsmith.verify.checks.token_files import compare_files, truth
from mnnsmith.verify.checks.tokens import check_tokens
from mnnsmith.verify.references.torch_model import load_tokenizer
from mnnsmith.verify.results import Finding, Outcome, TextFigures
from text_samples import byte_level_json, template_source
from verify_samples import (
    RECIPE,
    bring_code,
    change_json,
    change_mtok,
    context,
    without_merge,
    write_model,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its bundle."""
    folder = tmp_path_factory.mktemp("tokens")
    write_model(folder / "model", template=template_source("smollm2"))
    return folder / "model", convert(folder / "model", folder / "bundle", recipe=RECIPE).path


@pytest.fixture
def bundle(made: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "bundle"))


def errors(outcome: Outcome[TextFigures]) -> list[Finding]:
    return [finding for finding in outcome.findings if finding.severity == "error"]


def test_a_right_tokenizer_passes(made: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Größe\n\ndef f():\n\treturn 1\nwith a NUL \0 inside\n" + "word " * 2000)
    found = check_tokens(context(made[1], made[0], "quick", text))
    assert errors(found) == []
    assert found.figures.texts > 3000 and found.figures.different == 0
    assert found.figures.engine_different == 0 and found.findings == ()
    assert found.summary.endswith("ids and texts are equal, with the engine's tokenizer, too")


def structure(bundle: Path, model: Path | None) -> list[Finding]:
    """What is found without any text."""
    given = context(bundle, model)
    return list(compare_files(given.bundle, truth(given)))


def test_without_the_original_the_bundles_own_file_is_the_measure(bundle: Path) -> None:
    assert errors(check_tokens(context(bundle, None))) == []
    change_mtok(bundle, lambda mtok: without_merge(mtok, 0))
    found = check_tokens(context(bundle, None))
    assert found.figures.different == 0 and found.figures.engine_different > 100
    assert {finding.where for finding in errors(found)} == {"tokenizer.mtok"}


def test_a_merge_missing_in_the_engines_file(made: tuple[Path, Path], bundle: Path) -> None:
    change_mtok(bundle, lambda mtok: without_merge(mtok, 3))
    found = check_tokens(context(bundle, made[0]))
    assert found.figures.different == 0 and found.figures.engine_different > 10
    structure, texts = errors(found)
    merges = json.loads(byte_level_json())["model"]["merges"]
    assert structure.message == f"merges: 1 missing, such as {tuple(merges[3])!r}."
    assert texts.where == structure.where == "tokenizer.mtok"
    assert "ids ... [" in texts.message and "expected ... [" in texts.message
    assert len(texts.message) < 900


def test_a_rare_merge_that_no_text_shows(made: tuple[Path, Path], bundle: Path) -> None:
    """The last merge of a long token: the structure tells it, whatever the texts hold."""

    def drop(mtok: Any) -> Any:
        return without_merge(mtok, max(merge[2] for merge in mtok.model.merges))

    change_mtok(bundle, drop)
    (finding,) = structure(bundle, made[0])
    assert finding.severity == "error" and finding.message.startswith("merges: 1 missing, such as")


def test_a_merge_missing_in_tokenizer_json(made: tuple[Path, Path], bundle: Path) -> None:
    change_json(bundle / "tokenizer.json", lambda spec: spec["model"]["merges"].pop(3))
    found = check_tokens(context(bundle, made[0]))
    assert found.figures.different > 10
    structure, texts = (f for f in errors(found) if f.where == "tokenizer.json")
    assert structure.message.startswith("merges: 1 missing, such as [")
    assert "texts are not as the original's" in texts.message


@pytest.mark.parametrize(
    ("part", "where", "words"),
    [
        ("vocab", "tokenizer.json", "vocab: "),
        ("added", "tokenizer.json", "added_tokens: "),
        ("pattern", "tokenizer.json", "pre_tokenizer: "),
        ("stop", "mnnsmith.json", "tokens that end an answer are [1], expected [2]"),
        ("eos", "mnnsmith.json", "eos_token is '<|im_start|>', expected '<|im_end|>'"),
        ("mtok stop", "tokenizer.mtok", "stop_ids: 1 missing, such as 2; 1 too many, such as 1"),
        ("mtok prefix", "tokenizer.mtok", "prefix_ids: 1 too many, such as 1"),
        ("mtok added", "tokenizer.mtok", "added_tokens: 1 missing"),
    ],
)
def test_every_part_that_differs_is_named(
    made: tuple[Path, Path], bundle: Path, part: str, where: str, words: str
) -> None:
    def swap(spec: dict[str, Any]) -> None:
        vocab = spec["model"]["vocab"]
        vocab["A"], vocab["B"] = vocab["B"], vocab["A"]

    if part == "vocab":
        change_json(bundle / "tokenizer.json", swap)
    elif part == "added":
        change_json(bundle / "tokenizer.json", lambda s: s["added_tokens"][-1].update(lstrip=True))
    elif part == "pattern":
        change_json(bundle / "tokenizer.json", lambda s: s["pre_tokenizer"].update(use_regex=False))
    elif part == "stop":
        change_json(bundle / "mnnsmith.json", lambda m: m["model"].update(stop_ids=[1]))
    elif part == "eos":
        change_json(bundle / "mnnsmith.json", lambda m: m["tokens"].update(eos="<|im_start|>"))
    elif part == "mtok stop":
        change_mtok(bundle, lambda mtok: replace(mtok, stop_ids=(1,)))
    elif part == "mtok prefix":
        change_mtok(bundle, lambda mtok: replace(mtok, prefix_ids=(1,)))
    else:
        change_mtok(bundle, lambda mtok: replace(mtok, added_tokens=mtok.added_tokens[:-1]))
    found = [f for f in structure(bundle, made[0]) if f.severity == "error"]
    assert [f.where for f in found if f.message.startswith(words)] == [where], found


def test_another_version_may_write_another_form(made: tuple[Path, Path], bundle: Path) -> None:
    change_json(bundle / "mnnsmith.json", lambda m: m.update(mnnsmith="0.0.1"))
    change_mtok(bundle, lambda mtok: replace(mtok, clean_up_spaces=True))
    (finding,) = structure(bundle, made[0])
    assert finding.severity == "warning"
    assert finding.message == "clean_up_spaces: True, expected False."


def test_damaged_files_are_errors(made: tuple[Path, Path], bundle: Path) -> None:
    (bundle / "tokenizer.json").write_text("[1]")
    with pytest.raises(BundleError, match="model"):
        structure(bundle, made[0])
    (bundle / "tokenizer.json").write_text("{")
    with pytest.raises(BundleError, match="no JSON"):
        structure(bundle, made[0])
    shutil.copy(made[1] / "tokenizer.json", bundle)
    (bundle / "tokenizer.mtok").write_bytes((made[1] / "tokenizer.mtok").read_bytes()[:-9])
    with pytest.raises(BundleError, match=r"tokenizer\.mtok"):
        structure(bundle, made[0])


@pytest.mark.parametrize(("data", "words"), [(b"\xff", "UTF-8"), (b" \n", "holds no text")])
def test_texts_that_are_none(
    made: tuple[Path, Path], tmp_path: Path, data: bytes, words: str
) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(UsageError, match=words):
        check_tokens(context(made[1], made[0], "quick", tmp_path / "x"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tokenizer_samples.MAKERS))
def test_no_family_of_tokenizers_is_blamed_for_the_engines_limits(
    name: str, tmp_path: Path
) -> None:
    """Over the whole corpus: all that the engine does otherwise is known."""
    write_model(tmp_path / "model", tokenizer_samples.sample(name).to_str())
    bundle = convert(tmp_path / "model", tmp_path / "bundle", recipe=RECIPE).path
    found = check_tokens(context(bundle, tmp_path / "model", "full"))
    assert errors(found) == []
    assert found.figures.texts > 12_000 and found.figures.different == 0


@pytest.mark.reference
def test_code_of_a_checkpoint_is_not_run_and_nothing_is_asked(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(made[0], tmp_path / "model"))
    mark = bring_code(model, {"AutoTokenizer": [None, "own.Own"]})
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    for check in (check_tokens, check_template):
        found = check(context(made[1], model))
        assert errors(found) == []
        told = [finding.message for finding in found.findings if finding.severity == "note"]
        assert any("code of the checkpoint, which is not run" in text for text in told)
    bring_code(model, ["own.Own", None])
    with pytest.raises(UnsupportedError, match="not run"):
        load_tokenizer(model)
    bring_code(model, {"AutoModel": "own.Own"})
    assert load_tokenizer(model).get_vocab()
    assert asked == [] and not mark.exists()
