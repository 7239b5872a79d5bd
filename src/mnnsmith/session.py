"""Questions and answers with a bundle: what `run`, `chat`, `demo` and library users share.

    with open_session("my-bundle") as session:
        for event in session.ask("What is the capital of France?"):
            if isinstance(event, TextPiece):
                print(event.text, end="", flush=True)

An answer streams as `TextPiece` events and ends with one `Answer`.  The engine's cache is reused:
of a new prompt only what differs from the tokens already there is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from mnnsmith.bundle.bundle import Bundle, open_bundle
from mnnsmith.engine import Engine, SamplingOptions
from mnnsmith.errors import ContextLengthError, TemplateError, UsageError
from mnnsmith.text.prompt import Prompt, encode_chat
from mnnsmith.text.reasoning import ReasoningSplitter, TextPiece
from mnnsmith.text.stream import Detokenizer, StopStrings
from mnnsmith.text.template import ChatTemplate, Message
from mnnsmith.text.tokenizer import TextTokenizer

_log = logging.getLogger(__name__)

THINK = ("<think>", "</think>")


class TokenRun(Protocol):
    """One generation: token ids one by one, then how it ended (see `engine.Generation`)."""

    seed: int
    finish_reason: str | None

    def __iter__(self) -> Iterator[int]: ...

    def close(self) -> None: ...


class TextModel(Protocol):
    """What is asked of an engine here; `engine.Engine` is one."""

    context_limit: int

    @property
    def tokens(self) -> tuple[int, ...]: ...

    def generate(
        self,
        ids: Sequence[int],
        options: SamplingOptions | None = None,
        max_new_tokens: int | None = None,
        stop_ids: Collection[int] = (),
    ) -> TokenRun: ...

    def rewind(self, position: int) -> None: ...

    def reset(self) -> None: ...


@dataclass(frozen=True)
class AnswerOptions:
    """How an answer is made.

    max_tokens: None goes on to the end of the context.  stop: texts that end the answer; they are
    not part of it.
    """

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    finish_reason: "stop" (an end token or a stop string), "length" (max_tokens), "context" (the
    context is full) or "cancelled".
    prompt_tokens, reused_tokens: length of the prompt, and how many of them the cache held already.
    first_token_s, total_s: seconds from the question to the first token, and to the end.
    """

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_string: str | None
    seed: int
    prompt_tokens: int
    reused_tokens: int
    first_token_s: float
    total_s: float

    @property
    def prompt_tokens_per_s(self) -> float:
        """Tokens of the prompt that were computed, per second."""
        fresh = self.prompt_tokens - self.reused_tokens
        return fresh / self.first_token_s if self.first_token_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the answer after the first one, per second."""
        seconds = self.total_s - self.first_token_s
        return (len(self.token_ids) - 1) / seconds if seconds > 0 and self.token_ids else 0.0


Event = TextPiece | Answer


class Reply(Iterator[TextPiece]):
    """Text pieces as they come; `answer` is what there is so far, final after the last piece.

    Prompt tokens that the engine's cache already holds, in the same order, are not computed again.
    `close` ends the answer early; so does an interrupt.
    """

    def __init__(
        self,
        engine: TextModel,
        tokenizer: TextTokenizer,
        ids: Sequence[int],
        options: AnswerOptions,
        stop_ids: Collection[int],
        *,
        in_reasoning: bool = False,
    ) -> None:
        self._began = time.monotonic()
        self._prompt_tokens = len(ids)
        self._reused = _keep_common(engine, ids)
        self._run = engine.generate(
            ids[self._reused :], options.sampling, options.max_tokens, stop_ids
        )
        self._ids: list[int] = []
        self._first_token_s = 0.0
        self._total_s = 0.0
        self._kept: list[TextPiece] = []
        self._stops = StopStrings(options.stop)
        tags = [tokenizer.id(tag) for tag in THINK]
        self._detokenizer = Detokenizer(tokenizer, keep=[tag for tag in tags if tag is not None])
        self._splitter = ReasoningSplitter(open_at_start=in_reasoning)
        self._pieces = self._stream()

    def __next__(self) -> TextPiece:
        piece = next(self._pieces)
        self._kept.append(piece)
        return piece

    def close(self) -> None:
        """End the answer here."""
        self._run.close()
        self._pieces.close()

    @property
    def answer(self) -> Answer:
        """The answer so far; its finish_reason is "cancelled" unless it came to its end."""
        stopped = self._stops.found is not None
        return Answer(
            text="".join(piece.text for piece in self._kept if not piece.reasoning),
            reasoning="".join(piece.text for piece in self._kept if piece.reasoning),
            token_ids=tuple(self._ids),
            finish_reason="stop" if stopped else self._run.finish_reason or "cancelled",
            stop_string=self._stops.found,
            seed=self._run.seed,
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused,
            first_token_s=self._first_token_s,
            total_s=self._total_s,
        )

    def _stream(self) -> Generator[TextPiece, None, None]:
        for id_ in self._run:
            self._total_s = time.monotonic() - self._began
            if not self._ids:
                self._first_token_s = self._total_s
            self._ids.append(id_)
            yield from self._splitter.push(self._stops.push(self._detokenizer.push(id_)))
            if self._stops.found is not None:
                self._run.close()
                break
        self._total_s = time.monotonic() - self._began
        rest = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        yield from self._splitter.push(rest)
        yield from self._splitter.flush()
        answer = self.answer
        _log.info(
            "%d prompt tokens (%d reused, %.0f/s), %d answer tokens (%.1f/s), ended by %s",
            *(answer.prompt_tokens, answer.reused_tokens, answer.prompt_tokens_per_s),
            *(len(answer.token_ids), answer.tokens_per_s, answer.finish_reason),
        )


def _keep_common(engine: TextModel, ids: Sequence[int]) -> int:
    """Take the engine's cache back to what it has in common with `ids`; gives that length.

    At least one token is left to feed, for the logits to come from.
    """
    held = engine.tokens
    common = 0
    limit = min(len(held), len(ids) - 1)
    while common < limit and held[common] == ids[common]:
        common += 1
    if common <= 0:
        engine.reset()
        return 0
    if common < len(held):
        try:
            engine.rewind(common)
        except UsageError:
            # A quantized cache cannot go back.
            engine.reset()
            return 0
    return common


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
        stop_ids: Collection[int] = (),
        system: str | None = None,
        options: AnswerOptions | None = None,
        variables: Mapping[str, Any] | None = None,
        allow_special: bool = False,
    ) -> None:
        """
        template: None for a model without one; then only `complete` works.
        variables: names for the template, such as `enable_thinking`.
        allow_special: let control tokens in the messages steer the model.
        """
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
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

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The prompt for a dialogue; raises TemplateError where the model has no template."""
        if self.template is None:
            raise TemplateError(
                "This model has no chat template, so it cannot hold a dialogue.",
                "Let it continue a text instead: mnnsmith run DIR --raw -p TEXT",
            )
        return encode_chat(
            self.template,
            self.tokenizer,
            messages,
            allow_special=self.allow_special,
            variables=self.variables,
        )

    def reply(self, messages: Sequence[Message]) -> Reply:
        """Answer a dialogue that the caller keeps; the session's own history is not used."""
        prompt = self.prompt(messages)
        return self._reply(prompt.ids, in_reasoning=prompt.text.rstrip().endswith(THINK[0]))

    def complete(self, text: str) -> Reply:
        """Continue a text, without a template."""
        ids = self.tokenizer.encode(text, add_special_tokens=True, allow_special=self.allow_special)
        return self._reply(ids)

    def ask(self, text: str) -> Generator[Event, None, None]:
        """Put a question into the dialogue and answer it: text pieces, then one `Answer`."""
        self.messages.append({"role": "user", "content": text})
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

    def _reply(self, ids: Sequence[int], *, in_reasoning: bool = False) -> Reply:
        if not ids:
            raise UsageError(
                "The prompt is empty, and this model has no token to begin a text with.",
                "Give a text with -p TEXT, or on standard input.",
            )
        if len(ids) >= self.engine.context_limit:
            raise ContextLengthError(
                f"The prompt has {len(ids)} tokens; the context of this bundle holds "
                f"{self.engine.context_limit}, the answer included.",
                "Shorten the prompt or the dialogue, or convert with a larger --max-context.",
            )
        return Reply(
            self.engine,
            self.tokenizer,
            ids,
            self.options,
            self.stop_ids,
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
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=1) as background:
        # The engine loads in a process of its own; meanwhile the tokenizer is read here.
        text = background.submit(_open_text, opened)
        engine = Engine(opened.path, threads=threads, memory=memory, precision=precision)
        try:
            tokenizer, template = text.result()
        except BaseException:
            engine.close()
            raise
    _log.info("loaded %s in %.2f s", opened.path, time.monotonic() - began)
    return ChatSession(
        engine,
        tokenizer,
        template,
        stop_ids=opened.stop_ids,
        system=system,
        options=options,
        variables=variables,
        allow_special=allow_special,
    )
