"""Questions and answers with a bundle: what `run`, `chat`, `demo` and library users share.

    with open_session("my-bundle") as session:
        for event in session.ask("What is the capital of France?"):
            if isinstance(event, TextPiece):
                print(event.text, end="", flush=True)

An answer streams as `TextPiece` events and ends with one `Answer`.  The engine's cache is reused:
of a new prompt only what differs from the tokens and pictures already there is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from mnnsmith.bundle.bundle import Bundle, open_bundle
from mnnsmith.engine import Engine, SamplingOptions
from mnnsmith.errors import BundleError, ContextLengthError, TemplateError, UsageError
from mnnsmith.reply import THINK, Answer, AnswerOptions, Reply, TextModel, TileRun
from mnnsmith.session_media import (
    MediaPrompt,
    MediaPrompts,
    MediaReader,
    has_media,
    no_vision,
    read_media_of,
    with_media,
)
from mnnsmith.text.prompt import encode_chat
from mnnsmith.text.reasoning import TextPiece
from mnnsmith.text.template import ChatTemplate, Message
from mnnsmith.text.tokenizer import TextTokenizer

__all__ = [
    "Answer",
    "AnswerOptions",
    "ChatSession",
    "Event",
    "Reply",
    "open_session",
    "sampling_defaults",
]

_log = logging.getLogger(__name__)

Event = TextPiece | Answer


class ChatSession:
    """A dialogue with a model: history, a system message, answers that stream.

    messages: the history, which callers may change.  After an answer that was cancelled the part
    that was given stays; a question without any answer is taken back.
    """

    def __init__(
        self,
        engine: TextModel,
        tokenizer: TextTokenizer,
        template: ChatTemplate | None,
        *,
        media: MediaPrompts | None = None,
        stop_ids: Collection[int] = (),
        system: str | None = None,
        options: AnswerOptions | None = None,
        variables: Mapping[str, Any] | None = None,
        allow_special: bool = False,
    ) -> None:
        """
        template: None for a model without one; then only `complete` works.
        media: None for a model that sees no pictures.
        variables: names for the template, such as `enable_thinking`.
        allow_special: let control tokens in the messages steer the model.
        """
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.media = media
        self.stop_ids = frozenset(stop_ids)
        self.options = options or AnswerOptions()
        self.variables = dict(variables or {})
        self.allow_special = allow_special
        self.messages: list[dict[str, Any]] = []
        self._system: str | None = None
        self.system = system

    def __enter__(self) -> ChatSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the template's process, and the engine if it can be closed."""
        if self.template is not None:
            self.template.close()
        if self.media is not None:
            self.media.close()
        if isinstance(self.engine, Engine):
            self.engine.close()

    @property
    def system(self) -> str | None:
        """The system message; None for none (a template may then write its own)."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._system = text
        self.messages = [m for m in self.messages if m["role"] != "system"]
        if text is not None:
            self.messages.insert(0, {"role": "system", "content": text})

    def reset(self) -> None:
        """Forget the dialogue, but for the system message."""
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def prompt(self, messages: Sequence[Message]) -> MediaPrompt:
        """The prompt for a dialogue, and the tiles of its pictures.

        messages: contents are texts, or lists of parts: {"type": "text", "text": ...},
        {"type": "image", "image": a path, a file's bytes, a Pillow image or an array},
        {"type": "video", "video": a path or `session_media.Frames`}.

        Raises TemplateError where the model has no template, UsageError for pictures given to a
        model that sees none, and what `MediaPrompts.make` raises.
        """
        if self.template is None:
            raise TemplateError(
                "This model has no chat template, so it cannot hold a dialogue.",
                "Let it continue a text instead: mnnsmith run DIR --raw -p TEXT",
            )
        if self.media is not None:
            return self.media.make(
                messages, allow_special=self.allow_special, variables=self.variables
            )
        if has_media(messages):
            raise no_vision()
        prompt = encode_chat(
            self.template,
            self.tokenizer,
            messages,
            allow_special=self.allow_special,
            variables=self.variables,
        )
        return MediaPrompt(prompt.text, prompt.ids)

    def reply(self, messages: Sequence[Message]) -> Reply:
        """Answer a dialogue that the caller keeps; the session's own history is not used."""
        made = self.prompt(messages)
        in_reasoning = made.text.rstrip().endswith(THINK[0])
        return self._reply(made.ids, made.tiles, in_reasoning=in_reasoning)

    def complete(self, text: str) -> Reply:
        """Continue a text, without a template; a picture has no place in it."""
        ids = self.tokenizer.encode(text, add_special_tokens=True, allow_special=self.allow_special)
        return self._reply(ids)

    def ask(
        self, text: str, *, images: Sequence[Any] = (), videos: Sequence[Any] = ()
    ) -> Generator[Event, None, None]:
        """Put a question into the dialogue and answer it: text pieces, then one `Answer`.

        images, videos: what `prompt` takes for them; they stand before the text, or where it says
        `<image>` and `<video>`.
        """
        content = with_media(text, images, videos) if images or videos else text
        self.messages.append({"role": "user", "content": content})
        reply: Reply | None = None
        try:
            reply = self.reply(self.messages)
            yield from reply
        finally:
            answer = reply.answer if reply is not None else None
            if reply is not None:
                reply.close()
            self._remember(answer)
        yield answer

    def _remember(self, answer: Answer | None) -> None:
        if answer is None or not (answer.text or answer.reasoning or answer.token_ids):
            self.messages.pop()
            return
        message = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        self.messages.append(message)

    def _reply(
        self, ids: Sequence[int], tiles: Sequence[TileRun] = (), *, in_reasoning: bool = False
    ) -> Reply:
        if not ids:
            raise UsageError(
                "The prompt is empty, and this model has no token to begin a text with.",
                "Give a text with -p TEXT, or on standard input.",
            )
        if len(ids) >= self.engine.context_limit:
            shown = sum(run.stop - run.start for run in tiles)
            pictures = f" ({shown} of them for {len(tiles)} tiles of pictures)" if tiles else ""
            raise ContextLengthError(
                f"The prompt has {len(ids)} tokens{pictures}; the context of this bundle holds "
                f"{self.engine.context_limit}, the answer included.",
                "Shorten the prompt or the dialogue, or convert with a larger --max-context.",
            )
        return Reply(
            self.engine,
            self.tokenizer,
            ids,
            self.options,
            self.stop_ids,
            tiles=tiles,
            in_reasoning=in_reasoning,
        )


def sampling_defaults(bundle: Bundle) -> dict[str, Any]:
    """What the model's authors recommend, as keywords of `SamplingOptions`; {} means greedy."""
    found = {
        name: value
        for name, value in bundle.manifest.generation.items()
        if name in SamplingOptions.__dataclass_fields__
    }
    if isinstance(found.get("top_k"), float):
        # JSON written by other tools may say 50.0.
        found["top_k"] = int(found["top_k"])
    return found


def _open_text(bundle: Bundle) -> tuple[TextTokenizer, ChatTemplate | None]:
    tokenizer = TextTokenizer(bundle.tokenizer_json())
    if bundle.chat_template is None:
        return tokenizer, None
    return tokenizer, ChatTemplate(
        bundle.chat_template,
        bundle.bos_token,
        bundle.eos_token,
        special_tokens=bundle.special_tokens,
    )


def open_session(
    bundle: Bundle | Path | str,
    *,
    system: str | None = None,
    options: AnswerOptions | None = None,
    variables: Mapping[str, Any] | None = None,
    allow_special: bool = False,
    threads: int | None = None,
    memory: str | None = None,
    precision: str | None = None,
) -> ChatSession:
    """Load a bundle with its tokenizer and template.

    options: None samples as the model's authors recommend.  threads, memory, precision: as for
    `engine.Engine`.  Close the session, or use it in a `with` block.

    Raises BundleError, TokenizerError, TemplateError or EngineError for what is damaged.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    if options is None:
        options = AnswerOptions(sampling=SamplingOptions(**sampling_defaults(opened)))
    reader = read_media_of(opened)
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=1) as background:
        # The engine loads in a process of its own; meanwhile the tokenizer is read here.
        text = background.submit(_open_text, opened)
        engine = Engine(opened.path, threads=threads, memory=memory, precision=precision)
        try:
            tokenizer, template = text.result()
            media = _media_prompts(opened, engine, reader, tokenizer, template)
        except BaseException:
            engine.close()
            raise
    _log.info("loaded %s in %.2f s", opened.path, time.monotonic() - began)
    return ChatSession(
        engine,
        tokenizer,
        template,
        media=media,
        stop_ids=opened.stop_ids,
        system=system,
        options=options,
        variables=variables,
        allow_special=allow_special,
    )


def _media_prompts(
    bundle: Bundle,
    engine: Engine,
    reader: MediaReader | None,
    tokenizer: TextTokenizer,
    template: ChatTemplate | None,
) -> MediaPrompts | None:
    """Raises BundleError where manifest and engine do not say the same of pictures."""
    facts = engine.vision
    said = None if reader is None else (reader.settings.tile, reader.settings.image_seq_len)
    if said != (None if facts is None else (facts.tile, facts.tile_tokens)):
        raise BundleError(
            f"{bundle.path}: manifest and llm_config.json differ on how pictures are taken.",
            "Convert the model again.",
        )
    if reader is None or facts is None or template is None:
        return None
    return MediaPrompts(reader, tokenizer, template, facts.image_token, facts.canvas_tokens)
