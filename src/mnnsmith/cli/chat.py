"""`mnnsmith chat`: a dialogue in the terminal, or line by line from a pipe."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from mnnsmith.cli import options as o
from mnnsmith.cli.answers import AnswerPrinter, explain_end
from mnnsmith.cli.console import (
    check_argument,
    decode,
    is_terminal,
    note,
    say,
    show_error,
)
from mnnsmith.cli.media import Media, require_reader
from mnnsmith.errors import (
    ContextLengthError,
    MnnsmithError,
    SourceError,
    TemplateError,
    UsageError,
)

if TYPE_CHECKING:
    from mnnsmith.session import ChatSession

HELP = """\
/image FILE     show a picture with the next message; /image alone counts, /image - takes all back
/video FILE     the same for a video
/reset          forget the dialogue
/system TEXT    set the system message; /system alone shows it, /system - removes it
/help           this list
/exit           leave (also Ctrl-D)
Ctrl-C ends an answer. A line that ends in \\ goes on in the next one."""


@o.with_session_options
def chat(directory: o.BundleDir, options: o.SessionOptions) -> None:
    """Talk to a bundle; /help lists the commands.

    /image FILE shows a picture with the next message.  With standard input from a pipe each line
    is a message, and the answers go to stdout.
    """
    bundle, settings = o.session_settings(directory, options)
    if bundle.chat_template is None:
        raise TemplateError(
            f"{directory}: this model has no chat template, so it cannot hold a dialogue.",
            "Let it continue a text instead: mnnsmith run DIR --raw -p TEXT",
        )
    from mnnsmith.session import open_session

    interactive = is_terminal(sys.stdin)
    with open_session(bundle, **settings) as session:
        if interactive:
            note(f"{directory}: {bundle.max_context} tokens of context. /help lists the commands.")
            # Line editing and history for input(), where Python has it.
            if importlib.util.find_spec("readline") is not None:
                importlib.import_module("readline")
        media = Media()
        while (line := _read(interactive)) is not None:
            if line.startswith("/"):
                if _command(session, media, line, interactive):
                    return
            elif line.strip():
                _answer(session, media, line, interactive)


def _read(interactive: bool) -> str | None:
    """The next message or command, None at the end of input."""
    lines: list[str] = []
    while True:
        try:
            line = _read_line("> " if not lines else ". ", interactive)
        except KeyboardInterrupt:
            if not interactive:
                raise
            say()
            note("(Ctrl-D or /exit leaves)")
            lines = []
            continue
        if line is None:
            return "\n".join(lines) if lines else None
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _read_line(prompt: str, interactive: bool) -> str | None:
    if interactive:
        try:
            return check_argument(input(prompt), "The message")
        except EOFError:
            say()
            return None
    data = sys.stdin.buffer.readline()
    return decode(data, "Standard input").rstrip("\r\n") if data else None


def _command(session: ChatSession, media: Media, line: str, interactive: bool) -> bool:
    """Carry out a /command; True when it ends the chat."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name in ("/exit", "/quit"):
        return True
    if name == "/reset":
        session.reset()
        media.clear()
        note("(the dialogue is forgotten)")
    elif name == "/system" and not rest:
        note(session.system if session.system is not None else "(no system message)")
    elif name == "/system":
        session.system = None if rest == "-" else rest
        note("(the system message is set)" if rest != "-" else "(no system message)")
    elif name in ("/image", "/video"):
        _show(session, media, name[1:], rest, interactive)
    elif name == "/help":
        say(HELP)
    else:
        note(f"There is no command {name}; /help lists them.")
    return False


def _show(session: ChatSession, media: Media, kind: str, file: str, interactive: bool) -> None:
    """Put a picture or a video beside the next message; one that is refused is not."""
    if file == "-":
        media.clear()
    if file in ("", "-"):
        found = f"{len(media.images)} pictures and {len(media.videos)} videos"
        note(f"({found} go with the next message)")
        return
    try:
        reader = require_reader(session.media.reader if session.media is not None else None)
        add = media.add_image if kind == "image" else media.add_video
        note(f"({add(reader, _unquoted(file))}: goes with the next message)")
    except MnnsmithError as error:
        if not interactive:
            raise
        show_error(error)


def _unquoted(file: str) -> str:
    """A path without the quotes or the backslashes that a terminal puts in for a dropped file."""
    if len(file) > 1 and file[0] == file[-1] and file[0] in "'\"":
        return file[1:-1]
    return file.replace("\\ ", " ")


def _answer(session: ChatSession, media: Media, text: str, interactive: bool) -> None:
    """Ask and show the answer.  Ctrl-C ends it; a question that is refused is taken back.

    Pictures of a question that was taken back go with the next one.
    """
    from mnnsmith.session import Answer

    before = len(session.messages)
    printer = AnswerPrinter()
    try:
        asked = session.ask(text, images=media.images, videos=media.videos)
        with closing(asked) as events:
            for event in events:
                if isinstance(event, Answer):
                    printer.end()
                    explain_end(event)
                else:
                    printer.write(event)
    except KeyboardInterrupt:
        printer.end()
        if not interactive:
            raise
        note("(cancelled)")
    except (ContextLengthError, SourceError, UsageError) as error:
        if not interactive:
            raise
        # The question cannot be answered, but the dialogue can go on.
        show_error(error)
    if len(session.messages) > before:
        media.clear()
