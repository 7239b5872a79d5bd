"""What Idefics3 and SmolVLM are made of: a llama, and a SigLIP tower that writes into its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Value
from mnnsmith.graph.weights import MatrixSlot
from mnnsmith.models import llama
from mnnsmith.models.canvas import CanvasLayout, canvas_graph
from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.language_model import LanguageModel, VisionModel, rename_tensors
from mnnsmith.models.siglip import encode_tiles, tower_graph, vision_shape
from mnnsmith.models.unread import judge_unread

_PLAIN, _TEXT = "model.", "model.text_model."
_DEFAULT_IMAGE_TOKEN = 128_257
# Settings of the picture processor, and of earlier versions of the architecture.
_NOT_OF_THE_TOWER = ("size", "max_image_size", "tie_word_embeddings", "use_base_siglip")
_NOT_OF_THE_TEXT = ("pixel_shuffle_factor", "perceiver_config", "is_llama_config")
_OTHER_ARCHITECTURE = {
    "use_resampler": "Pictures then go through a perceiver, which no file here writes.",
    "qk_layer_norms": "Queries and keys then have norms.",
    "rope_interleaved": "Rotary positions then pair neighbours.",
}


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graphs of `Idefics3ForConditionalGeneration` and its `SmolVLM` twin.

    Both classes of transformers compute the same, of the same tensors.
    """
    text = _part(config, "text_config", {
        "tie_word_embeddings": config.flag("tie_word_embeddings", False)
    })  # fmt: skip
    vision = _part(config, "vision_config", {})
    text.only("model_type", ("llama",), "llama", "The text part is to be a llama.")
    for key, why in _OTHER_ARCHITECTURE.items():
        text.only(key, (False,), False, why)
    for key in _NOT_OF_THE_TOWER:
        vision.raw(key)
    for key in _NOT_OF_THE_TEXT:
        text.raw(key)
    shuffle = config.integer("scale_factor", 2)
    model = rename_tensors(llama.build(text, limits), _text_tensor)
    shape = vision_shape(vision, shuffle, model.hidden_size)
    notes = (*model.notes, *_unread(config, text, "text_config"), *_unread(config, vision,
             "vision_config"))  # fmt: skip
    token = config.integer("image_token_id", _DEFAULT_IMAGE_TOKEN)
    if token >= model.head.rows:
        raise config.error(f"image_token_id {token} is no token of {model.head.rows}")
    config.raw("vocab_size")

    def of_canvas(embedding: MatrixSlot, layout: CanvasLayout) -> Graph:
        def encode(g: Graph, tiles: Value) -> Value:
            return encode_tiles(g, tiles, shape)

        return canvas_graph(encode, shape.tile, shape.tile_tokens, embedding, layout)

    picture = VisionModel(
        tower_graph(shape), shape.layers, shape.hidden, shape.tile, shape.tile_tokens, token,
        of_canvas,
    )  # fmt: skip
    return replace(model, vision=picture, notes=notes)


def _text_tensor(name: str) -> str:
    return _TEXT + name.removeprefix(_PLAIN) if name.startswith(_PLAIN) else name


def _part(config: ConfigReader, key: str, fixed: Mapping[str, Any]) -> ConfigReader:
    found = config.raw(key)
    if not isinstance(found, Mapping):
        raise config.error(f"{key} must be an object")
    return ConfigReader({**found, **fixed}, f"{config.origin}: {key}")


def _unread(config: ConfigReader, part: ConfigReader, key: str) -> tuple[str, ...]:
    """Notes on keys of a part without effect; one that asks for another computation is an error."""
    keys, notes = judge_unread(config.raw(key), part.unused(), key, part.origin)
    plain = (f"{key} keys without effect here: {', '.join(keys)}",) if keys else ()
    return (*notes, *plain)
