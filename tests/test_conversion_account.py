"""Every tensor is used once, tied on purpose, or ignored with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import tiny_checkpoint as tiny
from mnnsmith.conversion.account import check_tensors
from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.weights import MatrixSlot, Role
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.layers import AttentionShape
from mnnsmith.models.registry import build_language_model
from mnnsmith.sources.checkpoint import Checkpoint, TokenizerFiles


@dataclass(frozen=True)
class Held:
    """A tensor in memory that counts what is read of it."""

    name: str
    values: np.ndarray
    dtype: str = "F16"
    block_format: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def rows(self, start: int, stop: int) -> np.ndarray:
        if self.dtype == "I8":
            raise UnsupportedError(f"{self.name}: I8")
        return self.values[start:stop]

    def quantized_rows(self, start: int, stop: int) -> Any:
        raise AssertionError


def checkpoint(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Checkpoint:
    held = {name: Held(name, value) for name, value in tensors.items()}
    return Checkpoint("here", "safetensors", config, held, TokenizerFiles("{}"), ())


def check(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    model, _ = build_language_model(config["model_type"], config, "here", ContextLimits())
    return check_tensors(model, checkpoint(config, tensors))


CONFIG = tiny.make_config()
UP = "model.layers.0.mlp.up_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return tiny.make_tensors(CONFIG)


def test_all_there(tensors: dict[str, np.ndarray]) -> None:
    assert check(CONFIG, tensors) == ()


def test_every_problem_is_listed(tensors: dict[str, np.ndarray]) -> None:
    del tensors["model.norm.weight"]
    tensors["extra"] = np.zeros(1, np.float32)
    tensors[UP] = tensors[UP][:-1]
    with pytest.raises(SourceError) as caught:
        check(CONFIG, tensors)
    message = str(caught.value)
    assert "here: its tensors do not fit model type llama" in message
    for part in ("model.norm.weight is missing", "extra is not used",
                 f"{UP} has shape [127, 64], expected 128 rows"):  # fmt: skip
        assert part in message
    assert message.count(";") == 2, "each problem once"


@pytest.mark.parametrize("shape", [(128, 60), (128,), (128, 64, 1), ()])
def test_a_tensor_of_another_width_is_one_problem(
    tensors: dict[str, np.ndarray], shape: tuple[int, ...]
) -> None:
    tensors[UP] = np.zeros(shape, np.float32)
    with pytest.raises(SourceError) as caught:
        check(CONFIG, tensors)
    message = str(caught.value)
    assert f"{UP} has shape {list(shape)}, expected [at least 128, 64]." in message
    assert "is not used" not in message


def test_a_long_list_is_cut(tensors: dict[str, np.ndarray]) -> None:
    more = {f"extra.{i}": np.zeros(1, np.float32) for i in range(500)}
    with pytest.raises(SourceError, match=r"\(and 492 more\)") as caught:
        check(CONFIG, {**tensors, **more})
    assert len(str(caught.value)) < 1000


def test_types_are_judged_without_a_read(tensors: dict[str, np.ndarray]) -> None:
    model, _ = build_language_model("llama", CONFIG, "here", ContextLimits())
    opened = checkpoint(CONFIG, tensors)
    opened.tensors[UP] = Held(UP, tensors[UP], dtype="I8")  # type: ignore[index]
    with pytest.raises(UnsupportedError, match=f"{UP}: I8"):
        check_tensors(model, opened)


def test_computed_tensors_of_old_checkpoints_are_left_out(
    tensors: dict[str, np.ndarray],
) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    notes = check(CONFIG, tensors)
    assert len(notes) == 1 and "1 tensors *.rotary_emb.inv_freq left out" in notes[0]


@pytest.mark.parametrize("head", ["absent", "equal", "different", "shorter"])
def test_a_tied_head(tensors: dict[str, np.ndarray], head: str) -> None:
    tied = {**CONFIG, "tie_word_embeddings": True}
    if head == "absent":
        del tensors[HEAD]
        assert check(tied, tensors) == ()
        return
    tensors[HEAD] = tensors[EMBEDDING].copy()
    if head == "equal":
        (note,) = check(tied, tensors)
        assert "lm_head.weight left out: it equals" in note
        return
    if head == "different":
        # The last value of the last block of rows.
        tensors[HEAD][-1, -1] += 0.5
    else:
        tensors[HEAD] = tensors[HEAD][:-1]
    with pytest.raises(SourceError, match=r"differs from model\.embed_tokens"):
        check(tied, tensors)


def phi3(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same llama with its projections fused, as phi3 stores them."""
    block = "model.layers.0"
    fused = {
        f"{block}.self_attn.qkv_proj.weight": [f"self_attn.{p}_proj" for p in "qkv"],
        f"{block}.mlp.gate_up_proj.weight": ["mlp.gate_proj", "mlp.up_proj"],
    }
    for name, parts in fused.items():
        tensors[name] = np.concatenate([tensors.pop(f"{block}.{p}.weight") for p in parts])
    return tensors


@pytest.mark.parametrize(("rows", "part"), [(0, None), (1, "has shape [129, 64], expected 128"),
                                            (-1, "has shape [127, 64], expected 128")])  # fmt: skip
def test_fused_tensors(tensors: dict[str, np.ndarray], rows: int, part: str | None) -> None:
    """Several slots tile one tensor; a row too many belongs to none."""
    config = {**CONFIG, "model_type": "phi3"}
    tensors = phi3(tensors)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert tensors[name].shape == (128, 64)
    tensors[name] = np.resize(tensors[name], (128 + rows, 64))
    if part is None:
        assert check(config, tensors) == ()
    else:
        with pytest.raises(SourceError) as caught:
            check(config, tensors)
        assert f"{name} {part}" in str(caught.value)


@pytest.mark.parametrize(
    ("spans", "problem"),
    [
        ([(0, 8), (8, 8)], None),
        ([(8, 8), (0, 8)], None),
        ([(0, 16), (0, 16)], "w is used twice, at row 0"),
        ([(0, 10), (8, 8)], "w is used twice, at row 8"),
        ([(0, 6), (8, 8)], "w is used in part: row 6 is left out"),
        ([(4, 12)], "w is used in part: row 0 is left out"),
        ([(0, 8)], "w has shape [16, 4], expected 8 rows"),
        ([(0, 20)], "w has shape [16, 4], expected 20 rows"),
    ],
)
def test_slots_must_tile_a_tensor(spans: list[tuple[int, int]], problem: str | None) -> None:
    g = Graph()
    x = g.to_channels(g.input("x", ["seq", 4]), 4, "x4")
    for i, (first, rows) in enumerate(spans):
        g.linear(x, MatrixSlot("w", rows, 4, Role.MLP, 0, first), f"linear{i}")
    embedding = MatrixSlot("e", 3, 4, Role.EMBEDDING)
    model = LanguageModel(g, embedding, MatrixSlot("h", 3, 4, Role.HEAD), 4, 1,
                          AttentionShape(1, 1, 4, 1.0), 8)  # fmt: skip
    tensors = {"w": np.zeros((16, 4), np.float32), "e": np.zeros((3, 4), np.float32)}
    opened = checkpoint({"model_type": "llama"}, tensors)
    if problem is None:
        assert check_tensors(model, opened) == ()
    else:
        with pytest.raises(SourceError) as caught:
            check_tensors(model, opened)
        assert problem in str(caught.value)
