"""A dialogue as token ids: the chat template, and what users typed kept as text.

A rendered prompt is one string, in which a user's `<|im_end|>` looks like the template's own.  To
tell them apart the control tokens in the messages are wrapped in two marker characters before
rendering.  Afterwards the markers are taken out again, and the marked places are encoded as text.
Only a dialogue that holds such a token takes this way; every other is encoded as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mnnsmith.errors import UsageError
from mnnsmith.text.template import ChatTemplate, Message
from mnnsmith.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Prompt:
    """text: the rendered prompt; ids: its tokens; guarded: tokens of users that were kept text."""

    text: str
    ids: list[int]
    guarded: int = 0


@dataclass(frozen=True)
class Rendered:
    """A dialogue as text, not encoded yet.

    as_text: ranges (start, end) of control texts that came from users, in order.
    control: what `TextTokenizer.encode_guarded` takes for them.
    """

    text: str
    as_text: tuple[tuple[int, int], ...] = ()
    control: tuple[str, ...] = ()


def encode_chat(
    template: ChatTemplate,
    tokenizer: TextTokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    allow_special: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> Prompt:
    """Render a dialogue and encode it, as transformers does with the whole string.

    The arguments and errors are those of `render_chat`, and the errors of `TextTokenizer.encode`.
    """
    rendered = render_chat(
        template,
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        allow_special=allow_special,
        variables=variables,
    )
    return encode_rendered(tokenizer, rendered)


def encode_rendered(tokenizer: TextTokenizer, rendered: Rendered) -> Prompt:
    """The tokens of a rendered dialogue.  Raises what `TextTokenizer.encode` raises."""
    ids = tokenizer.encode_guarded(rendered.text, rendered.as_text, rendered.control)
    return Prompt(rendered.text, ids, len(rendered.as_text))


def render_chat(
    template: ChatTemplate,
    tokenizer: TextTokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    allow_special: bool = False,
    variables: Mapping[str, Any] | None = None,
    placeholders: Sequence[str] = (),
) -> Rendered:
    """Render a dialogue, and mark the control tokens that users typed.

    allow_special: let control tokens in the messages steer the model.  Otherwise they are encoded
    as the plain text they look like.  In assistant messages only special tokens are held back:
    templates look for other control text there, such as `</think>`.
    placeholders: texts that the caller replaces in the result, such as `<video>`, which users may
    type, too: they count as control tokens.

    Raises what `ChatTemplate.render` raises.
    """
    chosen = dict(variables or {})

    def render(dialogue: Sequence[Message], names: Mapping[str, Any]) -> str:
        return template.render(dialogue, add_generation_prompt, **names)

    control = (*tokenizer.control_texts(template.literal_text), *placeholders)
    pattern = _any_of(control)
    everything = [list(messages), chosen]
    if allow_special or not any(pattern.search(text) for text in _texts(everything)):
        return Rendered(render(messages, chosen))
    start, end = _unused_characters("".join([*_texts(everything), template.source]))
    special = _any_of(
        [*(token.text for token in tokenizer.added_tokens if token.special), *placeholders]
    )

    def marked(value: Any, tokens: re.Pattern[str]) -> Any:
        return _map_texts(value, lambda text: tokens.sub(f"{start}\\g<0>{end}", text))

    dialogue = [
        marked(message, special if message.get("role") == "assistant" else pattern)
        for message in messages
    ]
    text, ranges = _unmark(render(dialogue, marked(chosen, pattern)), control, start, end)
    return Rendered(text, tuple(ranges), control)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _unused_characters(text: str) -> tuple[str, str]:
    """Two private-use characters that do not occur in `text`."""
    present = set(text)
    free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in present)
    start, end = next(free, None), next(free, None)
    if start is None or end is None:
        raise UsageError(
            "The messages use every private-use character, so none is left to mark the control "
            "tokens in them."
        )
    return start, end


def _unmark(
    text: str, control: Sequence[str], start: str, end: str
) -> tuple[str, list[tuple[int, int]]]:
    """Take the markers out.  Gives the text and the ranges of control tokens that were marked.

    A template may have cut a text between a marker and its token; such a marker is only dropped.
    """
    marked = re.compile(f"{start}({_any_of(control).pattern}){end}|[{start}{end}]")
    pieces: list[str] = []
    ranges: list[tuple[int, int]] = []
    done = length = 0
    for match in marked.finditer(text):
        kept, token = text[done : match.start()], match[1] or ""
        pieces += (kept, token)
        length += len(kept)
        if token:
            ranges.append((length, length + len(token)))
        length += len(token)
        done = match.end()
    pieces.append(text[done:])
    return "".join(pieces), ranges


def _texts(value: Any) -> Iterator[str]:
    """Every string in nested lists and mappings, names excepted."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _map_texts(item, change) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(item, change) for item in value]
    return value
