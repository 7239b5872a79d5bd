"""A bench of deliberate faults: each fails, in the right check, which says where it is.

Weights, numbers and tokens of a bundle are held against the original's, so a fault that is only in
the bundle is named by `weights`, `tokens` or `template`.  What a model file has wrong is the same
in the bundle and in what it is held against; that is for `exact` and `layers`, with a reference
that shares no code with us.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import faults as make
from faults import Fault, Sound, make_faulty, present
from mnnsmith import api
from mnnsmith.errors import SourceError
from mnnsmith.verify.results import CHECKS, Verification
from peaky import CASES, MIXTURES

pytestmark = [pytest.mark.engine, pytest.mark.reference]

_1 = "model.layers.1."
_FEW_BITS = {"name": "few", "default": "w8g32", "rules": [{"layers": [1, 1], "scheme": "w4g32"}]}
# For each check that is to fail, what one of its errors says, place first.
Says = Mapping[str, str]

WEIGHTS: dict[str, tuple[Fault, str]] = {
    "a row of q swapped": (
        Fault("llama", source=make.tensor(_1 + "self_attn.q_proj.weight",
                                          make.rows_swapped(3, 77))),
        r"layer1/attention/q .*2 of 128 rows .*row 3 holds row 77, row 77 holds row 3\.",
    ),
    "a row of down swapped": (
        Fault("llama", "w4g32-head8",
              source=make.tensor(_1 + "mlp.down_proj.weight", make.rows_swapped(3, 77))),
        r"layer1/mlp/down .*row 3 holds row 77",
    ),
    "a row of the embedding swapped": (
        Fault("llama", source=make.tensor("model.embed_tokens.weight", make.rows_swapped(84, 90))),
        r"embedding .*row 84 holds row 90",
    ),
    "a row of a tied embedding swapped": (
        Fault("llama-tied",
              source=make.tensor("model.embed_tokens.weight", make.rows_swapped(84, 90))),
        r"lm_head .*model\.embed_tokens\.weight.*row 84 holds row 90",
    ),
    "a row swapped in fp16": (
        Fault("llama", "fp16",
              source=make.tensor(_1 + "self_attn.o_proj.weight", make.rows_swapped(3, 77))),
        r"layer1/attention/o .*row 3 holds row 77",
    ),
    "a row swapped in the weight file": (
        Fault("llama", bundle=make.stored_rows_swapped("layer0/mlp/up", 5, 6)),
        r"layer0/mlp/up .*row 5 holds row 6",
    ),
    "a head of q permuted": (
        Fault("llama", source=make.tensor(_1 + "self_attn.q_proj.weight", make.heads_swapped(32))),
        r"layer1/attention/q .*64 of 128 rows .*row 0 holds row 32",
    ),
    "the tied head upside down": (
        Fault("llama-tied", source=make.tensor("model.embed_tokens.weight", lambda w: w[::-1])),
        r"lm_head .*384 of 384 rows .*row 0 holds row 383",
    ),
    "scale and zero swapped": (
        Fault("llama", bundle=make.scale_and_zero_swapped("layer1/mlp/gate")),
        r"layer1/mlp/gate .*1 of 192 rows .*the first is row 0",
    ),
    "fewer bits in a layer": (
        Fault("llama", made_by=_FEW_BITS),
        r"layer1/attention/q is stored as w4g32; the recipe asks for w8g32",
    ),
    "fewer bits in a matrix, stored as more": (
        Fault("llama", source=make.tensor(_1 + "mlp.up_proj.weight", make.at_four_bits)),
        r"layer1/mlp/up .*192 of 192 rows .*by up to [89]\.\d+ steps",
    ),
    "embedding block recorded wrongly": (
        Fault("llama", bundle=make.embedding_entry(quant_block=lambda block: block // 2)),
        r"embedding .*383 of 384 rows",
    ),
    "embedding of the head": (
        Fault("llama", bundle=make.embedding_of_the_head),
        r"embedding .*384 of 384 rows",
    ),
    "bias dropped": (
        Fault("llama-bias", source=make.tensor(_1 + "self_attn.q_proj.bias", lambda b: b * 0)),
        r"layer1/attention/q: bias .*128 of 128 values",
    ),
    "gains without the one": (
        Fault("gemma3_text", program=make.gains_without_one),
        r"layer0/attention_norm: gain .*found -0\.09\d*, expected 0\.90",
    ),
    "rope key left interleaved": (
        Fault("deepseek_v3", "w8g32-sym", program=make.rope_key_interleaved),
        r"layer0/attention/k_rope .*14 of 16 rows .*row 66 holds row 65",
    ),
    "experts exchanged": (
        Fault("qwen3_moe", source=make.exchanged(_1 + "mlp.experts.2.down_proj.weight",
                                                 _1 + "mlp.experts.3.down_proj.weight")),
        r"layer1/mlp/expert2/down .*128 of 128 rows",
    ),
    "router bias missing": (
        Fault("deepseek_v3", "w8g32-sym",
              source=make.tensor(_1 + "mlp.gate.e_score_correction_bias", lambda b: b * 0)),
        r"layer1/mlp/router/bias.*8 of 8 values",
    ),
    "epsilon of one norm": (
        Fault("llama", bundle=make.operator("layer1/mlp_norm", lambda m: m.update(epsilon=1e-5))),
        r"layer1/mlp_norm: epsilon is 1e-05, expected 1e-06\.",
    ),
    "epsilon of the last norm": (
        Fault("llama", bundle=make.operator("hidden_states", lambda m: m.update(epsilon=1e-5))),
        r"hidden_states: epsilon is 1e-05, expected 1e-06\.",
    ),
    "attention scale of the graph": (
        Fault("llama",
              bundle=make.operator("layer1/attention/mix", lambda m: m.update(attnScale=0.2))),
        r"layer1/attention/mix: attnScale is 0\.2, expected 0\.176777",
    ),
    "high positions of rope": (
        Fault("llama-long", program=make.high_positions_wrong),
        r"rope/table/cos_high",
    ),
}  # fmt: skip

_FROM_1 = r"differs from position 1 on.*The first token is right"
_ROPE = r"layer 0, attention .*begins at layer0/attention/mix\..*rope"
COMPUTED: dict[str, tuple[Fault, Says]] = {
    "rope base one percent off": (
        Fault("llama", source=make.config(rope_parameters={"rope_theta": 10100.0})),
        {"weights": "rope/table/cos_low", "exact": "attention is not: rope", "layers": _ROPE},
    ),
    "rope stretched, in the model file": (
        Fault("llama", program=make.rope_stretched(1.01), stands=True),
        {"exact": _FROM_1, "layers": _ROPE},
    ),
    "rope stretched by a thousandth, in the model file": (
        Fault("llama", program=make.rope_stretched(1.001), stands=True),
        {"exact": "The first token is right", "layers": _ROPE},
    ),
    "sines of the next position, in the model file": (
        Fault("llama", program=make.sines_of_the_next_position, stands=True),
        {"exact": _FROM_1, "layers": _ROPE},
    ),
    "llama3 factor": (
        Fault("llama-llama3", source=make.config(rope_parameters={"factor": 7.0})),
        {"weights": "rope/table/cos_low", "exact": "attention is not: rope", "layers": _ROPE},
    ),
    "YaRN's factor of rope, in the model file": (
        Fault("llama-yarn", program=make.rope_without_factor, stands=True),
        {"exact": _FROM_1, "layers": _ROPE},
    ),
    "YaRN's factor of attention": (
        Fault("deepseek_v2-yarn", "w8g32-sym", program=make.without_mscale),
        {"weights": r"llm_config\.json.*attn_scale is", "exact": _FROM_1,
         "layers": r"layer 0, attention .*rope .*the scale of attention"},
    ),
    "YaRN's factor of attention, in the model file": (
        Fault("deepseek_v2-yarn", "w8g32-sym", program=make.without_mscale, stands=True),
        {"exact": _FROM_1, "layers": r"layer 0, attention .*rope .*the scale of attention"},
    ),
    "epsilon of every norm": (
        Fault("llama", source=make.config(rms_norm_eps=1e-5)),
        {"weights": r"layer0/attention_norm: epsilon is 1e-05, expected 1e-06 \(and of 6 more",
         "exact": "The first token is wrong already",
         "layers": r"begins at layer0/attention_norm\..*the epsilon of the norm"},
    ),
    "attention scale that the engine reads": (
        Fault("llama", bundle=make.engine_config(
            lambda c: c.update(attn_scale=c["attn_scale"] * 1.1))),
        {"weights": r"llm_config\.json.*attn_scale is 0\.194\d*, expected 0\.176",
         "exact": _FROM_1, "layers": r"begins at layer0/attention/mix\..*the scale of attention"},
    ),
    "gains without the one, in the model file": (
        Fault("gemma3_text", program=make.gains_without_one, stands=True),
        {"exact": "The first token is wrong already",
         "layers": r"begins at layer0/attention_norm\..*the gain of the norm"},
    ),
    "rope key left interleaved, in the model file": (
        Fault("deepseek_v3", "w8g32-sym", program=make.rope_key_interleaved, stands=True),
        {"exact": _FROM_1, "layers": r"layer 0, attention .*rope .*which elements pair up"},
    ),
    "weights of experts normalized or not": (
        Fault("qwen3_moe", source=make.config(norm_topk_prob=False)),
        {"weights": r"layer1/mlp/mixture: reads layer1/mlp/router/top, expected "
                    r"layer1/mlp/router/normalized",
         "exact": "layer1/mlp/router/epsilon", "layers": "layer1/mlp/router/epsilon"},
    ),
    "window one too wide": (
        Fault("mistral-window", bundle=make.engine_config(lambda c: c.update(sliding_window=41))),
        {"weights": r"llm_config\.json.*sliding_window is 41, expected 40",
         "exact": "from position 40 on", "layers": "The first 40 tokens agree, .* window has 40"},
    ),
    "window one too wide, in the model file": (
        Fault("mistral-window", program=make.window_off_by_one, stands=True),
        {"exact": "from position 40 on", "layers": "The first 40 tokens agree.*the mask of"},
    ),
    "another activation, in the model file": (
        Fault("llama", program=make.another_activation, stands=True),
        {"exact": "The first token is wrong already",
         "layers": r"layer 0, mlp .*begins at layer0/mlp/act\..*the activation"},
    ),
    "one token too many after going back": (
        Fault("llama", engine=make.rewind_one_too_few),
        {"exact": r"^reuse.*from position 48 on.*Only going back fails: the KV cache"},
    ),
    "one token too few after going back": (
        Fault("llama", engine=make.rewind_one_too_many),
        {"exact": r"^reuse.*from position 48 on.*Only going back fails"},
    ),
    "later parts overwrite the token before": (
        Fault("llama", engine=make.later_parts_overwrite),
        {"exact": r"^split.*from position 1 on.*positions or masks of later parts",
         "layers": "The tokens before 48 agree, and at 48 a later part of the text was fed"},
    ),
}  # fmt: skip
# The others take minutes together.
QUICK = (
    "rope stretched, in the model file", "epsilon of every norm",
    "YaRN's factor of attention, in the model file", "one token too many after going back",
    "later parts overwrite the token before",
)  # fmt: skip

TEXT: dict[str, tuple[Fault, Says]] = {
    "a newline after the template": (
        Fault("llama", bundle=make.engine_config(
            lambda c: c["jinja"].update(chat_template=c["jinja"]["chat_template"] + "\n"))),
        {"template": r"^llm_config\.json.*the chat template is not the original's"},
    ),
    "a newline after each message": (
        Fault("llama", source=make.template(lambda t: t.replace("'\n'", "'\n\n'"))),
        {"template": r"^llm_config\.json.*20 dialogues differ from transformers"},
    ),
    "a newline in the engine's template": (
        Fault("llama", bundle=make.mtok(chat_template=lambda t: t.replace("'\n'", "'\n\n'"))),
        {"template": r"^tokenizer\.mtok.*the chat template is not the original's"},
    ),
    "the first token doubled": (
        Fault("llama", source=make.template(lambda t: "{{ bos_token }}{{ bos_token }}" + t)),
        {"template": r"^llm_config\.json.*20 dialogues differ from transformers"},
    ),
    "a merge missing for the engine": (
        Fault("llama", bundle=make.mtok_without_merge(5)),
        {"tokens": r"^tokenizer\.mtok.*merges: 1 missing, such as \('a', 'f'\)"},
    ),
    "a merge missing": (
        Fault("llama", source=make.tokenizer(lambda spec: spec["model"]["merges"].pop(5))),
        {"tokens": r"^tokenizer\.json.*merges: 1 missing, such as \['a', 'f'\]"},
    ),
    "no token ends an answer": (
        Fault("llama", bundle=make.manifest(lambda m: m["model"].update(stop_ids=[]))),
        {"tokens": r"^mnnsmith\.json.*tokens that end an answer are \[\], expected \[1\]"},
    ),
    "no token ends an answer for the engine": (
        Fault("llama", bundle=make.mtok(stop_ids=lambda ids: ())),
        {"tokens": r"^tokenizer\.mtok.*stop_ids: 1 missing"},
    ),
    "the engine puts a token first": (
        Fault("llama", bundle=make.mtok(prefix_ids=lambda ids: (0,))),
        {"tokens": r"^tokenizer\.mtok.*prefix_ids: 1 too many"},
    ),
}  # fmt: skip
QUICK_TEXT = (
    "a newline after the template", "a newline after each message",
    "a merge missing for the engine",
)  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    return Sound(tmp_path_factory.mktemp("sound"))


def verified(
    fault: Fault, sound: Sound, folder: Path, checks: tuple[str, ...], reference: str = "auto",
    level: str = "quick",
) -> Verification:  # fmt: skip
    source = sound.source(fault.case)
    bundle = make_faulty(fault, source, lambda: sound.bundle(fault.case, fault.recipe), folder)
    with present(fault):
        return api.verify(
            bundle, source, checks=checks, bisect="layers" in checks, reference=reference,
            level=level, threads=2, recorded=False,
        )  # fmt: skip


def assert_placed(found: Verification, says: Says) -> None:
    """Just these checks fail, and each says where."""
    failed = {check.name: check for check in found.checks if check.status == "failed"}
    assert not found.passed and failed.keys() == says.keys(), failed
    for name, words in says.items():
        errors = [f for f in failed[name].findings if f.severity == "error"]
        told = [f"{f.where} {f.message} {f.hint}" for f in errors]
        assert any(re.search(words, text, re.DOTALL) for text in told), told


def slow_but(quick: tuple[str, ...], names: Mapping[str, object]) -> list[object]:
    marked = [
        pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in names
    ]
    assert set(quick) <= names.keys()
    return list(marked)


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_is_stored_wrongly_is_named(name: str, sound: Sound, tmp_path: Path) -> None:
    fault, words = WEIGHTS[name]
    assert_placed(verified(fault, sound, tmp_path, ("files", "weights")), {"weights": words})


@pytest.mark.parametrize("name", slow_but(QUICK, COMPUTED))
def test_what_is_computed_wrongly_is_placed(name: str, sound: Sound, tmp_path: Path) -> None:
    fault, says = COMPUTED[name]
    assert_placed(verified(fault, sound, tmp_path, ("files", "weights", "exact", "layers")), says)


@pytest.mark.parametrize("name", slow_but(QUICK_TEXT, TEXT))
def test_what_is_wrong_with_text_is_shown(name: str, sound: Sound, tmp_path: Path) -> None:
    fault, says = TEXT[name]
    checks = ("files", "tokens", "template") if name not in QUICK_TEXT else ("files", *says)
    assert_placed(verified(fault, sound, tmp_path, checks), says)


@pytest.mark.slow
def test_positions_beyond_the_low_table_of_rope(sound: Sound, tmp_path: Path) -> None:
    """Level full feeds a small model as many tokens."""
    fault = Fault("llama-long", program=make.high_positions_wrong, stands=True)
    found = verified(fault, sound, tmp_path, ("weights", "exact"), level="full")
    assert_placed(found, {"exact": "4160 tokens of text .*from position 4096 on"})


# ------------------------------------------------------------------ which reference sees what

IN_THE_BUNDLE = (
    "attention scale that the engine reads", "epsilon of every norm", "window one too wide",
    "later parts overwrite the token before", "one token too many after going back",
)  # fmt: skip
IN_THE_MODEL_FILE = tuple(name for name in COMPUTED if name.endswith("in the model file"))


@pytest.mark.parametrize("name", slow_but(IN_THE_BUNDLE[:1], dict.fromkeys(IN_THE_BUNDLE)))
def test_onnx_runtime_sees_faults_of_a_bundle(name: str, sound: Sound, tmp_path: Path) -> None:
    fault, says = COMPUTED[name]
    checks = ("files", "weights", "exact", "layers")
    found = verified(fault, sound, tmp_path, checks, "onnx")
    failed = {check.name for check in found.checks if check.status == "failed"}
    assert failed == says.keys()


@pytest.mark.parametrize("name", slow_but(IN_THE_MODEL_FILE[:1], dict.fromkeys(IN_THE_MODEL_FILE)))
def test_onnx_runtime_shares_faults_of_a_model_file(
    name: str, sound: Sound, tmp_path: Path
) -> None:
    """It computes our own graph: only transformers can tell."""
    found = verified(COMPUTED[name][0], sound, tmp_path, ("weights", "exact", "layers"), "onnx")
    assert found.passed


# ------------------------------------------------------------------ what is no fault


def test_another_order_of_heads_computes_the_same(sound: Sound, tmp_path: Path) -> None:
    """It is not what the original gives, which `weights` says; but nothing is computed wrongly."""
    fault = Fault("llama", "fp16", source=make.groups_permuted(1, 32))
    found = verified(fault, sound, tmp_path, ("files", "weights", "exact", "layers"))
    assert_placed(found, {"weights": r"layer1/attention/v .*row 0 holds row 32"})
    figures = found.figures.layers
    # Held against the original, whose heads are in their order.
    assert figures is not None and min(value.snr_db for value in figures.shipped) > 40


def test_a_shift_of_all_positions_computes_the_same(sound: Sound, tmp_path: Path) -> None:
    fault = Fault("llama", program=make.all_positions_shifted, stands=True)
    assert verified(fault, sound, tmp_path, ("files", "weights", "exact", "layers")).passed


def test_biases_that_a_model_file_forgets_stop_the_conversion(sound: Sound, tmp_path: Path) -> None:
    fault = Fault("llama-bias", source=make.config(attention_bias=False))
    with pytest.raises(SourceError, match=r"self_attn\.\w+_proj\.bias"):
        verified(fault, sound, tmp_path, ("weights",))


SOUND = [
    (name, recipe)
    for name in (*CASES, *MIXTURES)
    for recipe in ("fp16", "w8g64", "w4g32-head8")
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "recipe"), SOUND)
def test_sound_bundles_pass_without_a_word(
    name: str, recipe: str, sound: Sound, tmp_path: Path
) -> None:
    found = verified(Fault(name, recipe), sound, tmp_path, CHECKS)
    loud = [f for check in found.checks for f in check.findings if f.severity != "note"]
    assert found.passed and not loud


# ------------------------------------------------------------------ a real model

SMOLLM2: dict[str, tuple[Fault, Says]] = {
    "a row of q swapped": (
        Fault("", bundle=make.stored_rows_swapped("layer12/attention/q", 3, 77)),
        {"weights": r"layer12/attention/q .*2 of 576 rows .*row 3 holds row 77"},
    ),
    "embedding block recorded wrongly": (
        Fault("", bundle=make.embedding_entry(quant_block=lambda block: block * 2)),
        {"weights": "^embedding .*49152 of 49152 rows|tie_embeddings"},
    ),
    "epsilon of one norm": (
        Fault("", bundle=make.operator("layer12/mlp_norm", lambda m: m.update(epsilon=1e-4))),
        {"weights": r"layer12/mlp_norm: epsilon is 0\.0001, expected 1e-05"},
    ),
    "attention scale that the engine reads": (
        Fault("", bundle=make.engine_config(lambda c: c.update(attn_scale=0.1375))),
        {"weights": r"attn_scale is 0\.1375, expected 0\.125", "exact": "attention is not",
         "layers": r"layer 0, attention .*the scale of attention"},
    ),
    "rope stretched by a thousandth, in the model file": (
        Fault("", program=make.rope_stretched(1.001), stands=True),
        {"exact": "attention is not: rope", "layers": r"layer 0, attention .*rope"},
    ),
    "one token too many after going back": (
        Fault("", engine=make.rewind_one_too_few), {"exact": "Only going back fails"},
    ),
    "a merge missing for the engine": (
        Fault("", bundle=make.mtok_without_merge(5000)),
        {"tokens": r"^tokenizer\.mtok.*merges: 1 missing"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["keep", "w4g32-head8"])
@pytest.mark.parametrize("name", SMOLLM2)
def test_faults_of_smollm2(
    name: str, recipe: str, smollm2_gguf: Path, sound: Sound, tmp_path: Path
) -> None:
    fault = replace(SMOLLM2[name][0], recipe=recipe)
    says = SMOLLM2[name][1]
    bundle = make_faulty(fault, smollm2_gguf, lambda: sound.made_of(smollm2_gguf, recipe), tmp_path)
    with present(fault):
        found = api.verify(
            bundle, smollm2_gguf, checks=("files", *says), bisect="layers" in says, threads=2,
            recorded=False,
        )  # fmt: skip
    assert_placed(found, says)
