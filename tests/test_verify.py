"""What `verify` does with its checks: order, failures, skips, the original, and what it records."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mnnsmith import api
from mnnsmith.conversion.convert import convert
from mnnsmith.errors import BundleError, EngineError, MissingResourceError, UsageError
from mnnsmith.verify import verify as verify_module
from mnnsmith.verify.context import Context
from mnnsmith.verify.gates import Thresholds
from mnnsmith.verify.output.record import recorded_verification
from mnnsmith.verify.output.results_json import parse_verification, to_json
from mnnsmith.verify.references import memory
from mnnsmith.verify.references import shared as references
from mnnsmith.verify.results import (
    CHECKS,
    ExactFigures,
    Figures,
    Finding,
    Outcome,
    TextFigures,
    Verification,
)
from text_samples import template_source
from tiny_checkpoint import write_checkpoint
from verification_samples import statistical
from verify_samples import RECIPE, change_json, write_model

pytestmark = pytest.mark.engine

FAST = ("files", "template")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("verify")
    write_model(folder / "model", template=template_source("smollm2"))
    return folder / "model", convert(folder / "model", folder / "bundle", recipe=RECIPE).path


@pytest.fixture
def bundle(made: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "bundle"))


def manifest(bundle: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((bundle / "mnnsmith.json").read_text())
    return data


Stub = Callable[[Context], Outcome[Any]]


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Stub]:
    """Checks that find nothing, in place of those that take time."""
    made: dict[str, Stub] = dict.fromkeys(CHECKS, lambda context: Outcome("fine", None))
    monkeypatch.setattr(verify_module, "_CHECKS", made)
    return made


# --- what runs -----------------------------------------------------------------------------------


def test_the_whole_without_a_reference(made: tuple[Path, Path], bundle: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    found = api.verify(
        bundle, made[0], checks=("template", "files"), progress=lambda *a: seen.append(a)
    )
    assert found.passed and [c.name for c in found.checks] == ["files", "template"]
    assert seen == [("files", 0, 1), ("files", 1, 1), ("template", 0, 1), ("template", 1, 1)]
    assert found.figures == Figures(template=TextFigures(20, 0, 0))
    subject = found.subject
    assert (subject.bundle, subject.source, subject.device) == ("bundle", "model", "local")
    assert (subject.model_type, subject.recipe, subject.source_revision) == ("llama", RECIPE, None)
    assert subject.settings["memory"] == "low"
    assert set(subject.files) == set(api.open_bundle(bundle).manifest.files)
    assert parse_verification(to_json(found), "it") == found


def test_the_order_is_fixed_and_options_reach_the_checks(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub]
) -> None:
    given: list[Context] = []
    stubs["exact"] = lambda context: given.append(context) or Outcome("", None)
    stubs["layers"] = lambda context: Outcome(f"bisect {context.bisect}", None)
    found = api.verify(
        bundle, made[0], checks=tuple(reversed(CHECKS)), level="full", bisect=True, threads=1
    )
    assert [check.name for check in found.checks] == list(CHECKS)
    assert found.level == given[0].level == "full" and given[0].threads == 1
    assert next(c for c in found.checks if c.name == "layers").summary == "bisect True"


def test_one_check_that_breaks_off_does_not_stop_the_others(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub]
) -> None:
    def broken(context: Context) -> Outcome[Any]:
        raise EngineError("the engine died.", "Try again.")

    stubs["exact"] = broken
    stubs["statistical"] = lambda context: Outcome("measured", statistical())
    found = api.verify(bundle, made[0])
    assert not found.passed
    by_name = {check.name: check for check in found.checks}
    assert {name for name, check in by_name.items() if check.status != "passed"} == {"exact"}
    assert by_name["exact"].summary == "broke off: the engine died."
    assert by_name["exact"].findings == (
        Finding("error", "exact", "the engine died.", "Try again."),
    )
    assert found.figures.exact is None and found.figures.statistical == statistical()
    noted = manifest(bundle)["verification"]
    assert noted["passed"] is False and noted["checks"]["exact"]["status"] == "failed"
    assert noted["figures"]["kl"] == asdict(statistical().kl)


def test_a_bug_in_a_check_is_no_finding(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub]
) -> None:
    def bug(context: Context) -> Outcome[Any]:
        raise ZeroDivisionError

    stubs["tokens"] = bug
    with pytest.raises(ZeroDivisionError):
        api.verify(bundle, made[0])
    assert "verification" not in manifest(bundle)


def test_figures_that_are_no_numbers(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub]
) -> None:
    figures = ExactFigures("x", "high", (), float("nan"))
    stubs["exact"] = lambda context: Outcome("fine", figures)
    found = api.verify(bundle, made[0])
    assert found.figures.exact is None and not found.passed
    (finding,) = next(c for c in found.checks if c.name == "exact").findings
    assert finding.where == "exact.max_kl"
    to_json(found)


def test_warnings_and_notes_do_not_fail(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub]
) -> None:
    told = (Finding("warning", "a", "b"), Finding("note", "c", "d"))
    stubs["ranges"] = lambda context: Outcome("near", None, told)
    found = api.verify(bundle, made[0])
    assert found.passed and found.checks[-1].findings == told


# --- references ----------------------------------------------------------------------------------


def test_nothing_to_compare_with(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "installed_program", lambda: None)
    found = api.verify(bundle, made[0])
    assert found.passed
    assert found.verdict == "passed, 3 checks skipped: exact, statistical, layers"
    assert manifest(bundle)["verification"]["skipped"] == ["exact", "statistical", "layers"]
    skipped = {check.name: check.summary for check in found.checks if check.status == "skipped"}
    assert set(skipped) == {"exact", "statistical", "layers"}
    assert all('pip install "mnnsmith[reference]"' in text for text in skipped.values())
    with pytest.raises(MissingResourceError, match=r"exact: .*nothing to compare"):
        api.verify(bundle, made[0], checks=("files", "exact"))
    with pytest.raises(MissingResourceError, match="statistical"):
        api.verify(bundle, made[0], thresholds=Thresholds(max_kl=0.1))


def test_what_does_not_fit_into_memory_is_not_begun(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 100 << 20)
    stubs.update(dict.fromkeys(("exact", "layers", "ranges"), _never))
    found = api.verify(bundle, made[0])
    skipped = {check.name: check.summary for check in found.checks if check.status == "skipped"}
    assert set(skipped) >= {"exact", "layers", "ranges"}
    assert skipped["ranges"] == "needs about 0.5 GB at memory: high, 0.1 GB are free."
    with pytest.raises(MissingResourceError, match=r"ranges: needs about 0\.5 GB"):
        api.verify(bundle, made[0], checks=("files", "ranges"))


def test_references_are_opened_once(
    made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    closed: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def __exit__(self, *_: object) -> None:
            closed.append(self.name)

    def new(self: references.References, weights: str) -> Any:
        opened.append(weights)
        return Fake(weights)

    monkeypatch.setattr(references.References, "_computed", new)
    given = (api.open_bundle(made[1]), api.prepare(made[0], recipe=RECIPE))
    chosen = references.choose_reference("transformers", None)
    with references.References(*given, chosen, None) as shared:
        for weights in ("original", "stored", "original"):
            with shared(weights) as reference:
                assert reference.name == weights
        assert opened == ["original", "stored"] and closed == []
    assert sorted(closed) == ["original", "stored"]

    # Too large for both: each goes when its last user has gone.
    opened.clear(), closed.clear()
    monkeypatch.setattr(references, "free_memory_bytes", lambda: 1)
    with references.References(*given, chosen, None) as shared:
        with shared("original"), shared("original"):
            pass
        assert (opened, closed) == (["original"], ["original"])
        with shared("original"), shared("stored"):
            assert closed == ["original"]
        assert sorted(closed[1:]) == ["original", "stored"]


@pytest.mark.parametrize("reference", ["bogus", "/no/such/file", ""])
def test_no_such_reference(made: tuple[Path, Path], reference: str) -> None:
    with pytest.raises(UsageError, match="reference"):
        api.verify(made[1], made[0], reference=reference)


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"level": "deep"}, "level must be one of quick, full"),
        ({"checks": ("files", "tea")}, "'tea' is no check"),
        ({"checks": ()}, "No check is chosen"),
        ({"texts": ("/no/such/text",)}, "cannot be read"),
        ({"device": "moon"}, "moon"),
        ({"checks": FAST, "thresholds": Thresholds(max_kl=1.0)}, "need the statistical check"),
        ({"checks": FAST, "save_reference": "x"}, "need the statistical check"),
        ({"checks": FAST, "bisect": True}, "--bisect is of no use to files, template"),
        ({"checks": FAST, "texts": (__file__,)}, "--text is of no use to files, template"),
        ({"checks": FAST, "reference": "onnx"}, "--reference is of no use to files, template"),
        ({"source": None, "revision": "main"}, "none is given"),
        ({"source": None, "offline": True}, "none is given"),
        ({"threads": 0}, "threads must be from 1 to 1024"),
        ({"threads": 10**20}, "threads must be from 1 to 1024"),
        ({"save_reference": ""}, "is empty"),
        ({"save_reference": "/no/such/run.npz"}, "there is no folder"),
        ({"save_reference": "/"}, "is a folder"),
    ],
)
def test_wrong_options_are_told_before_the_work(
    made: tuple[Path, Path], stubs: dict[str, Stub], options: dict[str, Any], words: str
) -> None:
    stubs.update(dict.fromkeys(CHECKS, _never))
    with pytest.raises(UsageError, match=words):
        api.verify(made[1], **{"source": made[0], **options})


@pytest.mark.parametrize("name", ["transformers", "onnx"])
def test_a_program_that_is_not_installed_is_told_before_the_work(
    made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(references.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(MissingResourceError, match=f"{name} is not installed"):
        api.verify(made[1], made[0], checks=FAST, reference=name)


@pytest.mark.parametrize("name", ["model/model.safetensors", "model/config.json", "bundle/llm.mnn"])
def test_a_reference_does_not_replace_what_is_read(
    made: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    for folder in made:
        shutil.copytree(folder, tmp_path / folder.name)
    # However the place is called.
    (tmp_path / "link").symlink_to(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    with pytest.raises(UsageError, match="is to be read"):
        api.verify(
            tmp_path / "bundle", tmp_path / "model", save_reference=tmp_path / "link",
            reference="onnx",
        )  # fmt: skip
    assert (tmp_path / name).read_bytes() == before


# --- the original --------------------------------------------------------------------------------


def test_the_original_must_be_known(made: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="the original is not known") as caught:
        api.verify(made[1])
    assert caught.value.hint is not None
    assert "--check files,tokens,template" in caught.value.hint
    found = api.verify(made[1], checks=FAST, recorded=False)
    assert found.passed and found.subject.source == "itself"


def test_another_original_is_refused(made: tuple[Path, Path], bundle: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(made[0], tmp_path / "other"))
    api.verify(bundle, other, checks=FAST)
    data = bytearray((other / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other / "model.safetensors").write_bytes(data)
    with pytest.raises(UsageError, match=r"is not what bundle was made of: model\.safetensors is"):
        api.verify(bundle, other, checks=FAST)
    write_checkpoint(tmp_path / "third")
    with pytest.raises(UsageError, match="is not what bundle was made of"):
        api.verify(bundle, tmp_path / "third", checks=FAST)


def test_what_is_damaged_is_a_finding_of_files(made: tuple[Path, Path], bundle: Path) -> None:
    with (bundle / "llm.mnn.weight").open("ab") as file:
        file.write(b"x")
    found = api.verify(bundle, made[0], checks=("files",))
    assert [c.status for c in found.checks] == ["failed"]
    assert any("llm.mnn.weight" in f.where for f in found.checks[0].findings)
    with pytest.raises(BundleError):
        api.verify(bundle, made[0], checks=("template",))


def test_a_bundle_that_knows_no_files_takes_no_original(
    made: tuple[Path, Path], bundle: Path
) -> None:
    change_json(bundle / "mnnsmith.json", lambda m: m["source"].pop("files"))
    with pytest.raises(UsageError, match="does not say which files") as caught:
        api.verify(bundle, made[0], checks=FAST)
    assert caught.value.hint is not None
    assert api.verify(bundle, checks=FAST).passed


def test_a_recipe_that_this_version_cannot_read(made: tuple[Path, Path], bundle: Path) -> None:
    change_json(bundle / "mnnsmith.json", lambda m: m["recipe"].update(default="w3g7"))
    with pytest.raises(UsageError, match="w3g7"):
        api.verify(bundle, made[0], checks=FAST)


# --- the record ----------------------------------------------------------------------------------


def test_the_bundle_keeps_the_verdict_and_stays_whole(
    made: tuple[Path, Path], bundle: Path
) -> None:
    before = manifest(bundle)
    assert "verification" not in before
    api.verify(bundle, made[0], checks=FAST, recorded=False)
    assert manifest(bundle) == before
    found = api.verify(bundle, made[0], checks=FAST)
    after = manifest(bundle)
    noted = after.pop("verification")
    assert after == before
    assert noted["passed"] is True and noted["date"] == found.date
    assert noted["source"] == "model" and noted["settings"] == found.subject.settings
    assert noted["checks"]["files"] == {"status": "passed", "summary": found.checks[0].summary}
    assert api.check(bundle).passed
    assert set(os.listdir(bundle)) == {*os.listdir(made[1]), "verification.json"}
    assert recorded_verification(api.open_bundle(bundle)) == found


def test_fewer_checks_do_not_replace_more(made: tuple[Path, Path], bundle: Path) -> None:
    api.verify(bundle, made[0], checks=FAST)
    before = manifest(bundle)
    found = api.verify(bundle, made[0], checks=["files"])
    assert "made more checks" in found.checks[0].findings[-1].message
    assert manifest(bundle) == before


def test_a_failure_is_recorded_whatever_was_before(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub]
) -> None:
    assert api.verify(bundle, made[0]).passed
    wrong = (Finding("error", "a", "b"),)
    stubs["exact"] = lambda context: Outcome("wrong", None, wrong)
    found = api.verify(bundle, made[0], checks=["exact"])
    assert manifest(bundle)["verification"]["passed"] is False
    assert recorded_verification(api.open_bundle(bundle)) == found


def test_skipped_checks_were_not_made(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    api.verify(bundle, made[0])
    before = manifest(bundle)
    monkeypatch.setattr(references, "installed_program", lambda: None)
    found = api.verify(bundle, made[0])
    assert "made more checks (exact, layers, stat" in found.checks[0].findings[-1].message
    assert manifest(bundle) == before


def test_a_bundle_that_was_replaced_meanwhile_is_not_noted_in(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub]
) -> None:
    def replaced(context: Context) -> Outcome[Any]:
        api.convert(made[0], bundle, recipe="fp16", force=True)
        return Outcome("fine", None)

    stubs["ranges"] = replaced
    found = api.verify(bundle, made[0])
    assert "replaced during the verification" in found.checks[0].findings[-1].message
    assert "verification" not in manifest(bundle)
    assert "verification.json" not in os.listdir(bundle)


def test_two_runs_that_wrote_at_once_are_told_apart(
    made: tuple[Path, Path], bundle: Path, tmp_path: Path
) -> None:
    api.verify(bundle, made[0], checks=FAST)
    result = (bundle / "verification.json").read_bytes()
    api.verify(bundle, made[0], checks=FAST, level="full")
    (bundle / "verification.json").write_bytes(result)
    with pytest.raises(UsageError, match=r"is not the result that mnnsmith\.json notes"):
        recorded_verification(api.open_bundle(bundle))


def test_a_users_text_does_not_go_with_the_bundle(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a secret word")
    told = (
        Finding("error", "tokenizer.json", "1 text is not as its: 'secret': ids [1]", "hint"),
        Finding("note", "a", "nothing quoted"),
    )
    score = replace(statistical().sample[0], text="secret")
    figures = replace(statistical(), sample=(score,))
    stubs["tokens"] = lambda context: Outcome("1 differs", None, told)
    stubs["statistical"] = lambda context: Outcome("measured", figures)
    found = api.verify(bundle, made[0], texts=[text])
    assert "secret" in to_json(found)
    for name in ("verification.json", "mnnsmith.json"):
        assert "secret" not in (bundle / name).read_text()
    kept = recorded_verification(api.open_bundle(bundle))
    assert kept.figures.statistical == replace(figures, sample=())
    findings = next(check for check in kept.checks if check.name == "tokens").findings
    assert findings[0].message.startswith("1 text is not as its (examples are left out")
    assert findings[1] == told[1]
    # The shipped text is no secret.
    api.verify(bundle, made[0])
    assert recorded_verification(api.open_bundle(bundle)).figures.statistical == figures


def test_a_record_of_other_files_is_refused(made: tuple[Path, Path], bundle: Path) -> None:
    with pytest.raises(UsageError, match="not verified yet"):
        recorded_verification(api.open_bundle(bundle))
    api.verify(bundle, made[0], checks=FAST)
    change_json(bundle / "llm_config.json", lambda c: c.update(other=1))
    with pytest.raises(UsageError, match="other files"):
        recorded_verification(api.open_bundle(bundle))


def test_a_verified_bundle_can_be_replaced(made: tuple[Path, Path], bundle: Path) -> None:
    api.verify(bundle, made[0], checks=["files"])
    api.convert(made[0], bundle, recipe="fp16", force=True)
    assert "verification.json" not in os.listdir(bundle)


def test_a_bundle_that_cannot_be_written(
    made: tuple[Path, Path], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("mnnsmith.files.os.replace", refuse)
    before = (bundle / "mnnsmith.json").read_bytes()
    found = api.verify(bundle, made[0], checks=FAST)
    assert found.passed
    (finding,) = found.checks[0].findings
    assert finding.severity == "note" and "Read-only file system" in finding.message
    assert (bundle / "mnnsmith.json").read_bytes() == before
    assert sorted(os.listdir(bundle)) == sorted(os.listdir(made[1]))


# --- gates ---------------------------------------------------------------------------------------


def test_gates_decide_with_the_checks(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub]
) -> None:
    stubs["statistical"] = lambda context: Outcome("measured", statistical())

    def run(thresholds: Thresholds, baseline: Verification | None = None) -> Verification:
        return api.verify(bundle, made[0], thresholds=thresholds, baseline=baseline)

    good = run(Thresholds(max_kl=0.05, min_top1=0.9))
    assert good.passed and [g.name for g in good.gates] == ["max-kl", "min-top1"]
    bad = run(Thresholds(max_kl=0.001))
    assert not bad.passed and all(c.status == "passed" for c in bad.checks)
    better = replace(
        statistical(),
        block_kl=tuple(kl / 2 for kl in statistical().block_kl),
        kl=replace(statistical().kl, mean=0.001, low=0.0009, high=0.0011),
    )
    old = replace(good, figures=replace(good.figures, statistical=better))
    assert any(g.name == "baseline KL" for g in run(Thresholds(), old).gates)
    assert run(Thresholds(), good).passed


def test_what_a_baseline_needs_is_known_before_the_work(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs["statistical"] = lambda context: Outcome("measured", statistical())
    old = api.verify(bundle, made[0])
    for name in CHECKS:
        stubs[name] = _never
    with pytest.raises(UsageError, match="a baseline with figures"):
        api.verify(bundle, made[0], checks=("files", "exact"), baseline=old)
    monkeypatch.setattr(references, "installed_program", lambda: None)
    with pytest.raises(MissingResourceError, match="statistical"):
        api.verify(bundle, made[0], baseline=old)


def test_another_reference_than_the_baselines_gives_a_result(
    made: tuple[Path, Path], bundle: Path, stubs: dict[str, Stub]
) -> None:
    stubs["statistical"] = lambda context: Outcome("measured", statistical())
    old = api.verify(bundle, made[0])
    other = replace(statistical(), reference_perplexity=19.0)
    stubs["statistical"] = lambda context: Outcome("measured", other)
    found = api.verify(bundle, made[0], baseline=old)
    assert not found.passed and found.figures.statistical == other
    assert [g.name for g in found.gates if not g.passed] == ["baseline original"]


def _never(context: Context) -> Outcome[Any]:
    raise AssertionError
