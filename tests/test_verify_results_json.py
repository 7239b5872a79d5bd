"""A verification as JSON: what is written is read again, and nothing else is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mnnsmith.errors import UsageError
from mnnsmith.verify.output.results_json import (
    non_finite,
    parse_verification,
    read_verification,
    to_json,
)
from mnnsmith.verify.results import Check, Figures, Interval, Verification
from verification_samples import judged, statistical

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def test_a_whole_result_comes_back(tmp_path: Path) -> None:
    found = judged()
    text = to_json(found)
    assert parse_verification(text, "it") == found
    path = tmp_path / "result.json"
    path.write_text(text, encoding="utf-8")
    assert read_verification(path) == read_verification(str(path)) == found
    data = json.loads(text)
    assert (data["passed"], data["format"]) == (False, 1)
    assert data["figures"]["statistical"]["greedy"] == [None, 17, 29]


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_result_comes_back(data: st.DataObject) -> None:
    st.register_type_strategy(float, FINITE)
    st.register_type_strategy(str, st.text(max_size=9))
    found = data.draw(st.from_type(Verification))
    found = replace(found, format=1)
    assert parse_verification(to_json(found), "it") == found


def test_no_number_that_json_cannot_hold_is_written() -> None:
    found = judged()
    for bad in (math.nan, math.inf, -math.inf):
        figures = Figures(statistical=replace(statistical(), kl=Interval(0.1, bad, 0.2)))
        assert non_finite(figures) == "statistical.kl.low"
        with pytest.raises(ValueError, match="JSON"):
            to_json(replace(found, figures=figures))
    figures = Figures(statistical=replace(statistical(), block_kl=(0.5, math.nan)))
    assert non_finite(figures) == "statistical.block_kl[1]"
    assert non_finite(found) is None


def test_half_a_surrogate_pair_does_not_stop_the_writer() -> None:
    odd = judged(checks=(Check("files", "passed", "größe\udcff", 1.0),))
    assert parse_verification(to_json(odd), "it").checks[0].summary.startswith("größe\ufffd")


Change = Callable[[dict[str, Any]], object]
WRONG: list[tuple[str, Change, str]] = [
    ("missing", lambda d: d.pop("level"), "level is missing"),
    ("missing inside", lambda d: d["subject"].pop("device"), r"subject\.device is missing"),
    ("unknown", lambda d: d.update(colour=1), "unknown field 'colour'"),
    ("unknown inside", lambda d: d["checks"][1].update(x=1), r"'x' in checks\[1\]"),
    ("text for number", lambda d: d.update(seconds="5"), r"seconds must be a finite \w+, not .5."),
    ("true for number", lambda d: d.update(seconds=True), "seconds must be a finite number"),
    ("float for int", lambda d: d["figures"]["tokens"].update(texts=1.5),
     r"figures\.tokens\.texts must be a whole number, not 1\.5"),
    ("true for int", lambda d: d["figures"]["tokens"].update(texts=True), "whole number, not True"),
    ("huge", lambda d: d.update(seconds=10**400), "finite number, not a very large number"),
    ("list for object", lambda d: d.update(subject=[]), "subject must be an object, not a list"),
    ("object for list", lambda d: d.update(checks={}), "checks must be a list, not a dict"),
    ("no text", lambda d: d["subject"]["files"].update(a=1), r"subject\.files\['a'\] must be"),
    ("bad status", lambda d: d["checks"][0].update(status="fine"),
     r"checks\[0\]\.status must be one of passed, failed, skipped, not 'fine'"),
    ("null", lambda d: d["checks"][0].update(summary=None), "summary must be a text, not None"),
    ("format", lambda d: d.update(format=2), "format is 2, this version reads 1"),
    ("no format", lambda d: d.pop("format"), "format is None"),
    ("verdict", lambda d: d.update(passed=True), "passed is True, but checks and gates say False"),
    ("no verdict", lambda d: d.pop("passed"), "passed is None"),
    ("odd greedy", lambda d: d["figures"]["statistical"].update(greedy=[None, "x"]),
     r"statistical\.greedy\[1\] must be a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_what_is_wrong_is_named_by_its_place(change: Change, words: str) -> None:
    data = json.loads(to_json(judged()))
    change(data)
    with pytest.raises(UsageError, match=words) as caught:
        parse_verification(json.dumps(data), "old.json")
    assert caught.value.message.startswith("old.json: ")
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", "[" * 100_000, '{"format": 1, "format": 1}', '{"a": NaN}', "\ud800"],
)
def test_what_is_no_result_at_all(text: str) -> None:
    with pytest.raises(UsageError, match=r"^old\.json"):
        parse_verification(text, "old.json")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(value: str) -> None:
    text = to_json(judged()).replace('"seconds": 38.2', f'"seconds": {value}')
    with pytest.raises(UsageError, match="seconds must be a finite number"):
        parse_verification(text, "old.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_verification(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_verification(tmp_path / "bytes.json")
