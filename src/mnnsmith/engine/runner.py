"""The process in which a language model runs: one plain file that needs only numpy and MNN.

`python runner.py` speaks a framed protocol on stdin and stdout, so the other end may be a local
pipe, ssh, adb or an emulator.  A frame is a 4-byte little-endian length, that many bytes of JSON,
then the raw bytes of the arrays that the JSON lists as `"arrays": [{name, dtype, shape}, ...]`.
A request has `op` and `id`; its replies repeat the `id`.  Replies with `partial` come before the
last one, and prove that work goes on.  Every reply has `position`, the tokens in the KV cache.

What the engine prints goes to stderr: stdout is put out of its reach before anything is imported.
A request that arrives while another is at work means that the caller gave up on the earlier one:
the work stops at the next piece of the prompt, and the cache goes back to where it was.

It is longer than the other modules, and repeats a few lines of theirs, for one reason: copied to a
phone, an emulator or a remote host it must run alone, so it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Arrays = Mapping[str, npt.NDArray[Any]]

HEADER_LIMIT_BYTES = 64 << 20
ARRAY_LIMIT_BYTES = 8 << 30
CONFIG_LIMIT_BYTES = 64 << 20
ALL_POSITIONS_BUDGET_BYTES = 32 << 20
UNQUANTIZED_CACHE = 8
# Of a runtime, by their numbers in MNN's `HintMode`.
DYNAMIC_QUANT_OPTIONS, ATTENTION_OPTION = 5, 7
# Of precision and memory, where a runtime takes them as numbers.
MODES = {"normal": 0, "high": 1, "low": 2}
# What the vision's graph calls its input; and those of the part of a graph of canvases that encodes
# one of several tiles: its number, that it is to go on, and the tiles.
TILES_INPUT, PART_INPUTS = "pixel_values", ("number", "going", "given")
ATTENTION_BLOCK = 64
# Files that a language model needs, and their names where config.json gives none.
FILE_KEYS = {
    "llm_config": "llm_config.json",
    "llm_model": "llm.mnn",
    "llm_weight": "llm.mnn.weight",
    "tokenizer_file": "tokenizer.txt",
    "embedding_file": "embeddings_bf16.bin",
}
# Where config.json does not name it; its weights lie beside it.
VISUAL_MODEL, WEIGHT_SUFFIX = "visual.mnn", ".weight"
# What the engine takes for a picture or a recording in a text, and reads or downloads.
MEDIA_MARKS = ("<img>", "<audio>")
# All else that the engine makes a path of (transformers/llm/engine/src/llmconfig.hpp of MNN 3.6.1).
# It looks for most of them only where other keys ask for it.
PATH_KEYS = (
    *("block_model", "lm_model", "embedding_model", "context_file", "ple_embed_file"),
    *("visual_model", "audio_model", "npu_model_dir", "lookup_file", "prefix_cache_path"),
    *("talker_model", "talker_weight", "talker_embedding_file", "predit_model", "dit_model"),
    *("bigvgan_model", "spk_dict", "draft_model", "mtp_model", "eagle_model", "eagle_fc"),
    *("eagle_d2t", "dflash_model", "dflash_fc", "dflash_lmhead"),
)


class RefusedError(Exception):
    """The request is wrong; the model and its cache are as they were."""


class FailedError(Exception):
    """The engine failed; nothing can be said about its state."""


class CancelledError(Exception):
    """The caller gave up on the request."""


class DamagedStreamError(Exception):
    """What came through the pipe is no frame."""


# --- sampling: pure functions on one row of logits ---------------------------------------------


def apply_penalties(
    logits: F64,
    seen: npt.NDArray[np.bool_],
    counts: npt.NDArray[np.int64],
    options: Mapping[str, Any],
) -> F64:
    """Lower the logits of tokens that occurred already; `logits` [vocab] is not changed.

    repetition_penalty divides positive and multiplies negative logits of every token in the
    context `seen` (Keskar et al. 2019, as transformers does); presence_penalty and
    frequency_penalty subtract once, and per occurrence in the answer (`counts`), as OpenAI does.
    """
    result: F64 = logits.copy()
    if options["repetition_penalty"] != 1.0:
        ids = np.flatnonzero(seen)
        old = result[ids]
        penalty = options["repetition_penalty"]
        result[ids] = np.where(old > 0, old / penalty, old * penalty)
    if options["presence_penalty"] or options["frequency_penalty"]:
        ids = np.flatnonzero(counts)
        result[ids] -= options["presence_penalty"] + options["frequency_penalty"] * counts[ids]
    return result


def candidates(
    logits: F64, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[I64, F64]:
    """The token ids that may be drawn, ascending, and their probabilities.

    In the order of transformers' warpers: temperature, the `top_k` best (ties stay; 0 = all), the
    smallest set that holds `top_p` of the probability, and those with at least `min_p` of the
    best one's.  The best token always stays.
    """
    ids = np.arange(logits.size, dtype=np.int64)
    scores = logits / temperature
    if 0 < top_k < scores.size:
        keep = scores >= np.partition(scores, -top_k)[-top_k]
        ids, scores = ids[keep], scores[keep]
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    if top_p < 1.0:
        keep = _nucleus(weights, top_p)
        ids, weights = ids[keep], weights[keep]
    if min_p > 0.0:
        keep = weights >= min_p * weights.max()
        ids, weights = ids[keep], weights[keep]
    return ids, weights / weights.sum()


def _nucleus(weights: F64, top_p: float) -> npt.NDArray[np.bool_]:
    """Which of the probabilities `weights` form the top-p set (Holtzman et al. 2020)."""
    tail = 1.0 - top_p
    # Below tail / n all together cannot exceed the tail: they go without being sorted.
    likely = np.flatnonzero(weights > tail / weights.size)
    order = likely[np.argsort(weights[likely], kind="stable")]
    dropped_mass = max(0.0, 1.0 - float(weights[likely].sum()))
    reached = dropped_mass + np.cumsum(weights[order])
    keep = np.zeros(weights.size, dtype=np.bool_)
    keep[order[reached > tail]] = True
    keep[int(weights.argmax())] = True
    return keep


class Sampler:
    """The state of one generation: options, random numbers, and which tokens occurred."""

    def __init__(self, options: Mapping[str, Any], vocab_size: int, context: Sequence[int]) -> None:
        self.options = dict(options)
        self.random = np.random.Generator(np.random.PCG64(self.options["seed"]))
        self.seen = np.zeros(vocab_size, dtype=np.bool_)
        self.seen[np.asarray(context, dtype=np.int64)] = True
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.penalized = (
            self.options["repetition_penalty"] != 1.0
            or self.options["presence_penalty"] != 0.0
            or self.options["frequency_penalty"] != 0.0
        )

    def draw(self, logits: F32) -> int:
        """The next token id for the logits [vocab]; temperature 0 takes the best."""
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            raise FailedError(
                "the logits are not finite: weights are damaged, or a value overflowed."
            )
        options = self.options
        token = best
        if self.penalized or options["temperature"] != 0.0:
            values = logits.astype(np.float64)
            if self.penalized:
                values = apply_penalties(values, self.seen, self.counts, options)
            if options["temperature"] == 0.0:
                token = int(values.argmax())
            else:
                ids, weights = candidates(
                    values,
                    options["temperature"],
                    options["top_k"],
                    options["top_p"],
                    options["min_p"],
                )
                place = np.searchsorted(np.cumsum(weights), self.random.random(), side="right")
                token = int(ids[min(int(place), ids.size - 1)])
        self.seen[token] = True
        self.counts[token] += 1
        return token


# --- the model ----------------------------------------------------------------------------------


def read_config(folder: str, name: str) -> dict[str, Any]:
    """A JSON object of the bundle, or RefusedError."""
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            data = file.read(CONFIG_LIMIT_BYTES + 1)
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror or error}.") from error
    if len(data) > CONFIG_LIMIT_BYTES:
        raise RefusedError(f"{path}: larger than {CONFIG_LIMIT_BYTES} bytes.")
    try:
        value = json.loads(data, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{path}: not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise RefusedError(f"{path}: a JSON object is expected, found {type(value).__name__}.")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that stands twice the engine may take the other one than Python does."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def bundle_config(folder: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's view of config.json, llm_config.json and the caller's overrides, checked.

    Nothing in it leads out of the bundle, but for a `tmp_path` that the caller gave.
    """
    config = read_config(folder, "config.json")
    described = _plain_name(folder, config, "llm_config")
    _check_file(folder, described, "llm_config")
    config.update(read_config(folder, described))
    # The engine's process has a place of its own for temporary files.
    config.pop("tmp_path", None)
    config.update(overrides)
    if "base_dir" in config:
        raise RefusedError(f"{folder}: base_dir is set; a bundle holds its own files.")
    for key in FILE_KEYS:
        if key == "llm_config" or (key == "embedding_file" and "tie_embeddings" in config):
            continue
        config[key] = _plain_name(folder, config, key)
        _check_file(folder, config[key], key)
    for key in (*FILE_KEYS, *PATH_KEYS):
        # An empty one names the bundle itself, as npu_model_dir does by default.
        if config.get(key, "") != "":
            _plain_name(folder, config, key)
    if config.get("is_visual") is True:
        config["visual_model"] = config.get("visual_model", VISUAL_MODEL)
        for name in (config["visual_model"], config["visual_model"] + WEIGHT_SUFFIX):
            _check_file(folder, name, "visual_model")
    if config.get("attention_mask") in ("glm", "glm2"):
        raise RefusedError(
            f"{folder}: attention mask {config['attention_mask']!r} is not supported."
        )
    # The engine allocates by these before it compares them with anything.
    for key, largest in (("max_position_embeddings", 1 << 28), ("hidden_size", 1 << 17)):
        if not isinstance(config.get(key), int) or not 1 <= config[key] <= largest:
            raise RefusedError(
                f"{folder}/llm_config.json: {key} must be an integer from 1 to {largest}, found "
                f"{config.get(key)!r}."
            )
    return config


def _plain_name(folder: str, config: Mapping[str, Any], key: str) -> str:
    """The value of `key`, which must name something that lies in the bundle itself."""
    name = config.get(key, FILE_KEYS.get(key))
    if (
        not isinstance(name, str)
        or os.path.basename(name) != name
        or name in ("", ".", "..")
        or "\0" in name
    ):
        raise RefusedError(f"{folder}: {key} must be a plain file name, found {name!r:.200}.")
    return name


def _check_file(folder: str, name: str, key: str) -> None:
    path = os.path.join(folder, name)
    if not os.path.isfile(path):
        raise RefusedError(f"{path}: missing ({key} of the bundle).")
    if os.path.getsize(path) == 0:
        raise RefusedError(f"{path}: the file is empty ({key} of the bundle).")


# --- pictures -----------------------------------------------------------------------------------


class Vision:
    """How pictures stand in the ids: each tile, or each canvas, as a run of image tokens."""

    def __init__(
        self,
        image_token: int,
        tile: int,
        tile_tokens: int,
        canvas_tokens: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """tile: pixels a side.  tile_tokens: the length of its run.

        canvas_tokens: where the model takes canvases instead, the length of the run of each, by its
        rows and columns of tiles (counted from one); 0 for one that it does not take.
        """
        self.image_token = image_token
        self.tile = tile
        self.tile_tokens = tile_tokens
        self.canvas_tokens = canvas_tokens

    def runs(self, ids: Sequence[int], tiles: Sequence[npt.NDArray[Any]]) -> list[tuple[int, int]]:
        """Where the run of each of `tiles` begins in `ids`, and its length; refuses other runs.

        One id alone is no picture: the engine takes its embedding from the table.
        """
        lengths = [self.length(tile) for tile in tiles]
        found: list[tuple[int, int]] = []
        place = 0
        while place < len(ids) and len(ids) > 1:
            end = place
            while end < len(ids) and ids[end] == self.image_token:
                end += 1
            if end > place:
                wanted = dict(enumerate(lengths)).get(len(found), self.tile_tokens)
                if end - place != wanted:
                    raise RefusedError(
                        f"a run of {end - place} image tokens at {place}; its "
                        f"{'tile' if self.canvas_tokens is None else 'canvas'} has {wanted}."
                    )
                found.append((place, wanted))
            place = max(end, place + 1)
        if len(found) != len(tiles):
            raise RefusedError(
                f"{len(found)} runs of image tokens, and {len(tiles)} tiles for them."
            )
        # There the engine would look up no text, or the last text a second time.
        if found and (found[0][0] == 0 or sum(found[-1]) == len(ids)):
            raise RefusedError("a picture needs at least one token before it and one after it.")
        return found

    def length(self, tile: npt.NDArray[Any]) -> int:
        """Of the run of a tile or canvas; refuses what is neither, and grids without tokens."""
        side = self.tile
        fits = tile.dtype == np.uint8 and tile.ndim == 3 and tile.shape[2] == 3
        if self.canvas_tokens is None:
            if not fits or tile.shape[:2] != (side, side):
                raise RefusedError(
                    f"tiles must be uint8 [{side}, {side}, 3], found {tile.dtype} "
                    f"{list(tile.shape)}."
                )
            return self.tile_tokens
        if not fits or tile.shape[0] % side or tile.shape[1] % side or not tile.size:
            raise RefusedError(
                f"a canvas must be uint8 [a * {side}, b * {side}, 3], found {tile.dtype} "
                f"{list(tile.shape)}."
            )
        rows, columns = tile.shape[0] // side, tile.shape[1] // side
        lengths = self.canvas_tokens
        if rows > len(lengths) or columns > len(lengths[0]) or not lengths[rows - 1][columns - 1]:
            raise RefusedError(
                f"a canvas of {rows} x {columns} tiles shows no grid that the model has tokens "
                f"for; the largest has {len(lengths)} x {len(lengths[0])}."
            )
        length: int = lengths[rows - 1][columns - 1]
        return length

    def cut(self, runs: Sequence[tuple[int, int]], start: int, stop: int, end: int) -> int:
        """Where a piece that begins at `start` may end: at `stop` if that is between texts.

        Else before it, or where nothing is left before it, after it; `end` is that of all ids.
        """
        for place in itertools.chain(range(stop, start, -1), range(stop + 1, end)):
            if not any(run <= place <= run + length for run, length in runs):
                return place
        return end


def tile_digest(tile: npt.NDArray[Any]) -> str:
    """What tells one tile from another, 32 hexadecimal digits (BLAKE2b of its levels)."""
    return hashlib.blake2b(tile.tobytes(), digest_size=16).hexdigest()


def vision_of(folder: str, config: Mapping[str, Any]) -> Vision | None:
    """What the configuration says of pictures, or None for a model that sees none."""
    if config.get("is_visual") is not True:
        return None
    values = []
    for name in ("image_pad", "image_size_unit", "image_seq_len"):
        value = config.get(name)
        if type(value) is not int or not 1 < value < 1 << 24:
            raise RefusedError(f"{folder}/llm_config.json: {name} is {value!r:.60}.")
        values.append(value)
    image_token, tile, tile_tokens = values
    canvas_tokens = _canvas_tokens(folder, config.get("canvas_tokens"))
    return Vision(image_token, tile, tile_tokens, canvas_tokens)


def _canvas_tokens(folder: str, rows: Any) -> list[list[int]] | None:
    if rows is None:
        return None
    lists = isinstance(rows, list) and all(isinstance(row, list) and row for row in rows)
    if (
        not lists
        or not 1 <= len(rows) <= 64
        or any(len(row) != len(rows[0]) for row in rows)
        or any(type(n) is not int or not 0 <= n < 1 << 24 for row in rows for n in row)
    ):
        raise RefusedError(f"{folder}/llm_config.json: canvas_tokens is {rows!r:.60}.")
    return list(rows)


class Model:
    """One loaded model, and the token ids and pictures in its KV cache."""

    def __init__(self, folder: str, overrides: Mapping[str, Any], piece_tokens: int) -> None:
        config = bundle_config(folder, overrides)
        self.folder = folder
        self.config = config
        threads = config.get("thread_num", 4)
        if not isinstance(threads, int) or not 1 <= threads <= 1024:
            raise RefusedError(f"{folder}/config.json: thread_num is {threads!r}.")
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1 << 16
        self.settings = {
            "memory": "low",
            "precision": "low",
            "attention_mode": UNQUANTIZED_CACHE,
            "dynamic_option": 0,
            "backend_type": "cpu",
        }
        self.settings.update({key: config[key] for key in self.settings if key in config})
        self.settings["thread_num"] = threads if "thread_num" in overrides else min(threads, usable)
        self.context_limit: int = config["max_position_embeddings"]
        self.piece_tokens = piece_tokens
        self.tokens: list[int] = []
        self.vision = vision_of(folder, config)
        # Of each tile in the cache: where its run begins, and what it shows.
        self.pictures: list[tuple[int, str]] = []
        # What `vision_values` opened: names, runtime, module.
        self.seeing: tuple[list[str], Any, Any] | None = None
        self.all_logits = bool(overrides.get("all_logits", False))
        self.counters = dict.fromkeys(("prefill_tokens", "decode_tokens", "tiles"), 0)
        self.seconds = dict.fromkeys(("prefill_s", "decode_s", "sample_s", "vision_s"), 0.0)
        started = time.perf_counter()
        self.llm = self._load(folder, overrides)
        # One token proves that the weights fit the graph, and tells the size of the vocabulary.
        self.vocab_size = int(self._run([0], all_positions=False).shape[-1])
        self._check_embeddings()
        self.reset()
        self.load_s = time.perf_counter() - started

    def _load(self, folder: str, overrides: Mapping[str, Any]) -> Any:
        import MNN.llm

        llm = MNN.llm.create(os.path.join(folder, "config.json"))._c_obj
        fixed: dict[str, Any] = {
            **self.settings,
            "all_logits": self.all_logits,
            # Prompts are cut in pieces here: the engine's own way returns the last piece's logits.
            "chunk": 0,
            "speculative_type": "",
        }
        if "chunk_limits" in self.config:
            fixed["chunk_limits"] = []
        # Never the bundle's own choice: two engines must not share a file.
        if "tmp_path" not in overrides:
            fixed["tmp_path"] = os.getcwd()
        llm.set_config(json.dumps({**overrides, **fixed}))
        if not llm.load():
            raise FailedError(f"{folder}: the engine could not load this bundle.")
        return llm

    def _check_embeddings(self) -> None:
        """The engine reads a row for any id, and does not notice a file cut short."""
        if "tie_embeddings" in self.config:
            return
        path = os.path.join(self.folder, self.config["embedding_file"])
        expected = 2 * self.vocab_size * self.config["hidden_size"]
        if os.path.getsize(path) < expected:
            raise FailedError(f"{path}: {os.path.getsize(path)} bytes, expected {expected}.")

    @property
    def position(self) -> int:
        return len(self.tokens)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse what the engine would read out of bounds."""
        if not ids:
            raise RefusedError("no token ids were given.")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RefusedError(f"token id {bad} is outside the vocabulary of {self.vocab_size}.")
        if self.position + len(ids) > self.context_limit:
            raise RefusedError(
                f"{self.position} tokens in the cache and {len(ids)} more exceed the context of "
                f"{self.context_limit}."
            )

    def check_pictures(
        self, ids: Sequence[int], tiles: Sequence[npt.NDArray[Any]]
    ) -> list[tuple[int, int]]:
        """Where the runs of the tiles begin in `ids`, and their lengths."""
        if self.vision is None:
            if len(tiles):
                raise RefusedError("this model sees no pictures.")
            return []
        return self.vision.runs(ids, tiles)

    def forward(
        self, ids: Sequence[int], tiles: Sequence[npt.NDArray[Any]], *, all_positions: bool
    ) -> Iterator[F32]:
        """Feed `ids`, a piece at a time; yields float32 logits [1, vocab] or [piece, vocab].

        tiles: uint8 [S, S, 3] red, green, blue, one for each run of image tokens; or canvases.
        """
        self.check_ids(ids)
        runs = self.check_pictures(ids, tiles)
        step = self.piece_tokens
        if all_positions:
            # Whole attention blocks: then pieces of any such length give the same bits.
            fitting = ALL_POSITIONS_BUDGET_BYTES // (4 * self.vocab_size)
            step = min(step, max(1, fitting // ATTENTION_BLOCK) * ATTENTION_BLOCK)
        kind = "prefill" if len(ids) > 1 else "decode"
        start = 0
        while start < len(ids):
            stop = min(start + step, len(ids))
            if self.vision is not None and stop < len(ids):
                stop = self.vision.cut(runs, start, stop, len(ids))
            # The engine drops the embeddings that a call does not use: each piece has its own.
            for tile, (run, length) in zip(tiles, runs, strict=True):
                if start <= run < stop:
                    self._show(tile, self.position + run - start, length)
            began = time.perf_counter()
            logits = self._run(ids[start:stop], all_positions=all_positions)
            self.counters[f"{kind}_tokens"] += stop - start
            self.seconds[f"{kind}_s"] += time.perf_counter() - began
            start = stop
            yield logits

    def _show(self, tile: npt.NDArray[Any], position: int, length: int) -> None:
        """Encode a tile or canvas; the engine keeps its embeddings for the next run that is fed."""
        import MNN.expr as expr

        assert self.vision is not None
        began = time.perf_counter()
        height, width = tile.shape[:2]
        # The engine reads a picture as a file's decoder gives it: blue, green, red.
        pixels = np.ascontiguousarray(tile[..., ::-1])
        data = expr.const(pixels, [height, width, 3], expr.NHWC, expr.uint8)
        ids = self.llm.tokenizer_encode(
            {
                "text": "<img>image_0</img>",
                "images": [{"data": data, "width": width, "height": height}],
            }
        )
        made = list(ids).count(self.vision.image_token)
        if made != length:
            kind = "tile" if self.vision.canvas_tokens is None else "canvas"
            raise FailedError(f"the engine made {made} embeddings of a {kind}, not {length}.")
        self.pictures.append((position, tile_digest(tile)))
        self.counters["tiles"] += 1
        self.seconds["vision_s"] += time.perf_counter() - began

    def vision_values(self, pixels: F32, names: Sequence[str]) -> dict[str, F32]:
        """Values of the vision's graph for one tile, float32 [1, 3, S, S], with these settings.

        Of a bundle that takes canvases: with the part that encodes a tile in the graph's place.
        """
        import MNN.expr as expr

        if self.vision is None:
            raise RefusedError("this model sees no pictures.")
        if self.seeing is None or self.seeing[0] != list(names):
            self.seeing = None
            self.seeing = (list(names), *self._open_vision(names))
        module = self.seeing[2]
        inputs = [expr.const(pixels, list(pixels.shape), expr.NCHW)]
        if self.vision.canvas_tokens is not None:
            number, going = (np.array([i], dtype=np.int32) for i in (0, 1))
            inputs = [expr.const(x, [1], expr.NCHW, expr.int) for x in (number, going)] + inputs
        outputs = module.forward(inputs)
        # The native arrays must be gone before their module is.
        values = {
            name: np.array(output.read(), dtype=np.float32).reshape(output.shape)
            for name, output in zip(names, outputs, strict=True)
        }
        del outputs
        return values

    def _open_vision(self, names: Sequence[str]) -> tuple[Any, Any]:
        """The runtime and the vision's graph, with outputs `names`, as the engine opens it."""
        import MNN.nn as nn

        settings = self.settings
        runtime = nn.create_runtime_manager((
            {
                "backend": 0, "numThread": settings["thread_num"],
                "precision": MODES[str(settings["precision"])],
                "memory": MODES[str(settings["memory"])],
            },
        ))  # fmt: skip
        runtime.set_hint(ATTENTION_OPTION, settings["attention_mode"])
        runtime.set_hint(DYNAMIC_QUANT_OPTIONS, settings["dynamic_option"])
        path = os.path.join(self.folder, self.config["visual_model"])
        takes_canvas = self.vision is not None and self.vision.canvas_tokens is not None
        given = PART_INPUTS if takes_canvas else (TILES_INPUT,)
        module = nn.load_module_from_file(
            path, list(given), list(names), runtime_manager=runtime, shape_mutable=True,
            rearrange=True,
        )  # fmt: skip
        if module is None:
            raise FailedError(f"{path}: the engine could not load this graph.")
        return runtime, module

    def _run(self, ids: Sequence[int], *, all_positions: bool) -> F32:
        """One call of the engine: logits [len(ids) or 1, vocab]."""
        one = len(ids) == 1
        if not one and all_positions != self.all_logits:
            self.all_logits = all_positions
            self.llm.set_config(json.dumps({"all_logits": all_positions}))
        # The engine takes "answer begun" for "decode", and clones the module for each new length
        # of a decode; so this says what the call is: one token a decode, more a prefill.
        self.llm.set_context({"gen_seq_len": 1 if one else 0})
        result = self.llm.forward([int(i) for i in ids])
        if not result.valid:
            raise FailedError("the engine's forward pass failed; its log says why.")
        shape = result.shape
        # The native array must be gone before its model is: copy, then drop it.
        logits = np.array(result.read(), dtype=np.float32).reshape(-1, shape[-1])
        del result
        if logits.shape[0] != (len(ids) if all_positions else 1):
            raise FailedError(f"{len(ids)} tokens gave logits of shape {shape}.")
        self.tokens.extend(ids)
        if self.llm.get_current_history() != self.position:
            raise FailedError(
                f"the KV cache holds {self.llm.get_current_history()} tokens, not {self.position}."
            )
        return logits

    def reset(self) -> None:
        self.llm.reset()
        self.tokens = []
        self.pictures = []

    def rewind(self, position: int) -> None:
        """Forget all but the first `position` tokens."""
        if not 0 <= position <= self.position:
            raise RefusedError(
                f"cannot rewind to {position}: {self.position} tokens are in the cache."
            )
        if position == 0:
            self.reset()
        elif position < self.position:
            if self.settings["attention_mode"] != UNQUANTIZED_CACHE:
                raise RefusedError("a quantized KV cache cannot be rewound exactly; reset it.")
            self.llm.erase_history(position, 0)
            self.tokens = self.tokens[:position]
            self.pictures = [entry for entry in self.pictures if entry[0] < position]

    def go_back(self, position: int) -> None:
        """As `rewind`, or to the beginning where only that is exact."""
        exact = self.settings["attention_mode"] == UNQUANTIZED_CACHE
        self.rewind(position if exact or position == self.position else 0)


# --- requests -----------------------------------------------------------------------------------


class Server:
    """Answers requests until stdin ends."""

    def __init__(self, requests_fd: int, replies_fd: int) -> None:
        self.requests_fd = requests_fd
        self.replies_fd = replies_fd
        self.model: Model | None = None
        self.sampler: Sampler | None = None
        self.request_id = 0

    def serve(self) -> None:
        while (frame := read_frame(self.requests_fd)) is not None:
            request, arrays = frame
            self.request_id = request["id"]
            try:
                reply, results = self.answer(request, arrays)
            except RefusedError as error:
                reply, results = {"error": "refused", "message": str(error)}, {}
            except CancelledError:
                reply, results = {"error": "cancelled", "message": "given up"}, {}
            except FailedError as error:
                reply, results = {"error": "failed", "message": str(error)}, {}
            self.reply(reply, results)

    def reply(self, reply: Mapping[str, Any], arrays: Arrays) -> None:
        position = self.model.position if self.model else 0
        header = {**reply, "id": self.request_id, "position": position}
        write_frame(self.replies_fd, header, arrays)

    def answer(self, request: Mapping[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
        op = request["op"]
        if op == "self_test":
            return self_test(), {}
        if op == "status":
            return {}, {}
        if op == "load":
            return self.load(request), {}
        if self.model is None:
            raise RefusedError("no model is loaded.")
        if op == "vision_values":
            return {}, self.model.vision_values(arrays["pixels"], request["names"])
        ids: list[int] = arrays["ids"].tolist() if "ids" in arrays else []
        tiles = [arrays[f"tile{i}"] for i in range(len(arrays) - ("ids" in arrays))]
        if op == "forward":
            return self.forward(self.model, ids, tiles, request["all_positions"])
        if op == "begin":
            self.sampler = Sampler(request["options"], self.model.vocab_size, self.model.tokens)
            return {}, {}
        if op == "next":
            return self.next_token(self.model, ids, tiles), {}
        if op == "reset":
            self.model.reset()
            return {}, {}
        if op == "rewind":
            self.model.rewind(request["position"])
            return {}, {}
        if op == "statistics":
            return self.statistics(self.model), {}
        return self.text(self.model, op, request, ids)

    def load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.model = None
        self.sampler = None
        model = Model(request["bundle"], request["config"], request["piece_tokens"])
        self.model = model
        return {
            "vocab_size": model.vocab_size,
            "context_limit": model.context_limit,
            "settings": model.settings,
            "vision": None if model.vision is None else vars(model.vision),
        }

    def forward(
        self, model: Model, ids: list[int], tiles: Sequence[npt.NDArray[Any]], all_positions: bool
    ) -> tuple[dict[str, Any], Arrays]:
        logits = None
        for logits in self.pieces(model, ids, tiles, all_positions):
            if all_positions:
                self.reply({"partial": True}, {"logits": logits})
            elif len(ids) > model.piece_tokens:
                self.reply({"partial": True}, {})
        if all_positions or logits is None:
            return {}, {}
        return {}, {"logits": logits[-1]}

    def next_token(
        self, model: Model, ids: list[int], tiles: Sequence[npt.NDArray[Any]]
    ) -> dict[str, Any]:
        if self.sampler is None:
            raise RefusedError("no generation was begun.")
        model.check_ids(ids)
        model.check_pictures(ids, tiles)
        self.sampler.seen[np.asarray(ids)] = True
        last = np.empty((0, 0), dtype=np.float32)
        for logits in self.pieces(model, ids, tiles, False):
            last = logits
            if len(ids) > model.piece_tokens:
                self.reply({"partial": True}, {})
        began = time.perf_counter()
        token = self.sampler.draw(last[-1])
        model.seconds["sample_s"] += time.perf_counter() - began
        return {"token": token}

    def pieces(
        self, model: Model, ids: list[int], tiles: Sequence[npt.NDArray[Any]], all_positions: bool
    ) -> Iterator[F32]:
        """Logits piece by piece; the cache goes back when the caller gives up."""
        start = model.position
        for logits in model.forward(ids, tiles, all_positions=all_positions):
            yield logits
            if model.position < start + len(ids) and self.another_request_waits():
                model.go_back(start)
                raise CancelledError

    def another_request_waits(self) -> bool:
        return bool(select.select([self.requests_fd], [], [], 0)[0])

    def statistics(self, model: Model) -> dict[str, Any]:
        return {
            "load_s": model.load_s,
            **model.counters,
            **model.seconds,
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def text(
        self, model: Model, op: str, request: Mapping[str, Any], ids: list[int]
    ) -> tuple[dict[str, Any], Arrays]:
        """The engine's own tokenizer and chat template."""
        if op == "tokens":
            ids_array = np.asarray(model.tokens, dtype=np.int32)
            return {"pictures": model.pictures}, {"ids": ids_array}
        if op == "tokenize":
            if model.vision is not None and any(m in request["text"] for m in MEDIA_MARKS):
                raise RefusedError("the engine would open the file or address in this text.")
            ids = model.llm.tokenizer_encode(request["text"])
            return {}, {"ids": np.asarray(ids, dtype=np.int32)}
        if op == "detokenize":
            if ids:
                # A range check only: nothing is fed.
                bad = [i for i in ids if not 0 <= i < model.vocab_size]
                if bad:
                    raise RefusedError(
                        f"token id {bad[0]} is outside the vocabulary of {model.vocab_size}."
                    )
            data = b"".join(decode_token(model.llm, i) for i in ids)
            return {}, {"bytes": np.frombuffer(data, dtype=np.uint8)}
        if op == "template":
            try:
                return {"text": model.llm.apply_chat_template(request["messages"])}, {}
            except UnicodeDecodeError as error:
                raise RefusedError("the engine's template code broke a character.") from error
        raise RefusedError(f"unknown operation {op!r}.")


def decode_token(llm: Any, token: int) -> bytes:
    """The bytes of one token; one that is part of a character is no valid text by itself."""
    try:
        text: str = llm.tokenizer_decode(token)
    except UnicodeDecodeError as error:
        return error.object
    return text.encode("utf-8", "surrogatepass")


# --- this process -------------------------------------------------------------------------------


def self_test() -> dict[str, Any]:
    """Run a tiny graph: the largest error of a 2-D matrix product."""
    import MNN.expr as expr
    import MNN.llm  # noqa: F401  (proves that it can be loaded)

    left = np.arange(12, dtype=np.float32).reshape(3, 4)
    right = np.arange(20, dtype=np.float32).reshape(4, 5) - 7
    result = expr.matmul(expr.const(left, [3, 4], expr.NCHW), expr.const(right, [4, 5], expr.NCHW))
    values = np.array(result.read(), dtype=np.float32).reshape(3, 5)
    del result
    return {"largest_error": float(np.abs(values - left @ right).max())}


def peak_rss_bytes() -> int:
    """The most memory that this process held.

    Linux: VmHWM, since ru_maxrss is inherited from the process that started this one.
    """
    if sys.platform == "linux":
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def read_exactly(fd: int, size_bytes: int) -> bytearray | None:
    """`size_bytes` bytes, or None at the end of the stream."""
    data = bytearray(size_bytes)
    view = memoryview(data)
    done = 0
    while done < size_bytes:
        count = os.readv(fd, [view[done : done + (1 << 20)]])
        if count == 0:
            return None
        done += count
    return data


def read_frame(fd: int) -> tuple[dict[str, Any], Arrays] | None:
    """One frame, or None at the end of the stream."""
    prefix = read_exactly(fd, 4)
    if prefix is None:
        return None
    (length,) = struct.unpack("<I", prefix)
    if length > HEADER_LIMIT_BYTES:
        raise DamagedStreamError(f"a header of {length} bytes")
    data = read_exactly(fd, length)
    if data is None:
        return None
    header = json.loads(data)
    arrays = {}
    for spec in header.pop("arrays", []):
        dtype = np.dtype(spec["dtype"])
        size_bytes = int(np.prod(spec["shape"], dtype=np.int64)) * dtype.itemsize
        if not 0 <= size_bytes <= ARRAY_LIMIT_BYTES:
            raise DamagedStreamError(f"an array of {size_bytes} bytes")
        body = read_exactly(fd, size_bytes)
        if body is None:
            return None
        arrays[spec["name"]] = np.frombuffer(body, dtype=dtype).reshape(spec["shape"])
    return header, arrays


def write_frame(fd: int, header: Mapping[str, Any], arrays: Arrays) -> None:
    parts = {
        name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()
    }
    specs = [
        {"name": name, "dtype": array.dtype.str, "shape": list(array.shape)}
        for name, array in parts.items()
    ]
    data = json.dumps({**header, "arrays": specs}).encode("ascii")
    blocks = [memoryview(struct.pack("<I", len(data)) + data)]
    blocks += [array.reshape(-1).view(np.uint8).data for array in parts.values()]
    for view in blocks:
        done = 0
        while done < len(view):
            done += os.write(fd, view[done:])


def main(server: type[Server] = Server) -> None:
    """Turn this process into a runner whose requests `server` answers."""
    requests_fd = os.dup(0)
    replies_fd = os.dup(1)
    os.dup2(2, 1)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    # Ctrl-C is the caller's business: it reaches a whole terminal group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        # A model that does not fit into memory shall cost this process, not the caller.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
    # This file's folder is first on the path; nothing there may shadow what the engine imports.
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        sys.path.pop(0)
    with contextlib.suppress(BrokenPipeError):
        server(requests_fd, replies_fd).serve()
    # No interpreter shutdown: destructors of the native code have nothing to add.
    os._exit(0)


if __name__ == "__main__":
    main()
