"""A chat template that makes other prompts than the original's is caught and shown."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mnnsmith.conversion.convert import convert
from mnnsmith.verify.checks.template import check_template
from mnnsmith.verify.results import Finding, Outcome, TextFigures
from mnnsmith.verify.texts.dialogues import DIALOGUES
from text_samples import template_source
from verify_samples import RECIPE, change_json, change_mtok, context, edit_json, write_model

pytestmark = pytest.mark.engine

SMOLLM2 = template_source("smollm2")
# Refuses system messages, as Gemma 2 and Mistral do.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
PLAIN = STRICT.replace("{{ raise_exception('no system') }}", "")


def made(folder: Path, template: str | None) -> tuple[Path, Path]:
    write_model(folder / "model", template=template)
    return folder / "model", convert(folder / "model", folder / "bundle", recipe=RECIPE).path


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return made(tmp_path_factory.mktemp("template"), SMOLLM2)


@pytest.fixture
def bundle(smollm2: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(smollm2[1], tmp_path / "bundle"))


def errors(outcome: Outcome[TextFigures]) -> list[Finding]:
    return [finding for finding in outcome.findings if finding.severity == "error"]


def set_template(bundle: Path, text: str) -> None:
    """In both files: our run time and the engine read the one, the engine may read the other."""
    change_json(bundle / "llm_config.json", lambda c: c["jinja"].update(chat_template=text))
    change_mtok(bundle, lambda mtok: replace(mtok, chat_template=text))


def test_a_right_template_passes(smollm2: tuple[Path, Path]) -> None:
    found = check_template(context(smollm2[1], smollm2[0]))
    assert found.findings == ()
    assert found.figures == TextFigures(len(DIALOGUES), 0, 0)
    assert len(DIALOGUES) == len({dialogue.name for dialogue in DIALOGUES}) == 20
    assert sum(dialogue.plain for dialogue in DIALOGUES) == 17
    assert check_template(context(smollm2[1], None)).findings == ()


def test_one_newline_too_many(smollm2: tuple[Path, Path], bundle: Path) -> None:
    assert SMOLLM2.count("<|im_start|>assistant\n") == 1
    set_template(bundle, SMOLLM2.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n\n"))
    found = check_template(context(bundle, smollm2[0]))
    # Where the answer is begun, which one dialogue does not ask for.
    assert found.figures.different == len(DIALOGUES) - 1
    assert found.figures.engine_different == 17
    rendered = next(f for f in errors(found) if "dialogues differ from" in f.message)
    assert "one question:\n" in rendered.message
    assert "\n+'\\n'" in rendered.message
    assert len(rendered.message) < 2000
    sources = {f.where for f in errors(found) if "the chat template is not" in f.message}
    assert sources == {"llm_config.json", "tokenizer.mtok"}
    assert "the engine's own template code" in {f.where for f in errors(found)}


def test_a_space_in_the_engines_file_alone(smollm2: tuple[Path, Path], bundle: Path) -> None:
    change_mtok(bundle, lambda mtok: replace(mtok, chat_template=SMOLLM2 + " "))
    found = check_template(context(bundle, smollm2[0]))
    (finding,) = errors(found)
    assert finding.where == "tokenizer.mtok" and found.figures.different == 0


def test_a_token_that_the_template_names(tmp_path: Path) -> None:
    model, bundle = made(tmp_path, "{{ eos_token }}" + PLAIN)
    assert check_template(context(bundle, model)).findings == ()
    change_json(bundle / "llm_config.json", lambda c: c["jinja"].update(eos="<|im_start|>"))
    found = check_template(context(bundle, model))
    assert found.figures.different == 0 and found.figures.engine_different > 0
    assert {f.where for f in errors(found)} == {"llm_config.json", "the engine's own template code"}
    change_json(bundle / "mnnsmith.json", lambda m: m["tokens"].update(eos="<|im_start|>"))
    assert check_template(context(bundle, model)).figures.different == len(DIALOGUES)


def test_what_is_refused_must_be_refused(tmp_path: Path) -> None:
    model, bundle = made(tmp_path, STRICT)
    found = check_template(context(bundle, model))
    # The engine ignores it, and cannot do better.
    assert errors(found) == [] and found.figures.different == 0
    (finding,) = found.findings
    assert finding.severity == "warning"
    assert "system message: is rendered, the original's template refuses it" in finding.message
    assert found.figures.engine_different == 4

    set_template(bundle, PLAIN)
    found = check_template(context(bundle, model))
    refused = sum(any(m["role"] == "system" for m in d.messages) for d in DIALOGUES)
    assert found.figures.different == refused == 4
    assert any("is rendered, " in f.message and "refuses it" in f.message for f in errors(found))


def test_what_is_rendered_must_not_be_refused(tmp_path: Path) -> None:
    model, bundle = made(tmp_path, PLAIN)
    set_template(bundle, STRICT)
    found = check_template(context(bundle, model))
    assert found.figures.different == 4
    assert any("is refused, " in f.message and "renders it" in f.message for f in errors(found))


def test_a_template_on_one_side_only(tmp_path: Path, smollm2: tuple[Path, Path]) -> None:
    model, bundle = made(tmp_path, None)
    assert check_template(context(bundle, model)).findings == ()
    assert check_template(context(bundle, model)).figures == TextFigures(0, 0, 0)
    (finding,) = errors(check_template(context(bundle, smollm2[0])))
    assert finding.message == "only the original has a chat template."
    (finding,) = errors(check_template(context(smollm2[1], model)))
    assert finding.message == "only the bundle has a chat template."


def test_a_first_token_that_the_engine_writes_by_its_id(tmp_path: Path) -> None:
    """The file then holds no text for it, and the template prints nothing: no difference."""
    model = tmp_path / "model"
    write_model(model, template="{{ bos_token }}" + PLAIN)
    prefix = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
              {"Sequence": {"id": "A", "type_id": 0}}]  # fmt: skip
    tokens = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}

    def post(spec: dict[str, Any]) -> None:
        spec["post_processor"] = {
            "type": "TemplateProcessing", "single": prefix, "pair": prefix, "special_tokens": tokens
        }  # fmt: skip

    edit_json(model / "tokenizer.json", post)
    edit_json(model / "tokenizer_config.json", lambda c: c.update(bos_token="<|endoftext|>"))
    bundle = convert(model, tmp_path / "bundle", recipe=RECIPE).path
    found = check_template(context(bundle, model))
    assert errors(found) == []
    assert found.figures.engine_different == 0
