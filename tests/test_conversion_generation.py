"""`generation_config.json` read as transformers reads it, and what the engine is then told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_checkpoint as tiny
from mnnsmith.api import convert, prepare
from mnnsmith.bundle import open_bundle
from mnnsmith.conversion.generation import recommended_sampling
from mnnsmith.engine import SamplingOptions
from mnnsmith.errors import SourceError
from mnnsmith.mnn.config_files import run_config


def read(**generation: Any) -> dict[str, Any]:
    return recommended_sampling(generation, "here").values


def config(**generation: Any) -> dict[str, Any]:
    made = run_config(read(**generation), blockwise=True, float16=True)
    return {key: made[key] for key in ("sampler_type", "mixed_samplers") if key in made}


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        # Without do_sample, transformers ignores all but the penalties.
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, {}),
        ({"do_sample": False, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True, "top_k": 0}, {"temperature": 1.0}),
        ({"do_sample": True, "top_k": None, "temperature": None}, {"temperature": 1.0,
                                                                  "top_k": 50}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20.0, "min_p": 0.1,
          "repetition_penalty": 1.05},
         {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1,
          "repetition_penalty": 1.05}),
        ({"do_sample": True, "temperature": 0, "repetition_penalty": 1.2},
         {"repetition_penalty": 1.2}),
        ({"do_sample": True, "top_k": 1 << 40}, {"temperature": 1.0, "top_k": 1 << 20}),
    ],
)  # fmt: skip
def test_as_transformers_reads_it(generation: dict[str, Any], expected: dict[str, Any]) -> None:
    found = read(**generation)
    assert found == expected and {k: type(v) for k, v in found.items() if k == "top_k"} == {
        k: int for k in found if k == "top_k"
    }
    SamplingOptions(**found)


@pytest.mark.reference
def test_the_defaults_are_those_of_transformers() -> None:
    from transformers import GenerationConfig

    given = GenerationConfig._get_default_generation_params()
    options = SamplingOptions(**read(do_sample=True))
    assert (options.temperature, options.top_k, options.top_p, options.repetition_penalty) == (
        given["temperature"], given["top_k"], given["top_p"], given["repetition_penalty"],
    )  # fmt: skip


def test_the_engine_reads_the_same_from_its_config() -> None:
    assert config() == {"sampler_type": "greedy"}
    assert config(repetition_penalty=1.3) == {
        "sampler_type": "mixed", "mixed_samplers": ["penalty", "greedy"]
    }  # fmt: skip
    assert config(do_sample=True) == {
        "sampler_type": "mixed", "mixed_samplers": ["topK", "temperature"]
    }  # fmt: skip
    assert config(do_sample=True, top_k=0, top_p=0.9, repetition_penalty=1.1) == {
        "sampler_type": "mixed", "mixed_samplers": ["penalty", "topP", "temperature"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [("top_p", 0), ("top_p", 1.5), ("temperature", -1), ("temperature", float("nan")),
     ("temperature", 10**400), ("top_k", -1), ("top_k", 2.5), ("top_k", "40"), ("min_p", 2),
     ("repetition_penalty", 0), ("repetition_penalty", True), ("top_p", [0.9])],
)  # fmt: skip
def test_what_the_options_do_not_take_is_refused_here(key: str, value: Any) -> None:
    with pytest.raises(SourceError, match=f"here: generation_config.json: {key}"):
        read(do_sample=True, **{key: value})
    with pytest.raises(SourceError, match="do_sample must be true or false"):
        read(do_sample="yes")


def test_what_has_no_effect_is_noted() -> None:
    off = {"typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": None, "num_beams": 1,
           "min_length": 0, "bad_words_ids": []}  # fmt: skip
    assert recommended_sampling({"do_sample": True, **off}, "here").notes == ()
    on = {"typical_p": 0.9, "no_repeat_ngram_size": 3, "suppress_tokens": [5]}
    (note,) = recommended_sampling({"do_sample": True, **on}, "here").notes
    assert note.endswith(": typical_p, no_repeat_ngram_size, suppress_tokens")
    (note,) = recommended_sampling(on, "here").notes
    assert note.endswith(": no_repeat_ngram_size, suppress_tokens")


@pytest.mark.engine
def test_it_reaches_the_bundle(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.write_checkpoint(model)
    tiny.write_json(model / "generation_config.json", {
        "repetition_penalty": 1.3, "no_repeat_ngram_size": 2,
    })  # fmt: skip
    bundle = convert(model, tmp_path / "out", recipe="w8g32")
    assert bundle.manifest.generation == {"repetition_penalty": 1.3}
    made = json.loads((tmp_path / "out/config.json").read_text())
    assert made["repetition_penalty"] == 1.3 and made["mixed_samplers"] == ["penalty", "greedy"]
    assert any("no_repeat_ngram_size" in note for note in bundle.manifest.data["notes"])
    tiny.write_json(model / "generation_config.json", {"do_sample": True, "top_p": 0})
    with pytest.raises(SourceError, match="top_p"):
        prepare(model)


@pytest.mark.engine
def test_named_special_tokens_reach_the_template(tmp_path: Path) -> None:
    from mnnsmith.session import open_session

    model = tmp_path / "model"
    tiny.write_checkpoint(model)
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tiny.write_json(model / "tokenizer_config.json", {
        **tokenizer, "chat_template": "{{ unk_token }}|{{ pad_token }}|{{ bos_token }}",
        "unk_token": "<|user|>", "pad_token": {"content": "</s>"},
    })  # fmt: skip
    convert(model, tmp_path / "out", recipe="w8g32")
    assert open_bundle(tmp_path / "out").special_tokens["unk_token"] == "<|user|>"
    with open_session(tmp_path / "out") as session:
        assert session.prompt([{"role": "user", "content": "x"}]).text == "<|user|>|</s>|<s>"
