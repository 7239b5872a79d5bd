"""The `mnnsmith` program: its commands, and the one place where errors become exit codes."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from mnnsmith.cli.canvas import canvas
from mnnsmith.cli.chat import chat
from mnnsmith.cli.check import check
from mnnsmith.cli.console import clean, say, show_error
from mnnsmith.cli.convert import convert
from mnnsmith.cli.demo import demo
from mnnsmith.cli.devices import devices
from mnnsmith.cli.doctor import doctor
from mnnsmith.cli.export import export
from mnnsmith.cli.inspect import inspect
from mnnsmith.cli.profile import profile
from mnnsmith.cli.report import report
from mnnsmith.cli.run import run
from mnnsmith.cli.verify import verify
from mnnsmith.errors import MnnsmithError
from mnnsmith.version import __version__

EXIT_BUG = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
# A program that a signal ends is known by 128 and the signal's number.
EXIT_SIGNAL = 128

app = typer.Typer(
    name="mnnsmith",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"mnnsmith {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show the log, and tracebacks of errors.")
]


@app.callback()
def _common(version: Version = False) -> None:
    """From a Hugging Face or GGUF checkpoint to a verified, quantized MNN bundle.

    Exit codes: 0 success, 1 a bug, 2 wrong usage, 3 a damaged checkpoint, 4 not supported,
    5 the conversion failed, 6 a damaged bundle, 7 the engine failed, 8 the machine lacks something,
    9 a verification failed, 130 interrupted.
    """


def _log_to_stderr() -> None:
    import logging

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(relativeCreated)7d ms %(name)s: %(message)s"))
    # Only our own: other packages write hosts and tokens of their requests.
    log = logging.getLogger("mnnsmith")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def _exits(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with the option -v, and with every error turned into a message and an exit code."""

    @functools.wraps(verb)
    def call(*args: Any, verbose: bool, **kwargs: Any) -> None:
        if verbose:
            _log_to_stderr()
        try:
            verb(*args, **kwargs)
            sys.stdout.flush()
        except MnnsmithError as error:
            if verbose:
                _show_traceback()
            show_error(error)
            raise SystemExit(error.exit_code) from None
        except KeyboardInterrupt:
            raise SystemExit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # The reader has gone.  Python flushes stdout once more as it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(EXIT_BROKEN_PIPE) from None
        except Exception as error:  # noqa: BLE001 - a bug: say where its traceback is
            _report_bug(error, verbose)
            raise SystemExit(EXIT_BUG) from None

    plain = signature(verb, eval_str=True)
    option = Parameter("verbose", Parameter.KEYWORD_ONLY, default=False, annotation=Verbose)
    parameters = [*plain.parameters.values(), option]
    call.__annotations__ = {found.name: found.annotation for found in parameters}
    call.__signature__ = plain.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def _show_traceback() -> None:
    import traceback

    traceback.print_exc()


def _report_bug(error: Exception, verbose: bool) -> None:
    """One line for the user; the traceback on stderr with -v, else in a file."""
    what = clean(f"{type(error).__name__}: {error}".splitlines()[0], sys.stderr)
    if verbose:
        _show_traceback()
        sys.stderr.write(f"error: this is a bug in mnnsmith: {what}\n")
        return
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile(
        "w", prefix="mnnsmith-", suffix=".log", delete=False, encoding="utf-8"
    ) as file:
        file.write(f"mnnsmith {__version__}, arguments {sys.argv[1:]!r}\n")
        traceback.print_exc(file=file)
    sys.stderr.write(
        f"error: this is a bug in mnnsmith: {what}\nPlease report it with {file.name}\n"
    )


for _verb in (
    convert,
    run,
    chat,
    inspect,
    check,
    verify,
    report,
    profile,
    canvas,
    export,
    devices,
    doctor,
    demo,
):
    app.command(_verb.__name__)(_exits(_verb))


def _end(number: int, frame: object) -> None:
    """Leave as an error does, so that child processes end and partial files go."""
    raise SystemExit(EXIT_SIGNAL + number)


def main() -> None:
    """The console script; always ends the process through SystemExit."""
    # What `timeout`, a CI server or a closed terminal sends.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # As `nohup` has it.
            signal.signal(number, _end)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that is not UTF-8 must not break an answer halfway.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    arguments = sys.argv[1:]
    if len(arguments) > 1 and arguments[0] in ("-v", "--verbose"):
        # -v belongs to a command, but people write it first, too.
        arguments[:2] = arguments[1::-1]
    app(arguments)
