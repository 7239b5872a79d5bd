"""Where a Hugging Face folder keeps its chat template and the texts of its special tokens.

The places, and which of them wins, are those of transformers 5:

1. `chat_template.jinja` (the template named "default") with `additional_chat_templates/*.jinja`;
2. `chat_template` of `tokenizer_config.json`: a string, or a list of {"name", "template"};
3. `chat_template.json`, written by older processors.  transformers gives it to processors only; for
   a folder that has no other template it is the one its authors meant.

For a model that takes pictures the processor's template wins: `chat_template` in
`processor_config.json`, then `chat_template.json`, then the places above.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mnnsmith.errors import SourceError, TemplateError
from mnnsmith.files import read_json_object, read_text

_MAX_TEMPLATE_BYTES = 4 << 20
_STANDARD_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class SpecialTokens:
    """Texts of the special tokens that have a name; None where the model has none.

    named: every named token by its name, as a chat template may use it (`pad_token`, `image_token`;
    bos and eos are among them).
    """

    bos: str | None = None
    eos: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)


def read_chat_template(
    folder: Path, processor: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[str | None, str | None]:
    """The folder's default chat template, or None where it has none, and a note or None.

    processor: the processor's files of a model that takes pictures, if it is one.

    Templates of which none is the default are no error as long as none is asked for, as in
    transformers; the note names them.  Raises TemplateError when a template file is damaged.
    """
    jinja, of_tokenizer, of_processor = (
        _jinja_files(folder),
        _in_tokenizer_config(folder),
        _in_json(folder),
    )
    places = [jinja, of_tokenizer, of_processor]
    if processor:
        path = folder / "processor_config.json"
        within = _templates(processor.get(path.name, {}).get("chat_template"), path)
        places = [within, of_processor, jinja, of_tokenizer]
    for templates in places:
        if templates and "default" not in templates:
            names = ", ".join(f"{name:.40}" for name in sorted(templates)[:8])
            return None, (
                f"no chat template: there are some named {names}, but none named default; copy the "
                "one to use to chat_template.jinja in the model's folder"
            )
        if templates:
            return templates["default"], None
    return None, None


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Named special tokens out of `tokenizer_config.json` and `special_tokens_map.json`.

    The map counts only where the config has no `added_tokens_decoder`, and then it wins, as in
    transformers.
    """
    config = _read_object(folder / "tokenizer_config.json")
    merged = dict(config)
    if "added_tokens_decoder" not in config:
        merged.update(_read_object(folder / "special_tokens_map.json"))
    extra = merged.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        merged = {**merged, **extra}
    named: dict[str, str] = {}
    for name, value in merged.items():
        is_extra = isinstance(extra, Mapping) and name in extra
        # Other keys that end so are flags, such as add_bos_token.
        if not (name in _STANDARD_NAMES or is_extra or name.endswith("_token")):
            continue
        text = _token_text(value)
        if text is not None:
            named[name] = text
        elif name in _STANDARD_NAMES and value is not None:
            raise SourceError(
                f"{folder}: the tokenizer's {name} is {value!r:.80}, which is neither a text nor "
                'an object with "content".'
            )
    return SpecialTokens(bos=named.get("bos_token"), eos=named.get("eos_token"), named=named)


def _token_text(value: object) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        return str(value["content"])
    return None


def _jinja_files(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    main = folder / "chat_template.jinja"
    if main.is_file():
        found["default"] = _read_template(main)
    more = folder / "additional_chat_templates"
    if more.is_dir():
        for path in sorted(more.glob("*.jinja"))[:64]:
            found[path.name.removesuffix(".jinja")] = _read_template(path)
    return found


def _in_tokenizer_config(folder: Path) -> dict[str, str]:
    path = folder / "tokenizer_config.json"
    return _templates(_read_object(path).get("chat_template"), path)


def _in_json(folder: Path) -> dict[str, str]:
    path = folder / "chat_template.json"
    return _templates(_read_object(path).get("chat_template"), path)


def _templates(value: object, path: Path) -> dict[str, str]:
    """{name: source} out of the forms a JSON file may have."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        pairs = [(item.get("name"), item.get("template")) for item in value]
    else:
        pairs = [(None, None)]
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in pairs):
        raise TemplateError(
            f"{path}: chat_template is neither a text nor a list of objects with name and template."
        )
    return dict(pairs)


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} where there is no such file."""
    return read_json_object(path) if path.is_file() else {}


def _read_template(path: Path) -> str:
    # Python turns \r\n into \n in a file opened as text, as transformers opens templates.
    text = read_text(path, _MAX_TEMPLATE_BYTES)
    return text.replace("\r\n", "\n").replace("\r", "\n")
