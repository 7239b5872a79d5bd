"""What a bundle's tokenizer files hold, part by part, against those of its original.

Texts can miss a rare merge; this does not.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from mnnsmith.bundle import Bundle
from mnnsmith.bundle.bundle import TOKENIZER_JSON
from mnnsmith.errors import BundleError
from mnnsmith.mnn.config_files import TOKENIZER_FILE
from mnnsmith.mnn.mtok import MtokReport, make_mtok
from mnnsmith.mnn.mtok.form import Bpe, Model, Mtok
from mnnsmith.mnn.mtok_reader import parse_mtok, read_mtok
from mnnsmith.sources.checkpoint import TokenizerFiles
from mnnsmith.verify.context import Context
from mnnsmith.verify.results import Finding, Severity
from mnnsmith.version import __version__

_AGAIN = "Convert the model again, or copy the bundle again."


@dataclass(frozen=True)
class Truth:
    """What a bundle's tokenizer must be.

    name: whose it is.  mtok: the engine's file, written anew; report: what is known of it.
    """

    name: str
    files: TokenizerFiles
    mtok: Mtok
    report: MtokReport


def truth(context: Context) -> Truth:
    """The original's tokenizer; without an original, the bundle's own `tokenizer.json`."""
    if context.original is not None:
        ready = context.original
        files, data, report = ready.checkpoint.tokenizer, ready.mtok, ready.tokenizer
        return Truth("the original", files, parse_mtok(data), report)
    bundle = context.bundle
    files = TokenizerFiles(
        bundle.tokenizer_json(), bundle.chat_template, bundle.bos_token, bundle.eos_token,
        bundle.stop_ids, bundle.special_tokens,
    )  # fmt: skip
    data, report = make_mtok(files)
    return Truth(f"the bundle's {TOKENIZER_JSON}", files, parse_mtok(data), report)


def compare_files(bundle: Bundle, expected: Truth) -> Iterator[Finding]:
    """Everything in which the files differ; raises `BundleError` where one is damaged."""
    # Another version of mnnsmith may write a part in another form that means the same.
    other_version = bundle.manifest.data.get("mnnsmith") != __version__
    form: Severity = "warning" if other_version else "error"
    rows = bundle.vocab_size
    yield from _tokenizer_json(bundle, expected, form)
    yield from _mtok(read_mtok(bundle.path / TOKENIZER_FILE), expected.mtok, rows, form)
    stop_ids = {i for i in expected.files.stop_ids if i < rows}
    if set(bundle.stop_ids) != stop_ids:
        yield _unlike(
            "error", "mnnsmith.json", f"tokens that end an answer are {sorted(bundle.stop_ids)}, "
            f"expected {sorted(stop_ids)}",
        )  # fmt: skip
    named = {
        **expected.files.special_tokens,
        "bos_token": expected.files.bos_token,
        "eos_token": expected.files.eos_token,
    }
    found = {
        **bundle.special_tokens, "bos_token": bundle.bos_token, "eos_token": bundle.eos_token
    }  # fmt: skip
    for name in sorted({*named, *found}):
        if named.get(name) != found.get(name):
            yield _unlike(
                "error", "mnnsmith.json",
                f"{name} is {found.get(name)!r:.80}, expected {named.get(name)!r:.80}",
            )  # fmt: skip


def _unlike(severity: Severity, where: str, message: str) -> Finding:
    return Finding(severity, where, f"{message}.", _AGAIN)


def _tokenizer_json(bundle: Bundle, expected: Truth, form: Severity) -> Iterator[Finding]:
    text = bundle.tokenizer_json()
    if text == expected.files.tokenizer_json:
        return
    try:
        found, wanted = json.loads(text), json.loads(expected.files.tokenizer_json)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{bundle.path / TOKENIZER_JSON}: is no JSON: {error}.", _AGAIN) from None
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise BundleError(f'{bundle.path / TOKENIZER_JSON}: has no "model" object.', _AGAIN)
    for part in ("vocab", "merges"):
        parts = [spec["model"].pop(part, None) for spec in (found, wanted)]
        if parts[0] != parts[1]:
            yield _unlike("error", TOKENIZER_JSON, f"{part}: {_difference(*parts)}")
    for part in sorted({*found, *wanted}):
        if found.get(part) == wanted.get(part):
            continue
        severity = "error" if part == "added_tokens" else form
        difference = _difference(found.get(part), wanted.get(part))
        yield _unlike(severity, TOKENIZER_JSON, f"{part}: {difference}")


def _mtok(found: Mtok, wanted: Mtok, rows: int, form: Severity) -> Iterator[Finding]:
    for part, difference in _model(found.model, wanted.model):
        yield _unlike("error", TOKENIZER_FILE, f"{part}: {difference}")
    for field in fields(Mtok):
        if field.name in ("model", "chat_template"):
            # A template has a check of its own.
            continue
        value, expected = getattr(found, field.name), getattr(wanted, field.name)
        if field.name == "stop_ids":
            # Ids beyond the model's rows cannot be given by it.
            value, expected = ({i for i in ids if i < rows} for ids in (value, expected))
        if value != expected:
            severity = "error" if field.name.endswith(("ids", "tokens", "token")) else form
            difference = _difference(value, expected)
            yield _unlike(severity, TOKENIZER_FILE, f"{field.name}: {difference}")


def _model(found: Model, wanted: Model) -> Iterator[tuple[str, str]]:
    if type(found) is not type(wanted):
        yield "model", f"{type(found).__name__}, expected {type(wanted).__name__}"
        return
    if found.vocab != wanted.vocab:
        yield "vocabulary", _difference(found.vocab, wanted.vocab)
    if isinstance(found, Bpe) and isinstance(wanted, Bpe) and found.merges != wanted.merges:
        texts = {number: text.decode("utf-8", "replace") for text, number in wanted.vocab}
        spelled = [
            [tuple(texts.get(i, "?") for i in merge[:2]) for merge in model.merges]
            for model in (found, wanted)
        ]
        yield "merges", _difference(*spelled)


def _difference(found: Any, wanted: Any) -> str:
    """How two values differ; of collections what is missing and too many, with an example."""
    if isinstance(found, str) or not (
        isinstance(found, Collection) and isinstance(wanted, Collection)
    ):
        return f"{found!r:.80}, expected {wanted!r:.80}"
    here, there = _items(found), _items(wanted)
    parts = []
    for word, items in (("missing", there - here), ("too many", here - there)):
        if items:
            example = min(items, key=lambda item: (len(item), item))
            parts.append(f"{len(items)} {word}, such as {example:.120}")
    return "; ".join(parts) or "in another order"


def _items(values: Iterable[Any]) -> set[str]:
    pairs = values.items() if isinstance(values, dict) else values
    return {repr(item) for item in pairs}
