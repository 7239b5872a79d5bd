"""The proof that ends a conversion: the engine loads the bundle and computes with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mnnsmith.conversion.plan import Plan
from mnnsmith.conversion.structure import check_structure
from mnnsmith.engine import Engine
from mnnsmith.errors import ConversionError, TemplateError
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.sources.checkpoint import TokenizerFiles
from mnnsmith.text.template import ChatTemplate

# The engine holds the weights in memory; beyond this, loading would take more of it than converting
# does, which is bounded whatever the model.
LOAD_LIMIT_BYTES = 192 << 20
_PROBE_TOKENS = 4


# Dialogues on which the engine's own template code is compared with jinja2.
_DIALOGUES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello, who are you?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
    [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of <Italy> & 'Spain'?"},
    ],
)


@dataclass(frozen=True)
class Proof:
    """What was proved.  `notes` are for the user; `data` goes into the manifest."""

    data: dict[str, Any]
    notes: tuple[str, ...] = ()


def prove_bundle(
    folder: Path, model: LanguageModel, plan: Plan, tokenizer: TokenizerFiles
) -> Proof:
    """Load the bundle, run a few tokens and the chat template through it.

    Raises `EngineError` if it does not load, `ConversionError` if the logits are not finite or all
    equal, `TemplateError` for a template that does not compile.  A bundle whose weights exceed
    192 MiB is not loaded here, and says so; its graph is read back and held against its weights.
    """
    if plan.all_bytes > LOAD_LIMIT_BYTES:
        found = check_structure(folder, model.head.rows)
        reason = (
            f"{plan.all_bytes / 1e6:.0f} MB of weights, more than the "
            f"{LOAD_LIMIT_BYTES / 1e6:.0f} MB that are loaded here"
        )
        return Proof({"loaded": False, "reason": reason, "structure": found})
    # Mapped, the weights would be written a second time.
    with Engine(folder, memory="low", config={"use_mmap": False}) as engine:
        _check_logits(engine, model.head.rows, model.max_context)
        if tokenizer.chat_template is None:
            return Proof({"loaded": True})
        same = _same_prompts(engine, tokenizer, tokenizer.chat_template)
    note = (
        "the engine's own code renders this chat template differently from jinja2 (mnnsmith run "
        "and chat use jinja2): an app must render the prompt itself, see docs/tokenizers.md"
    )
    return Proof({"loaded": True, "engine_template_equal": same}, () if same else (note,))


def probe(folder: Path, vocabulary: int, max_context: int) -> None:
    """Load a bundle in the engine and run a few tokens through it; raises if that goes wrong."""
    with Engine(folder, memory="low") as engine:
        _check_logits(engine, vocabulary, max_context)


def _same_prompts(engine: Engine, tokenizer: TokenizerFiles, source: str) -> bool:
    """Whether the engine makes the same prompts of some dialogues, or both refuse them."""
    template = ChatTemplate(
        source, tokenizer.bos_token, tokenizer.eos_token, special_tokens=tokenizer.special_tokens
    )
    try:
        for dialogue in _DIALOGUES:
            try:
                expected = template.render(dialogue)
            except TemplateError:
                # Such as a template that takes no system message: nothing to compare.
                continue
            if engine.engine_apply_template(dialogue) != expected:
                return False
    finally:
        template.close()
    return True


def _check_logits(engine: Engine, vocabulary: int, max_context: int) -> None:
    ids = [(7919 * (i + 1)) % vocabulary for i in range(min(_PROBE_TOKENS, max_context))]
    tiles = None
    if engine.vision is not None:
        facts = engine.vision
        # A canvas of one tile is a picture that is not split.
        run = facts.tile_tokens if facts.canvas_tokens is None else facts.canvas_tokens[0][0]
        ids = [*ids, *[facts.image_token] * run, ids[0]]
        tiles = np.zeros((1, facts.tile, facts.tile, 3), np.uint8)
    logits = engine.forward(ids, tiles=tiles)
    if logits.shape != (vocabulary,):
        raise ConversionError(
            f"The converted model gives logits of shape {logits.shape}, expected ({vocabulary},)."
        )
    if not np.isfinite(logits).all() or float(np.ptp(logits)) == 0.0:
        raise ConversionError(
            "The converted model gives logits that are not finite or all equal.",
            "Check the checkpoint; if transformers runs it well, please report this as a bug.",
        )
