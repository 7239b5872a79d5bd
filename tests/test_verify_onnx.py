"""ONNX Runtime as the reference: what it needs of the machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnnsmith.api import prepare
from mnnsmith.errors import MissingResourceError
from mnnsmith.verify.references import onnx_reference, onnx_session
from peaky import CASES, make_checkpoint

pytestmark = [pytest.mark.reference]


@pytest.mark.parametrize("name", ["write_model", "write_weights"])
def test_no_room_for_the_references_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make_checkpoint(CASES["llama"], tmp_path)
    ready = prepare(tmp_path, recipe="fp16")
    monkeypatch.setattr(onnx_session, name, full)
    with (
        pytest.raises(MissingResourceError, match="No space left on device") as found,
        onnx_reference.open_onnx(ready.checkpoint, ready.model, threads=1) as reference,
    ):
        reference.run(np.array([[3, 4]]))
    assert "TMPDIR" in str(found.value.hint)
