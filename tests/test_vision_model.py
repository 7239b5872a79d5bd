"""SmolVLM and Idefics3 against transformers: the tower by layer, the connector, and the logits."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import weight_oracle
from exact import log_softmax
from mnn_module import run_module
from mnnsmith.api import Bundle, Engine, convert, inspect, prepare
from mnnsmith.conversion.plan import make_plan
from mnnsmith.conversion.stream import read_vector, write_weights
from mnnsmith.engine.converter import graph_json_to_mnn
from mnnsmith.errors import (
    EngineError,
    MnnsmithError,
    RecipeError,
    SourceError,
    UnsupportedError,
    UsageError,
)
from mnnsmith.graph.weights import MatrixSlot
from mnnsmith.mnn.graph_json import Weights, graph_json
from mnnsmith.quant.recipe import parse_recipe_name
from smolvlm_checkpoint import IMAGE_ID, SMALL_VOCAB, write_small

# Of the values' norm; and in nats.
MAX_ERROR, MAX_KL = 1e-5, 1e-6
# As SmolVLM-256M, Idefics3-8B and SmolVLM-2.2B relate tile, patch and scale.  The last tile is
# no multiple of its patch, and its heads are as wide as SmolVLM-2.2B's, unlike the text's.
SHAPES: dict[str, dict[str, Any]] = {
    "smolvlm-512": {"image_size": 128, "patch_size": 16, "scale_factor": 4},
    "idefics3-364": {"image_size": 56, "patch_size": 14, "scale_factor": 2},
    "smolvlm-384": {
        "image_size": 90, "patch_size": 14, "scale_factor": 3, "hidden_size": 144,
        "num_attention_heads": 2,
    },
}  # fmt: skip


@dataclass
class Case:
    """A checkpoint, its bundle at fp16 (which holds every weight exactly), and transformers'."""

    folder: Path
    bundle: Bundle
    model: Any
    tile: int
    tile_tokens: int

    def tiles(self, count: int) -> np.ndarray:
        """uint8 [count, S, S, 3]: blots of color, and grain, another in every tile."""
        random = np.random.default_rng([count, self.tile])
        cells = random.integers(0, 256, (count, 8, 8, 3))
        size = -(-self.tile // 8)
        blots = cells.repeat(size, 1).repeat(size, 2)[:, : self.tile, : self.tile]
        return (0.7 * blots + random.integers(0, 77, blots.shape)).astype(np.uint8)

    def prompt(self, tiles: int, text: int = 9) -> list[int]:
        """Text, then a tile and text after it, for each tile."""
        random = np.random.default_rng(tiles)
        ids = random.integers(30, SMALL_VOCAB, text).tolist()
        for _ in range(tiles):
            ids += [IMAGE_ID] * self.tile_tokens + random.integers(30, SMALL_VOCAB, 5).tolist()
        return ids

    def logits(self, ids: list[int], tiles: np.ndarray) -> np.ndarray:
        """transformers', float64 [len(ids), vocab]."""
        import torch

        pixels = torch.from_numpy(normalized(tiles))[None]
        with torch.no_grad():
            out = self.model(input_ids=torch.tensor([ids]), pixel_values=pixels)
        return out.logits[0].double().numpy()


def normalized(tiles: np.ndarray) -> np.ndarray:
    """float32 [n, 3, S, S] from -1 to 1."""
    values = (tiles.astype(np.float64) / 255).astype(np.float32)
    return np.ascontiguousarray(((values - 0.5) / 0.5).transpose(0, 3, 1, 2))


def kl(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    p, q = log_softmax(expected), log_softmax(actual.astype(np.float64))
    return (np.exp(p) * (p - q)).sum(-1)


@pytest.fixture(scope="module", params=list(SHAPES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    import torch
    from transformers import AutoModelForImageTextToText

    folder = tmp_path_factory.mktemp(request.param)
    family = request.param.split("-")[0]
    write_small(folder / "model", family, **SHAPES[request.param])
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    bundle = convert(folder / "model", folder / "bundle", recipe="fp16")
    facts = bundle.manifest.model["vision"]
    return Case(
        folder / "model", bundle, model.eval(), int(facts["tile"]), int(facts["tile_tokens"])
    )


@pytest.mark.engine
@pytest.mark.reference
@pytest.mark.parametrize("count", [1, 4])
def test_every_value_of_the_tower_is_that_of_transformers(
    case: Case, count: int, tmp_path: Path
) -> None:
    import torch

    ready = prepare(case.folder, recipe="fp16")
    assert ready.model.vision is not None and ready.plan.vision is not None
    g = ready.model.vision.graph
    side = case.model.config.vision_config.image_size // case.model.config.vision_config.patch_size
    wanted = {}
    for i, mark in enumerate(g.landmarks):
        shape = [side**2, "tiles", mark.value.shape[1]]
        g.mark_output(g.from_channels(mark.value, shape, f"seen{i}"))
        wanted[f"seen{i}"] = mark.module
    assert len(wanted) == 1 + 3 * ready.model.vision.layers
    weights = Weights(ready.plan.vision.records, lambda slot: read_vector(slot, ready.checkpoint))
    (tmp_path / "graph.json").write_text(json.dumps(graph_json(g, weights)))
    graph_json_to_mnn(tmp_path / "graph.json", tmp_path / "tower.mnn")
    write_weights(
        ready.plan.vision, ready.checkpoint, tmp_path / "tower.mnn.weight", threads=2,
        progress=lambda done, total: None,
    )  # fmt: skip
    pixels = normalized(case.tiles(count))
    found = run_module(tmp_path / "tower.mnn", pixels, [*wanted, "image_embeds"])

    expected: dict[str, np.ndarray] = {}
    handles = []
    for name, module in case.model.named_modules():
        if name in wanted.values():
            handles.append(module.register_forward_hook(_keep(expected, name)))
    tower, connector = case.model.model.vision_model, case.model.model.connector
    with torch.no_grad():
        features = connector(tower(torch.from_numpy(pixels)).last_hidden_state).numpy()
    for handle in handles:
        handle.remove()
    for output, module in wanted.items():
        _assert_near(found[output].transpose(1, 0, 2), expected[module], module)
    assert found["image_embeds"].shape == (count, case.tile_tokens, 1, features.shape[-1])
    _assert_near(found["image_embeds"][:, :, 0], features, "connector")


def _keep(values: dict[str, np.ndarray], name: str) -> Any:
    def hook(module: Any, arguments: Any, output: Any) -> None:
        values[name] = (output[0] if isinstance(output, tuple) else output).numpy()

    return hook


def _assert_near(actual: np.ndarray, expected: np.ndarray, where: str) -> None:
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert error < MAX_ERROR, f"{where}: {error:.3g}"


@pytest.mark.engine
@pytest.mark.reference
def test_logits_after_pictures_are_those_of_transformers(case: Case) -> None:
    with Engine(case.bundle.path, memory="high", precision="high") as engine:
        for count in (1, 2, 7):
            ids, tiles = case.prompt(count), case.tiles(count)
            expected = case.logits(ids, tiles)
            engine.reset()
            actual = engine.forward(ids, all_positions=True, tiles=tiles)
            assert kl(expected, actual).max() < MAX_KL
            # The premise: another order, colors or rows are another picture.
            for other in (tiles[..., ::-1], tiles[:, ::-1], tiles.transpose(0, 2, 1, 3)):
                wrong = case.logits(ids, np.ascontiguousarray(other))
                assert kl(expected, wrong)[-1] > 1e-3
        assert engine.statistics.tiles == 10


@pytest.mark.engine
@pytest.mark.reference
def test_pieces_parts_and_turns_give_what_one_prompt_gives(case: Case) -> None:
    ids, tiles = case.prompt(5, text=3), case.tiles(5)
    expected = case.logits(ids, tiles)
    length = case.tile_tokens
    for piece in (1, 2, length, length + 1, 2 * length + 3):
        with Engine(case.bundle.path, memory="high", precision="high", piece_tokens=piece) as e:
            assert kl(expected, e.forward(ids, all_positions=True, tiles=tiles)).max() < MAX_KL
    with Engine(case.bundle.path, memory="high", precision="high") as engine:
        cut = 3 + 2 * length + 5 + 2
        engine.forward(ids[:cut], tiles=tiles[:2])
        rest = engine.forward(ids[cut:], all_positions=True, tiles=tiles[2:])
        assert kl(expected[cut:], rest).max() < MAX_KL
        assert len(engine.pictures) == 5 and len({digest for _, digest in engine.pictures}) == 5
        assert [place for place, _ in engine.pictures] == [3 + i * (length + 5) for i in range(5)]
        engine.rewind(cut)
        assert len(engine.pictures) == 2
        again = engine.forward(ids[cut:], all_positions=True, tiles=tiles[2:])
        assert kl(expected[cut:], again).max() < MAX_KL
        engine.reset()
        assert engine.pictures == ()
        run = engine.generate(ids, max_new_tokens=8, tiles=tiles)
        assert list(run) == _greedy(case, ids, tiles, 8)


def _greedy(case: Case, ids: list[int], tiles: np.ndarray, count: int) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        ids.append(int(case.logits(ids, tiles)[-1].argmax()))
    return ids[-count:]


@pytest.mark.engine
@pytest.mark.reference
def test_what_does_not_fit_is_refused_and_harms_nothing(case: Case) -> None:
    ids, tiles = case.prompt(2), case.tiles(2)
    with Engine(case.bundle.path, memory="high", precision="high") as engine:
        wrong = [
            (ids, None, "2 runs of image tokens, and 0 tiles"),
            (ids, tiles[:1], "2 runs of image tokens, and 1 tiles"),
            (ids[:5], tiles, "0 runs of image tokens, and 2 tiles"),
            ([*ids[:-1], IMAGE_ID], tiles, "a run of 1 image tokens"),
            ([IMAGE_ID] * case.tile_tokens + [40], tiles[:1], "before it and one after it"),
            (ids[: 9 + case.tile_tokens], tiles[:1], "before it and one after it"),
            (ids, tiles[:, 1:], "tiles must be uint8"),
            (ids, tiles.astype(np.float32), "tiles must be uint8"),
        ]
        for given, pictures, message in wrong:
            with pytest.raises(UsageError, match=message):
                engine.forward(given, tiles=pictures)
            with pytest.raises(UsageError, match=message):
                engine.generate(given, tiles=pictures)
        with pytest.raises(UsageError, match="open the file or address"):
            engine.engine_tokenize("<img>/etc/passwd</img>")
        assert engine.position == 0
        # One image token, as a model may write it, is a token like others.
        alone = engine.forward([40]), engine.forward([IMAGE_ID])
        assert not np.array_equal(*alone)
        engine.reset()
        actual = engine.forward(ids, all_positions=True, tiles=tiles)
        assert kl(case.logits(ids, tiles), actual).max() < MAX_KL


@pytest.mark.reference
@pytest.mark.parametrize("side", [4, 6, 8, 14, 16, 24, 26, 27, 28, 32])
def test_patch_i_has_row_i_of_the_position_table(side: int) -> None:
    import torch
    from transformers import SmolVLMVisionConfig
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

    module = SmolVLMVisionEmbeddings(
        SmolVLMVisionConfig(hidden_size=1, image_size=side, patch_size=1, num_attention_heads=1)
    )
    with torch.no_grad():
        module.patch_embedding.weight.zero_()
        module.patch_embedding.bias.zero_()
        module.position_embedding.weight.copy_(torch.arange(side**2)[:, None])
        mask = torch.ones(1, side, side, dtype=torch.bool)
        rows = module(torch.zeros(1, 3, side, side), mask)[0, :, 0]
    assert rows.int().tolist() == list(range(side**2))


def test_recipes_speak_of_vision_apart(tmp_path: Path) -> None:
    write_small(tmp_path, hidden_size=64, intermediate_size=96)
    ready = prepare(tmp_path, recipe="w4g32-head8")
    assert ready.plan.vision is not None
    assert ready.plan.vision.schemes() == {"fp16": 14}
    assert set(ready.plan.schemes()) == {"w4g32", "w8g32"}
    eight = make_plan(
        ready.model, ready.checkpoint, parse_recipe_name("w4g32-head8-vision8")
    ).vision
    # The patch embedding stays.
    assert eight is not None and eight.schemes() == {"w8g32": 13, "fp16": 1}
    recipe = tmp_path / "mixed.json"
    recipe.write_text(json.dumps({
        "default": "w4g32", "vision": "w8g32",
        "rules": [
            {"role": "vision", "layers": [0, 0], "scheme": "fp32"},
            {"tensor": "*.vision_model.*.fc1.weight", "scheme": "w4g32"},
            {"layers": [0, 0], "scheme": "w8g32"},
        ],
    }))  # fmt: skip
    mixed = prepare(tmp_path, recipe=recipe).plan
    assert mixed.vision is not None
    assert mixed.vision.schemes() == {"fp32": 6, "w8g32": 6, "w4g32": 1, "fp16": 1}
    recipe.write_text(json.dumps({
        "default": "w4g32", "rules": [{"role": "patch", "scheme": "w8g64"}]
    }))  # fmt: skip
    assert prepare(tmp_path, recipe=recipe).plan.vision.schemes() == {"fp16": 13, "w8g64": 1}
    with pytest.raises(RecipeError, match="does not fit"):
        prepare(tmp_path, recipe="w4g128-vision8-fit".replace("-fit", ""))


def test_a_text_model_has_no_use_for_a_rule_about_vision(tmp_path: Path) -> None:
    from tiny_checkpoint import write_checkpoint

    write_checkpoint(tmp_path / "text")
    recipe = tmp_path / "vision.json"
    recipe.write_text(json.dumps({
        "default": "w4g32", "rules": [{"role": "vision", "scheme": "w8g64"}]
    }))  # fmt: skip
    with pytest.raises(RecipeError, match="decides about no weight"):
        prepare(tmp_path / "text", recipe=recipe)


@pytest.mark.engine
@pytest.mark.reference
@pytest.mark.parametrize("recipe", ["w4g32-head8", "w8g32-vision8", "w8g32-vision4"])
def test_a_quantized_bundle_computes_with_the_weights_that_it_holds(
    recipe: str, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    tensors = write_small(tmp_path / "model", image_size=64, patch_size=16, scale_factor=2)
    bundle = convert(tmp_path / "model", tmp_path / "out", recipe=recipe)
    schemes = {name: w["scheme"] for name, w in bundle.manifest.data["weights"].items()}
    stored = recipe.split("-vision")
    assert schemes["visual/patch_embedding"] == "fp16"
    assert schemes["visual/connector"] == (f"w{stored[1]}g32" if len(stored) > 1 else "fp16")
    model = prepare(tmp_path / "model", recipe=recipe).model
    assert model.vision is not None
    decoded = weight_oracle.matrices(bundle.path)
    seen = weight_oracle.linear_layers(bundle.path / "visual.mnn")
    for graph, weights in ((model.graph, decoded), (model.vision.graph, seen)):
        for node in graph.all_nodes():
            slot = node.slots.get("weight")
            if isinstance(slot, MatrixSlot):
                shape = tensors[slot.tensor].shape
                tensors[slot.tensor] = weights[node.name].reshape(shape)
    tensors[model.embedding.tensor] = decoded["embedding"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    ).eval()
    case = Case(tmp_path / "model", bundle, reference, 64, 4)
    ids, tiles = case.prompt(2), case.tiles(2)
    with Engine(bundle.path, memory="high", precision="high") as engine:
        actual = engine.forward(ids, all_positions=True, tiles=tiles)
    assert kl(case.logits(ids, tiles), actual).max() < MAX_KL


@pytest.fixture(scope="module")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("small")
    write_small(folder / "model")
    return convert(folder / "model", folder / "bundle", recipe="w8g32-vision8")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def _say(folder: Path, **changes: Any) -> None:
    _change(folder, "llm_config.json", lambda config: config.update(changes))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "visual.mnn").unlink(), "missing"),
        (lambda d: (d / "visual.mnn.weight").unlink(), "missing"),
        (lambda d: _cut(d / "visual.mnn.weight"), "the graph reads"),
        (lambda d: (d / "visual.mnn").write_bytes(b"\0" * 64), "does not load"),
        (lambda d: _say(d, visual_model="../visual.mnn"), "plain file name"),
        (lambda d: _say(d, image_pad="x"), "image_pad"),
        (lambda d: _say(d, image_seq_len=5), "4 embeddings of a tile, not 5"),
        # The engine takes the tile for a grid, and fails in its own code.
        (lambda d: _say(d, image_size_unit=128), "crashed"),
    ],
)
def test_a_damaged_bundle_is_an_error(
    small_bundle: Bundle, damage: Any, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(small_bundle.path, folder)
    damage(folder)
    with pytest.raises(EngineError, match=message), Engine(folder) as engine:
        facts = engine.vision
        assert facts is not None
        ids = [40, *[facts.image_token] * facts.tile_tokens, 41]
        engine.forward(ids, tiles=np.zeros((1, facts.tile, facts.tile, 3), np.uint8))


def test_inspection_tells_of_vision(tmp_path: Path) -> None:
    write_small(tmp_path)
    found = inspect(tmp_path)
    assert found.vision is not None
    assert (found.vision.tile, found.vision.tile_tokens, found.vision.layers) == (64, 4, 2)
    assert found.roles is not None
    assert found.roles["vision"].tensors == 13 and found.roles["patch"].tensors == 1
    tensors = sum(role.tensors for role in found.roles.values())
    assert tensors == sum(found.source_dtypes.values())
    assert found.parameters == prepare(tmp_path, recipe="fp16").plan.all_parameters


def _change(folder: Path, name: str, change: Any) -> None:
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("file", "change", "error", "message"),
    [
        ("config.json", lambda c: c.pop("vision_config"), SourceError, "vision_config"),
        ("config.json", lambda c: c.update(scale_factor=3), SourceError, "does not divide"),
        ("config.json", lambda c: c.update(image_token_id=10**6), SourceError, "image_token_id"),
        ("config.json", lambda c: c.update(image_token_id=40), SourceError, "<image> is token"),
        ("config.json", lambda c: c["vision_config"].update(image_size=4096, patch_size=1),
         SourceError, "none of SigLIP"),
        ("config.json", lambda c: c["vision_config"].update(hidden_act="gelu"),
         UnsupportedError, "hidden_act"),
        ("config.json", lambda c: c["vision_config"].update(use_qk_norm=True),
         UnsupportedError, "use_qk_norm"),
        ("config.json", lambda c: c["text_config"].update(use_resampler=True),
         UnsupportedError, "perceiver"),
        ("config.json", lambda c: c["text_config"].update(model_type="mistral"),
         UnsupportedError, "mistral"),
        ("preprocessor_config.json", lambda c: c["max_image_size"].update(longest_edge=32),
         SourceError, "pixels a side"),
        ("processor_config.json", lambda c: c.update(image_seq_len=7), SourceError, "image tokens"),
    ],
)  # fmt: skip
def test_files_that_disagree_are_named(
    file: str, change: Any, error: type[MnnsmithError], message: str, tmp_path: Path
) -> None:
    write_small(tmp_path)
    _change(tmp_path, file, change)
    with pytest.raises(error, match=message):
        prepare(tmp_path)


def test_a_config_as_published_is_read(tmp_path: Path) -> None:
    """With the keys of older versions, which transformers does not read either."""
    write_small(tmp_path, "idefics3")

    def older(config: dict[str, Any]) -> None:
        config["text_config"] |= {
            "_flash_attn_2_enabled": True, "_name_or_path": "None", "is_llama_config": True,
            "neftune_noise_alpha": 0.0, "pixel_shuffle_factor": 4, "qk_layer_norms": False,
            "perceiver_config": {"resampler_depth": 6}, "rope_interleaved": False,
            "torch_dtype": "bfloat16", "use_resampler": False,
        }  # fmt: skip
        config["text_config"].pop("tie_word_embeddings")
        for key in ("num_channels", "hidden_act", "layer_norm_eps"):
            config["vision_config"].pop(key)
        config["vision_config"] |= {
            "max_image_size": {"longest_edge": 64}, "size": {"longest_edge": 256},
            "tie_word_embeddings": False, "use_base_siglip": False,
        }  # fmt: skip
        config |= {"use_cache": True, "vocab_size": SMALL_VOCAB, "pad_token_id": 128002}

    _change(tmp_path, "config.json", older)
    ready = prepare(tmp_path, recipe="fp16")
    assert not ready.model.tied
    assert [note for note in ready.notes if "without effect" in note] == [
        "text_config keys without effect here: _flash_attn_2_enabled, neftune_noise_alpha"
    ]


def test_every_tensor_is_used_once(tmp_path: Path) -> None:
    from tiny_checkpoint import write_safetensors

    tensors = write_small(tmp_path)
    ready = prepare(tmp_path, recipe="fp16")
    assert ready.plan.all_parameters == sum(t.size for t in tensors.values())
    write_safetensors(
        tmp_path / "model.safetensors", {**tensors, "model.vision_model.head.probe": np.zeros(2)}
    )
    with pytest.raises(SourceError, match=r"head\.probe is not used"):
        prepare(tmp_path)
    tensors.pop("model.connector.modality_projection.proj.weight")
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(SourceError, match=r"proj\.weight is missing"):
        prepare(tmp_path)
