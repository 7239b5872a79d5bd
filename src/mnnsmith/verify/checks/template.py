"""Whether a bundle's chat template makes the prompts of the original's.

Three programs render: ours, which `run` and `chat` use; transformers on the original's folder where
it is installed, else ours on the original's source; and the engine's own, which an app may use.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mnnsmith.bundle import Bundle
from mnnsmith.errors import EngineError, MnnsmithError, TemplateError, UsageError
from mnnsmith.files import read_json_object
from mnnsmith.mnn.config_files import TOKENIZER_FILE
from mnnsmith.mnn.mtok_reader import read_mtok
from mnnsmith.sources.checkpoint import TokenizerFiles
from mnnsmith.text.template import ChatTemplate
from mnnsmith.verify.checks.token_files import Truth, truth
from mnnsmith.verify.checks.tokens import TRANSFORMERS_ERRORS, original_folder
from mnnsmith.verify.context import Context
from mnnsmith.verify.references.torch_model import load_processor, load_tokenizer
from mnnsmith.verify.results import Finding, Outcome, Severity, TextFigures
from mnnsmith.verify.texts.dialogues import Dialogue, dialogues

_CONFIG_FILE = "llm_config.json"
_EXAMPLES = 2
_DIFF_LINES = 12
_LINE_CHARS = 120
_AGAIN = "Convert the model again, or copy the bundle again."
_OWN = (
    "An app must render the prompt itself and give it to the engine as text or ids; "
    "docs/tokenizers.md lists what the engine's template code cannot do."
)
# None: the template refuses the dialogue.
Render = Callable[[Dialogue], str | None]


@dataclass(frozen=True)
class _Prompt:
    dialogue: Dialogue
    text: str | None


def check_template(context: Context) -> Outcome[TextFigures]:
    """Render dialogues with the bundle's template, the original's, and the engine's code.

    What a template refuses, it must refuse in the bundle, too.  Where the engine alone differs,
    although all that it reads is the original's, it is a warning: its code cannot do better.
    """
    bundle, expected = context.bundle, truth(context)
    source = expected.files.chat_template
    if source is None or bundle.chat_template is None:
        return _absent(bundle, source)
    texts = list(_sources(bundle, expected))
    with _open(bundle.chat_template, _names(bundle)) as ours, _open(source, expected.files) as own:
        prompts = [
            _Prompt(dialogue, _render(own, dialogue)) for dialogue in dialogues(sees=_sees(bundle))
        ]
        name, prompts, notes = _by_transformers(context, prompts)
        found = [(prompt, _render(ours, prompt.dialogue)) for prompt in prompts]
    differing = [(p.dialogue.name, text, p.text) for p, text in found if text != p.text]
    findings = [*texts, *notes, *_findings("error", _CONFIG_FILE, name, differing, _AGAIN)]
    engine, engine_findings = _engine(context, expected, prompts, faulty=bool(texts))
    findings += engine_findings
    if not differing and not engine:
        summary = f"{len(prompts)} dialogues are rendered alike, by the engine, too"
    else:
        summary = (
            f"{len(prompts)} dialogues: {len(differing) or 'none'} rendered otherwise than by "
            f"{name}, {engine or 'none'} by the engine"
        )
    if texts:
        summary = f"what the bundle has is not the original's; {summary}"
    return Outcome(summary, TextFigures(len(prompts), len(differing), engine), tuple(findings))


def _sees(bundle: Bundle) -> bool:
    return bundle.manifest.model.get("vision") is not None


def _absent(bundle: Bundle, source: str | None) -> Outcome[TextFigures]:
    nothing = TextFigures(0, 0, 0)
    if source is None and bundle.chat_template is None:
        return Outcome("the model has no chat template", nothing)
    whose = "the original" if source is not None else "the bundle"
    message = f"only {whose} has a chat template."
    return Outcome(message.rstrip("."), nothing,
                   (Finding("error", _CONFIG_FILE, message, _AGAIN),))  # fmt: skip


def _names(bundle: Bundle) -> TokenizerFiles:
    return TokenizerFiles(
        "", None, bundle.bos_token, bundle.eos_token, (), bundle.special_tokens
    )  # fmt: skip


def _open(source: str, names: TokenizerFiles) -> ChatTemplate:
    return ChatTemplate(
        source, names.bos_token, names.eos_token, special_tokens=names.special_tokens
    )


def _render(template: ChatTemplate, dialogue: Dialogue) -> str | None:
    try:
        return template.render(dialogue.given, **dialogue.variables)
    except TemplateError:
        return None


def _sources(bundle: Bundle, expected: Truth) -> Iterator[Finding]:
    """The text of the template in each file that holds it, and the tokens that it names."""
    source = expected.files.chat_template or ""
    mtok = read_mtok(bundle.path / TOKENIZER_FILE)
    config = read_json_object(bundle.path / _CONFIG_FILE).get("jinja")
    jinja: Mapping[str, Any] = config if isinstance(config, dict) else {}
    values = (
        (_CONFIG_FILE, "the chat template", jinja.get("chat_template"), source),
        (_CONFIG_FILE, "bos", jinja.get("bos"), expected.files.bos_token or ""),
        (_CONFIG_FILE, "eos", jinja.get("eos"), expected.files.eos_token or ""),
        (TOKENIZER_FILE, "the chat template", mtok.chat_template, expected.mtok.chat_template),
    )
    for where, what, found, wanted in values:
        if found != wanted:
            difference = _diff(wanted, found) if isinstance(found, str) else f"{found!r:.80}"
            yield Finding("error", where, f"{what} is not {expected.name}'s:\n{difference}", _AGAIN)


def _by_transformers(
    context: Context, prompts: list[_Prompt]
) -> tuple[str, list[_Prompt], list[Finding]]:
    """The prompts as transformers renders them, if it can; else as they are."""
    whose = "the bundle" if context.original is None else "the original"
    ours = f"{whose}'s template in jinja2"
    folder = original_folder(context)
    if folder is None or importlib.util.find_spec("transformers") is None:
        return ours, prompts, []
    import transformers
    from jinja2 import TemplateError as JinjaError

    name = f"transformers {transformers.__version__}"
    rendered = []
    try:
        renderer = load_processor(folder) if _sees(context.bundle) else load_tokenizer(folder)
        for prompt in prompts:
            text = prompt.text
            # What our own renderer refused or stopped is not run without its limits.
            if text is not None:
                text = renderer.apply_chat_template(
                    [dict(message) for message in prompt.dialogue.given],
                    tokenize=False,
                    **{"add_generation_prompt": True, **prompt.dialogue.variables},
                )
            rendered.append(_Prompt(prompt.dialogue, text))
    except (MnnsmithError, *TRANSFORMERS_ERRORS, JinjaError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        note = Finding("note", name, f"cannot be compared with: {first_line:.200}")
        return ours, prompts, [note]
    return name, rendered, []


def _engine(
    context: Context, expected: Truth, prompts: list[_Prompt], *, faulty: bool
) -> tuple[int, list[Finding]]:
    """How many dialogues the engine renders otherwise, and what is to be said of them.

    faulty: whether anything that the engine reads is not the original's.
    """
    differing: list[tuple[str, str | None, str | None]] = []
    try:
        with context.open_engine(context.bundle.path) as engine:
            for prompt in prompts:
                if not prompt.dialogue.plain:
                    continue
                try:
                    found = engine.engine_apply_template(prompt.dialogue.messages)
                except UsageError as error:
                    found = error.message
                wanted = _without_prefix(prompt.text, expected)
                if found != wanted:
                    differing.append((prompt.dialogue.name, found, wanted))
    except EngineError as error:
        return len(differing), [Finding("error", "the engine", error.message, error.hint)]
    severity: Severity = "error" if faulty else "warning"
    where = "the engine's own template code"
    return len(differing), list(
        _findings(severity, where, f"{expected.name}'s template", differing,
                  _AGAIN if faulty else _OWN)
    )  # fmt: skip


def _without_prefix(text: str | None, expected: Truth) -> str | None:
    """The engine puts a first token by its id where the file says so, and prints nothing for it."""
    bos = expected.files.bos_token
    if text is None or not bos or expected.mtok.bos_token or not expected.mtok.prefix_ids:
        return text
    return text.removeprefix(bos)


def _findings(
    severity: Severity, where: str, name: str,
    differing: list[tuple[str, str | None, str | None]], hint: str,
) -> Iterator[Finding]:  # fmt: skip
    """One finding for all, with the first ones shown."""
    if not differing:
        return
    shown = []
    for dialogue, found, wanted in differing[:_EXAMPLES]:
        if found is None:
            shown.append(f"{dialogue}: is refused, {name} renders it")
        elif wanted is None:
            shown.append(f"{dialogue}: is rendered, {name} refuses it")
        else:
            shown.append(f"{dialogue}:\n{_diff(wanted, found)}")
    names = ", ".join(dialogue for dialogue, _, _ in differing)
    examples = "\n".join(shown)
    yield Finding(
        severity, where,
        f"{len(differing)} dialogues differ from {name} ({names}).\n{examples}", hint,
    )  # fmt: skip


def _diff(wanted: str, found: str) -> str:
    """A short unified diff; lines as Python writes them, so that spaces and line ends show."""
    diff = list(
        difflib.unified_diff(_lines(wanted), _lines(found), "expected", "found", n=1, lineterm="")
    )
    cut = [*diff[:_DIFF_LINES], "..."] if len(diff) > _DIFF_LINES else diff
    return "\n".join(cut)


def _lines(text: str) -> list[str]:
    return [f"{line!r:.{_LINE_CHARS}}" for line in text.splitlines(keepends=True)]
