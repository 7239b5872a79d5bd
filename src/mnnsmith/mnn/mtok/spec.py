"""A `tokenizer.json` read strictly: every field has the type it must have, or TokenizerError."""

from __future__ import annotations

import builtins
import math
from collections.abc import Mapping
from typing import Any

from mnnsmith.errors import SourceError, TokenizerError
from mnnsmith.files import parse_json

MAX_JSON_CHARS = 512 << 20
# The library stops at 128 levels; real files have about 8.
MAX_DEPTH = 64
# Ids are stored as 32-bit numbers, and the engine allocates a table up to the largest.
MAX_ID = (1 << 31) - 1
_MISSING = object()


class Node:
    """A JSON object of the file, with the path by which errors name it."""

    def __init__(self, value: Mapping[str, Any], path: str) -> None:
        self._value = value
        self.path = path

    @property
    def type(self) -> str:
        """The `type` field, which names the kind of a component."""
        return self.text("type")

    def fail(self, message: str, hint: str | None = None) -> TokenizerError:
        """An error that starts with where this object stands."""
        return TokenizerError(f"tokenizer.json: {self.path}: {message}", hint)

    def refuse(self, what: str) -> TokenizerError:
        """The error for a part that `.mtok` cannot express."""
        return self.fail(
            f"{what} cannot be expressed in the engine's tokenizer format (.mtok).",
            "docs/tokenizers.md lists what can; the model needs another tokenizer.json.",
        )

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self._value.get(key) is not None

    def raw(self, key: str) -> Any:
        return self._value.get(key)

    def text(self, key: str, default: Any = _MISSING) -> str:
        return str(self._typed(key, str, "a string", default))

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        return bool(self._typed(key, bool, "true or false", default))

    def integer(self, key: str, low: int, high: int, default: Any = _MISSING) -> int:
        value = self._typed(key, int, "a whole number", default)
        if isinstance(value, bool) or not low <= value <= high:
            raise self.fail(f"{key} must be a whole number of {low} to {high}, not {_show(value)}.")
        return int(value)

    def child(self, key: str) -> Node | None:
        """The object at `key`, or None where it is missing or null."""
        if not self.has(key):
            return None
        return Node(self._typed(key, dict, "an object", _MISSING), f"{self.path}.{key}")

    def need_child(self, key: str) -> Node:
        child = self.child(key)
        if child is None:
            raise self.fail(f"{key} is missing.")
        return child

    def children(self, key: str, default: Any = _MISSING) -> list[Node]:
        """The objects of the list at `key`."""
        items = self.items(key, default)
        nodes = []
        for index, item in enumerate(items):
            path = f"{self.path}.{key}[{index}]"
            if not isinstance(item, dict):
                raise TokenizerError(
                    f"tokenizer.json: {path} must be an object, not {_show(item)}."
                )
            nodes.append(Node(item, path))
        return nodes

    def items(self, key: str, default: Any = _MISSING) -> list[Any]:
        value = self._typed(key, list, "a list", default)
        return value if isinstance(value, list) else list(value)

    def mapping(self, key: str) -> dict[str, Any]:
        value = self._typed(key, dict, "an object", _MISSING)
        return value if isinstance(value, dict) else dict(value)

    def _typed(self, key: str, kind: builtins.type, name: str, default: Any) -> Any:
        value = self._value.get(key)
        if value is None:
            if default is _MISSING:
                raise self.fail(f"{key} is missing.")
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.fail(f"{key} must be {name}, not {_show(value)}.")
        return value


def read_json(text: str) -> Node:
    """The whole file as its root object."""
    if len(text) > MAX_JSON_CHARS:
        raise TokenizerError(
            f"tokenizer.json has {len(text)} characters; at most {MAX_JSON_CHARS} are read."
        )
    try:
        value = parse_json(text, "tokenizer.json")
    except SourceError as error:
        raise TokenizerError(
            error.message,
            error.hint or "Fetch the file again; it is damaged, or no tokenizer.json.",
        ) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"tokenizer.json must be an object, not {_show(value)}.")
    _check_depth(value)
    return Node(value, "(root)")


def _check_depth(root: Any) -> None:
    """Component trees are walked by recursion, so their depth is bounded once, here."""
    level = [root]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            values = item.values() if isinstance(item, dict) else item
            deeper += [value for value in values if isinstance(value, (dict, list))]
        if not deeper:
            return
        level = deeper
    raise TokenizerError(f"tokenizer.json is nested more than {MAX_DEPTH} levels deep.")


def finite(value: Any, where: str) -> float:
    """A score: any finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TokenizerError(f"tokenizer.json: {where} must be a number, not {_show(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > 1e15:
        raise TokenizerError(f"tokenizer.json: {where} must be a finite number, not {number}.")
    return number


def token_id(value: Any, where: str) -> int:
    """A token id: a whole number that fits 31 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ID:
        raise TokenizerError(
            f"tokenizer.json: {where} must be a token id (0 to {MAX_ID}), not {_show(value)}."
        )
    return value


def _show(value: Any) -> str:
    """A value for a message, cut short; the length of a container is enough."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return "a number of more than 64 bits"
    return repr(value)[:60]
