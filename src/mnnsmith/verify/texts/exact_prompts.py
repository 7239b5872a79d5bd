"""Prompts for the exact check: text, control tokens, random tokens, and no routers near a tie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mnnsmith.models.rope import LOW_POSITIONS
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.verify.context import Context, Level
from mnnsmith.verify.references.reference import Reference
from mnnsmith.verify.texts.windows import leading_ids, shipped_sections

I64 = npt.NDArray[np.int64]

_PROMPTS: dict[Level, int] = {"quick": 3, "full": 5}
_TOKENS: dict[Level, int] = {"quick": 96, "full": 320}
# One prompt goes beyond the engine's pieces of 256 tokens; at level full several times.
_LONG_TOKENS: dict[Level, int] = {"quick": 300, "full": 1100}
_BEYOND = 64
# At level quick it goes beyond a sliding window up to this one, too.
_QUICK_WINDOW = 600
# A prompt longer than this takes minutes on a large model.
_LONGEST_TOKENS = 4200
# Weights times tokens for which the reference takes no more than a minute on two cores.
_AFFORDABLE = 1e12
_SHORTEST_TOKENS = 8
_CANDIDATES = 24
# Languages and code in turn, so that the first few prompts are of different kinds.
_STRIDE = 7


@dataclass(frozen=True)
class Prompt:
    """label: as findings name it.  ids: int64 [n]."""

    label: str
    ids: I64


def decisive_prompts(
    context: Context, tokenizer: TextTokenizer, reference: Reference
) -> tuple[Prompt, ...]:
    """Prompts on which no router of the reference is near a tie.

    Some are of text in several languages, some of random ids with control tokens between them.
    All are of one length, shorter ones where no long one is decisive; a longer one is added, of
    `long_tokens`.  Empty where none is found.
    """
    rows, room = context.bundle.vocab_size, context.bundle.max_context
    stream = _text_stream(tokenizer, rows)
    length = min(_TOKENS[context.level], room - 1)
    wanted = _PROMPTS[context.level]
    found: list[Prompt] = []
    while not found and length >= _SHORTEST_TOKENS:
        candidates = list(_candidates(stream, tokenizer, rows, length, _image_token(context)))
        # A few at a time: mostly the first ones will do.
        for start in range(0, len(candidates), wanted):
            batch = candidates[start : start + wanted]
            decisive = reference.decisive(np.stack([prompt.ids for prompt in batch]))
            found += [p for p, good in zip(batch, decisive, strict=True) if good]
            if len(found) >= wanted:
                break
        length //= 2
    found = found[:wanted]
    length = long_tokens(context)
    if found and length > found[0].ids.size:
        found += _long(stream, length, reference)
    return tuple(found)


def long_tokens(context: Context, level: Level | None = None) -> int:
    """How long the longest prompt is, at the context's level or another.

    Longer than the engine's pieces, and than the sliding window, where there is one (at level quick
    a narrow one); of a small model, at level full, longer than rope's table of low positions.
    """
    level = level or context.level
    length, room = _LONG_TOKENS[level], context.bundle.max_context - 1
    if context.original is not None:
        window = context.original.model.sliding_window or 0
        if level == "full" or window <= _QUICK_WINDOW:
            length = max(length, window + _BEYOND)
        beyond = LOW_POSITIONS + _BEYOND
        affordable = context.original.plan.parameters * beyond < _AFFORDABLE
        if level == "full" and beyond <= room and affordable:
            length = max(length, beyond)
    return min(length, _LONGEST_TOKENS, room)


def _long(stream: I64, length: int, reference: Reference) -> list[Prompt]:
    ids = np.resize(stream, length)
    if reference.decisive(ids[None]).all():
        return [Prompt(f"{length} tokens of text", ids)]
    return []


def _image_token(context: Context) -> int | None:
    """The token that stands for a part of a picture, and so for nothing in a text."""
    vision = context.original.model.vision if context.original else None
    return None if vision is None else vision.image_token


def _candidates(
    stream: I64, tokenizer: TextTokenizer, rows: int, length: int, image_token: int | None
) -> Iterator[Prompt]:
    """Text from different places, every other prompt random."""
    special = [
        id_ for id_ in sorted(tokenizer.special_ids) if id_ < rows and id_ != image_token
    ]  # fmt: skip
    places = max(1, stream.size // length)
    lead = np.array([id_ for id_ in leading_ids(tokenizer) if id_ < rows], dtype=np.int64)
    for i in range(_CANDIDATES):
        if i % 3 == 1:
            yield Prompt(
                f"{length} random tokens, seed {i}", _random(special, rows, length, i, image_token)
            )
        else:
            start = i * _STRIDE % places * length
            ids = np.concatenate([lead, np.roll(stream, -start)])
            yield Prompt(f"{length} tokens of text, from {start}", np.resize(ids, length))


def _random(
    special: Sequence[int], rows: int, length: int, seed: int, image_token: int | None
) -> I64:
    """Random ids, about one in eight a control token."""
    random = np.random.default_rng([length, seed])
    ids = random.integers(0, rows, length)
    if special:
        chosen = random.random(length) < 1 / 8
        ids[chosen] = random.choice(special, int(chosen.sum()))
    if image_token is not None:
        ids[ids == image_token] = (image_token + 1) % rows
    return ids


def _text_stream(tokenizer: TextTokenizer, rows: int) -> I64:
    """All shipped texts, one after another."""
    parts = [tokenizer.encode(section.text) for section in shipped_sections()]
    ids = np.concatenate([np.array(part, dtype=np.int64) for part in parts])
    return ids[ids < rows]
