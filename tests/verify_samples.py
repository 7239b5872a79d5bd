"""Small bundles for the tests of verification, and ways to damage them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mnnsmith.api import Engine, open_bundle, prepare
from mnnsmith.bundle.manifest import MANIFEST
from mnnsmith.files import sha256_of
from mnnsmith.mnn.mtok.form import Mtok
from mnnsmith.mnn.mtok.pack import pack
from mnnsmith.mnn.mtok_reader import read_mtok
from mnnsmith.verify.context import Context, Level
from text_samples import byte_level_json
from tiny_checkpoint import write_checkpoint, write_json

RECIPE = "w8g32"


def write_model(
    folder: Path, tokenizer_json: str | None = None, template: str | None = None
) -> None:
    """A tiny llama with a real tokenizer: merges, special and other added tokens."""
    text = tokenizer_json or byte_level_json()
    spec = json.loads(text)
    vocab = spec["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    size = 1 + max([*ids, *(token["id"] for token in spec["added_tokens"])])
    write_checkpoint(folder, vocab_size=-(-size // 8) * 8, eos_token_id=2, bos_token_id=None)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    names = [t["content"] for t in spec["added_tokens"]]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if len(names) > 2:
        config |= {"eos_token": names[2], "pad_token": names[0]}
    write_json(folder / "tokenizer_config.json", config)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def context(bundle: Path, model: Path | None, level: Level = "quick", *texts: Path) -> Context:
    """As `verify` makes it, without references."""

    def no_reference(weights: str) -> Any:
        raise AssertionError(weights)

    ready = None if model is None else prepare(model, recipe=RECIPE)
    return Context(open_bundle(bundle, whole=False), ready, level, Engine, no_reference, texts)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit_json(path, change)
    note_hashes(path.parent)


def bring_code(model: Path, auto_map: Any) -> Path:
    """Give a checkpoint a tokenizer of its own; the file that comes to be if its code is run."""
    mark = model / "was-run"
    (model / "own.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    edit_json(model / "tokenizer_config.json", lambda c: c.update(auto_map=auto_map))
    return mark


def change_mtok(bundle: Path, change: Callable[[Mtok], Mtok]) -> None:
    path = bundle / "tokenizer.mtok"
    path.write_bytes(pack(change(read_mtok(path))))
    note_hashes(bundle)


def without_merge(mtok: Mtok, index: int) -> Mtok:
    merges = [merge for merge in mtok.model.merges if merge[2] != index]  # type: ignore[union-attr]
    return replace(mtok, model=replace(mtok.model, merges=tuple(merges)))


def note_hashes(bundle: Path) -> None:
    """Make the manifest agree with the files, so that only what they mean is wrong."""
    path = bundle / MANIFEST
    data = json.loads(path.read_text(encoding="utf-8"))
    for name in data["files"]:
        file = bundle / name
        data["files"][name] = {"sha256": sha256_of(file), "bytes": file.stat().st_size}
    path.write_text(json.dumps(data), encoding="utf-8")
