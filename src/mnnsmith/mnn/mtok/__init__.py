"""The engine's tokenizer file `.mtok`, written from a Hugging Face `tokenizer.json`.

`docs/tokenizers.md` has the bytes, what is supported, and what the engine does otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mnnsmith.errors import MissingResourceError
from mnnsmith.mnn.mtok.build import build
from mnnsmith.mnn.mtok.notes import Notes
from mnnsmith.mnn.mtok.pack import pack

if TYPE_CHECKING:
    from mnnsmith.sources.checkpoint import TokenizerFiles


@dataclass(frozen=True)
class MtokReport:
    """What was written.

    vocab_size: ids in the file's table, added tokens and holes included.
    prefix_ids: what the engine puts before every text; stop_ids: what ends an answer.
    rewritten: parts that stand in the file in another form that gives the same ids.
    differences: texts for which the engine's tokenizer will differ from the original.
    """

    vocab_size: int
    added_tokens: int
    prefix_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    rewritten: tuple[str, ...]
    differences: tuple[str, ...]
    size_bytes: int


def make_mtok(tokenizer: TokenizerFiles) -> tuple[bytes, MtokReport]:
    """The bytes of the engine's tokenizer file, and what to know of them.

    Raises TokenizerError when the tokenizer is damaged, or by name for a part that the format
    cannot express.
    """
    notes = Notes()
    mtok = build(tokenizer, notes)
    data = pack(mtok)
    return data, MtokReport(
        vocab_size=len(mtok.model.vocab),
        added_tokens=len(mtok.added_tokens),
        prefix_ids=mtok.prefix_ids,
        stop_ids=mtok.stop_ids,
        rewritten=tuple(notes.rewritten),
        differences=tuple(notes.differences),
        size_bytes=len(data),
    )


def write_mtok(tokenizer: TokenizerFiles, path: Path) -> MtokReport:
    """Write the engine's tokenizer file at `path`.

    Raises what `make_mtok` raises; MissingResourceError when the file cannot be written.
    """
    data, report = make_mtok(tokenizer)
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise MissingResourceError(
            f"{path}: cannot write the tokenizer: {error.strerror or error}.",
            "Check free space and permissions of the output folder.",
        ) from error
    return report


__all__ = ["MtokReport", "make_mtok", "write_mtok"]
