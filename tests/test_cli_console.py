"""What the commands show, without running one."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from mnnsmith.cli import console
from mnnsmith.cli.options import template_variables
from mnnsmith.errors import SourceError, UsageError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colour(variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert console.use_color(Terminal()) is expected
    assert console.use_color(io.StringIO()) is False


def test_a_terminal_is_not_steered_by_what_it_shows() -> None:
    hostile = "a\x1b]0;title\x07\r\x9b2Jb\tc\n"
    assert console.clean(hostile, Terminal()) == "a\ufffd]0;title\ufffd\ufffd\ufffd2Jb\tc\n"
    assert console.clean(hostile, io.StringIO()) == hostile


@pytest.mark.parametrize(
    ("name", "show"), [("stdout", console.say), ("stderr", console.note), ("stdout", None)]
)
def test_lines_are_cleaned_on_a_terminal(
    name: str, show: Callable[[str], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(stream: io.StringIO) -> str:
        monkeypatch.setattr(sys, name, stream)
        if show is None:
            console.say("a\x1b[2Jb\x9bc", console.Style(stream).red)
        else:
            show("a\x1b[2Jb\x9bc")
        return stream.getvalue()

    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(Terminal()) == "a\ufffd[2Jb\ufffdc\n"
    assert shown(io.StringIO()) == "a\x1b[2Jb\x9bc\n", "a file gets what is there"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    coloured = shown(Terminal())
    assert "a\ufffd[2Jb\ufffdc" in coloured
    assert coloured.startswith("\x1b[") == (show is not console.say)
    assert coloured.endswith("\x1b[0m\n") == (show is not console.say)


def test_an_error_shows_its_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    console.show_error(SourceError("It is damaged.", "Fetch it again."))
    assert stream.getvalue() == "error: It is damaged.\nFetch it again.\n"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (96_000_000, "96.0 MB"), (3e13, "30.0 TB")]
)
def test_sizes(count: float, text: str) -> None:
    assert console.format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7"), (134_515_008, "134.5 M"), (6.7e9, "6.7 B"), (2e12, "2.0 T")]
)
def test_counts(count: float, text: str) -> None:
    assert console.format_count(count) == text


def test_progress_is_quiet_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with console.ProgressBars() as bars:
        bars("weights", 10, 20)
    assert stream.getvalue() == ""


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "100")
    with console.ProgressBars() as bars:
        bars("weights", 10_000_000, 20_000_000)
        bars("graph", 0, 1)
    assert "10.0 MB of 20.0 MB" in stream.getvalue() and "graph" in stream.getvalue()


def test_template_variables() -> None:
    pairs = ["enable_thinking=false", "n=3", 'tools=[{"a": 1}]', "name=Ann", "empty=", "a=b=c"]
    assert template_variables(pairs) == {
        "enable_thinking": False,
        "n": 3,
        "tools": [{"a": 1}],
        "name": "Ann",
        "empty": "",
        "a": "b=c",
    }


@pytest.mark.parametrize("pair", ["novalue", "=x", "a b=x", "1a=x"])
def test_a_wrong_template_variable_is_refused(pair: str) -> None:
    with pytest.raises(UsageError, match="NAME=VALUE"):
        template_variables([pair])


def test_arguments_that_are_no_text_are_refused() -> None:
    assert console.check_argument("größe 🤷", "--prompt") == "größe 🤷"
    with pytest.raises(UsageError, match="--prompt is not UTF-8"):
        console.check_argument("a\udcffb", "--prompt")
