"""A bundle that holds any model, not a language model: `model.mnn` and its manifest."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mnnsmith.bundle.manifest import MODULE_KIND, write_manifest
from mnnsmith.bundle.staging import staged_folder
from mnnsmith.files import sha256_of

MODULE_FILE = "model.mnn"


def write_module_bundle(
    target: Path, model: Path, facts: Mapping[str, Any], *, replace: bool
) -> int:
    """Put the converted file `model` and a manifest of `facts` into `target`, whole or not at all.

    Gives the size in bytes of the model.  Raises as `staged_folder`.
    """
    size = model.stat().st_size
    with staged_folder(target, replace=replace, needed_bytes=size) as folder:
        shutil.copyfile(model, folder / MODULE_FILE)
        files = {MODULE_FILE: {"sha256": sha256_of(folder / MODULE_FILE), "bytes": size}}
        write_manifest(folder, {**facts, "kind": MODULE_KIND, "files": files})
    return size
