"""Inputs that failed for real people: each gives the right value, or a clear error before work.

Some are tested where their part is: chat templates (case 7) in test_sources_chat_template and
test_text_template, streamed emoji (10) in test_text_stream, GGUF (11) in test_gguf*, ends of the
context and prompts (12) in test_engine and test_text_prompt, conversations that must not see each
other (13) in test_engine.  Full disks, kills and interrupts (6) are in test_cases_disk.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import tiny_checkpoint as tiny
import weight_oracle
from mnnsmith.api import Engine, convert, open_bundle, prepare
from mnnsmith.errors import (
    MnnsmithError,
    RecipeError,
    SourceError,
    TokenizerError,
    UnsupportedError,
    UsageError,
)

MAX_ERROR = 1e-3
IDS = [11, 70, 200, 3, 99, 99, 42, 17, 255, 8, 120, 64]


def refused(kind: type[MnnsmithError], model: Path, *parts: object, **options: object) -> str:
    """`prepare` refuses, and the message has every part; returns it."""
    with pytest.raises(kind) as caught:
        prepare(model, **options)  # type: ignore[arg-type]
    for part in parts:
        assert str(part) in str(caught.value), f"{part!r} is not in: {caught.value}"
    return str(caught.value)


def decoded(bundle: Path, model: Path, recipe: str) -> dict[str, np.ndarray]:
    """The tensors of a bundle by their names in the checkpoint, read by the independent decoder."""
    ready = prepare(model, recipe=recipe)
    found = weight_oracle.matrices(bundle)
    tensors = {n: t.rows(0, t.shape[0]) for n, t in ready.checkpoint.tensors.items()}
    for node in ready.model.graph.nodes:
        if node.kind == "linear":
            tensors[node.slots["weight"].tensor] = found[node.name]
    return {**tensors, "model.embed_tokens.weight": found["embedding"]}


def assert_runs_as(bundle: Path, expected: np.ndarray) -> None:
    with Engine(bundle, memory="high", precision="high") as engine:
        got = engine.forward(IDS, all_positions=True)
    error = np.abs(got - expected).max() / expected.std()
    assert error < MAX_ERROR, f"largest error: {error:.3g} of the standard deviation"


# ----------------------------------------------------------------------- 1 and 5: block widths


@pytest.mark.engine
@pytest.mark.parametrize(
    ("hidden", "inner", "recipe", "stored"),
    [
        (576, 192, "w8g128-fit", "w8g64"),
        (576, 192, "w8g64", "w8g64"),
        (96, 160, "w4g64-fit", "w4g32"),
        (96, 160, "w4g32-sym", "w4g32-sym"),
        (128, 256, "w8g128", "w8g128"),
        (40, 56, "w8", "w8"),
    ],
)
def test_case_1_the_block_that_is_recorded_is_the_one_used(
    hidden: int, inner: int, recipe: str, stored: str, tmp_path: Path
) -> None:
    """A tied head, at widths that the block divides or does not."""
    model, bundle = tmp_path / "model", tmp_path / "bundle"
    shape = {"hidden_size": hidden, "intermediate_size": inner, "tie_word_embeddings": True}
    original = tiny.write_checkpoint(model, **shape)
    made = convert(model, bundle, recipe=recipe)
    schemes = {w["tensor"]: w["scheme"] for w in made.manifest.data["weights"].values()}
    assert set(schemes.values()) == {stored}
    notes = [n for n in made.manifest.data["notes"] if "in place of" in n]
    assert bool(notes) == recipe.endswith("-fit")
    tensors = decoded(bundle, model, recipe)
    bits = 4 if "w4" in recipe else 8
    for name in schemes:
        step = np.abs(original[name]).max() * 2 / (2**bits - 1)
        assert np.abs(tensors[name] - original[name]).max() < step
    assert_runs_as(bundle, tiny.logits(tiny.make_config(**shape), tensors, IDS))


@pytest.mark.parametrize(
    ("hidden", "recipe", "parts"),
    [
        (576, "w8g128", ["w8g128 does not fit", "128 does not divide 576", "w8g32, w8g64"]),
        (96, "w4g64", ["w4g64 does not fit", "64 does not divide 96", "w4g32", "w4g64-fit"]),
        (64, "w4g128", ["128 does not divide 64", "w4g32, w4g64"]),
        (64, "w4", ["8 does not divide 36", "fp16"]),
        (576, "w6g64", ["6 bits", "4 or 8", "5 and 6 do not exist"]),
        (576, "w4g48", ["blocks of 48", "32, 64, 128 or 256"]),
        (576, "int4", ["'int4' is not a recipe", "w4g64-head8"]),
    ],
)
def test_cases_1_and_5_blocks_that_do_not_fit(
    hidden: int, recipe: str, parts: list[str], tmp_path: Path
) -> None:
    inner = 36 if recipe == "w4" else 192
    tiny.write_checkpoint(tmp_path, hidden_size=hidden, intermediate_size=inner)
    refused(RecipeError, tmp_path, *parts, recipe=recipe)


# ----------------------------------------------------------------------- 3: unknown models


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "frobnicator"},
        {"model_type": "Llama"},
        {"model_type": "config"},
        {"model_type": "../llama"},
    ],
)
def test_case_3_unknown_architectures_are_named_before_weights_are_read(
    changes: dict[str, object], tmp_path: Path
) -> None:
    """There are no weights and no tokenizer here: whoever looked would complain of that."""
    tiny.write_json(tmp_path / "config.json", tiny.make_config(**changes))
    refused(
        UnsupportedError, tmp_path, repr(changes["model_type"]),
        "Supported are: deepseek_v2, deepseek_v3, gemma3_text, idefics3, llama, mistral, mixtral",
    )  # fmt: skip


def test_case_3_no_model_type(tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path, model_type=None)
    refused(SourceError, tmp_path, "config.json has no model_type")


# ----------------------------------------------------------------------- 4: damage


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny.write_checkpoint(folder)
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    tiny.write_checkpoint(folder, shards=3)
    return folder


SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_case_4_one_tensor_too_many(model: Path) -> None:
    tensors = tiny.make_tensors(tiny.make_config())
    tensors["model.layers.0.mlp.extra.weight"] = np.zeros((4, 4), np.float32)
    tiny.write_weights(model, tensors)
    refused(
        SourceError, model, model, "model type llama",
        "model.layers.0.mlp.extra.weight is not used",
    )  # fmt: skip


def test_case_4_one_tensor_missing(model: Path) -> None:
    tensors = tiny.make_tensors(tiny.make_config())
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    tiny.write_weights(model, tensors)
    refused(SourceError, model, model, "model.layers.0.self_attn.k_proj.weight is missing")


@pytest.mark.parametrize(
    ("name", "shape", "parts"),
    [
        ("model.layers.0.mlp.up_proj.weight", (128, 60), ["[128, 60]", "[at least 128, 64]"]),
        ("model.layers.0.mlp.up_proj.weight", (129, 64), ["[129, 64]", "expected 128 rows"]),
        ("model.layers.0.mlp.up_proj.weight", (127, 64), ["[127, 64]", "expected 128 rows"]),
        ("model.layers.0.mlp.up_proj.weight", (128, 64, 1), ["[128, 64, 1]"]),
        ("model.norm.weight", (63,), ["[63]", "expected 64 rows"]),
        ("model.norm.weight", (), ["model.norm.weight has shape []"]),
        ("lm_head.weight", (0, 64), ["[0, 64]", f"expected {tiny.VOCAB} rows"]),
    ],
)
def test_case_4_a_wrong_shape(
    model: Path, name: str, shape: tuple[int, ...], parts: list[str]
) -> None:
    tensors = tiny.make_tensors(tiny.make_config())
    tensors[name] = np.ones(shape, np.float32)
    tiny.write_weights(model, tensors)
    refused(SourceError, model, model, name, *parts)


def test_case_4_a_missing_shard(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    refused(
        SourceError, sharded, "model.safetensors.index.json", f"{SHARDS[1]} is missing",
        "fetch the missing file",
    )  # fmt: skip


def test_case_4_a_shard_without_what_the_index_says(sharded: Path) -> None:
    shutil.copy(sharded / SHARDS[0], sharded / SHARDS[1])
    refused(SourceError, sharded, SHARDS[1], "which the index places in", SHARDS[0])


def test_case_4_a_tensor_that_no_shard_has(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.7.extra"] = SHARDS[0]
    tiny.write_json(path, index)
    refused(SourceError, sharded, path, "1 tensors are in no shard", "model.layers.7.extra")


def test_case_4_an_index_that_leads_out_of_its_folder(sharded: Path, tmp_path: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    tiny.write_safetensors(tmp_path / "x.safetensors", {"a": np.zeros(1, np.float32)})
    tiny.write_json(path, {"weight_map": {"a": "../x.safetensors"}})
    refused(SourceError, sharded, path, "'../x.safetensors' is not the name of a shard")


@pytest.mark.parametrize("keep", [0.999, 0.5])
def test_case_4_a_truncated_shard(sharded: Path, keep: float) -> None:
    path = sharded / SHARDS[2]
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])
    message = refused(SourceError, sharded, path, "truncated", "download it again")
    assert f"the file at {int(keep * len(data))}" in message, "the actual size"


@pytest.mark.parametrize("size", [0, 5, 60])
def test_case_4_weights_cut_in_the_header(model: Path, size: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(SourceError, model, path, f"{size}")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 2203\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_case_4_a_git_lfs_pointer(model: Path, name: str) -> None:
    (model / name).write_text(POINTER)
    refused(SourceError, model, model / name, "Git LFS pointer", "git lfs pull")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json"])
def test_case_4_a_zero_byte_file(model: Path, name: str) -> None:
    (model / name).write_bytes(b"")
    refused(SourceError, model, model / name, "the file is empty", "Download it again")


@pytest.mark.engine
def test_case_4_a_zero_byte_tokenizer_that_nothing_else_asks_for(
    model: Path, tmp_path: Path
) -> None:
    """Without an end-of-text token nobody looks at it before the engine's tokenizer is made."""
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer.json").write_bytes(b"")
    stages: list[str] = []
    with pytest.raises(TokenizerError, match="empty"):
        convert(model, tmp_path / "out", progress=lambda stage, *_: stages.append(stage))
    assert not stages, "work was begun first"
    assert sorted(os.listdir(tmp_path)) == ["model"]


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_case_4_a_missing_file(model: Path, missing: str) -> None:
    (model / missing).unlink()
    refused(SourceError, model, model, missing)


def test_case_4_pickled_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    refused(
        UnsupportedError, model, "pytorch_model.bin", "loading a pickle runs code",
        "safe_serialization=True",
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["I8", "F64", "I64", "BOOL"])
def test_case_4_weights_of_a_type_that_are_no_weights(model: Path, dtype: str) -> None:
    path = model / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    nbytes = 64 * {"I8": 1, "BOOL": 1}.get(dtype, 8)
    header["model.norm.weight"] = {
        "dtype": dtype, "shape": [64], "data_offsets": [len(data), len(data) + nbytes],
    }  # fmt: skip
    tiny.write_raw_safetensors(path, json.dumps(header).encode(), data + bytes(nbytes))
    refused(UnsupportedError, model, "model.norm.weight", dtype, "F32, F16, BF16")


@pytest.mark.engine
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("recipe", ["fp16", "w4g32"])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_case_4_values_that_are_no_numbers(
    model: Path, tmp_path: Path, name: str, recipe: str, value: float
) -> None:
    tensors = tiny.make_tensors(tiny.make_config())
    tensors[name].flat[5] = value
    tiny.write_weights(model, tensors)
    with pytest.raises(MnnsmithError, match="not finite") as caught:
        convert(model, tmp_path / "out", recipe=recipe)
    assert name in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["model"]


def test_case_4_a_head_that_is_not_tied_after_all(model: Path) -> None:
    tiny.write_json(model / "config.json", tiny.make_config(tie_word_embeddings=True))
    refused(
        SourceError, model, "lm_head.weight differs from model.embed_tokens.weight",
        "tie_word_embeddings to false",
    )  # fmt: skip


def test_case_4_a_head_stored_although_it_is_tied(model: Path) -> None:
    tensors = tiny.make_tensors(tiny.make_config())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tiny.write_weights(model, tensors)
    tiny.write_json(model / "config.json", tiny.make_config(tie_word_embeddings=True))
    assert any("lm_head.weight left out" in note for note in prepare(model).notes)


# ----------------------------------------------------------------------- 6: output paths


@pytest.mark.engine
@pytest.mark.parametrize(
    "name", ["my model", "モデル 🦙 é", "-o", "a*b[c]?", "dots.v1.0", "quote'\" $HOME \\n"]
)
def test_case_6_any_name_will_do(model: Path, tmp_path: Path, name: str) -> None:
    moved = tmp_path / "in" / name
    moved.parent.mkdir()
    model.rename(moved)
    target = tmp_path / "out" / "new" / name
    bundle = convert(moved, target, recipe="fp16")
    assert bundle.path == target and bundle.manifest.data["source"]["name"] == name
    config = tiny.make_config()
    assert_runs_as(target, tiny.logits(config, tiny.make_tensors(config), IDS))
    assert os.listdir(target.parent) == [name], "something was left beside it"


@pytest.mark.engine
def test_case_6_a_name_that_is_no_text(model: Path, tmp_path: Path) -> None:
    """Bytes that are not UTF-8, as old archives unpack them; the engine opens no such path."""
    moved, target = (tmp_path / os.fsdecode(b"caf\xe9" + end) for end in (b"-in", b"-out"))
    model.rename(moved)
    with pytest.raises(UsageError, match="not UTF-8"):
        convert(moved, target, recipe="fp16")
    bundle = convert(moved, tmp_path / "out", recipe="fp16")
    assert bundle.manifest.data["source"]["name"] == "caf\ufffd-in"


@pytest.mark.engine
def test_case_6_an_output_that_exists(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    convert(model, target, recipe="fp16")
    before = {f.name: f.read_bytes() for f in target.iterdir()}
    with pytest.raises(UsageError, match=r"out: exists already.*\n.*--force"):
        convert(model, target, recipe="w8g32")
    assert {f.name: f.read_bytes() for f in target.iterdir()} == before
    assert convert(model, target, recipe="w8g32", force=True).manifest.recipe == "w8g32"
    assert sorted(os.listdir(tmp_path)) == ["model", "out"]


@pytest.mark.engine
def test_case_6_an_output_that_is_a_link(model: Path, tmp_path: Path) -> None:
    """The folder that a link leads to is replaced; the link stays."""
    real, link = tmp_path / "real", tmp_path / "link"
    convert(model, real, recipe="fp16")
    link.symlink_to(real)
    convert(model, link, recipe="w8g32", force=True)
    assert link.is_symlink() and open_bundle(real).manifest.recipe == "w8g32"
    assert sorted(os.listdir(tmp_path)) == ["link", "model", "real"]


def test_case_6_outputs_that_are_never_replaced(model: Path, tmp_path: Path) -> None:
    holiday = tmp_path / "photos"
    holiday.mkdir()
    (holiday / "beach.jpg").write_bytes(b"x")
    file = tmp_path / "file"
    file.write_text("mine")
    for target, part in (
        (holiday, "holds no mnnsmith bundle"),
        (file, "is not a folder"),
        (model, "holds no mnnsmith bundle"),
        (file / "a" / "b", "file is not a folder"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "\0", "null"),
        ("~nobody-of-this-name/x", "home"),
    ):
        with pytest.raises(MnnsmithError, match=part):
            convert(model, target, force=True)
    assert sorted(os.listdir(tmp_path)) == ["file", "model", "photos"]


def test_case_6_an_output_that_holds_the_model(model: Path, tmp_path: Path) -> None:
    """--force would delete what is to be converted."""
    (tmp_path / "mnnsmith.json").write_text("{}")
    with pytest.raises(UsageError, match="which is to be converted") as caught:
        convert(model, tmp_path, force=True)
    assert "would delete it" in str(caught.value).replace("\n", " ")
    assert (model / "config.json").is_file()


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_threads_out_of_range(model: Path, tmp_path: Path, threads: int) -> None:
    with pytest.raises(UsageError, match=f"threads must be from 1 to 1024, not {threads}"):
        convert(model, tmp_path / "out", threads=threads)


# ----------------------------------------------------------------------- 8: special tokens


BARS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")


@pytest.mark.engine
def test_case_8_special_tokens_with_full_width_bars(model: Path, tmp_path: Path) -> None:
    """A distilled reasoning model's tokens reach config, manifest, template and engine whole."""
    tiny.write_tokenizer(model, BARS)
    template = f"{BARS[0]}{{{{ messages[0].content }}}}{BARS[3]}<think>\n"
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    bundle = convert(model, tmp_path / "out", recipe="fp16")
    assert bundle.stop_ids == (1,) and bundle.chat_template == template
    assert (bundle.bos_token, bundle.eos_token) == BARS[:2]
    raw = json.loads((bundle.path / "llm_config.json").read_bytes())["jinja"]
    assert raw == {"chat_template": template, "bos": BARS[0], "eos": BARS[1]}
    text = f"{BARS[2]}hi{BARS[3]}"
    with Engine(bundle.path) as engine:
        ids = engine.engine_tokenize(text)
        assert ids[0] == 2 and ids[-1] == 3 and len(ids) == 4
        assert engine.engine_detokenize(ids).decode() == text


# ----------------------------------------------------------------------- 9: FP8


@pytest.mark.engine
def test_case_9_fp8_with_a_scale_for_each_block(tmp_path: Path) -> None:
    """128x128 blocks at widths of 192 and 320: the last blocks are narrower."""
    model, bundle = tmp_path / "model", tmp_path / "bundle"
    shape = {"hidden_size": 192, "intermediate_size": 320}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    random = np.random.default_rng(5)
    stored, plain = {}, {}
    for name, value in tiny.make_tensors(tiny.make_config(**shape)).items():
        stored[name] = plain[name] = value
        if "proj" in name:
            # Codes of 0.5 to 3.75 and their negatives; scales differ by a factor of 8.
            codes = random.integers(0x30, 0x48, value.shape, dtype=np.uint8)
            codes |= random.integers(0, 2, value.shape, dtype=np.uint8) << 7
            scales = random.uniform(0.01, 0.08, [-(-n // 128) for n in value.shape])
            scales = scales.astype(np.float32).astype(np.float64)
            stored[name], stored[f"{name}_scale_inv"] = codes, scales
            plain[name] = (
                e4m3(codes)
                * np.kron(scales, np.ones((128, 128)))[: value.shape[0], : value.shape[1]]
            )
    tiny.write_checkpoint(model, tensors=stored, quantization_config=quantization, **shape)
    convert(model, bundle, recipe="fp32")
    assert_runs_as(bundle, tiny.logits(tiny.make_config(**shape), plain, IDS))


def e4m3(codes: np.ndarray) -> np.ndarray:
    """The formula, for codes without NaN."""
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3 & 15).astype(int), codes & 7
    assert (exponent > 0).all()
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_case_9_fp8_without_its_scales(tmp_path: Path) -> None:
    tensors = dict(tiny.make_tensors(tiny.make_config()))
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.full((128, 64), 0x38, np.uint8)
    tiny.write_checkpoint(tmp_path, tensors=tensors)
    refused(SourceError, tmp_path, name, "F8_E4M3", "no scale tensor", f"{name}_scale_inv")


# ----------------------------------------------------------------------- 14: LoRA


def test_case_14_an_adapter_is_to_be_merged_first(tmp_path: Path) -> None:
    tiny.write_json(tmp_path / "adapter_config.json", {
        "base_model_name_or_path": "org/base", "peft_type": "LORA", "r": 8,
    })  # fmt: skip
    tiny.write_safetensors(tmp_path / "adapter_model.safetensors", {"a": np.zeros((2, 2))})
    tiny.write_tokenizer(tmp_path)
    refused(
        UnsupportedError, tmp_path, tmp_path, "adapter (LoRA)", "'org/base'", "Merge it first",
        "merge_and_unload",
    )  # fmt: skip


# ----------------------------------------------------------------------- any shape


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("seed", range(24))
def test_odd_shapes(seed: int, tmp_path: Path) -> None:
    """Widths, heads and vocabularies that no vector unit likes."""
    random = np.random.default_rng(seed)

    def pick(*choices: object) -> object:
        return choices[random.integers(len(choices))]

    recipe = pick("fp16", "fp32", "w8", "w4g32", "w8g32-sym", "w4-sym", "w4g32-head8")
    heads, kv_heads = pick((1, 1), (2, 1), (3, 3), (3, 1), (4, 2), (6, 3))
    step = 1 if "fp" in recipe else 32 if "g32" in recipe else 8
    head_dim = pick(2, 4, 6, 10, 34) if step == 1 else step * pick(1, 2)
    shape = {
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "hidden_size": heads * head_dim, "intermediate_size": step * pick(1, 3, 5, 11),
        "vocab_size": pick(260, 261, 263, 1000), "num_hidden_layers": pick(1, 2, 3),
        "max_position_embeddings": pick(16, 20, 5000), "tie_word_embeddings": pick(True, False),
    }  # fmt: skip
    model, bundle = tmp_path / "model", tmp_path / "bundle"
    tiny.write_checkpoint(model, seed=seed, **shape)
    convert(model, bundle, recipe=recipe)
    tensors = decoded(bundle, model, recipe)
    head = weight_oracle.matrices(bundle)["lm_head"]
    assert_runs_as(bundle, tiny.logits(tiny.make_config(**shape), tensors, IDS, head))
