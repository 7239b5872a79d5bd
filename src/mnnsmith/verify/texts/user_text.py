"""The texts that a user gives to be verified on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mnnsmith.errors import SourceError, UsageError
from mnnsmith.files import read_text, user_path

MAX_TEXT_BYTES = 16 << 20


def read_user_texts(paths: Sequence[Path]) -> tuple[str, ...]:
    """Each file as text; raises `UsageError` for one that is no UTF-8, empty or over 16 MiB."""
    texts = []
    for path in paths:
        try:
            text = read_text(user_path(path), MAX_TEXT_BYTES)
        except SourceError as error:
            raise UsageError(error.message, error.hint) from error
        if not text.strip():
            raise UsageError(f"{path}: holds no text.")
        texts.append(text)
    return tuple(texts)
