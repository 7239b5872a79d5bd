"""What the commands show: results on stdout, all else on stderr, colour on terminals only.

`rich` is imported when a progress bar is really drawn.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from mnnsmith.errors import MnnsmithError, UsageError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# More text than any context holds.
MAX_INPUT_BYTES = 64 << 20


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal; False for one that is closed."""
    try:
        return stream.isatty()
    except ValueError:
        return False


def use_color(stream: TextIO) -> bool:
    """Whether to write escape sequences: a capable terminal, and no NO_COLOR (no-color.org)."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and is_terminal(stream)


class Style:
    """Escape sequences for a stream, empty where it has no colour."""

    def __init__(self, stream: TextIO) -> None:
        on = use_color(stream)
        self.dim = "\033[2m" if on else ""
        self.bold = "\033[1m" if on else ""
        self.red = "\033[31m" if on else ""
        self.green = "\033[32m" if on else ""
        self.reset = "\033[0m" if on else ""


def clean(text: str, stream: TextIO | None = None) -> str:
    """`text` without characters that steer a terminal, if `stream` is one (or None).

    Models and files are not trusted to move the cursor or to set the window's title.
    """
    if stream is not None and not is_terminal(stream):
        return text
    return text.translate(_CONTROL)


# All of C0, DEL and C1 but tab and line feed.
_CONTROL = {
    code: "\ufffd" for code in (*range(9), *range(11, 32), *range(127, 160)) if code not in (9, 10)
}


def say(text: str = "", style: str = "") -> None:
    """A line of the command's result, on stdout, in one of the `Style`s of it."""
    _write_line(text, style, sys.stdout)


def note(text: str) -> None:
    """A line about the work, on stderr."""
    _write_line(text, Style(sys.stderr).dim, sys.stderr)


def _write_line(text: str, style: str, stream: TextIO) -> None:
    # What is shown may come out of a file, so it is always cleaned; only `style` is ours.
    reset = Style(stream).reset if style else ""
    stream.write(f"{style}{clean(text, stream)}{reset}\n")
    stream.flush()


def show_error(error: MnnsmithError) -> None:
    """An error and what to do next, on stderr."""
    style = Style(sys.stderr)
    message = clean(error.message, sys.stderr)
    sys.stderr.write(f"{style.red}{style.bold}error:{style.reset} {message}\n")
    if error.hint:
        sys.stderr.write(clean(error.hint, sys.stderr) + "\n")
    sys.stderr.flush()


def say_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout, keys as given."""
    say(json.dumps(value, ensure_ascii=False, indent=2, default=str))


def table(rows: list[tuple[str, str]], indent: str = "  ") -> str:
    """Lines of a name and a value, the values aligned."""
    width = max((len(name) for name, _ in rows), default=0)
    lines = (f"{indent}{name:<{width}}  {value}".rstrip() for name, value in rows)
    return "\n".join(lines)


def format_bytes(count: float) -> str:
    """12.3 MB; decimal units, as disks and downloads count."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_count(count: float) -> str:
    """134.5 M, 6.7 B: parameters."""
    for unit in ("", " k", " M", " B"):
        if abs(count) < 1000:
            return f"{count:.0f}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f} T"


def read_stdin() -> str:
    """All of standard input as UTF-8, without the line's end that a shell adds.

    Raises UsageError when it is not text, or too much.
    """
    data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise UsageError(f"Standard input is longer than {MAX_INPUT_BYTES >> 20} MiB.")
    return decode(data, "Standard input").removesuffix("\n")


def decode(data: bytes, what: str) -> str:
    """UTF-8 bytes as text; raises UsageError that names the byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{what} is not UTF-8 text (byte {error.start}).", "Convert it to UTF-8 first."
        ) from error


def check_argument(text: str, what: str) -> str:
    """A text from the command line, if it is valid Unicode.

    Python keeps bytes that are no UTF-8 as lone surrogates, which no tokenizer takes.
    """
    decode(os.fsencode(text) if _has_surrogate(text) else b"", what)
    return text


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


class ProgressBars:
    """One bar for each stage of a long work, on stderr; nothing when that is no terminal.

    Call it with (stage, done, total); `total` in bytes for the stages named in `byte_stages`.
    """

    def __init__(self, *, byte_stages: tuple[str, ...] = ("weights",)) -> None:
        self._byte_stages = byte_stages
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressBars:
        if is_terminal(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = ("{task.description:<10}", BarColumn(), TextColumn("{task.fields[amount]}"))
            console = Console(stderr=True, no_color=not use_color(sys.stderr))
            self._bars = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bars is None:
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, amount="")
        amount = f"{done}/{total}"
        if stage in self._byte_stages:
            amount = f"{format_bytes(done)} of {format_bytes(total)}"
        self._bars.update(self._tasks[stage], completed=done, total=total, amount=amount)
