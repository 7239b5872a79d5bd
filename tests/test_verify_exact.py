"""The exact check: right bundles pass, and each kind of fault is found and placed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mnnsmith.api import Engine, convert, open_bundle, prepare
from mnnsmith.verify.checks.exact import MAX_KL, check_exact
from mnnsmith.verify.context import Context
from mnnsmith.verify.output.results_json import non_finite
from mnnsmith.verify.references.together import run_together
from mnnsmith.verify.references.transformers_reference import open_transformers
from mnnsmith.verify.results import ExactFigures, Outcome
from mnnsmith.verify.stored.checkpoint import stored_checkpoint
from peaky import CASES, MIXTURES, make_checkpoint
from tiny_checkpoint import VOCAB
from verify_stand_ins import StandInEngine, StandInReference, stand_in_context

# ---------------------------------------------------------------- faults of known kind, in numpy


def at(where: Callable[[np.ndarray, StandInEngine], np.ndarray], size: float = 0.1) -> Any:
    """A fault that adds to one logit wherever `where` says so."""

    def fault(logits: np.ndarray, positions: np.ndarray, engine: StandInEngine) -> np.ndarray:
        logits[where(positions, engine), 3] += np.float32(size)
        return logits

    return fault


def check(folder: Path, fault: Any, reference: StandInReference | None = None) -> Any:
    return check_exact(stand_in_context(folder, StandInEngine(fault), reference))


def failed(outcome: Outcome[ExactFigures]) -> set[str]:
    return {case.name for case in outcome.figures.cases if not case.passed}


def test_an_equal_bundle_passes(tmp_path: Path) -> None:
    outcome = check(tmp_path, None)
    names = [case.name for case in outcome.figures.cases]
    assert dict.fromkeys(names) == dict.fromkeys(["prompt", "split", "decode", "reuse", "greedy"])
    assert outcome.findings == () and outcome.figures.max_kl < 1e-12
    assert {1, 2, 17, 96} <= {case.tokens for case in outcome.figures.cases}


def test_it_runs_in_float(tmp_path: Path) -> None:
    engine = StandInEngine()
    check_exact(stand_in_context(tmp_path, engine))
    assert engine.opened_with["memory"] == engine.opened_with["precision"] == "high"


@pytest.mark.parametrize("size", [0.004, 0.02, 1.0])
def test_a_difference_just_beyond_the_bound_fails(tmp_path: Path, size: float) -> None:
    outcome = check(tmp_path, at(lambda positions, _: positions >= 0, size))
    assert failed(outcome) >= {"prompt", "split", "decode", "reuse"}
    # The spread of these logits is 1.83.
    errors = {case.name: case.error for case in outcome.figures.cases}
    assert errors["prompt"] == pytest.approx(size / 1.83, rel=0.02)


def test_a_difference_below_the_bound_passes(tmp_path: Path) -> None:
    outcome = check(tmp_path, at(lambda positions, _: positions >= 0, 0.0003))
    assert not failed(outcome) and max(case.error for case in outcome.figures.cases) > 1e-4


def test_a_fault_of_single_steps_is_placed(tmp_path: Path) -> None:
    outcome = check(tmp_path, at(lambda p, _: (p > 0) & (p.size == 1)))
    assert "prompt" not in failed(outcome) and "decode" in failed(outcome)
    finding = next(f for f in outcome.findings if f.where.startswith("decode"))
    assert "from position 17 on" in finding.message


def test_a_fault_of_later_parts_is_placed(tmp_path: Path) -> None:
    outcome = check(tmp_path, at(lambda p, _: (p > 0) & (p[0] > 0) & (p.size > 1)))
    assert "split" in failed(outcome) and not {"prompt", "decode"} & failed(outcome)
    first = outcome.findings[0]
    assert first.where.startswith("split") and "from position 1 on" in first.message
    assert first.hint is not None and "later parts" in first.hint


def test_a_cache_that_keeps_forgotten_tokens_is_placed(tmp_path: Path) -> None:
    outcome = check(tmp_path, at(lambda p, engine: (p >= 0) & engine.rewound))
    assert failed(outcome) == {"reuse"}
    assert outcome.findings[0].hint is not None and "going back" in outcome.findings[0].hint


def test_a_cache_that_rewinds_one_too_few_is_found(tmp_path: Path) -> None:
    class OffByOne(StandInEngine):
        def rewind(self, position: int) -> None:
            kept = self.cache[: position - 1]
            super().rewind(position)
            self.cache = [*kept, 3][:position]

    outcome = check_exact(stand_in_context(tmp_path, OffByOne()))
    assert failed(outcome) == {"reuse"}


def test_a_reset_that_does_nothing_is_found(tmp_path: Path) -> None:
    class Stays(StandInEngine):
        def reset(self) -> None:
            self.cache = self.cache[-1:]

    assert "prompt" in failed(check_exact(stand_in_context(tmp_path, Stays())))


def test_where_a_fault_begins_tells_attention_from_weights(tmp_path: Path) -> None:
    later = check(tmp_path, at(lambda p, _: p >= 40))
    assert "position 40 on" in later.findings[0].message
    assert later.findings[0].hint is not None and "attention is not" in later.findings[0].hint
    all_ = check(tmp_path, at(lambda p, _: p >= 0))
    assert all_.findings[0].hint is not None and "first token is wrong" in all_.findings[0].hint


@pytest.mark.parametrize(
    ("where", "name"),
    [
        # Whole texts beyond the engine's pieces of 256 tokens; single steps far from the first.
        (lambda p, _: (p >= 256) & (p.size > 256), "prompt"),
        (lambda p, _: (p >= 256) & (p.size == 1), "decode"),
    ],
)
def test_a_fault_of_long_texts_is_found(where: Any, name: str, tmp_path: Path) -> None:
    outcome = check(tmp_path, at(where))
    assert failed(outcome) == {name}
    assert "from position 2" in outcome.findings[0].message


def test_a_reference_is_run_seldom(tmp_path: Path) -> None:
    """One that is streamed reads all weights in each run."""
    reference = StandInReference()
    check(tmp_path, None, reference)
    assert [ids.shape for ids in reference.runs] == [(1, 300), (3, 96), (1, 23)]


def test_prompts_that_run_together_give_what_they_give_alone() -> None:
    reference = StandInReference()
    prompts = [np.arange(n) % VOCAB for n in (96, 300, 80, 290, 30)]
    runs = run_together(reference, prompts)
    assert [ids.shape for ids in reference.runs] == [(2, 300), (2, 96), (1, 30)]
    for ids, run in zip(prompts, runs, strict=True):
        assert (run.ids == ids[None]).all()
        assert (run.hidden == StandInReference().run(ids[None]).hidden).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_fail(tmp_path: Path, value: float) -> None:
    outcome = check(tmp_path, at(lambda p, _: p == 50, value))
    assert "prompt" in failed(outcome) and "position 50 on" in outcome.findings[0].message
    assert non_finite(outcome.figures) is None


def test_another_greedy_answer_fails(tmp_path: Path) -> None:
    class Chooses(StandInEngine):
        def generate(self, ids: Any, max_new_tokens: int) -> Any:
            for i, token in enumerate(super().generate(ids, max_new_tokens)):
                yield token if i < 5 else 9

    outcome = check_exact(stand_in_context(tmp_path, Chooses()))
    assert failed(outcome) == {"greedy"}
    assert "from position 17 on" in outcome.findings[0].message


def test_prompts_with_routers_near_a_tie_are_not_used(tmp_path: Path) -> None:
    """Token 36 is the space, which all prompts of text have; that leaves random ones."""
    reference = StandInReference(indecisive=36)
    outcome = check(tmp_path, None, reference)
    assert outcome.figures.cases and not failed(outcome)
    assert reference.runs and not any((ids == 36).any() for ids in reference.runs)


def test_no_decisive_prompt_is_said(tmp_path: Path) -> None:
    class Undecided(StandInReference):
        def decisive(self, ids: np.ndarray) -> np.ndarray:
            return np.zeros(len(ids), dtype=bool)

    outcome = check(tmp_path, None, Undecided())
    assert outcome.figures.cases == () and outcome.findings[0].severity == "warning"


def test_a_small_context_is_enough(tmp_path: Path) -> None:
    outcome = check_exact(stand_in_context(tmp_path, StandInEngine(), max_context=40))
    assert not failed(outcome) and max(case.tokens for case in outcome.figures.cases) < 40


# ---------------------------------------------------------------- real bundles on the real engine

QUICK = ("llama-bias:w4g32-head8", "qwen3_moe:w8g32")
SLOW = [
    f"{name}:{recipe}"
    for name in (*CASES, *MIXTURES)
    for recipe in ("fp16", "w4g32-head8")
    if f"{name}:{recipe}" not in QUICK
]


def verify_real(source: Path, bundle: Path, *, level: Any = "quick") -> Outcome[ExactFigures]:
    """The check of a bundle against `source` with the weights that the bundle stores."""
    opened = open_bundle(bundle)
    original = prepare(source, recipe=opened.manifest.recipe)

    def reference(weights: str) -> Any:
        checkpoint = stored_checkpoint(opened, original)
        return open_transformers(checkpoint, original.model, threads=2)

    return check_exact(Context(opened, original, level, Engine, reference, (), 2))


@pytest.mark.parametrize(
    ("case", "level"),
    [(case, "quick") for case in QUICK]
    + [pytest.param(case, "full", marks=pytest.mark.slow) for case in SLOW],
)
@pytest.mark.engine
@pytest.mark.reference
def test_right_bundles_pass(case: str, level: str, tmp_path: Path) -> None:
    name, recipe = case.split(":")
    make_checkpoint({**CASES, **MIXTURES}[name], tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "bundle", recipe=recipe)
    outcome = verify_real(tmp_path / "source", tmp_path / "bundle", level=level)
    assert outcome.findings == () and outcome.figures.max_kl < MAX_KL
    assert all(case.tokens for case in outcome.figures.cases)
    if level == "full":
        assert max(case.tokens for case in outcome.figures.cases) == 1096


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "source"
    make_checkpoint(CASES["llama"], folder)
    return folder


FAULTS: dict[str, tuple[str, Callable[[dict[str, Any], dict[str, np.ndarray]], None]]] = {
    "rope's base": ("attention is not", lambda c, _: c["rope_parameters"].update(rope_theta=9e3)),
    "epsilon": ("first token is wrong", lambda c, _: c.update(rms_norm_eps=1e-4)),
    "scale": ("attention is not", lambda _, t: _times(t, "1.self_attn.q_proj", 1.02)),
    "heads": ("attention is not", lambda _, t: _swap(t, "2.self_attn.q_proj", 0, 32, 32)),
    "a row": ("first token is wrong", lambda _, t: _swap(t, "0.mlp.up_proj", 5, 9, 1)),
}


def _times(tensors: dict[str, np.ndarray], name: str, factor: float) -> None:
    weight = tensors[f"model.layers.{name}.weight"]
    tensors[f"model.layers.{name}.weight"] = (weight * factor).astype(np.float16)


def _swap(tensors: dict[str, np.ndarray], name: str, first: int, second: int, rows: int) -> None:
    weight = tensors[f"model.layers.{name}.weight"]
    one, two = weight[first : first + rows].copy(), weight[second : second + rows].copy()
    weight[first : first + rows], weight[second : second + rows] = two, one


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.engine
@pytest.mark.reference
def test_faults_of_a_bundle_are_found(fault: str, llama: Path, tmp_path: Path) -> None:
    """The bundle is made of a checkpoint with the fault, and held against one without."""
    from safetensors.numpy import load_file, save_file

    hint, inject = FAULTS[fault]
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for file in llama.iterdir():
        (wrong / file.name).write_bytes(file.read_bytes())
    config = json.loads((wrong / "config.json").read_text())
    tensors = load_file(wrong / "model.safetensors")
    inject(config, tensors)
    (wrong / "config.json").write_text(json.dumps(config))
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    convert(wrong, tmp_path / "bundle", recipe="fp16")
    original = prepare(llama, recipe="fp16")

    def reference(weights: str) -> Any:
        return open_transformers(original.checkpoint, original.model, threads=2)

    context = Context(open_bundle(tmp_path / "bundle"), original, "quick", Engine, reference, (), 2)
    outcome = check_exact(context)
    first = outcome.findings[0]
    assert first.severity == "error" and first.where.startswith("prompt")
    assert first.hint is not None and hint in first.hint


def test_far_positions_may_differ_as_much_as_rounded_angles_make_them() -> None:
    from mnnsmith.verify.checks.exact import MAX_FAR_KL, MAX_KL, _allowed_kl

    assert _allowed_kl(4094, 4098).tolist() == [MAX_KL, MAX_KL, MAX_FAR_KL, MAX_FAR_KL]
