"""An unsupported model is an answer of `inspect`, with what its config says; exit code 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tiny_checkpoint as tiny
from gguf_samples import BYTE_TOKENIZER, llama_tensors, write_gguf, write_llama
from mnnsmith.api import inspect
from mnnsmith.cli.main import app
from mnnsmith.conversion import prove

_QUANTIZED: dict[str, Any] = {"quantization_config": {"quant_method": "gptq", "bits": 4}}


def test_foreign_quantization(tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path / "m", **_QUANTIZED)
    found = inspect(tmp_path / "m")
    assert found.unsupported is not None and "gptq" in found.unsupported
    assert (found.model_type, found.layers, found.hidden_size) == ("llama", 1, 64)
    assert (found.heads, found.kv_heads, found.head_dim) == (4, 2, 16)
    assert (found.vocab_size, found.max_context) == (tiny.VOCAB, 128)


def test_an_unknown_model_type_needs_no_tokenizer(tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path / "m", model_type="frobnicator", num_hidden_layers=7)
    (tmp_path / "m/tokenizer.json").unlink()
    found = inspect(tmp_path / "m")
    assert found.unsupported is not None and "'frobnicator' is not supported" in found.unsupported
    assert (found.model_type, found.layers) == ("frobnicator", 7)


def test_an_unknown_gguf_architecture(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "mamba", {"block_count": 2}, llama_tensors(), BYTE_TOKENIZER)
    found = inspect(path)
    assert found.unsupported is not None and "'mamba' is not supported" in found.unsupported
    assert found.format == "gguf"


@pytest.mark.parametrize("changes", [_QUANTIZED, {"model_type": "frobnicator"}])
def test_the_command_succeeds(tmp_path: Path, changes: dict[str, Any]) -> None:
    tiny.write_checkpoint(tmp_path / "m", **changes)
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "m")])
    assert done.exit_code == 0, done.output
    assert "not supported: " in done.output and "width       64" in done.output


def test_memory_to_convert_counts_the_engine_that_proves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "m.gguf")
    loaded = inspect(tmp_path / "m.gguf").convert_bytes
    monkeypatch.setattr("mnnsmith.inspection.inspect.LOAD_LIMIT_BYTES", 0)
    assert prove.LOAD_LIMIT_BYTES == 192 << 20
    unloaded = inspect(tmp_path / "m.gguf").convert_bytes
    # At fp16 the engine holds the linear layers, the head among them, as fp32, and the rope tables.
    linear = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) + 264 * 64
    least = 4 * linear + 266_240
    assert least <= loaded - unloaded <= 1.05 * least
