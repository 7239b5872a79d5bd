"""Options that several commands have, declared once."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from mnnsmith.cli.console import check_argument, note
from mnnsmith.errors import UsageError

if TYPE_CHECKING:
    from mnnsmith.bundle import Bundle

# A small model that has begun to repeat itself would go on to the end of the context.
DEFAULT_MAX_TOKENS = 1024

BundleDir = Annotated[
    Path, typer.Argument(metavar="DIR", help="A bundle: the folder that `convert` wrote.")
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A Hugging Face folder, a .gguf file, or a hub id (org/name)."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout.")]
Recipe = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="How weights are stored, such as w4g64-head8, w8g128 or fp16, or a JSON file.",
    ),
]
Revision = Annotated[
    str | None, typer.Option(metavar="REV", help="Branch, tag or commit of a hub model.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Use only hub files fetched before.")]
MaxContext = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Longest context in tokens [default: the model's]."),
]

System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Longest answer in tokens [default: 1024]."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End the answer at this text; may be given several times."),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="T", help="0 always takes the best token. The default of this and the next"
        " options is what the model's authors recommend, else 0.",
    ),
]  # fmt: skip
TopK = Annotated[
    int | None, typer.Option(metavar="K", help="Choose among the K best tokens; 0 = all.")
]
TopP = Annotated[
    float | None,
    typer.Option(metavar="P", help="Choose among the best tokens that hold probability P."),
]
MinP = Annotated[
    float | None,
    typer.Option(metavar="P", help="Leave out tokens below P times the best one's probability."),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(metavar="R", help="Above 1: fewer repeats of earlier tokens.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(metavar="R", help="Above 0: fewer tokens of the answer so far.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(metavar="R", help="The same, growing with each occurrence.")
]
Seed = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="Makes a sampled answer repeatable.")
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Threads [default: one per usable core].")
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="LEVEL", help="low | normal | high: high computes in float, exact but slower."
    ),
]
Precision = Annotated[
    str | None, typer.Option(metavar="LEVEL", help="low | normal | high; differs on ARM only.")
]
TemplateVar = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="A variable for the chat template, such as enable_thinking=false; JSON or text.",
    ),
]
AllowSpecial = Annotated[
    bool,
    typer.Option(
        "--allow-special", help="Let control tokens in the text, such as <|im_end|>, act as such."
    ),
]


@dataclass(frozen=True)
class SessionOptions:
    """The options of a command that talks to a bundle; each field becomes one of them."""

    system: System = None
    max_tokens: MaxTokens = None
    stop: Stop = None
    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    repetition_penalty: RepetitionPenalty = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    seed: Seed = None
    template_var: TemplateVar = None
    allow_special: AllowSpecial = False
    threads: Threads = None
    memory: Memory = None
    precision: Precision = None


def with_session_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with the fields of its parameter `options`, a `SessionOptions`, in its place."""
    plain = signature(verb, eval_str=True)
    hints = get_type_hints(SessionOptions, include_extras=True)
    names = [field.name for field in fields(SessionOptions)]
    own = [found for found in plain.parameters.values() if found.name != "options"]
    added = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(SessionOptions)
    ]

    @functools.wraps(verb)
    def call(*arguments: Any, **given: Any) -> None:
        options = SessionOptions(**{name: given.pop(name) for name in names})
        verb(*arguments, options=options, **given)

    call.__signature__ = plain.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    return call


def session_settings(directory: Path, options: SessionOptions) -> tuple[Bundle, dict[str, Any]]:
    """The opened bundle, and the keywords that `open_session` takes for these options.

    Sampling options that were not given are the bundle's own.  Nothing is loaded yet.  Raises
    UsageError for a value out of its range, BundleError for what is no bundle.
    """
    variables = template_variables(options.template_var)
    if options.system is not None:
        check_argument(options.system, "--system")
    from mnnsmith.bundle import open_bundle
    from mnnsmith.engine import SamplingOptions
    from mnnsmith.session import AnswerOptions, sampling_defaults

    bundle = open_bundle(directory)
    sampling = sampling_defaults(bundle)
    for name in SamplingOptions.__dataclass_fields__:
        value = getattr(options, name)
        if value is not None:
            sampling[name] = value
    chosen = SamplingOptions(**sampling)
    if chosen.temperature == 0:
        _note_unused(options)
    answer = AnswerOptions(
        sampling=chosen,
        max_tokens=DEFAULT_MAX_TOKENS if options.max_tokens is None else options.max_tokens,
        stop=tuple(check_argument(text, "--stop") for text in options.stop or ()),
    )
    return bundle, {
        "system": options.system,
        "options": answer,
        "variables": variables,
        "allow_special": options.allow_special,
        "threads": options.threads,
        "memory": options.memory,
        "precision": options.precision,
    }


def _note_unused(options: SessionOptions) -> None:
    """Sampling options that a greedy answer does not look at."""
    names = ("top_k", "top_p", "min_p", "seed")
    given = [f"--{n.replace('_', '-')}" for n in names if getattr(options, n) is not None]
    if given:
        note(f"({', '.join(given)} without effect: the temperature is 0, so the best token wins)")


def refuse(what: str, **given: object) -> None:
    """Raise UsageError for an option that is given and that `what` does not have."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise UsageError(f"--{name.replace('_', '-')} is not for {what}.")


def template_variables(pairs: Sequence[str] | None) -> dict[str, Any]:
    """NAME=VALUE pairs; a value that is JSON is taken as such, any other is text."""
    variables: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, value = check_argument(pair, "--template-var").partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(
                f"--template-var {pair!r:.80} is not NAME=VALUE.",
                "For example: --template-var enable_thinking=false",
            )
        try:
            variables[name] = json.loads(value)
        except (ValueError, RecursionError):
            variables[name] = value
    return variables
