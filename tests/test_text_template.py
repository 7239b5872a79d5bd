"""Chat templates: rendering equals transformers', and a hostile template is stopped."""

from __future__ import annotations

import gc
import os
import time
from datetime import datetime
from typing import Any

import psutil
import pytest
from tests.text_samples import (
    DIALOGUES,
    SYSTEM,
    TEMPLATES,
    TOOLS,
    USER,
    byte_level_json,
    template_source,
)

from mnnsmith.errors import TemplateError, UsageError
from mnnsmith.text.template import MAX_SOURCE_CHARS, ChatTemplate

NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


@pytest.mark.reference
@pytest.mark.parametrize("name", NAMES)
def test_rendering_equals_transformers(name: str) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokens = {"bos_token": "<|begin|>", "eos_token": "<｜end▁of▁sentence｜>"}
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level_json()),
        chat_template=template_source(name),
        **tokens,
    )
    rendered = 0
    with ChatTemplate(template_source(name), **tokens) as ours:
        for title, messages in DIALOGUES.items():
            for variables in ({}, {"enable_thinking": False}, {"tools": TOOLS}):
                for prompt in (True, False):
                    try:
                        expected = theirs.apply_chat_template(
                            messages, tokenize=False, add_generation_prompt=prompt, **variables
                        )
                    except Exception:  # noqa: BLE001 - templates refuse with any exception
                        with pytest.raises(TemplateError):
                            ours.render(messages, prompt, **variables)
                        continue
                    found = ours.render(messages, prompt, **variables)
                    assert found == expected, (title, variables, prompt)
                    rendered += 1
    # Every template takes most dialogues: two refusals for every rendering would be a broken test.
    assert rendered >= 30


def test_known_renderings() -> None:
    def render(name: str, title: str, **variables: Any) -> str:
        with ChatTemplate(template_source(name), "<s>", "</s>") as template:
            return template.render(DIALOGUES[title], **variables)

    assert render("smollm2", "system") == (
        "<|im_start|>system\nBe short.<|im_end|>\n"
        "<|im_start|>user\n What is the capital of France? <|im_end|>\n<|im_start|>assistant\n"
    )
    assert render("mistral", "multi") == (
        "<s>[INST]  What is the capital of France? [/INST] Paris.</s>"
        "[INST] And of <Italy> & 'Spain'?\n\n[/INST]"
    )
    assert render("gemma3", "system") == (
        "<s><start_of_turn>user\nBe short.\n\nWhat is the capital of France?<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    assert render("deepseek_r1_distill", "single") == (
        "<s><｜User｜> What is the capital of France? <｜Assistant｜><think>\n"
    )
    assert render("qwen3", "single", enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    today = datetime.now().strftime("%d %b %Y")
    assert f"Today Date: {today}\n" in render("llama3", "single")
    assert "Today Date: 1 Jan 2000\n" in render("llama3", "single", date_string="1 Jan 2000")


def test_a_refusal_shows_the_templates_own_words() -> None:
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('No system!') }}{% endif %}ok"
    with ChatTemplate(source) as template:
        with pytest.raises(TemplateError, match=r"refuses this dialogue: No system!"):
            template.render([USER])
        assert template.render([SYSTEM]) == "ok"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% if %}", "line 2"),
        ("a\nb\n{{ 'x' | nofilter }}", "line 3.*nofilter"),
        ("\n{% macro f(x) %}\n{{ x.y.z }}\n{% endmacro %}\n{{ f(1) }}", "line 3"),
        ("\n\n{{ missing.field.of }}", "line 3.*missing"),
        ("{% include 'other' %}", "loader"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{% for a in b %}" * 25 + "{% endfor %}" * 25, "nested"),
        ("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", "deeply"),
    ],
)
def test_an_error_names_the_line(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ dict.__class__.x }}",
        "{{ (messages | attr('__class__')).x }}",
        "{{ '{0.__class__.x}'.format(1) }}",
    ],
)
def test_a_template_cannot_reach_python(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render([USER])


HOSTILE = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a' * (messages | length * 10**10) }}",
    "{{ messages * 10**10 }}",
    "{{ 7 ** (messages | length * 10**9) }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '{:99999999999}'.format(1) }}",
    "{{ 'a' | center(10**11) }}",
    "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{{ lipsum(n=10**9) }}",
    "{{ 1 | round(10**9, 'ceil') }}",
    "{{ range(99999) | list | tojson(indent=10**6) }}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_is_stopped(source: str) -> None:
    began, held = time.monotonic(), psutil.Process().memory_info().rss
    with pytest.raises(TemplateError):
        ChatTemplate(source, time_limit_s=0.5).render([USER])
    # Bounded, that is: the limit is half a second, and a busy machine may be slow.
    assert time.monotonic() - began < 60
    # The child's memory was its own.
    assert psutil.Process().memory_info().rss - held < 256 << 20


def test_a_template_renders_again_after_it_was_stopped() -> None:
    source = "{% if slow %}{{ lipsum(n=10**9) }}{% endif %}{{ messages[0].content }}"
    with ChatTemplate(source, time_limit_s=0.5) as template:
        with pytest.raises(TemplateError, match="did not finish"):
            template.render([USER], slow=True)
        assert template.render([USER]) == USER["content"]


def test_output_is_bounded() -> None:
    with pytest.raises(TemplateError, match="longer than"):
        ChatTemplate("{% for i in range(50) %}{{ 'a' * 10**6 }}{% endfor %}").render([USER])


def test_a_huge_source_is_refused() -> None:
    with pytest.raises(TemplateError, match="characters"):
        ChatTemplate("a" * (MAX_SOURCE_CHARS + 1))


def test_an_empty_dialogue_is_refused() -> None:
    with ChatTemplate("x") as template, pytest.raises(UsageError, match="empty"):
        template.render([])


def test_values_of_other_types_are_inert() -> None:
    class Image:
        def save(self) -> str:
            return "written"

    with ChatTemplate("{{ messages[0].image }}") as template:
        assert template.render([{"role": "user", "image": Image()}]) == "<Image>"
    loop: list[Any] = []
    loop.append(loop)
    with ChatTemplate("x") as template, pytest.raises(UsageError, match="nested"):
        template.render([{"role": "user", "content": loop}])


def test_every_character_passes() -> None:
    text = "".join(map(chr, range(0x2100))) + "\ud83d 😀 \U000f0000"
    with ChatTemplate("{{ messages[0].content }}") as template:
        assert template.render([{"role": "user", "content": text}]) == text


def test_no_process_is_left_behind() -> None:
    def children() -> int:
        return len(psutil.Process(os.getpid()).children())

    before = children()
    template = ChatTemplate("x")
    assert children() == before + 1
    template.close()
    assert children() == before
    assert template.render([USER]) == "x"
    del template
    gc.collect()
    assert children() == before


def test_literal_text_holds_what_the_template_writes() -> None:
    with ChatTemplate(template_source("qwen3")) as template:
        assert "<|im_start|>" in template.literal_text and "</think>" in template.literal_text
    # A comment is not written.
    with ChatTemplate("{# <|im_end|> #}a") as template:
        assert "<|im_end|>" not in template.literal_text
