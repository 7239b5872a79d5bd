"""A bundle at work: logits, generated tokens, statistics.  The model runs in a child process."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.engine.client import Header, Runner, RunnerRefusedError
from mnnsmith.engine.converter import GRAPH_LIMIT_BYTES
from mnnsmith.engine.device import Device, Launch, LocalDevice
from mnnsmith.engine.machine import MAX_THREADS
from mnnsmith.engine.mapped import MappingState, claim, in_memory
from mnnsmith.engine.runner import WEIGHT_SUFFIX, Arrays, RefusedError, Vision, bundle_config
from mnnsmith.engine.sampling import SamplingOptions
from mnnsmith.engine.weight_extent import required_weight_bytes
from mnnsmith.errors import ContextLengthError, EngineError, UsageError

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

LOAD_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 300.0
# Measured: as fast as longer pieces, with less memory, and the same bits as 64 and 128.
PIECE_TOKENS = 256
LEVELS = ("low", "normal", "high")


@dataclass(frozen=True)
class EngineStatistics:
    """Counts and wall-clock seconds since the bundle was loaded.

    A call with one token counts as decode, one with more as prefill; load includes one token that
    proves the bundle.  tiles and vision_s are of pictures; prefill_s is without them.
    peak_rss_bytes is the most memory the child process held.
    """

    load_s: float
    prefill_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float
    sample_s: float
    tiles: int
    vision_s: float
    peak_rss_bytes: int

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        seconds = self.decode_s + self.sample_s
        return self.decode_tokens / seconds if seconds else 0.0


@dataclass(frozen=True)
class VisionFacts:
    """How pictures are fed: a tile is uint8 [tile, tile, 3], and a run of image tokens in the ids.

    tile_tokens: the length of that run.
    canvas_tokens: None for a model that takes tiles.  One that takes whole pictures is fed what
    `vision.canvas` makes, and these are the lengths of runs by rows and columns of tiles of a
    canvas, counted from one (0 for one that it does not take).
    """

    image_token: int
    tile: int
    tile_tokens: int
    canvas_tokens: Sequence[Sequence[int]] | None = None


class Engine:
    """One loaded bundle and one conversation: a KV cache that `forward` and `generate` extend.

    The weights of a mixture of experts are mapped from a cache on disk (`mnnsmith.engine.mapped`),
    which the first load writes, so that only the experts in use take memory.

    The model runs in a child process of its own.  A damaged bundle, a crash or a hang gives an
    EngineError and ends the child, never this process.  Threads may share an engine: a call waits
    for the one before it.  Close it, or use it in a `with` block.
    """

    def __init__(
        self,
        bundle_dir: str | os.PathLike[str],
        *,
        memory: str | None = None,
        precision: str | None = None,
        threads: int | None = None,
        config: Mapping[str, Any] | None = None,
        all_logits: bool = False,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
        piece_tokens: int = PIECE_TOKENS,
        device: Device | None = None,
    ) -> None:
        """Load the bundle in `bundle_dir`.

        memory, precision: "low", "normal" or "high"; None takes the bundle's own setting.
        threads: None takes the bundle's own, at most the processors that are usable.
        config: keys of the engine's config.json that replace the bundle's.
        all_logits: set when `forward(all_positions=True)` is the main use; it works without, and
            then costs a second set of work buffers.
        load_timeout_s, call_timeout_s: the longest time without a sign of life; a long prompt
            gives one after each piece.  A device that is slower takes a multiple of it, and so
            does a canvas, by its tiles.
        piece_tokens: prompts are fed in pieces of this length, which bounds memory.
        device: where it runs, see `parse_device`; None is this machine.

        Raises UsageError for wrong options; MissingResourceError when the device lacks something;
        EngineError when it cannot be reached or the bundle does not load.
        """
        overrides = _overrides(memory, precision, threads, config)
        _check_mapping(device, overrides)
        if piece_tokens < 1:
            raise UsageError(f"piece_tokens must be at least 1, found {piece_tokens}.")
        self.bundle_dir = Path(bundle_dir).absolute()
        self.device: Device = device or LocalDevice()
        self._call_timeout_s = call_timeout_s * self.device.time_factor
        self._lock = threading.RLock()
        self._generation = 0
        self._position = 0
        checked = _check_bundle(self.bundle_dir, overrides)
        overrides["all_logits"] = bool(all_logits)
        launch, remote = self.device.launch(), self.device.send(self.bundle_dir)
        if self.device.maps_weights:
            self._mapped = claim(self.bundle_dir, checked, overrides)
        else:
            self._mapped = in_memory(
                f"they are on this machine only, not on {self.device.name}"
                if checked.get("use_mmap")
                else None
            )
        request = {"bundle": remote, "piece_tokens": piece_tokens}
        try:
            header = self._load(
                launch, request, overrides, load_timeout_s * self.device.time_factor
            )
        except BaseException:
            self._mapped.release()
            raise
        self.vocab_size: int = header["vocab_size"]
        self.context_limit: int = header["context_limit"]
        self.settings: Mapping[str, Any] = header["settings"]
        # None for a model that sees no pictures.
        self.vision = None if header["vision"] is None else VisionFacts(**header["vision"])

    def _load(
        self,
        launch: Launch,
        request: Mapping[str, Any],
        overrides: Mapping[str, Any],
        timeout_s: float,
    ) -> Header:
        """Start the child process and have it load the bundle."""
        while True:
            self._runner = Runner(launch, self._mapped.inherited)
            try:
                header, _ = self._runner.call(
                    "load",
                    silence_s=timeout_s,
                    config={**overrides, **self._mapped.overrides},
                    **request,
                )
                self._mapped.loaded()
                return header
            except (EngineError, RunnerRefusedError) as error:
                self._runner.kill()
                if self._mapped.failed():
                    continue
                message = error.message if isinstance(error, EngineError) else str(error)
                raise _does_not_load(self.bundle_dir, message) from error
            except BaseException:
                self._runner.kill()
                raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child process and free everything; twice is fine."""
        with self._lock:
            self._runner.close()
            self._mapped.release()

    @property
    def closed(self) -> bool:
        """True after `close`, and after any failure of the engine."""
        return self._runner.closed

    @property
    def mapping(self) -> MappingState:
        """Whether the weights are mapped from disk, and from where."""
        return self._mapped.mapping

    @property
    def pid(self) -> int | None:
        """The child process."""
        return self._runner.pid

    @property
    def position(self) -> int:
        """The number of tokens in the KV cache."""
        with self._lock:
            if self._runner.uncertain:
                self._call("status")
            return self._position

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids in the KV cache."""
        _, arrays = self._call("tokens")
        return tuple(arrays["ids"].tolist())

    @property
    def pictures(self) -> tuple[tuple[int, str], ...]:
        """The tiles in the KV cache: where the run of each begins, and its `tile_digest`."""
        header, _ = self._call("tokens")
        return tuple((place, digest) for place, digest in header["pictures"])

    @property
    def statistics(self) -> EngineStatistics:
        header, _ = self._call("statistics")
        names = EngineStatistics.__dataclass_fields__
        return EngineStatistics(**{name: header[name] for name in names})

    def forward(
        self,
        ids: Sequence[int],
        *,
        all_positions: bool = False,
        tiles: Sequence[U8] | U8 | None = None,
    ) -> F32:
        """Feed `ids` after what the cache holds.

        tiles: uint8 [S, S, 3], red, green, blue: one for each run of image tokens in `ids`, in
        their order.  They are encoded one by one, each before the piece of the prompt that has it.
        Of a bundle that takes whole pictures: canvases, see `VisionFacts`.

        Returns float32 logits: [vocab] after the last of `ids`, or [len(ids), vocab].  An
        interrupt (Ctrl-C) stops at the end of a piece and takes the cache back to before the call.

        Raises UsageError for no ids, ids outside the vocabulary, or tiles that do not fit them,
        ContextLengthError when they do not fit the context, EngineError when the engine fails.
        """
        with self._lock:
            self._generation += 1
            arrays = self._checked(ids, tiles)
            array = arrays["ids"]
            if not all_positions:
                _, results = self._call("forward", arrays, all_positions=False)
                return _writable(results["logits"])
            logits = np.empty((array.size, self.vocab_size), dtype=np.float32)
            filled = 0

            def take(_: Header, piece: Arrays) -> None:
                nonlocal filled
                rows = piece["logits"]
                logits[filled : filled + rows.shape[0]] = rows
                filled += rows.shape[0]

            self._call("forward", arrays, on_partial=take, all_positions=True)
            if filled != array.size:
                raise EngineError(f"{array.size} tokens gave logits for {filled} positions.")
            return logits

    def generate(
        self,
        ids: Sequence[int],
        options: SamplingOptions | None = None,
        max_new_tokens: int | None = None,
        stop_ids: Collection[int] = (),
        *,
        tiles: Sequence[U8] | U8 | None = None,
    ) -> Generation:
        """Feed `ids`, then choose token after token; see `Generation` for how it ends.

        tiles: those of the pictures in `ids`, see `forward`.

        options: None chooses the best token each time.  max_new_tokens: None goes on to the end of
        the context.  stop_ids end the answer and are not part of it.

        Raises as `forward`, before any work is done.
        """
        if max_new_tokens is not None and max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, found {max_new_tokens}.")
        with self._lock:
            self._generation += 1
            arrays = self._checked(ids, tiles)
            request = (options or SamplingOptions()).request()
            self._call("begin", options=request)
            return Generation(self, arrays, request["seed"], max_new_tokens, frozenset(stop_ids))

    def reset(self) -> None:
        """Empty the KV cache: the next call sees nothing of what was before."""
        with self._lock:
            self._generation += 1
            self._call("reset")

    def rewind(self, position: int) -> None:
        """Forget all but the first `position` tokens of the cache.

        Going on from there equals never having fed the forgotten tokens.  Raises UsageError when
        the cache holds fewer, or is quantized (its stored scales depend on all tokens).
        """
        with self._lock:
            self._generation += 1
            self._call("rewind", position=int(position))

    def vision_values(self, pixels: F32, names: Sequence[str]) -> dict[str, F32]:
        """Values of the vision's graph for one tile, with the settings of this engine.

        pixels: float32 [3, S, S], as the tower takes them.  names: of tensors of the graph, each
        float32 in the shape that the graph gives it.  Raises UsageError for a model of text alone,
        EngineError where the graph lacks one.
        """
        given = np.ascontiguousarray(pixels[None], dtype=np.float32)
        _, results = self._call("vision_values", {"pixels": given}, names=list(names))
        return {name: _writable(value) for name, value in results.items()}

    def engine_tokenize(self, text: str) -> list[int]:
        """The ids that the engine's own tokenizer gives: what an app on a phone will see.

        Raises UsageError for text with NUL (the engine's interface ends text there) or lone
        surrogates.
        """
        _, arrays = self._call("tokenize", text=_plain(text))
        ids: list[int] = arrays["ids"].tolist()
        return ids

    def engine_detokenize(self, ids: Sequence[int]) -> bytes:
        """The bytes that the engine's own decoder gives, one token at a time as it streams.

        Token by token there is no stripping of a leading space, and a token may be part of a
        character; so the result is bytes.
        """
        array = self._integers(ids)
        _, arrays = self._call("detokenize", {"ids": array})
        return arrays["bytes"].tobytes()

    def engine_apply_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that the engine's own template code makes of `role` / `content` messages."""
        plain = [{key: _plain(message[key]) for key in ("role", "content")} for message in messages]
        header, _ = self._call("template", messages=plain)
        text: str = header["text"]
        return text

    def _call(self, op: str, arrays: Arrays | None = None, **fields: Any) -> tuple[Header, Arrays]:
        with self._lock:
            try:
                header, results = self._runner.call(
                    op, arrays, silence_s=self._silence_s(arrays or {}), **fields
                )
            except RunnerRefusedError as error:
                raise UsageError(f"{self.bundle_dir.name}: {error}") from error
            self._position = header["position"]
            return header, results

    def _silence_s(self, arrays: Arrays) -> float:
        """The longest time without a sign of life: while a canvas is encoded there is none."""
        tiles = 1
        if self.vision is not None:
            pixels = self.vision.tile**2
            tiles = max([1, *(a[..., 0].size // pixels for a in arrays.values() if a.ndim == 3)])
        return tiles * self._call_timeout_s

    def _integers(self, ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """`ids` as int32, each inside the vocabulary (the engine itself reads out of bounds)."""
        array = np.asarray(ids)
        if array.size == 0:
            return np.empty(0, dtype=np.int32)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise UsageError(f"token ids must be a flat sequence of integers, found {array.dtype}.")
        bad = array[(array < 0) | (array >= self.vocab_size)]
        if bad.size:
            raise UsageError(
                f"token id {int(bad[0])} is outside the vocabulary of {self.vocab_size} "
                f"({self.bundle_dir.name}).",
                "Were the ids made by another model's tokenizer?",
            )
        return array.astype(np.int32)

    def _checked(
        self, ids: Sequence[int], tiles: Sequence[U8] | U8 | None
    ) -> dict[str, npt.NDArray[Any]]:
        """`ids` as `_integers` gives them, not empty, with room in the context, and their tiles."""
        array = self._integers(ids)
        if array.size == 0:
            raise UsageError("no token ids were given: an empty prompt has nothing to go on from.")
        position = self.position
        if position + array.size > self.context_limit:
            raise ContextLengthError(
                f"{array.size} tokens do not fit: the context holds {self.context_limit}, of which "
                f"{position} are in use.",
                "Shorten the prompt, or start anew with reset().",
            )
        return {"ids": array, **self._checked_tiles(array, tiles)}

    def _checked_tiles(
        self, ids: npt.NDArray[np.int32], tiles: Sequence[U8] | U8 | None
    ) -> dict[str, npt.NDArray[Any]]:
        given = [] if tiles is None else list(tiles)
        if self.vision is None:
            if given:
                raise UsageError(f"{self.bundle_dir.name}: this model sees no pictures.")
            return {}
        facts = self.vision
        rules = Vision(facts.image_token, facts.tile, facts.tile_tokens, facts.canvas_tokens)
        try:
            rules.runs(ids.tolist(), given)
        except RefusedError as error:
            raise UsageError(
                f"{self.bundle_dir.name}: {error}",
                "Ids and tiles must be those that the picture processor made for one prompt.",
            ) from error
        return {f"tile{i}": np.ascontiguousarray(tile) for i, tile in enumerate(given)}


class Generation(Iterator[int]):
    """Token ids, one per `next`; the work is done when one is asked for.

    The last token given is not in the cache until the next one is asked for, so to stop is to stop
    asking: the cache then holds the prompt and all tokens given but the last.  Any other use of
    the engine ends the generation: asking on is then a UsageError.

    finish_reason: None while it goes on; "stop" (`stop_token` tells which of the stop ids),
    "length" (max_new_tokens), "context" (the context is full) or "cancelled" (`close`, or an
    interrupt).
    seed: the seed in use, also when none was given.
    """

    def __init__(
        self,
        engine: Engine,
        arrays: Arrays,
        seed: int,
        max_new_tokens: int | None,
        stop_ids: frozenset[int],
    ) -> None:
        self._engine = engine
        self._number = engine._generation
        self._pending = arrays
        self._left = max_new_tokens
        self._stop_ids = stop_ids
        self.seed = seed
        self.finish_reason: str | None = None
        self.stop_token: int | None = None

    def __next__(self) -> int:
        engine = self._engine
        with engine._lock:
            if self.finish_reason is not None:
                raise StopIteration
            if engine._generation != self._number:
                raise UsageError(
                    "the engine was used for something else while this generation ran.",
                    "One engine holds one conversation; open another for a second one.",
                )
            if self._left == 0:
                return self._finish("length")
            if engine._position + self._pending["ids"].size > engine.context_limit:
                return self._finish("context")
            try:
                header, _ = engine._call("next", self._pending)
            except BaseException:
                self.finish_reason = "cancelled"
                raise
            token: int = header["token"]
            if token in self._stop_ids:
                self.stop_token = token
                return self._finish("stop")
            self._pending = {"ids": np.array([token], dtype=np.int32)}
            if self._left is not None:
                self._left -= 1
            return token

    def _finish(self, reason: str) -> int:
        self.finish_reason = reason
        raise StopIteration

    def close(self) -> None:
        """End the generation here; the engine is ready for something else."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"


def _overrides(
    memory: str | None,
    precision: str | None,
    threads: int | None,
    config: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The caller's options as keys of the engine's config.json."""
    result = dict(config or {})
    for name, value in (("memory", memory), ("precision", precision)):
        if value is not None:
            result[name] = value
        if name in result and result[name] not in LEVELS:
            raise UsageError(f"{name} must be one of {', '.join(LEVELS)}, found {result[name]!r}.")
    if threads is not None:
        if not 1 <= threads <= MAX_THREADS:
            raise UsageError(f"threads must be from 1 to {MAX_THREADS}, found {threads}.")
        result["thread_num"] = threads
    try:
        json.dumps(result)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"config must hold what JSON can hold: {error}.") from error
    return result


def _check_mapping(device: Device | None, overrides: Mapping[str, Any]) -> None:
    """Refuse what would name files of this machine on another one."""
    given = [key for key in ("use_mmap", "tmp_path") if overrides.get(key)]
    if device is not None and not device.maps_weights and given:
        raise UsageError(f"{device.name}: {given[0]} is for bundles that run on this machine.")


def _check_bundle(folder: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What can be seen without the engine: files missing or cut short.  Gives the configuration."""
    if not folder.is_dir():
        raise EngineError(f"{folder}: there is no such folder.")
    try:
        config = bundle_config(str(folder), overrides)
        _check_weights(folder, config["llm_model"], config["llm_weight"])
        if config.get("is_visual") is True:
            visual = config["visual_model"]
            _check_weights(folder, visual, visual + WEIGHT_SUFFIX)
    except RefusedError as error:
        raise _does_not_load(folder, str(error)) from error
    except EngineError as error:
        raise _does_not_load(folder, error.message) from error
    except OSError as error:
        raise _does_not_load(folder, str(error)) from error
    return config


def _check_weights(folder: Path, graph: str, weights: str) -> None:
    required = required_weight_bytes(_read_graph(folder / graph))
    found = (folder / weights).stat().st_size
    if found < required:
        raise EngineError(f"{weights} has {found} bytes, the graph reads {required}.")


def _read_graph(path: Path) -> bytes:
    """The whole graph, if its size is one that a graph can have (a sparse file has any)."""
    size_bytes = path.stat().st_size
    if size_bytes > GRAPH_LIMIT_BYTES:
        raise EngineError(
            f"{path.name} has {size_bytes} bytes, more than the {GRAPH_LIMIT_BYTES} we accept."
        )
    return path.read_bytes()


def _does_not_load(folder: Path, message: str) -> EngineError:
    return EngineError(
        f"{folder}: the bundle does not load: {message}",
        "If it was copied or downloaded, check that it is whole: mnnsmith check DIR",
    )


def _plain(text: str) -> str:
    if "\0" in text:
        raise UsageError("text with a NUL character cannot be given to the engine: it ends there.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"text is not valid Unicode: {error}.") from error
    return text


def _writable(array: npt.NDArray[Any]) -> F32:
    return np.array(array, dtype=np.float32)
