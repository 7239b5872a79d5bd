"""`mnnsmith.json`: what a bundle holds, what it came from, and how it was made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mnnsmith.errors import BundleError, SourceError
from mnnsmith.files import read_json_object, replace_text

MANIFEST = "mnnsmith.json"
# The whole result of the last verification, of which the manifest keeps the main part.
VERIFICATION = "verification.json"
# What belongs to a bundle beside the files that its manifest lists.
UNLISTED = frozenset({MANIFEST, VERIFICATION})
FORMAT = 1
# The value of `kind` for a bundle that holds any other model; a language model's has none.
MODULE_KIND = "module"
_LARGEST_SETTING = 1 << 31


@dataclass(frozen=True)
class Manifest:
    """The fields of `mnnsmith.json` that programs use; `data` is the whole object.

    files: sha256 and size in bytes of every other file of the bundle.
    """

    data: Mapping[str, Any]
    files: Mapping[str, tuple[str, int]]

    @property
    def model(self) -> Mapping[str, Any]:
        """model_type, parameters, layers, max_context, stop_ids, ..."""
        model: Mapping[str, Any] = self.data["model"]
        return model

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return str(self.data["recipe"]["name"])

    @property
    def generation(self) -> Mapping[str, Any]:
        """Sampling defaults of the model's authors."""
        generation: Mapping[str, Any] = self.data["generation"]
        return generation


def write_manifest(folder: Path, data: Mapping[str, Any]) -> None:
    """Write `mnnsmith.json`; keys are sorted, so that equal contents are equal bytes."""
    (folder / MANIFEST).write_text(_text({"format": FORMAT, **data}), encoding="utf-8")


def note_in_manifest(folder: Path, key: str, value: Mapping[str, Any]) -> None:
    """Put `value` under `key` of a finished bundle's manifest, which is replaced in one step.

    What was noted meanwhile under other keys is kept.  Raises `MissingResourceError`
    where the folder cannot be written.
    """
    replace_text(folder / MANIFEST, _text({**read_manifest(folder).data, key: value}))


def _text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and validate `mnnsmith.json` of a language model; raises `BundleError`."""
    path = folder / MANIFEST
    manifest = read_any_manifest(folder)
    data = manifest.data
    if data.get("kind") == MODULE_KIND:
        raise BundleError(
            f"{folder}: holds a module (from {data['source'].get('file')!r:.80}), no language "
            "model.",
            "Run it with mnnsmith.engine.module.Module(DIR).",
        )
    for key in ("model", "generation"):
        if not isinstance(data.get(key), dict):
            raise BundleError(f"{path}: {key} is missing or no object.", "Convert the model again.")
    _check_model(path, data["model"])
    for key, value in data["generation"].items():
        if type(value) not in (int, float) or not abs(value) <= _LARGEST_SETTING:
            raise BundleError(f"{path}: generation.{key} must be a number, not {value!r:.60}.")
    return manifest


def read_any_manifest(folder: Path) -> Manifest:
    """Read `mnnsmith.json` of a bundle of any kind, and validate what all have."""
    path = folder / MANIFEST
    if not path.is_file():
        raise BundleError(
            f"{folder}: there is no {MANIFEST}, so this is no mnnsmith bundle.",
            "Give the folder that `mnnsmith convert` wrote; a model must be converted first.",
        )
    try:
        data = read_json_object(path)
    except SourceError as error:
        raise BundleError(error.message, "Convert the model again.") from error
    if data.get("format") != FORMAT:
        raise BundleError(
            f"{path}: format {data.get('format')!r:.40}, this version reads {FORMAT}.",
            "Use the version of mnnsmith that made it, or convert again.",
        )
    for key in ("recipe", "source", "files"):
        if not isinstance(data.get(key), dict):
            raise BundleError(f"{path}: {key} is missing or no object.", "Convert the model again.")
    if not isinstance(data["recipe"].get("name"), str):
        raise BundleError(f"{path}: recipe.name is missing.")
    return Manifest(data, {name: _file(path, name, v) for name, v in data["files"].items()})


def _check_model(path: Path, model: Mapping[str, Any]) -> None:
    for key in ("max_context", "vocab_size", "layers"):
        if type(model.get(key)) is not int or model[key] < 1:
            raise BundleError(f"{path}: model.{key} must be a whole number above zero.")
    if not isinstance(model.get("model_type"), str):
        raise BundleError(f"{path}: model.model_type must be a string.")
    ids = model.get("stop_ids")
    if not isinstance(ids, list) or not all(
        type(i) is int and 0 <= i < model["vocab_size"] for i in ids
    ):
        raise BundleError(f"{path}: model.stop_ids must be token ids.")


def _file(path: Path, name: str, value: Any) -> tuple[str, int]:
    # A name from an untrusted file must not lead out of the bundle, nor steer a terminal.
    if Path(name).name != name or name in ("", ".", "..") or not name.isprintable():
        raise BundleError(f"{path}: {name!r:.80} is not a plain file name.")
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("sha256"), str)
        or type(value.get("bytes")) is not int
    ):
        raise BundleError(f"{path}: files.{name} must give sha256 and bytes.")
    return value["sha256"], value["bytes"]
