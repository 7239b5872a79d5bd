"""Where a folder keeps its chat template and special tokens: the same place as transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.text_samples import byte_level_json

from mnnsmith.errors import SourceError, TemplateError
from mnnsmith.sources.chat_template import read_chat_template, read_special_tokens

FILES: dict[str, str] = {
    "chat_template.jinja": "jinja {{ 1 }}\r\nend",
    "tokenizer_config.json": json.dumps({"chat_template": "config"}),
    "chat_template.json": json.dumps({"chat_template": "json"}),
}
NAMED = json.dumps(
    {
        "chat_template": [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "named default"},
        ]
    }
)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (FILES, "jinja {{ 1 }}\nend"),
        ({k: FILES[k] for k in ("tokenizer_config.json", "chat_template.json")}, "config"),
        ({"chat_template.json": FILES["chat_template.json"]}, "json"),
        ({"tokenizer_config.json": NAMED}, "named default"),
        ({"tokenizer_config.json": '{"chat_template": null}'}, None),
        (
            {"chat_template.jinja": "main", "additional_chat_templates/rag.jinja": "rag"},
            "main",
        ),
        (
            {"additional_chat_templates/default.jinja": "d", "tokenizer_config.json": NAMED},
            "d",
        ),
    ],
)
def test_precedence(tmp_path: Path, files: dict[str, str], expected: str | None) -> None:
    assert read_chat_template(write(tmp_path, files)) == (expected, None)


@pytest.mark.reference
@pytest.mark.parametrize(
    "files",
    [
        FILES,
        {"tokenizer_config.json": FILES["tokenizer_config.json"]},
        {"tokenizer_config.json": NAMED},
        {"chat_template.jinja": "main", "additional_chat_templates/rag.jinja": "rag"},
        {"chat_template.jinja": "main", "tokenizer_config.json": NAMED},
        {"additional_chat_templates/default.jinja": "d", "tokenizer_config.json": NAMED},
    ],
)
def test_precedence_equals_transformers(tmp_path: Path, files: dict[str, str]) -> None:
    from transformers import PreTrainedTokenizerFast

    write(tmp_path, {**files, "tokenizer.json": byte_level_json()})
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert read_chat_template(tmp_path) == (theirs.get_chat_template(), None)


TOKENS: list[dict[str, Any]] = [
    {"tokenizer_config.json": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}},
    {
        "tokenizer_config.json": {
            "bos_token": None,
            "add_bos_token": False,
            "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
            "pad_token": "<|endoftext|>",
            "image_token": "<|im_start|>",
        }
    },
    {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "pad_token": "<|im_start|>"},
        "special_tokens_map.json": {"eos_token": {"content": "<|endoftext|>", "lstrip": False}},
    },
    {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "added_tokens_decoder": {}},
        "special_tokens_map.json": {"eos_token": "<|endoftext|>"},
    },
    {"tokenizer_config.json": {"extra_special_tokens": {"boi": "<|im_start|>"}}},
]


@pytest.mark.reference
@pytest.mark.parametrize("files", TOKENS)
def test_special_tokens_equal_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    from transformers import PreTrainedTokenizerFast

    texts = {name: json.dumps(value) for name, value in files.items()}
    write(tmp_path, {**texts, "tokenizer.json": byte_level_json()})
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    found = read_special_tokens(tmp_path)
    assert dict(found.named) == theirs.special_tokens_map
    assert (found.bos, found.eos) == (theirs.bos_token, theirs.eos_token)


def test_special_tokens(tmp_path: Path) -> None:
    assert read_special_tokens(tmp_path).named == {}
    texts = {name: json.dumps(value) for name, value in TOKENS[2].items()}
    found = read_special_tokens(write(tmp_path, texts))
    assert found.eos == "<|endoftext|>" and found.bos is None
    assert found.named["pad_token"] == "<|im_start|>"


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": '{"chat_template": 3}'},
        {"tokenizer_config.json": '{"chat_template": [{"name": "default"}]}'},
        {"tokenizer_config.json": '{"chat_template": ["x"]}'},
    ],
)
def test_a_wrong_template_entry_gives_an_error(tmp_path: Path, files: dict[str, str]) -> None:
    with pytest.raises(TemplateError):
        read_chat_template(write(tmp_path, files))


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": '{"chat_template": [{"name": "rag", "template": "x"}]}'},
        {"additional_chat_templates/rag.jinja": "rag"},
    ],
)
def test_named_templates_without_a_default_are_noted(tmp_path: Path, files: dict[str, str]) -> None:
    """As in transformers they are an error only where one is applied."""
    template, note = read_chat_template(write(tmp_path, files))
    assert template is None and note is not None and "named rag, but none named default" in note


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"bos_token": 3}'])
def test_a_damaged_file_gives_an_error(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"tokenizer_config.json": text})
    with pytest.raises(SourceError):
        read_special_tokens(tmp_path)


def test_a_template_that_is_no_text_gives_an_error(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(SourceError, match="UTF-8"):
        read_chat_template(tmp_path)
