"""Mutated tokenizers and mutated files give our errors, in bounded time, and nothing else."""

from __future__ import annotations

import contextlib
import json
import random
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokenizer_samples as samples
from mnnsmith.errors import BundleError, TokenizerError
from mnnsmith.mnn.mtok import write_mtok
from mnnsmith.mnn.mtok.pattern_tree import parse
from mnnsmith.mnn.mtok.patterns import engine_pattern
from mnnsmith.mnn.mtok_reader import parse_mtok
from mnnsmith.sources.checkpoint import TokenizerFiles
from test_mtok import byte_level_spec

QUICK = settings(
    max_examples=250, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
LONG = settings(QUICK, max_examples=10_000)
LIMIT_S = 20.0

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 255, 258, 259, 1 << 31, 1 << 70, 1.5, -0.0, 1e308, float("nan"),
    "", "a", "Ġ", "th", "<end>", "▁", "\ud800", "x" * 70_000, "A", "first", "always", "Isolated",
    "MergedWithNext", "NFC", "Lowercase", "Replace", "Strip", "Prepend", "ByteLevel", "Metaspace",
    "Split", "Digits", "BPE", "Unigram", "WordPiece", "Fuse", "ByteFallback", "Sequence",
    r"\p{L}+|[^a-z\s]", "[一-龥]+$", [], {}, [[]], [1], ["a", "b"], {"a": 1}, {"String": " "},
    {"Regex": r"\s+"}, {"type": "NFKC"}, {"type": "Digits"},
    {"type": "Metaspace", "replacement": "▁", "split": True},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
)  # fmt: skip


@lru_cache(maxsize=1)
def bases() -> tuple[str, ...]:
    """Small tokenizers of each kind of model, as text."""
    texts = [json.dumps(byte_level_spec())]
    for name in ("llama2", "mistral", "unigram_bytes", "word_piece", "deepseek"):
        spec = json.loads(samples.sample(name).to_str())
        texts.append(json.dumps(_shrunk(spec)))
    return tuple(texts)


def _shrunk(spec: dict[str, Any]) -> dict[str, Any]:
    """The first 400 entries, and the merges that they allow."""
    model = spec["model"]
    if isinstance(model["vocab"], list):
        return spec
    keep = sorted(model["vocab"], key=model["vocab"].get)[:400]
    model["vocab"] = {token: number for number, token in enumerate(keep)}
    if "merges" in model:
        known = model["vocab"]
        model["merges"] = [m for m in model["merges"] if {*m, m[0] + m[1]} <= set(known)]
    number = len(keep)
    for token in spec["added_tokens"]:
        if token["content"] not in model["vocab"]:
            token["id"] = number
            number += 1
    return spec


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree, big vocabularies by a few entries."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    found = []
    for key in keys[:12] + keys[-4:] if len(keys) > 16 else keys:
        found.append((value, key))
        if isinstance(value[key], (dict, list)):
            found += _places(value[key])
    return found


def mutate(seed: int) -> str:
    """A tokenizer.json with a few things wrong, by seed."""
    rng = random.Random(seed)
    base = rng.choice(bases())
    if rng.random() < 0.2:
        at = rng.randrange(len(base))
        return base[:at] + rng.choice(["", '"', "}", "[", "\\ud8", "1", "\x00"]) + base[at + 1 :]
    spec = json.loads(base)
    for _ in range(rng.randrange(1, 4)):
        container, key = rng.choice(_places(spec))
        if rng.random() < 0.2:
            del container[key]
        else:
            container[key] = json.loads(json.dumps(rng.choice(VALUES)))
    return json.dumps(spec)


def check_writer(seed: int, path: Path) -> None:
    started = time.monotonic()
    try:
        write_mtok(TokenizerFiles(mutate(seed), stop_ids=(1,)), path)
    except TokenizerError:
        pass
    else:
        parse_mtok(path.read_bytes())
    assert time.monotonic() - started < LIMIT_S


def check_reader(seed: int, data: bytes) -> None:
    rng = random.Random(seed)
    broken = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(rng.choice((60, len(broken)))) % max(1, len(broken))
        match rng.randrange(4):
            case 0:
                broken[at] = rng.randrange(256)
            case 1:
                del broken[at : at + rng.randrange(1, 9)]
            case 2:
                broken[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 3:
                broken[at : at + 4] = b"\xff\xff\xff\xff"
    with contextlib.suppress(BundleError):
        parse_mtok(bytes(broken))


def check_pattern(text: str) -> None:
    started = time.monotonic()
    with contextlib.suppress(TokenizerError):
        engine_pattern(parse(text))
    assert time.monotonic() - started < LIMIT_S


PATTERNS = st.text("ab1 é一^$|()[]{}?*+\\-.,!:=<>&pPLNMSudsSDwWnrtxi0\n\ud800", max_size=24)


@given(st.integers(0, 1 << 40))
@QUICK
def test_mutated_tokenizers(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    check_writer(seed, tmp_path_factory.getbasetemp() / "fuzz.mtok")


@given(st.integers(0, 1 << 40))
@QUICK
def test_mutated_files(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    path = tmp_path_factory.getbasetemp() / "whole.mtok"
    if not path.exists():
        write_mtok(TokenizerFiles(bases()[0], chat_template="{{ x }}"), path)
    check_reader(seed, path.read_bytes())


@given(PATTERNS)
@QUICK
def test_odd_patterns(text: str) -> None:
    check_pattern(text)


@pytest.mark.slow
@given(st.integers(0, 1 << 40))
@LONG
def test_many_mutated_tokenizers(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    check_writer(seed, tmp_path_factory.getbasetemp() / "fuzz.mtok")


@pytest.mark.slow
@given(st.integers(0, 1 << 40), st.sampled_from(range(5)))
@LONG
def test_many_mutated_files(
    tmp_path_factory: pytest.TempPathFactory, seed: int, index: int
) -> None:
    path = tmp_path_factory.getbasetemp() / f"whole{index}.mtok"
    if not path.exists():
        write_mtok(TokenizerFiles(bases()[index]), path)
    check_reader(seed, path.read_bytes())


@pytest.mark.slow
@given(PATTERNS)
@LONG
def test_many_odd_patterns(text: str) -> None:
    check_pattern(text)
