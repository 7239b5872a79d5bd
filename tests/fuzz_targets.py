"""Hostile inputs and what reads them; run as a child process with limits by `test_fuzz.py`.

`python fuzz_targets.py COUNT [TARGET ...]` feeds every target COUNT inputs.  Each must be taken, or
refused with a `MnnsmithError`, within two seconds of processor time and a bound on memory.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import tiny_checkpoint as tiny
from mnnsmith.errors import MnnsmithError

ADDRESS_SPACE_BYTES = 4 << 30
SECONDS_PER_INPUT = 2.0
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3")

# ---------------------------------------------------------------- nasty values and mutations

_DEEP = "@deep@"
NASTY = (
    None, True, False, 0, -1, 1, 2, 3, 64, 2**31, 2**63, -(2**63), 10**8, 10**9, 10**30, 10**400,
    0.5, -0.5, 1e-320, 1e30, 1e308, float("nan"), float("inf"), -float("inf"), 3.0,
    "", "x", "\ud800", "\0", "../x", "/etc/passwd", "x" * 5000, "0.5", "nan", "F32", "BF16", "🦙",
    [], [[]], [0], [1, 2], ["x"], [None], [-1, 2**62], {}, {"a": 1}, {"": {}}, _DEEP,
    list(range(1000)), {"type": "BPE"}, {"rope_type": "yarn", "factor": 1e9}, [0, 2**63],
)  # fmt: skip
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "su", "mrope", 3)
SCALING = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(ROPE_KINDS)},
    optional={
        key: st.sampled_from((*NASTY, 1.0, 4.0, 8192, 32.0, [1.0] * 8, [1.0] * 16))
        for key in (
            "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "short_factor",
            "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor",
            "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor", "long_factor", "type",
        )
    },
)  # fmt: skip

_place = st.integers(0, 1 << 20)
_value = st.one_of(
    *[st.sampled_from(NASTY)] * 5, st.integers(-(2**65), 2**65), st.floats(), st.text(max_size=8)
)
_edit = st.tuples(st.sampled_from(("set", "set", "set", "delete", "rename", "add")), _place, _value)
edits = _edit.map(lambda one: [one]) | st.lists(_edit, min_size=1, max_size=3)
_byte = st.tuples(_place, st.integers(0, 255), st.sampled_from(("flip", "cut", "insert")))
bytes_edits = st.one_of(*[st.just([])] * 4, st.lists(_byte, min_size=1, max_size=3))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, child in value.items():
            found += _paths(child, (*path, key))
    elif isinstance(value, list):
        for i, child in enumerate(value[:20]):
            found += _paths(child, (*path, i))
    return found


def mutated(document: Any, changes: list[tuple[str, int, Any]]) -> Any:
    """A copy with values replaced, removed, renamed or added at any depth."""
    document = copy.deepcopy(document)
    for kind, place, value in changes:
        paths = _paths(document)
        if not paths:
            break
        path = paths[place % len(paths)]
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        value = copy.deepcopy(value)
        if kind == "delete":
            del parent[path[-1]]
        elif kind == "rename" and isinstance(parent, dict):
            parent[str(value)[:40]] = parent.pop(path[-1])
        elif kind == "add" and isinstance(parent, dict):
            parent[f"added{place}"] = value
        else:
            parent[path[-1]] = value
    return document


def as_json(document: Any, changes: list[tuple[int, int, str]] = ()) -> bytes:
    """The bytes of a JSON file, then damaged; `_DEEP` becomes 3000 nested lists."""
    data = json.dumps(document).replace(f'"{_DEEP}"', "[" * 3000 + "]" * 3000).encode()
    return damaged(data, changes)


def damaged(data: bytes, changes: list[tuple[int, int, str]]) -> bytes:
    for place, byte, kind in changes:
        at = place % max(1, len(data))
        if kind == "flip":
            data = data[:at] + bytes([byte]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[at + byte :]
        else:
            data = data[:at] + bytes([byte]) * (byte + 1) + data[at:]
    return data


# ---------------------------------------------------------------- targets


class Workshop:
    """Folders that targets work in; built once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plain = root / "plain"
        tiny.write_checkpoint(self.plain)
        self.config = tiny.make_config()
        self.sharded = root / "sharded"
        tiny.write_checkpoint(self.sharded, shards=3)
        self.index = json.loads((self.sharded / "model.safetensors.index.json").read_text())
        self.header, self.data = _split(self.plain / "model.safetensors")
        self.fp8 = root / "fp8"
        self.fp8_config = make_fp8(self.fp8)
        self.gguf = make_gguf(root / "tiny.gguf")
        self.bundle = make_bundle(root / "bundle")

    def copy(self, name: str) -> Path:
        folder = self.root / f"copy-{name}"
        if not folder.exists():
            shutil.copytree(getattr(self, name), folder)
        return folder


def _split(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def make_fp8(folder: Path) -> dict[str, Any]:
    """A llama whose matrices are FP8 with a scale for each 32x32 block."""
    import numpy as np

    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    config = tiny.make_config(quantization_config=quantization)
    tensors: dict[str, np.ndarray] = {}
    for name, value in tiny.make_tensors(config).items():
        if "proj" not in name:
            tensors[name] = value
            continue
        codes = np.random.default_rng(len(tensors)).integers(0, 120, value.shape, dtype=np.uint8)
        rows, cols = (-(-n // 32) for n in value.shape)
        tensors[name] = codes
        tensors[f"{name}_scale_inv"] = np.full((rows, cols), 0.01, dtype=np.float64)
    tiny.write_checkpoint(folder, tensors=tensors, quantization_config=quantization)
    return config


def make_gguf(path: Path) -> bytes:
    from gguf_samples import write_llama

    write_llama(path)
    return path.read_bytes()


def make_bundle(folder: Path) -> Path:
    """The descriptions of a bundle, as `convert` writes them; weights and graph are stand-ins."""
    from mnnsmith.bundle.manifest import write_manifest

    folder.mkdir()
    tiny.write_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    for name in ("llm.mnn", "llm.mnn.weight", "tokenizer.mtok"):
        (folder / name).write_bytes(struct.pack("<I", 4) + bytes(60))
    tiny.write_json(folder / "llm_config.json", {
        "model_type": "llama", "hidden_size": 64, "layer_nums": 1, "attention_mask": "float",
        "attention_type": "full", "max_position_embeddings": 128,
        "jinja": {"chat_template": tiny.TEMPLATE, "bos": "<s>", "eos": "</s>"},
        "tie_embeddings": {"weight_offset": 0, "alpha_offset": 0, "alpha_size": 0,
                           "quant_bit": 16, "quant_block": 0, "alpha_dtype": "fp16"},
    })  # fmt: skip
    tiny.write_json(folder / "config.json", {
        "llm_model": "llm.mnn", "llm_weight": "llm.mnn.weight", "tokenizer_file": "tokenizer.mtok",
        "backend_type": "cpu", "thread_num": 4, "precision": "low", "memory": "low",
    })  # fmt: skip
    write_manifest(folder, {
        "mnnsmith": "0", "engine": "3.6.1", "recipe": {"name": "fp16"}, "notes": [],
        "source": {"name": "x", "format": "safetensors", "revision": None, "files": {}},
        "model": {"model_type": "llama", "parameters": 1, "layers": 1, "hidden_size": 64,
                  "vocab_size": tiny.VOCAB, "max_context": 128, "stop_ids": [1]},
        "tokens": {"bos": "<s>", "eos": "</s>"}, "proof": {},
        "generation": {"temperature": 0.5, "top_k": 5},
        "files": {f.name: {"sha256": "0" * 64, "bytes": f.stat().st_size}
                  for f in sorted(folder.iterdir())},
    })  # fmt: skip
    return folder


Target = Callable[[Any], None]
TARGETS: dict[str, tuple[Callable[[Workshop], Target], st.SearchStrategy[Any]]] = {}


def target(strategy: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    def register(make: Callable[[Workshop], Target]) -> Callable[[Workshop], Target]:
        TARGETS[make.__name__] = (make, strategy)
        return make

    return register


_length = st.one_of(st.none(), st.sampled_from((0, 1, 7, 100, 10**8, 2**31, 2**63, 2**64 - 1)))


@target(st.tuples(edits, bytes_edits, _length, st.booleans()))
def safetensors_header(shop: Workshop) -> Target:
    from mnnsmith.sources.safetensors import open_safetensors

    def read(given: Any) -> None:
        changes, bad_bytes, length, twice = given
        header = as_json(mutated(shop.header, changes), bad_bytes)
        if twice:
            header = header[:-1] + b"," + header[1:]
        path = shop.root / "fuzz.safetensors"
        size = len(header) if length is None else length
        path.write_bytes(struct.pack("<Q", size) + header + shop.data)
        for tensor in open_safetensors(path).values():
            rows = tensor.shape[0] if tensor.shape else 1
            assert tensor.rows(0, min(rows, 4)).dtype == "float32"

    return read


@target(st.tuples(edits, bytes_edits))
def weight_index(shop: Workshop) -> Target:
    from mnnsmith.sources.huggingface import open_weights

    folder = shop.copy("sharded")

    def read(given: Any) -> None:
        changes, bad_bytes = given
        data = as_json(mutated(shop.index, changes), bad_bytes)
        (folder / "model.safetensors.index.json").write_bytes(data)
        tensors, _ = open_weights(folder)
        assert set(tensors) == set(tiny.shapes(shop.config))

    return read


@target(st.tuples(st.sampled_from(FAMILIES), edits, bytes_edits, st.none() | SCALING))
def config(shop: Workshop) -> Target:
    from mnnsmith.api import prepare

    folder = shop.copy("plain")

    def read(given: Any) -> None:
        family, changes, bad_bytes, scaling = given
        document: dict[str, Any] = {**shop.config, "model_type": family, "head_dim": 16}
        if family == "gemma3_text":
            document |= {"layer_types": ["full_attention"], "hidden_act": None}
        if scaling is not None:
            document |= {"rope_scaling": scaling, "original_max_position_embeddings": 64}
        (folder / "config.json").write_bytes(as_json(mutated(document, changes), bad_bytes))
        prepare(folder, recipe="fp16")

    return read


@target(st.tuples(st.dictionaries(
    st.sampled_from(sorted(tiny.make_config())) | st.sampled_from((
        "head_dim", "rope_scaling", "rope_parameters", "sliding_window", "layer_types",
        "quantization_config", "attention_bias", "mlp_bias", "partial_rotary_factor",
        "use_sliding_window", "max_window_layers", "query_pre_attn_scalar",
    )), _value, min_size=1, max_size=4), st.sampled_from(FAMILIES)))  # fmt: skip
def config_fields(shop: Workshop) -> Target:
    """Fields of the right names with wrong values, several at once."""
    from mnnsmith.api import prepare

    folder = shop.copy("plain")

    def read(given: Any) -> None:
        fields, family = given
        document = {**shop.config, "model_type": family, "head_dim": 16, **fields}
        (folder / "config.json").write_bytes(as_json(document))
        prepare(folder)

    return read


@target(st.tuples(edits, bytes_edits))
def tokenizer(shop: Workshop) -> Target:
    from mnnsmith.api import prepare
    from mnnsmith.mnn.mtok import write_mtok

    folder = shop.copy("plain")
    tiny.write_json(folder / "config.json", shop.config)
    document = json.loads((shop.plain / "tokenizer.json").read_text())

    def read(given: Any) -> None:
        changes, bad_bytes = given
        (folder / "tokenizer.json").write_bytes(as_json(mutated(document, changes), bad_bytes))
        try:
            ready = prepare(folder, recipe="fp16")
            write_mtok(ready.checkpoint.tokenizer, shop.root / "fuzz.mtok")
        finally:
            shutil.copy(shop.plain / "tokenizer.json", folder / "tokenizer.json")

    return read


_SIDE_FILES: dict[str, Any] = {
    "tokenizer_config.json": {
        "chat_template": tiny.TEMPLATE, "bos_token": "<s>", "eos_token": {"content": "</s>"},
        "added_tokens_decoder": {"0": {"content": "<s>"}}, "extra_special_tokens": {"a": "b"},
    },
    "special_tokens_map.json": {"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
    "chat_template.json": {"chat_template": tiny.TEMPLATE},
    "generation_config.json": {
        "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1,
        "repetition_penalty": 1.1, "eos_token_id": [1, 2], "bos_token_id": 0,
    },
}  # fmt: skip


@target(st.tuples(st.sampled_from(sorted(_SIDE_FILES)), edits, bytes_edits))
def side_files(shop: Workshop) -> Target:
    """generation_config.json and what belongs to the tokenizer."""
    from mnnsmith.api import prepare

    folder = shop.copy("plain")
    tiny.write_json(folder / "config.json", shop.config)

    def read(given: Any) -> None:
        name, changes, bad_bytes = given
        if name == "chat_template.json":
            tiny.write_json(folder / "tokenizer_config.json", {})
        (folder / name).write_bytes(as_json(mutated(_SIDE_FILES[name], changes), bad_bytes))
        try:
            ready = prepare(folder, recipe="fp16")
            text = json.dumps(ready.checkpoint.tokenizer.chat_template, ensure_ascii=False)
            text.encode("utf-8")
        finally:
            (folder / name).unlink()
            shutil.copy(shop.plain / "tokenizer_config.json", folder)

    return read


@target(st.tuples(edits, edits, bytes_edits))
def fp8(shop: Workshop) -> Target:
    from mnnsmith.api import prepare

    folder = shop.copy("fp8")
    header, data = _split(shop.fp8 / "model.safetensors")

    def read(given: Any) -> None:
        in_config, in_header, bad_bytes = given
        quantization = mutated(shop.fp8_config["quantization_config"], in_config)
        changed = {**shop.fp8_config, "quantization_config": quantization}
        (folder / "config.json").write_bytes(as_json(changed))
        raw = as_json(mutated(header, in_header), bad_bytes)
        tiny.write_raw_safetensors(folder / "model.safetensors", raw, data)
        ready = prepare(folder, recipe="fp16")
        for tensor in ready.checkpoint.tensors.values():
            tensor.rows(0, min(8, tensor.shape[0]))

    return read


@target(st.lists(_byte, min_size=1, max_size=4))
def gguf(shop: Workshop) -> Target:
    """The first kilobytes hold header, metadata and the list of tensors."""
    from mnnsmith.api import prepare

    path = shop.root / "fuzz.gguf"
    head = len(shop.gguf) // 4

    def read(changes: Any) -> None:
        here = [(place % head, byte, kind) for place, byte, kind in changes]
        path.write_bytes(damaged(shop.gguf, here))
        prepare(path)

    return read


_RECIPE = {
    "name": "mine", "default": "w4g64", "misfit": "fit",
    "rules": [{"role": "head", "scheme": "w8g64"}, {"layers": [0, 1], "scheme": "fp16"},
              {"tensor": "*.down_proj.weight", "role": "mlp", "scheme": "w8g32-sym"}],
}  # fmt: skip


@target(st.tuples(edits, bytes_edits))
def recipe_file(shop: Workshop) -> Target:
    from mnnsmith.api import prepare

    path = shop.root / "recipe.json"

    def read(given: Any) -> None:
        changes, bad_bytes = given
        path.write_bytes(as_json(mutated(_RECIPE, changes), bad_bytes))
        prepare(shop.plain, recipe=path)

    return read


_PARTS = (
    "fp16", "fp32", "w4", "w8", "w6", "g64", "g32", "g48", "-sym", "-head8", "-head", "-fit", "~",
    "-embed16", "-scale32", "keep", "9" * 5000, "４", "*", "\0", "\ud800", "/", ".json",
)  # fmt: skip


@target(st.lists(st.sampled_from(_PARTS) | st.text(max_size=3), max_size=5).map("".join))
def recipe_name(shop: Workshop) -> Target:
    from mnnsmith.api import prepare

    def read(name: Any) -> None:
        prepare(shop.plain, recipe=name)

    return read


_NAMES = ("mnnsmith.json", "llm_config.json", "config.json")


@target(st.tuples(st.sampled_from(_NAMES), edits, bytes_edits))
def bundle(shop: Workshop) -> Target:
    """What opening a bundle and starting an engine read before the engine itself."""
    from mnnsmith.api import open_bundle
    from mnnsmith.engine.engine import _check_bundle
    from mnnsmith.engine.sampling import SamplingOptions
    from mnnsmith.session import sampling_defaults

    folder = shop.copy("bundle")
    manifest = json.loads((shop.bundle / "mnnsmith.json").read_text())

    def read(given: Any) -> None:
        name, changes, bad_bytes = given
        document = json.loads((shop.bundle / name).read_text())
        data = as_json(mutated(document, changes), bad_bytes)
        (folder / name).write_bytes(data)
        if name != "mnnsmith.json":
            # The size fits, so the content is what is judged.
            listed = copy.deepcopy(manifest)
            listed["files"][name]["bytes"] = len(data)
            tiny.write_json(folder / "mnnsmith.json", listed)
        try:
            opened = open_bundle(folder)
            SamplingOptions(**sampling_defaults(opened)).request()
            opened.tokenizer_json()
            _check_bundle(folder, {})
        finally:
            for each in _NAMES:
                shutil.copy(shop.bundle / each, folder / each)

    return read


_PARTS_OF_WEIGHTS = ("graph", "llm_config.json", "llm.mnn.weight")


@target(st.tuples(st.sampled_from(_PARTS_OF_WEIGHTS), edits, bytes_edits))
def stored_weights(shop: Workshop) -> Target:
    """What verification reads of a bundle's weights: graph, embedding's entry, weight file."""
    from mnnsmith.api import open_bundle, prepare
    from mnnsmith.conversion.convert import config_files
    from mnnsmith.conversion.slots import read_vector
    from mnnsmith.conversion.stream import write_weights
    from mnnsmith.mnn.graph_json import Weights, graph_json
    from mnnsmith.sources.checkpoint import read_whole
    from mnnsmith.verify.stored import checkpoint as stored
    from mnnsmith.verify.stored import weights as stored_weights

    folder = shop.root / "stored"
    shutil.copytree(shop.bundle, folder)
    ready = prepare(shop.plain, recipe="w8g32")
    weights = Weights(ready.plan.records, lambda slot: read_vector(slot, ready.checkpoint))
    sound = json.loads(json.dumps(graph_json(ready.model.graph, weights)))
    config = config_files(ready)["llm_config.json"]
    (folder / "llm.mnn.weight").unlink()
    write_weights(ready.plan, ready.checkpoint, folder / "llm.mnn.weight", threads=1,
                  progress=lambda done, total: None)  # fmt: skip
    data = (folder / "llm.mnn.weight").read_bytes()
    tiny.write_json(folder / "llm_config.json", config)
    bundle = open_bundle(folder, whole=False)
    graphs = [sound]
    # The converter's part, which runs in a child, is not what is tried here.
    stored_weights.mnn_to_graph_json = lambda path: graphs[0]  # type: ignore[assignment]

    def check() -> None:
        found = stored.stored_checkpoint(bundle, ready)
        for tensor in found.tensors.values():
            read_whole(tensor)

    check()

    def read(given: Any) -> None:
        name, changes, bad_bytes = given
        try:
            if name == "graph":
                # As the converter's reader leaves it: a list of operators, of any content.
                graphs[0] = {**sound, "oplists": mutated(sound["oplists"], changes)}
            elif name == "llm_config.json":
                (folder / name).write_bytes(as_json(mutated(config, changes), bad_bytes))
            else:
                (folder / name).write_bytes(damaged(data, bad_bytes))
            check()
        finally:
            graphs[0] = sound
            tiny.write_json(folder / "llm_config.json", config)
            (folder / "llm.mnn.weight").write_bytes(data)

    return read


@target(st.lists(_byte, min_size=1, max_size=4))
def graph_bytes(shop: Workshop) -> Target:
    """The places of operators and names in `llm.mnn`, which probes are added to."""
    from mnnsmith.mnn.net_extension import _offsets, _root, _string, extend_net, tensor_names

    names = b"".join(map(_string, ("ids", "hidden", "logits")))
    # The root ends at 84; a list of three takes 16 bytes, and the names follow.
    net = _root(32, {3: 84, 7: 100, 8: 3}) + _offsets(84, [116, 116, 116])
    places = [116, 116 + len(_string("ids")), 116 + len(_string("ids") + _string("hidden"))]
    net += _offsets(100, places) + names
    assert tensor_names(net) == ["ids", "hidden", "logits"]

    def read(changes: Any) -> None:
        bad = damaged(net, changes)
        found = tensor_names(bad)
        assert sum(map(len, found)) <= 16 << 20
        assert len(extend_net(bad, net, {0: "x"} if found else {})) < 1 << 20

    return read


@target(st.tuples(edits, bytes_edits))
def verification(shop: Workshop) -> Target:
    """A baseline, or what a report is made of."""
    from mnnsmith.api import report_page
    from mnnsmith.verify.output.results_json import read_verification, to_json
    from verification_samples import verification as sample

    document = json.loads(to_json(sample("bundle")))
    path = shop.root / "verification.json"

    def read(given: Any) -> None:
        changes, bad_bytes = given
        path.write_bytes(as_json(mutated(document, changes), bad_bytes))
        report_page([read_verification(path)])

    return read


@target(st.tuples(edits, st.lists(_byte, max_size=3)))
def saved_reference(shop: Workshop) -> Target:
    import numpy as np

    from mnnsmith.verify.references.array_file import write_arrays
    from mnnsmith.verify.references.saved_reference import SavedReference

    path = shop.root / "reference.npz"
    ids = np.arange(6, dtype=np.int64)
    meta = {"format": 1, "name": "x", "model_type": "llama", "files": {"a": "b"},
            "windows": [{"decisive": True, "values": ["v"]}]}  # fmt: skip
    arrays = {
        "head": np.ones((8, 4), np.float16),
        "ids/0": ids,
        "hidden/0": np.ones((6, 4), np.float32),
        "values/0/0": np.ones((6, 3), np.float32),
    }

    def read(given: Any) -> None:
        changes, bad_bytes = given
        text = np.frombuffer(as_json(mutated(meta, changes)), dtype=np.uint8)
        write_arrays(path, {**arrays, "meta": text})
        if bad_bytes:
            path.write_bytes(damaged(path.read_bytes(), bad_bytes))
        with SavedReference(path) as found:
            run = found.run(ids[None], ["v"])
            found.logits(run.hidden[0])
            found.decisive(ids[None])

    return read


_PATHS = st.lists(
    st.sampled_from(("a", "..", "~", "~nobody", "\0", "\ud800", "x" * 300, "/", " ", ".gguf", "é"))
    | st.text(max_size=4),
    max_size=4,
).map("".join)


@target(_PATHS)
def model_path(shop: Workshop) -> Target:
    """Never a hub id: those have one slash and go to the network."""
    from mnnsmith.api import open_bundle, prepare

    def read(name: Any) -> None:
        with contextlib.suppress(MnnsmithError):
            prepare(f"./nothing/{name}", offline=True)
        open_bundle(name)

    return read


# ---------------------------------------------------------------- running them


class HangError(BaseException):
    """An input took too long; no handler of the product catches it."""


def _too_long(*_: object) -> None:
    raise HangError(f"more than {SECONDS_PER_INPUT} s of processor time")


def run(name: str, count: int, shop: Workshop) -> tuple[int, int]:
    """Feed `count` inputs to a target; returns how many were refused and how many were read."""
    make, strategy = TARGETS[name]
    read = make(shop)
    tally = [0, 0]

    @settings(
        max_examples=count, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(strategy)
    def property_(given_: Any) -> None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_INPUT)
        try:
            read(given_)
            tally[1] += 1
        except MnnsmithError as error:
            assert str(error).strip() and len(str(error)) < 20_000, "no message, or a novel"
            tally[0] += 1
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    property_()
    return tally[0], tally[1]


def main(arguments: list[str]) -> int:
    count, names = int(arguments[1]), arguments[2:] or list(TARGETS)
    warnings.simplefilter("error")
    signal.signal(signal.SIGPROF, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    total = 0
    with tempfile.TemporaryDirectory(prefix="mnnsmith-fuzz-") as root:
        os.chdir(root)
        shop = Workshop(Path(root))
        for name in names:
            start = time.process_time()
            refused, taken = run(name, count, shop)
            total += refused + taken
            took = time.process_time() - start
            print(f"{name}: {refused} refused, {taken} read, {took:.1f} s", flush=True)
    print(f"total: {total}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
