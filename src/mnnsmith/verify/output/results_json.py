"""A verification as JSON, and back: one reader for all the dataclasses of `results`."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mnnsmith.errors import SourceError, UsageError
from mnnsmith.files import parse_json, read_text, user_path
from mnnsmith.verify.results import FORMAT, Verification

# The verdict, which follows from the rest, for programs that read nothing else.
_VERDICT = "passed"
_HINT = "Is this what `mnnsmith verify --json` wrote? Verify again to write it anew."
_PLAIN = {str: "a text", int: "a whole number", bool: "true or false", type(None): "null"}


def to_json(verification: Verification) -> str:
    """The text of the whole result; equal results are equal texts.

    Raises ValueError for a number that is not finite, which JSON cannot hold (`non_finite` says
    where one stands).
    """
    data = {_VERDICT: verification.passed, **to_plain(verification)}
    return json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def to_plain(value: Any) -> Any:
    """A dataclass of `results` as dictionaries and lists; half surrogate pairs become U+FFFD."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return value


def non_finite(value: Any, where: str = "") -> str | None:
    """Where the first number stands that is infinite or none at all, such as "cases[2].kl"."""
    return next(_non_finite(value, where), None)


def read_verification(path: str | Path) -> Verification:
    """The result in a file that `verify --json` wrote.

    Raises `UsageError`, with the place of what is wrong, for a file that cannot be read or is no
    such result.
    """
    return parse_verification(read_result(path), str(user_path(path)))


def read_result(path: str | Path) -> str:
    """The text of such a file; raises `UsageError`."""
    try:
        return read_text(user_path(path))
    except SourceError as error:
        raise UsageError(error.message, error.hint or _HINT) from error


def parse_verification(text: str, where: str) -> Verification:
    """The result whose text `to_json` gave.

    where: what messages call it.  Raises `UsageError`, with the place of what is wrong.
    """
    try:
        data = parse_json(text, where)
    except SourceError as error:
        raise UsageError(error.message, error.hint or _HINT) from error
    if not isinstance(data, dict):
        raise _wrong(where, "", "an object", data)
    if data.get("format") != FORMAT:
        raise UsageError(
            f"{where}: format is {_shown(data.get('format'))}, this version reads {FORMAT}.", _HINT
        )
    verdict = data.pop(_VERDICT, None)
    found: Verification = _read(Verification, data, where, "")
    if verdict is not found.passed:
        raise UsageError(
            f"{where}: {_VERDICT} is {_shown(verdict)}, but checks and gates say {found.passed}.",
            _HINT,
        )
    return found


def _non_finite(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield where
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            place = f"{where}.{field.name}" if where else field.name
            yield from _non_finite(getattr(value, field.name), place)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _non_finite(item, f"{where}[{index}]")


def _read(kind: Any, value: Any, where: str, place: str) -> Any:
    """`value` as the type `kind`; the depth is that of the types, whatever the file holds."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = (a for a in arguments if a is not type(None))
        return _read(inner, value, where, place)
    if origin is Literal:
        if value not in arguments or not isinstance(value, str):
            raise _wrong(where, place, f"one of {', '.join(arguments)}", value)
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, place, "a list", value)
        return tuple(
            _read(arguments[0], item, where, f"{place}[{i}]") for i, item in enumerate(value)
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong(where, place, "an object", value)
        return {
            key: _read(arguments[1], item, where, f"{place}[{key!r:.60}]")
            for key, item in value.items()
        }
    if is_dataclass(kind):
        return _read_object(kind, value, where, place)
    if kind is float:
        return _read_float(value, where, place)
    # Not isinstance: true is an int to Python.
    if type(value) is not kind:
        raise _wrong(where, place, _PLAIN[kind], value)
    return value


def _read_float(value: Any, where: str, place: str) -> float:
    try:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    except OverflowError:
        # A whole number of hundreds of digits is as wrong as infinity.
        pass
    raise _wrong(where, place, "a finite number", value)


def _read_object(kind: Any, value: Any, where: str, place: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(where, place, "an object", value)
    hints = _hints(kind)
    found = {}
    for field in fields(kind):
        inside = f"{place}.{field.name}" if place else field.name
        if field.name in value:
            found[field.name] = _read(hints[field.name], value[field.name], where, inside)
        elif field.default is MISSING:
            raise UsageError(f"{where}: {inside} is missing.", _HINT)
    unknown = sorted(set(value) - {field.name for field in fields(kind)})
    if unknown:
        inside = f" in {place}" if place else ""
        raise UsageError(f"{where}: unknown field {unknown[0]!r:.60}{inside}.", _HINT)
    return kind(**found)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _wrong(where: str, place: str, expected: str, value: Any) -> UsageError:
    inside = f"{place} " if place else ""
    return UsageError(f"{where}: {inside}must be {expected}, not {_shown(value)}.", _HINT)


def _shown(value: Any) -> str:
    """A value of any size in a few characters."""
    if value is None or isinstance(value, (str, bool, float)):
        return f"{value!r:.60}"
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 64 else "a very large number"
    return f"a {type(value).__name__}"
