"""What every source gives: a config, lazy tensors, a tokenizer, and the files they came from.

A source translates its own naming and layout into Hugging Face's, so that the model files know one
form only.  No weight is read before `rows` or `quantized_rows` is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import SourceError

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class QuantizedRows:
    """Rows as blocks along the input width, as the source stores them.

    The value of element `c` of row `r` is, with `b = c // block`,
    `scale[r, b] * (codes[r, c] - 2**(bits-1)) + zero[r, b]` (`zero` is None for symmetric blocks).

    codes: uint8 [rows, cols]; scale: float32 [rows, cols/block], exactly representable in fp16;
    zero: float32 of the same shape, the value at level 0.
    """

    bits: int
    block: int
    codes: U8
    scale: F32
    zero: F32 | None

    def dequantize(self) -> F32:
        """float32 [rows, cols]."""
        rows, cols = self.codes.shape
        level = self.codes.reshape(rows, -1, self.block).astype(np.float32)
        level -= 1 << (self.bits - 1)
        # A damaged scale may be no number; who reads the values judges them.
        with np.errstate(over="ignore", invalid="ignore"):
            values = level * self.scale[..., None]
            if self.zero is not None:
                values += self.zero[..., None]
        return values.reshape(rows, cols)


@dataclass(frozen=True)
class BlockFormat:
    """A source block format that can be carried over unchanged: its bits, block and symmetry."""

    bits: int
    block: int
    symmetric: bool


class Tensor(Protocol):
    """One tensor of a checkpoint, read a range of rows (first dimension) at a time."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """The stored type by its standard name: F32, F16, BF16, F8_E4M3, Q4_0, Q6_K, ..."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes in the source file, scales included."""
        ...

    @property
    def block_format(self) -> BlockFormat | None:
        """Set when `quantized_rows` can give the stored blocks."""
        ...

    def rows(self, start: int, stop: int) -> F32:
        """float32 [stop - start, *shape[1:]] (a 1-D tensor gives [stop - start])."""
        ...

    def quantized_rows(self, start: int, stop: int) -> QuantizedRows:
        """The stored blocks; only where `block_format` is set."""
        ...


def read_whole(tensor: Tensor) -> F32:
    """The whole tensor as float32; for norms, biases and other small ones."""
    return tensor.rows(0, tensor.shape[0])


def row_ranges(rows: int, cols: int, budget_bytes: int = 16 << 20) -> Iterator[tuple[int, int]]:
    """Split `rows` so that a float32 block of `cols` columns holds at most `budget_bytes`."""
    step = max(1, budget_bytes // max(1, 4 * cols))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer as the source has it.

    tokenizer_json: the text of a Hugging Face `tokenizer.json` (built from metadata for GGUF).
    chat_template: jinja source, or None where the model has none.
    bos_token, eos_token: their text, as templates use them.
    special_tokens: the text of every special token that has a name (`pad_token`, `unk_token`, ...).
    stop_ids: ids that end an answer (from generation_config, config and tokenizer, in that order).
    """

    tokenizer_json: str
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    stop_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """An opened model: everything but the weights is in memory.

    config: the model's `config.json` (for GGUF: the same keys, derived from its metadata).
    generation: `generation_config.json`, or {}.
    processor: the processor's files of a model that takes pictures, parsed, by name:
    `preprocessor_config.json`, `processor_config.json`, `video_preprocessor_config.json`.
    notes: facts for the report, such as "rope_freqs.weight became llama3 rope scaling".
    """

    origin: str
    format: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: TokenizerFiles
    files: tuple[Path, ...]
    generation: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    revision: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        return read_model_type(self.config, self.origin)


def read_model_type(config: Mapping[str, Any], origin: str) -> str:
    """The architecture that a config names."""
    value = config.get("model_type")
    if not isinstance(value, str) or not value:
        raise SourceError(
            f"{origin}: config.json has no model_type.",
            "Is this a transformers checkpoint? Its config.json must name the architecture.",
        )
    return value
