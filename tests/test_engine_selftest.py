"""The engine's report for `mnnsmith doctor`."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from mnnsmith.engine import client
from mnnsmith.engine.selftest import engine_versions, self_test


def test_versions_are_those_installed() -> None:
    assert engine_versions()["MNN"] == version("MNN")


@pytest.mark.engine
def test_a_working_engine_has_no_problem(capfd: pytest.CaptureFixture[str]) -> None:
    report = self_test()
    assert report.problem is None
    assert report.processors >= 1
    assert report.mnn == version("MNN")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ("raise ImportError('MNN is broken')", "MNN is broken"),
        ("import os; os.abort()", "SIGABRT"),
        ("print('no frame at all', flush=True); input()", "no reply"),
    ],
)
def test_a_broken_engine_is_a_problem_not_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str, expected: str
) -> None:
    script = tmp_path / "runner.py"
    script.write_text(child)
    monkeypatch.setattr(client, "RUNNER", script)
    problem = self_test().problem
    assert problem is not None
    assert expected in problem
