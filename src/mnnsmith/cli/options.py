"""Options that several commands have, declared once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mnnsmith.cli.console import check_argument
from mnnsmith.errors import UsageError

if TYPE_CHECKING:
    from mnnsmith.bundle import Bundle
    from mnnsmith.session import AnswerOptions

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
    typer.Option(metavar="N", min=1, help="Longest answer in tokens [default: to the context]."),
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


def answer_options(
    bundle: Bundle,
    *,
    max_tokens: int | None,
    stop: Sequence[str] | None,
    **sampling: float | None,
) -> AnswerOptions:
    """The bundle's sampling defaults with the given options in their place.

    Raises UsageError for a value out of its range.
    """
    from mnnsmith.engine import SamplingOptions
    from mnnsmith.session import AnswerOptions, sampling_defaults

    given: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    return AnswerOptions(
        sampling=SamplingOptions(**{**sampling_defaults(bundle), **given}),
        max_tokens=max_tokens,
        stop=tuple(check_argument(text, "--stop") for text in stop or ()),
    )


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
