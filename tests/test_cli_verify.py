"""`mnnsmith verify` as people and CI run it: exit codes, files, output, an interrupt."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mnnsmith.conversion.convert import convert
from mnnsmith.verify.output.results_json import read_verification
from text_samples import template_source
from verify_samples import RECIPE, change_mtok, without_merge, write_model

pytestmark = pytest.mark.engine

PROGRAM = [sys.executable, "-m", "mnnsmith.cli", "verify"]
FAST = ("--check", "files, template,")


def verify(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "200", **variables},
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("verify")
    write_model(folder / "model", template=template_source("smollm2"))
    return folder / "model", convert(folder / "model", folder / "bundle", recipe=RECIPE).path


@pytest.fixture
def bundle(made: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "bundle"))


def test_a_good_bundle(made: tuple[Path, Path], bundle: Path, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"result.{kind}" for kind in ("json", "md", "xml")}
    files["md"].write_text("old")
    found = verify(
        bundle, "--source", made[0], *FAST, "--json", files["json"], "--markdown", files["md"],
        "--junit", files["xml"],
    )  # fmt: skip
    assert (found.returncode, found.stderr.count("wrote")) == (0, 3)
    first, *lines, last = found.stdout.splitlines()
    assert first == f"bundle: llama, {RECIPE}, against model (quick, local)" and last == "passed"
    assert [line.split()[:2] for line in lines] == [["ok", "files"], ["ok", "template"]]
    result = read_verification(files["json"])
    assert result.passed and [c.name for c in result.checks] == ["files", "template"]
    assert files["md"].read_text().startswith("## ✅ bundle: verification passed")
    assert ElementTree.parse(files["xml"]).getroot()[0].get("tests") == "2"
    shown = subprocess.run(
        [*PROGRAM[:-1], "inspect", bundle], capture_output=True, text=True, check=True
    )
    assert f"passed: files, template (quick on local, {result.date})" in shown.stdout


def test_a_name_that_is_no_text(made: tuple[Path, Path], bundle: Path, tmp_path: Path) -> None:
    renamed = bundle.rename(tmp_path / os.fsdecode(b"b\xffu\nndle"))
    files = {kind: tmp_path / f"result.{kind}" for kind in ("json", "md", "xml")}
    found = verify(
        renamed, "--source", made[0], *FAST, "--json", files["json"], "--markdown", files["md"],
        "--junit", files["xml"], PYTHONUTF8="0", LC_ALL="C",
    )  # fmt: skip
    # The engine itself may not find a folder of such a name; the results must be written.
    assert found.returncode in (0, 9) and found.stderr.count("wrote") == 3, found.stderr
    assert read_verification(files["json"]).subject.bundle.endswith("u\nndle")
    assert "verification" in files["md"].read_text(encoding="utf-8")
    ElementTree.parse(files["xml"])


def test_a_bad_bundle_fails_and_its_files_are_written(
    made: tuple[Path, Path], bundle: Path, tmp_path: Path
) -> None:
    change_mtok(bundle, lambda mtok: without_merge(mtok, 3))
    xml, page = tmp_path / "result.xml", tmp_path / "result.md"
    found = verify(
        bundle, "--source", made[0], "--check", "tokens", "--junit", xml, "--markdown", page,
        "--json", "-",
    )  # fmt: skip
    assert found.returncode == 9
    assert "error: " in found.stderr and "the verification failed: tokens." in found.stderr
    data = json.loads(found.stdout)
    assert data["passed"] is False and data["checks"][0]["status"] == "failed"
    suite = ElementTree.parse(xml).getroot()[0]
    assert suite.get("failures") == "1"
    failure = suite.find("testcase/failure")
    assert failure is not None and "merges: 1 missing" in str(failure.text)
    assert "❌" in page.read_text() and "merges: 1 missing" in page.read_text()
    # As people see it.
    found = verify(bundle, "--source", made[0], "--check", "tokens")
    assert found.returncode == 9 and "FAIL  tokens" in found.stdout
    assert "error: tokens: tokenizer.mtok: merges: 1 missing" in found.stdout
    assert found.stdout.splitlines()[-1] == "failed"


def test_a_missed_gate(made: tuple[Path, Path], bundle: Path, tmp_path: Path) -> None:
    """The baseline had a check that passed, which fails now."""
    old = tmp_path / "old.json"
    arguments = ("--source", made[0], "--check", "files", "--baseline", old)
    assert verify(bundle, *arguments[:-2], "--json", old).returncode == 0
    good = verify(bundle, *arguments)
    assert good.returncode == 0 and "baseline" in good.stdout
    with (bundle / "llm.mnn").open("ab") as file:
        file.write(b"x")
    found = verify(bundle, *arguments)
    assert found.returncode == 9
    assert "the verification failed: files, baseline checks." in found.stderr


def test_what_could_not_run_is_said_loudly(
    made: tuple[Path, Path], bundle: Path, tmp_path: Path
) -> None:
    """Without a reference, three checks are skipped: it passes, and claims no more than it is."""
    hide = tmp_path / "sitecustomize.py"
    hide.write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda n, p=None: None if n in ('torch', 'onnxruntime') else find(n, p)\n"
    )
    page = tmp_path / "result.md"
    found = verify(bundle, "--source", made[0], "--markdown", page, PYTHONPATH=str(tmp_path))
    assert found.returncode == 0, found.stderr
    verdict = "passed, 3 checks skipped: exact, statistical, layers"
    assert found.stdout.splitlines()[-1] == verdict
    assert "no full verification" in found.stderr
    assert page.read_text().splitlines()[0].endswith(verdict)
    shown = subprocess.run(
        [*PROGRAM[:-1], "inspect", bundle], capture_output=True, text=True, check=True
    )
    noted = "passed: files, weights, tokens, template, ranges; skipped: exact, statistical, layers"
    assert f"{noted} (quick" in shown.stdout, shown.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--check", "tea"], 2, "'tea' is no check"),
        (["--text", "/no/such"], 2, "/no/such"),
        (["--json", "/no/such/folder/x.json"], 2, "there is no folder"),
        (["--markdown", "/"], 2, "is a folder"),
        (["--json", ""], 2, "is empty"),
        (["--json", "/tmp/no-such", "--junit", "/tmp/../tmp/no-such"], 2, "is given twice"),
        (["--min-top1", "95"], 2, "--min-top1"),
        (["--max-kl", "nan"], 2, "--max-kl"),
        (["--baseline", "/no/such.json"], 2, "cannot be read"),
        (["--source", "/no/such/model"], 3, "no such file or folder"),
        ([], 2, "the original is not known"),
    ],
)
def test_wrong_usage(
    made: tuple[Path, Path], arguments: list[str], status: int, words: str
) -> None:
    found = verify(made[1], *arguments)
    assert (found.returncode, found.stdout) == (status, "")
    assert words in found.stderr and "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"format": 1, "seconds": 1' + "0" * 5000 + "}", "not valid JSON"),
        ('{"a": "\\u001b[2J\\ud800"}', "no Unicode"),
    ],
)
def test_a_hostile_baseline(made: tuple[Path, Path], tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "old.json").write_text(text)
    found = verify(made[1], *FAST, "--baseline", tmp_path / "old.json")
    assert (found.returncode, found.stdout) == (2, "")
    assert words in found.stderr and "\x1b" not in found.stderr


@pytest.mark.parametrize("name", ["mnnsmith.json", "llm.mnn.weight"])
def test_a_result_does_not_replace_a_file_of_the_bundle(bundle: Path, name: str) -> None:
    before = (bundle / name).read_bytes()
    found = verify(bundle, *FAST, "--json", bundle / name)
    assert (found.returncode, found.stdout) == (2, "") and "file of the bundle" in found.stderr
    assert (bundle / name).read_bytes() == before


def test_an_interrupt_leaves_nothing_behind(
    made: tuple[Path, Path], bundle: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    target = tmp_path / "result.json"
    target.write_text("old")
    with subprocess.Popen(
        [*PROGRAM, bundle, "--source", made[0], "--check", "tokens,template", "--level", "full",
         "--json", target],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        time.sleep(4)
        os.killpg(process.pid, signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert out == b"" and b"Traceback" not in error
    assert target.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
