"""The session with a scripted model: history, stops, reasoning, reuse of the cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.text_samples import byte_level_json, template_source

from mnnsmith.engine import SamplingOptions
from mnnsmith.errors import ContextLengthError, TemplateError, UsageError
from mnnsmith.session import Answer, AnswerOptions, ChatSession, open_session
from mnnsmith.text.reasoning import TextPiece
from mnnsmith.text.template import ChatTemplate
from mnnsmith.text.tokenizer import TextTokenizer


class ScriptedRun:
    def __init__(self, model: ScriptedModel, ids: list[int], limit: int | None, stops: set[int]):
        self.model, self.ids, self.limit, self.stops = model, ids, limit, stops
        self.seed, self.finish_reason = 7, None

    def __iter__(self) -> Iterator[int]:
        given = 0
        pending = self.ids
        while self.finish_reason is None:
            if given == self.limit:
                self.finish_reason = "length"
                return
            if len(self.model.tokens) + len(pending) > self.model.context_limit:
                self.finish_reason = "context"
                return
            self.model.tokens += tuple(pending)
            self.model.fed.append(pending)
            if not self.model.script:
                self.finish_reason = "cancelled"
                raise KeyboardInterrupt
            token = self.model.script.pop(0)
            if token in self.stops:
                self.finish_reason = "stop"
                return
            given += 1
            pending = [token]
            yield token

    def close(self) -> None:
        self.finish_reason = self.finish_reason or "cancelled"


class ScriptedModel:
    """Answers with the tokens of `script`; an empty script is an interrupt."""

    def __init__(self, context_limit: int = 4096, can_rewind: bool = True) -> None:
        self.context_limit, self.can_rewind = context_limit, can_rewind
        self.tokens: tuple[int, ...] = ()
        self.pictures: tuple[tuple[int, str], ...] = ()
        self.script: list[int] = []
        self.fed: list[list[int]] = []

    def generate(
        self,
        ids: Sequence[int],
        options: SamplingOptions | None = None,
        max_new_tokens: int | None = None,
        stop_ids: Collection[int] = (),
        *,
        tiles: Any = None,
    ) -> ScriptedRun:
        self.fed = []
        return ScriptedRun(self, list(ids), max_new_tokens, set(stop_ids))

    def rewind(self, position: int) -> None:
        if not self.can_rewind:
            raise UsageError("the cache is quantized")
        assert position <= len(self.tokens)
        self.tokens = self.tokens[:position]

    def reset(self) -> None:
        self.tokens = ()


class Chat:
    """A session over a scripted model."""

    def __init__(self, template: str = "qwen3", **options: Any) -> None:
        self.tokenizer = TextTokenizer(byte_level_json())
        self.model = ScriptedModel(
            options.pop("context_limit", 4096), options.pop("can_rewind", True)
        )
        self.end = self.tokenizer.encode("<|im_end|>", allow_special=True)[0]
        self.session = ChatSession(
            self.model,
            self.tokenizer,
            ChatTemplate(template_source(template)),
            stop_ids=[self.end],
            **options,
        )

    def ask(self, question: str, answer: str) -> Answer:
        self.model.script = [*self.tokenizer.encode(answer, allow_special=True), self.end]
        *pieces, last = self.session.ask(question)
        assert isinstance(last, Answer)
        assert all(isinstance(piece, TextPiece) for piece in pieces)
        assert last.text == "".join(p.text for p in pieces if not p.reasoning)  # type: ignore[union-attr]
        return last


@pytest.fixture
def chat() -> Iterator[Chat]:
    made = Chat()
    yield made
    made.session.close()


def test_an_answer_and_the_history(chat: Chat) -> None:
    first = chat.ask("Hi", "Hello 🤷🏽!")
    assert (first.text, first.reasoning, first.finish_reason) == ("Hello 🤷🏽!", "", "stop")
    assert first.token_ids == tuple(chat.tokenizer.encode("Hello 🤷🏽!"))
    chat.ask("Bye", "See you")
    assert [m["content"] for m in chat.session.messages] == ["Hi", "Hello 🤷🏽!", "Bye", "See you"]
    chat.session.reset()
    assert chat.session.messages == []


def test_the_model_sees_the_rendered_dialogue(chat: Chat) -> None:
    chat.session.system = "Be short."
    chat.ask("Hi", "Hello")
    chat.ask("Bye", "See you")
    seen = chat.tokenizer.decode(chat.model.tokens, skip_special=False)
    assert seen == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\nSee you"
    )


def test_only_what_is_new_is_computed(chat: Chat) -> None:
    first = chat.ask("Hi", "Hello")
    assert first.reused_tokens == 0
    held = len(chat.model.tokens)
    second = chat.ask("Bye", "See you")
    assert second.reused_tokens == held
    assert len(chat.model.fed[0]) == second.prompt_tokens - held
    # Another dialogue shares the beginning only.
    chat.session.reset()
    third = chat.ask("Ho", "Hello")
    assert 0 < third.reused_tokens < first.prompt_tokens
    # The same question again: one token is fed, for its logits.
    chat.session.reset()
    fourth = chat.ask("Ho", "Hello")
    assert fourth.reused_tokens == fourth.prompt_tokens - 1


def test_a_cache_that_cannot_go_back_is_emptied() -> None:
    chat = Chat(can_rewind=False)
    chat.ask("Hi", "Hello")
    chat.session.reset()
    answer = chat.ask("Ho", "Hello")
    assert answer.reused_tokens == 0
    prompt = chat.session.prompt([{"role": "user", "content": "Ho"}])
    assert chat.model.fed[0] == prompt.ids
    chat.session.close()


def test_reasoning_is_told_apart_and_remembered_as_such(chat: Chat) -> None:
    answer = chat.ask("Hi", "<think>\nEasy.\n</think>\n\nHello")
    assert (answer.reasoning, answer.text) == ("Easy.", "Hello")
    assert chat.session.messages[-1] == {
        "role": "assistant",
        "content": "Hello",
        "reasoning_content": "Easy.",
    }
    chat.ask("Bye", "See you")
    # This template drops earlier reasoning.
    assert "Easy." not in chat.tokenizer.decode(chat.model.tokens, skip_special=False)


def test_a_template_that_opens_the_reasoning() -> None:
    chat = Chat("deepseek_r1_distill")
    answer = chat.ask("Hi", "Easy.\n</think>\n\nHello")
    assert (answer.reasoning, answer.text) == ("Easy.", "Hello")
    chat.session.close()


def test_reasoning_switched_off_by_a_variable() -> None:
    chat = Chat(variables={"enable_thinking": False})
    assert chat.ask("Hi", "Hello").text == "Hello"
    assert "<think>\n\n</think>" in chat.tokenizer.decode(chat.model.tokens)
    chat.session.close()


def test_a_stop_string_ends_the_answer() -> None:
    chat = Chat(options=AnswerOptions(stop=("\nUser:",)))
    answer = chat.ask("Hi", "Hello\nUser: again")
    assert (answer.text, answer.finish_reason, answer.stop_string) == ("Hello", "stop", "\nUser:")
    assert chat.model.script, "the rest was not asked for"
    assert chat.session.messages[-1]["content"] == "Hello"
    chat.session.close()


def test_limits_are_reported() -> None:
    chat = Chat(options=AnswerOptions(max_tokens=3))
    answer = chat.ask("Hi", "Hello, hello, hello")
    assert answer.finish_reason == "length" and len(answer.token_ids) == 3
    chat.session.close()
    small = Chat(context_limit=30)
    answer = small.ask("Hi", "Hello, hello, hello")
    assert answer.finish_reason == "context"
    assert answer.prompt_tokens + len(answer.token_ids) == 31
    small.session.close()


def test_a_question_that_does_not_fit_is_taken_back() -> None:
    chat = Chat(context_limit=60)
    with pytest.raises(ContextLengthError, match="60"):
        chat.ask("word " * 200, "x")
    assert chat.session.messages == [] and chat.model.tokens == ()
    assert chat.ask("Hi", "Hello").text == "Hello"
    chat.session.close()


def test_an_interrupted_answer_keeps_its_part(chat: Chat) -> None:
    chat.model.script = chat.tokenizer.encode("Hello")
    with pytest.raises(KeyboardInterrupt):
        list(chat.session.ask("Hi"))
    assert [m["content"] for m in chat.session.messages] == ["Hi", "Hello"]
    assert chat.ask("And?", "Bye").text == "Bye"


def test_an_answer_given_up_keeps_what_was_read(chat: Chat) -> None:
    chat.model.script = chat.tokenizer.encode("a b c d")
    events = chat.session.ask("Hi")
    piece = next(events)
    assert isinstance(piece, TextPiece)
    events.close()
    assert chat.session.messages[-1]["content"] == piece.text


def test_an_interrupt_before_the_first_token_takes_the_question_back(chat: Chat) -> None:
    with pytest.raises(KeyboardInterrupt):
        list(chat.session.ask("Hi"))
    assert chat.session.messages == []


def test_the_system_message_can_be_changed(chat: Chat) -> None:
    chat.session.system = "One"
    chat.ask("Hi", "Hello")
    chat.session.system = "Two"
    assert [m["content"] for m in chat.session.messages] == ["Two", "Hi", "Hello"]
    chat.session.reset()
    assert [m["content"] for m in chat.session.messages] == ["Two"]
    chat.session.system = None
    assert chat.session.messages == []


def test_control_tokens_of_a_user_stay_text_unless_asked() -> None:
    for allow in (False, True):
        chat = Chat(allow_special=allow)
        chat.ask("a<|im_end|>b", "Hello")
        assert chat.model.tokens.count(chat.end) == (2 if allow else 1)
        chat.session.close()


def test_a_refused_dialogue_is_taken_back() -> None:
    chat = Chat("mistral")
    chat.session.messages = [{"role": "user", "content": "one"}]
    with pytest.raises(TemplateError, match="alternate"):
        list(chat.session.ask("two"))
    assert len(chat.session.messages) == 1
    chat.session.close()


def test_without_a_template_only_texts_are_continued() -> None:
    tokenizer = TextTokenizer(byte_level_json())
    model = ScriptedModel()
    session = ChatSession(model, tokenizer, None, options=AnswerOptions(max_tokens=2))
    with pytest.raises(TemplateError, match="no chat template"):
        list(session.ask("Hi"))
    assert session.messages == []
    model.script = tokenizer.encode(" of the end")
    reply = session.complete("The end")
    text = "".join(piece.text for piece in reply)
    assert reply.answer.text == text and reply.answer.finish_reason == "length"
    assert model.tokens[: reply.answer.prompt_tokens] == tuple(tokenizer.encode("The end"))
    with pytest.raises(UsageError, match="empty"):
        session.complete("")


@pytest.mark.engine
def test_a_real_bundle(tmp_path: Path) -> None:
    from mnnsmith.conversion.convert import convert
    from mnnsmith.selftest import write_tiny_checkpoint

    write_tiny_checkpoint(tmp_path / "model")
    template = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    bundle = convert(tmp_path / "model", tmp_path / "bundle")
    options = AnswerOptions(max_tokens=8, stop=("hi",))
    with open_session(bundle, options=options) as session:
        *_, answer = session.ask("abc")
        assert isinstance(answer, Answer)
        assert (answer.text, answer.stop_string) == ("defg", "hi")
        *_, second = session.ask("wxyz")
        assert isinstance(second, Answer)
        assert second.text.startswith("{|}") and second.reused_tokens > 0
        # The cache is right after going back: the same dialogue anew gives the same tokens.
        session.reset()
        session.engine.reset()
        again = [list(session.ask(text))[-1] for text in ("abc", "wxyz")]
        assert [a.token_ids for a in again] == [answer.token_ids, second.token_ids]  # type: ignore[union-attr]
