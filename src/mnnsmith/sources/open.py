"""One door for every source: a folder, a GGUF file, or a hub id."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.files import user_path
from mnnsmith.sources.checkpoint import Checkpoint

# org/name as the hub allows it.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def open_checkpoint(
    model: str | Path,
    *,
    revision: str | None = None,
    offline: bool = False,
    weights: bool = True,
    accept: Callable[[Mapping[str, Any]], object] = lambda config: None,
) -> Checkpoint:
    """Open what the user named; weights stay unread.

    model: a folder, a `.gguf` file (any part of a split one), or `org/name` on the hub.
    revision: branch, tag or commit on the hub.  offline: use the hub's local cache only.
    weights: False leaves the weights of a hub model where they are: `tensors` is then empty.
    accept: is given the config and may refuse it by raising, before weights are fetched or opened.
    """
    path = user_path(model)
    if path.name in ("", ".."):
        # A folder named by its place alone ("."): messages and the bundle need its name.
        path = Path(os.path.abspath(path))
    if path.is_dir():
        # Regular files only: to open a pipe would wait for who writes into it.
        ggufs = sorted(file for file in path.glob("*.gguf") if file.is_file())
        if not (path / "config.json").exists() and len(ggufs) == 1:
            return _open_gguf(ggufs[0], accept)
        from mnnsmith.sources.huggingface import open_folder, read_config

        accept(read_config(path))
        return open_folder(path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return _open_gguf(path, accept)
        raise UnsupportedError(
            f"{path}: a file of this kind cannot be converted.",
            "Give the folder of a transformers checkpoint, a .gguf file, or a hub id (org/name).",
        )
    name = str(model)
    if _HUB_ID.fullmatch(name) and not path.parent.is_dir():
        from mnnsmith.sources.hub import fetch
        from mnnsmith.sources.huggingface import open_folder, read_config

        small = fetch(name, revision=revision, offline=offline, weights=False)
        accept(read_config(small.folder))
        if not weights:
            return open_folder(small.folder, origin=name, revision=small.commit, weights=False)
        whole = fetch(name, revision=small.commit, offline=offline, weights=True)
        return open_folder(whole.folder, origin=name, revision=whole.commit)
    raise SourceError(
        f"{name}: no such file or folder.",
        "Give the folder of a transformers checkpoint, a .gguf file, or a hub id (org/name).",
    )


def _open_gguf(path: Path, accept: Callable[[Mapping[str, Any]], object]) -> Checkpoint:
    from mnnsmith.sources.gguf import open_gguf

    # Its header holds the config and the list of tensors alike.
    checkpoint = open_gguf(path)
    accept(checkpoint.config)
    return checkpoint
