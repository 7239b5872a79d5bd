"""Whether the engine works on this machine, for `mnnsmith doctor`."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from mnnsmith.engine.device import Launch
from mnnsmith.engine.machine import installed_version, usable_processors
from mnnsmith.engine.selftest import check_engine
from mnnsmith.errors import EngineError


def test_versions_are_those_installed() -> None:
    assert installed_version("MNN") == version("MNN")
    assert installed_version("no-such-package-anywhere") is None
    assert usable_processors() >= 1


@pytest.mark.engine
def test_a_working_engine_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    check_engine()
    assert capfd.readouterr() == ("", "")


BROKEN = {
    "raise ImportError('MNN is broken')": "MNN is broken",
    "import os; os.abort()": "SIGABRT",
    "print('no frame at all', flush=True); input()": "no reply",
    """import json, struct, sys
data = json.dumps({'id': 1, 'largest_error': float('nan')}).encode()
sys.stdout.buffer.write(struct.pack('<I', len(data)) + data)
sys.stdout.flush()
sys.stdin.read()""": "a matrix product is off by nan",
}


@pytest.mark.parametrize("child", BROKEN)
def test_a_broken_engine_is_an_error_with_a_remedy(tmp_path: Path, child: str) -> None:
    script = tmp_path / "runner.py"
    script.write_text(child)
    with pytest.raises(EngineError, match=BROKEN[child]) as caught:
        check_engine(Launch((sys.executable, str(script))))
    assert caught.value.hint is not None and "pip install" in caught.value.hint
