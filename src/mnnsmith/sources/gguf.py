"""Open a GGUF model as a checkpoint: one file, or any part of a split one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mnnsmith.sources.checkpoint import Checkpoint
from mnnsmith.sources.gguf_config import translate
from mnnsmith.sources.gguf_file import open_gguf_file
from mnnsmith.sources.gguf_tokenizer import read_tokenizer


def open_gguf(path: Path) -> Checkpoint:
    """A GGUF model in Hugging Face's terms; no weight is read.

    SourceError (TokenizerError) for a missing, damaged or contradictory file, UnsupportedError for
    an architecture, tensor type, tokenizer or option that is not known.
    """
    file = open_gguf_file(path)
    translation = translate(file)
    tokenizer, tokenizer_notes = read_tokenizer(file)
    types = Counter(info.type_name for info in file.tensors.values())
    stored = ", ".join(f"{count} {name}" for name, count in types.most_common())
    return Checkpoint(
        origin=str(path),
        format="gguf",
        config=translation.config,
        tensors=translation.tensors,
        tokenizer=tokenizer,
        files=file.paths,
        notes=(f"Tensors: {stored}.", *translation.notes, *tokenizer_notes),
    )
