"""One answer of a model as it streams: text pieces, how it ended, and what the cache gave to it."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mnnsmith.engine import SamplingOptions
from mnnsmith.engine.runner import tile_digest
from mnnsmith.errors import UsageError
from mnnsmith.text.reasoning import ReasoningSplitter, TextPiece
from mnnsmith.text.stream import Detokenizer, StopStrings
from mnnsmith.text.tokenizer import TextTokenizer
from mnnsmith.vision.settings import U8

_log = logging.getLogger(__name__)

THINK = ("<think>", "</think>")


class TokenRun(Protocol):
    """One generation: token ids one by one, then how it ended (see `engine.Generation`)."""

    seed: int
    finish_reason: str | None

    def __iter__(self) -> Iterator[int]: ...

    def close(self) -> None: ...


class TextModel(Protocol):
    """What is asked of an engine here; `engine.Engine` is one."""

    context_limit: int

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def pictures(self) -> tuple[tuple[int, str], ...]: ...

    def generate(
        self,
        ids: Sequence[int],
        options: SamplingOptions | None = None,
        max_new_tokens: int | None = None,
        stop_ids: Collection[int] = (),
        *,
        tiles: Sequence[U8] | None = None,
    ) -> TokenRun: ...

    def rewind(self, position: int) -> None: ...

    def reset(self) -> None: ...


@dataclass(frozen=True)
class AnswerOptions:
    """How an answer is made.

    max_tokens: None goes on to the end of the context.  stop: texts that end the answer; they are
    not part of it.
    """

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class TileRun:
    """Positions start..stop of a prompt's ids take the features of `tile`.

    tile: uint8 [S, S, 3], red, green, blue; of a bundle that takes whole pictures, a canvas.
    """

    start: int
    stop: int
    tile: U8


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    finish_reason: "stop" (an end token or a stop string), "length" (max_tokens), "context" (the
    context is full) or "cancelled".
    prompt_tokens, reused_tokens: length of the prompt, and how many of them the cache held already.
    tiles, reused_tiles: tiles of pictures and frames in the prompt, and those that the cache held.
    first_token_s, total_s: seconds from the question to the first token, and to the end.
    """

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_string: str | None
    seed: int
    prompt_tokens: int
    reused_tokens: int
    tiles: int
    reused_tiles: int
    first_token_s: float
    total_s: float

    @property
    def prompt_tokens_per_s(self) -> float:
        """Tokens of the prompt that were computed, per second."""
        fresh = self.prompt_tokens - self.reused_tokens
        return fresh / self.first_token_s if self.first_token_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the answer after the first one, per second."""
        seconds = self.total_s - self.first_token_s
        return (len(self.token_ids) - 1) / seconds if seconds > 0 and self.token_ids else 0.0


Event = TextPiece | Answer


class Reply(Iterator[TextPiece]):
    """Text pieces as they come; `answer` is what there is so far, final after the last piece.

    Prompt tokens that the engine's cache already holds, in the same order, are not computed again.
    `close` ends the answer early; so does an interrupt.
    """

    def __init__(
        self,
        engine: TextModel,
        tokenizer: TextTokenizer,
        ids: Sequence[int],
        options: AnswerOptions,
        stop_ids: Collection[int],
        *,
        tiles: Sequence[TileRun] = (),
        in_reasoning: bool = False,
    ) -> None:
        """tiles: those of the pictures in `ids`, in their order."""
        self._began = time.monotonic()
        self._prompt_tokens, self._tiles = len(ids), len(tiles)
        self._reused = keep_common(engine, ids, tiles)
        fresh = [run.tile for run in tiles if run.start >= self._reused]
        self._reused_tiles = len(tiles) - len(fresh)
        self._run = engine.generate(
            ids[self._reused :], options.sampling, options.max_tokens, stop_ids,
            tiles=fresh or None,
        )  # fmt: skip
        self._ids: list[int] = []
        self._first_token_s = 0.0
        self._total_s = 0.0
        self._kept: list[TextPiece] = []
        self._stops = StopStrings(options.stop)
        tags = [tokenizer.id(tag) for tag in THINK]
        self._detokenizer = Detokenizer(tokenizer, keep=[tag for tag in tags if tag is not None])
        self._splitter = ReasoningSplitter(open_at_start=in_reasoning)
        self._pieces = self._stream()

    def __next__(self) -> TextPiece:
        piece = next(self._pieces)
        self._kept.append(piece)
        return piece

    def close(self) -> None:
        """End the answer here."""
        self._run.close()
        self._pieces.close()

    @property
    def answer(self) -> Answer:
        """The answer so far; its finish_reason is "cancelled" unless it came to its end."""
        stopped = self._stops.found is not None
        return Answer(
            text="".join(piece.text for piece in self._kept if not piece.reasoning),
            reasoning="".join(piece.text for piece in self._kept if piece.reasoning),
            token_ids=tuple(self._ids),
            finish_reason="stop" if stopped else self._run.finish_reason or "cancelled",
            stop_string=self._stops.found,
            seed=self._run.seed,
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused,
            tiles=self._tiles,
            reused_tiles=self._reused_tiles,
            first_token_s=self._first_token_s,
            total_s=self._total_s,
        )

    def _stream(self) -> Generator[TextPiece, None, None]:
        for id_ in self._run:
            self._total_s = time.monotonic() - self._began
            if not self._ids:
                self._first_token_s = self._total_s
            self._ids.append(id_)
            yield from self._splitter.push(self._stops.push(self._detokenizer.push(id_)))
            if self._stops.found is not None:
                self._run.close()
                break
        self._total_s = time.monotonic() - self._began
        rest = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        yield from self._splitter.push(rest)
        yield from self._splitter.flush()
        answer = self.answer
        _log.info(
            "%d prompt tokens (%d reused, %.0f/s), %d answer tokens (%.1f/s), ended by %s",
            *(answer.prompt_tokens, answer.reused_tokens, answer.prompt_tokens_per_s),
            *(len(answer.token_ids), answer.tokens_per_s, answer.finish_reason),
        )


def keep_common(engine: TextModel, ids: Sequence[int], tiles: Sequence[TileRun] = ()) -> int:
    """Take the engine's cache back to what it has in common with a prompt; gives that length.

    At least one token is left to feed, for the logits to come from; a picture is kept whole or not
    at all, and one that is left to feed comes after a token that is.
    """
    held = engine.tokens
    common = 0
    limit = min(len(held), len(ids) - 1)
    while common < limit and held[common] == ids[common]:
        common += 1
    if tiles:
        # Ids are the same for all pictures.
        shown = dict(engine.pictures)
        other = [r.start for r in tiles if shown.get(r.start) != tile_digest(r.tile)]
        common = min([common, *other])
    while any(run.start <= common < run.stop for run in tiles):
        common -= 1
    if common <= 0:
        engine.reset()
        return 0
    if common < len(held):
        try:
            engine.rewind(common)
        except UsageError:
            # A quantized cache cannot go back.
            engine.reset()
            return 0
    return common
