"""`mnnsmith run`: one prompt, one answer."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from mnnsmith.cli import media as m
from mnnsmith.cli import options as o
from mnnsmith.cli.answers import AnswerPrinter, as_json, explain_end
from mnnsmith.cli.console import check_argument, is_terminal, read_stdin, say_json
from mnnsmith.errors import UsageError

Prompt = Annotated[
    str | None,
    typer.Option(
        "--prompt", "-p", metavar="TEXT", help="What to ask; '-' or nothing reads standard input."
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
]


@o.with_session_options
def run(
    directory: o.BundleDir,
    options: o.SessionOptions,
    prompt: Prompt = None,
    image: m.Images = None,
    video: m.Videos = None,
    raw: Raw = False,
    json_output: o.Json = False,
) -> None:
    """Ask a bundle once; the answer streams to stdout.

    Pictures stand before the text, or where it says <image>.  On a terminal reasoning is shown
    dimmed; elsewhere stdout gets the answer only.
    """
    if raw and (options.system is not None or options.template_var):
        raise UsageError("--raw uses no chat template, so --system and --template-var do nothing.")
    if raw and (image or video):
        raise UsageError(
            "--raw uses no chat template, which is what gives pictures and videos their place.",
            "Leave --raw out.",
        )
    bundle, settings = o.session_settings(directory, options)
    text = _prompt_text(prompt)
    media = m.read_media(bundle, image, video)
    from mnnsmith.session import open_session
    from mnnsmith.session_media import with_media

    content = with_media(text, media.images, media.videos) if media else text

    began = time.monotonic()
    with open_session(bundle, **settings) as session:
        load_s = time.monotonic() - began
        if raw:
            reply = session.complete(text)
        else:
            reply = session.reply([*session.messages, {"role": "user", "content": content}])
        if json_output:
            for _ in reply:
                continue
            say_json(as_json(reply.answer, load_s))
        else:
            printer = AnswerPrinter()
            try:
                for piece in reply:
                    printer.write(piece)
            finally:
                printer.end()
            explain_end(reply.answer)


def _prompt_text(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return check_argument(prompt, "--prompt")
    if prompt is None and is_terminal(sys.stdin):
        raise UsageError(
            "There is no prompt.", "Give one with -p TEXT, or on standard input, or use `chat`."
        )
    return read_stdin()
