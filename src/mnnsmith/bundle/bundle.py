"""A bundle on disk, opened for use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mnnsmith.bundle.manifest import Manifest, read_manifest
from mnnsmith.errors import BundleError, SourceError
from mnnsmith.files import check_json_bounds, is_file, read_json_object, read_text, user_path

TOKENIZER_JSON = "tokenizer.json"
# The device's settings, which a user may change after the conversion.
EDITABLE = frozenset({"config.json"})


@dataclass(frozen=True)
class Bundle:
    """What `convert` returns and `run` opens.

    chat_template, bos_token, eos_token: as the model's authors gave them; None where they did not.
    special_tokens: texts of all special tokens that a template may name, such as `pad_token`.
    stop_ids: token ids that end an answer.  max_context: tokens.
    """

    path: Path
    manifest: Manifest
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(self.manifest.model["stop_ids"])

    @property
    def max_context(self) -> int:
        return int(self.manifest.model["max_context"])

    @property
    def vocab_size(self) -> int:
        return int(self.manifest.model["vocab_size"])

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(size for _, size in self.manifest.files.values())

    def tokenizer_json(self) -> str:
        """The text of the original tokenizer."""
        try:
            text = read_text(self.path / TOKENIZER_JSON)
            check_json_bounds(text, str(self.path / TOKENIZER_JSON))
            return text
        except SourceError as error:
            raise BundleError(error.message, "Convert the model again.") from error


def open_bundle(path: Path | str, *, whole: bool = True) -> Bundle:
    """Open a bundle's descriptions; weights and graph stay unread.

    whole: also see that every file is there and has its size.  Raises `BundleError` if it is no
    bundle, or not whole.
    """
    folder = user_path(path)
    if not folder.is_dir():
        what = "is a file, not a bundle" if is_file(folder) else "no such folder"
        raise BundleError(
            f"{folder}: {what}.",
            "Give the folder that `mnnsmith convert` wrote; a model must be converted first.",
        )
    manifest = read_manifest(folder)
    for name, (_, size) in manifest.files.items() if whole else ():
        file = folder / name
        if not is_file(file):
            raise BundleError(f"{file}: is missing from the bundle.", "Convert the model again.")
        if name not in EDITABLE and file.stat().st_size != size:
            raise BundleError(
                f"{file}: has {file.stat().st_size} bytes, expected {size}.",
                "The copy is incomplete or changed; copy the bundle again.",
            )
    tokens = manifest.data.get("tokens", {})
    return Bundle(
        folder,
        manifest,
        _template(folder),
        _text(folder, tokens, "bos"),
        _text(folder, tokens, "eos"),
        _named(folder, tokens),
    )


def _template(folder: Path) -> str | None:
    try:
        config: dict[str, Any] = read_json_object(folder / "llm_config.json")
    except SourceError as error:
        raise BundleError(error.message, "Convert the model again.") from error
    jinja = config.get("jinja")
    if jinja is None:
        return None
    template = jinja.get("chat_template") if isinstance(jinja, dict) else None
    if not isinstance(template, str):
        raise BundleError(f"{folder / 'llm_config.json'}: jinja.chat_template must be a string.")
    return template


def _text(folder: Path, tokens: Any, key: str) -> str | None:
    value = tokens.get(key) if isinstance(tokens, dict) else None
    if value is not None and not isinstance(value, str):
        raise BundleError(f"{folder}: tokens.{key} of the manifest must be a string.")
    return value


def _named(folder: Path, tokens: Any) -> dict[str, str]:
    """Bundles of version 0.1.0 have none."""
    named = tokens.get("named", {}) if isinstance(tokens, dict) else {}
    if not isinstance(named, dict) or not all(isinstance(text, str) for text in named.values()):
        raise BundleError(f"{folder}: tokens.named of the manifest must map names to strings.")
    return dict(named)
