"""Dialogues on which chat templates are compared: each stands for a way in which they go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mnnsmith.vision.messages import collect_media


@dataclass(frozen=True)
class Dialogue:
    """variables: for the template, such as `add_generation_prompt`.

    in_parts: whether the model's template takes contents as lists of parts, as of pictures.
    """

    name: str
    messages: tuple[Mapping[str, Any], ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    in_parts: bool = False

    @property
    def given(self) -> tuple[Mapping[str, Any], ...]:
        """The messages as the template is to have them."""
        return collect_media(self.messages).messages if self.in_parts else self.messages

    @property
    def plain(self) -> bool:
        """Whether the engine's interface can take it: a role and a text, and no variables."""
        return not self.variables and all(
            set(message) == {"role", "content"} and isinstance(message["content"], str)
            for message in self.messages
        )


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


_CALL = {"type": "function", "function": {"name": "find", "arguments": {"q": "<é>"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string", "description": "the word"}},
            "required": ["q"],
        },
    },
}
_LONG = "All work and no play makes Jack a dull boy.\n" * 300

DIALOGUES: tuple[Dialogue, ...] = (
    Dialogue("one question", (_user("What is the capital of France?"),)),
    Dialogue("system message", (_system("Be brief."), _user("2 + 2?"))),
    Dialogue("empty system message", (_system(""), _user("Hello"))),
    Dialogue("three turns", (_user("Hi"), _assistant("Hello!"), _user("<Italy> & 'Spain'?"))),
    Dialogue(
        "system and five turns",
        (_system("You are a pirate."), _user("Hi"), _assistant("Arr!"), _user("Who are you?"),
         _assistant("A pirate."), _user("Bye")),
    ),
    Dialogue("unicode", (_user("Größe, naïve, 東京, привет, שלום, 👩\u200d🚀 \u00a0\u3000x"),)),
    Dialogue("spaces at the ends", (_user("  two before, three after   "), _assistant(" a "),
                                    _user("\tx\t"))),
    Dialogue("lines", (_user("\none\n\ntwo\r\nthree\n\n"), _assistant("four\n"), _user("five"))),
    Dialogue("empty message", (_user(""),)),
    Dialogue("long", (_user(_LONG), _assistant(_LONG), _user("Go on."))),
    Dialogue(
        "text like tools",
        (_user('<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call> {{ 1 + 1 }}'),
         _assistant("```json\n{\"a\": [1, 2]}\n```"), _user("{% raw %} \\n %}")),
    ),
    Dialogue(
        "control tokens typed",
        (_user("<|im_end|>\n<|im_start|>system\nx</s><s>[/INST]<end_of_turn><|eot_id|>"),),
    ),
    Dialogue("reasoning in the text", (_user("Hi"), _assistant("<think>\nEasy.\n</think>\n\nHo."),
                                       _user("Again"))),
    Dialogue("answer last", (_user("Hi"), _assistant("Hello!"))),
    Dialogue("two questions in a row", (_user("One"), _user("Two"))),
    Dialogue("answer first", (_assistant("Hello!"), _user("Hi"))),
    Dialogue("system message late", (_user("Hi"), _system("Be brief."), _user("Hi"))),
    Dialogue("without the beginning of an answer", (_user("Hi"),),
             {"add_generation_prompt": False}),
    Dialogue("tools", (_user("Find é"), _assistant("", tool_calls=[_CALL]),
                       {"role": "tool", "content": "found"}), {"tools": [_TOOL]}),
    Dialogue("reasoning beside the text", (_user("Hi"), _assistant("Ho", reasoning_content="Easy."),
                                           _user("Again"))),
)  # fmt: skip


def _seen(*parts: str | None) -> dict[str, Any]:
    """A message of texts, and of pictures where there is None."""
    return _user_parts([
        {"type": "image", "image": b""} if text is None else {"type": "text", "text": text}
        for text in parts
    ])  # fmt: skip


def _user_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": parts}


_WITH_PICTURES: tuple[Dialogue, ...] = (
    Dialogue("one picture", (_seen(None, "What is this?"),)),
    Dialogue("two pictures", (_seen(None, None, "Compare them."),)),
    Dialogue("pictures between texts", (_seen("First", None, "then", None),)),
    Dialogue("a picture alone", (_seen(None),)),
    Dialogue("pictures in two turns", (_seen(None, "Hi"), _assistant("A cat."),
                                       _seen("And this?", None))),
    Dialogue("a picture after text of turns", (_system("Be brief."), _user("Hi"),
                                               _assistant("Ho"), _seen(None, "Now?"))),
    Dialogue("a picture's mark typed", (_seen(None, "what is <image>?"),)),
)  # fmt: skip


def dialogues(*, sees: bool) -> tuple[Dialogue, ...]:
    """Those for a model of text alone, or for one that sees: the same in parts, and pictures."""
    if not sees:
        return DIALOGUES
    return tuple(replace(dialogue, in_parts=True) for dialogue in (*DIALOGUES, *_WITH_PICTURES))
