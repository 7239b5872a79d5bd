"""The engine's own chat template code against jinja2, which our run time uses.

An app on a phone that lets the engine render gets what is shown here; docs/tokenizers.md lists it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mnnsmith.api import Bundle, Engine, convert
from mnnsmith.errors import TemplateError
from mnnsmith.text.template import ChatTemplate
from text_samples import DIALOGUES, TEMPLATES, template_source
from tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.engine

FAMILIES = sorted(p.stem for p in TEMPLATES.glob("*.jinja") if p.stem != "exotic")
COMPARED = ("single", "system", "multi", "system multi", "reasoning text", "empty text")


def bundle_with(source: str, folder: Path) -> Bundle:
    checkpoint = folder / "checkpoint"
    write_checkpoint(checkpoint)
    (checkpoint / "chat_template.jinja").write_text(source, encoding="utf-8")
    return convert(checkpoint, folder / "bundle", recipe="fp16")


@pytest.fixture
def ours(request: pytest.FixtureRequest) -> Iterator[ChatTemplate]:
    template = ChatTemplate(template_source(request.param), "<s>", "</s>")
    yield template
    template.close()


@pytest.mark.parametrize(("name", "ours"), [(f, f) for f in FAMILIES], indirect=["ours"])
def test_templates_of_the_families_are_equal(name: str, ours: ChatTemplate, tmp_path: Path) -> None:
    bundle = bundle_with(template_source(name), tmp_path)
    assert bundle.manifest.data["proof"]["engine_template_equal"] is True
    with Engine(bundle.path) as engine:
        for title in COMPARED:
            dialogue = DIALOGUES[title]
            assert engine.engine_apply_template(dialogue) == ours.render(dialogue), title


@pytest.mark.parametrize(("name", "ours"), [("mistral", "mistral")], indirect=["ours"])
def test_the_engine_ignores_a_refusal(name: str, ours: ChatTemplate, tmp_path: Path) -> None:
    """`raise_exception` does nothing there: a dialogue that the model cannot hold goes through."""
    bundle = bundle_with(template_source(name), tmp_path)
    with pytest.raises(TemplateError):
        ours.render(DIALOGUES["two users"])
    with Engine(bundle.path) as engine:
        assert engine.engine_apply_template(DIALOGUES["two users"])


DIFFERENT = {
    "multiplied text": "{{ '=' * 2 }}{{ messages[0]['role'] }}",
    "loop.previtem": "{% for m in messages %}{{ loop.previtem is defined }}{% endfor %}",
    "loop.cycle": "{% for m in messages %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "format": "{{ '%03d' | format(7) }}",
    "unique": "{{ ['a', 'a'] | unique | list | length }}{{ messages[0]['role'] }}",
    "False": "{{ 1 == 2 }}{{ messages[0]['role'] }}",
}


@pytest.mark.parametrize("construct", DIFFERENT)
def test_what_the_engine_renders_differently_is_noted(construct: str, tmp_path: Path) -> None:
    bundle = bundle_with(DIFFERENT[construct], tmp_path)
    assert bundle.manifest.data["proof"]["engine_template_equal"] is False
    assert any("renders this chat template differently" in n for n in bundle.manifest.data["notes"])
