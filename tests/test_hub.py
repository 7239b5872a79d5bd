"""Models by hub id, against a stand-in server: what is fetched, resumed, refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_checkpoint as tiny
from hub_stand_in import COMMIT, Hub, serve
from mnnsmith.quant.recipe import DEFAULT_RECIPE

NEEDED = [
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
]  # fmt: skip
_CHILD = """
import json, sys
import huggingface_hub.constants
from mnnsmith.api import prepare
from mnnsmith.errors import MnnsmithError
options = json.loads(sys.argv[1])
# What has arrived is written to the disk in pieces of 10 MB; here the files are smaller.
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 1000
try:
    ready = prepare(fetch=True, **options)
except MnnsmithError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
else:
    c = ready.checkpoint
    name = "model.layers.0.mlp.up_proj.weight"
    print(json.dumps({
        "origin": c.origin, "revision": c.revision, "model_type": c.model_type,
        "files": sorted(p.name for p in c.files), "sum": float(c.tensors[name].rows(0, 128).sum()),
    }))
"""


def only(url: str, home: Path) -> dict[str, str]:
    """An environment that knows no hub but the stand-in."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return environment | {
        "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip


def _run(url: str, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of ours, with that hub."""
    return subprocess.run(
        [sys.executable, "-m", "mnnsmith.cli", *words],
        capture_output=True, text=True, timeout=100, env=only(url, home), cwd=home.parent,
    )  # fmt: skip


def ask(url: str, home: Path, model: str = "org/tiny", **options: Any) -> dict[str, Any]:
    """`prepare` with the weights, in a process of its own."""
    environment = only(url, home) | options.pop("environment", {})
    options.setdefault("recipe", "fp16")
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps({"model": model, **options})],
        capture_output=True, text=True, timeout=100, env=environment, cwd=home.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with more in it than we need."""
    path = tmp_path / "repository"
    tiny.write_checkpoint(path)
    tiny.write_json(path / "generation_config.json", {"eos_token_id": 1})
    for extra in ("pytorch_model.bin", "README.md", "consolidated.safetensors", "model.gguf",
                  "onnx/model.onnx", "original/model.safetensors", "flax_model.msgpack",
                  "modeling_tiny.py"):  # fmt: skip
        (path / extra).parent.mkdir(exist_ok=True)
        (path / extra).write_bytes(b"not needed")
    return path


def no_weights(hub: Hub) -> bool:
    return not any(".safetensors" in request for request in hub.asked)


def only_small(hub: Hub) -> bool:
    return not any(name.endswith((".safetensors", ".bin", ".gguf")) for name, _ in hub.downloads)


def test_only_what_is_needed_is_fetched_and_the_cache_then_serves(
    folder: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    with serve(folder) as hub:
        first = ask(hub.url, home)
        assert hub.fetched == NEEDED
        expected = tiny.make_tensors(tiny.make_config())["model.layers.0.mlp.up_proj.weight"]
        assert first["origin"] == "org/tiny" and first["revision"] == COMMIT
        assert first["files"] == NEEDED and np.isclose(first["sum"], expected.sum(), rtol=1e-5)
        hub.downloads.clear()
        assert ask(hub.url, home) == first
        assert not hub.downloads, "the cache was not used"
        hub.asked.clear()
        assert ask(hub.url, home, offline=True) == first
        assert ask(hub.url, home, environment={"HF_HUB_OFFLINE": "1"}) == first
        assert not hub.asked, "offline is offline"


def test_offline_without_a_cache(folder: Path, tmp_path: Path) -> None:
    with serve(folder) as hub:
        answer = ask(hub.url, tmp_path / "home", offline=True)
        assert not hub.asked
    assert answer["error"] == "MissingResourceError"
    assert "org/tiny: not whole in the local cache" in answer["message"]
    assert "without --offline" in answer["message"]


def test_a_download_that_is_cut_goes_on_where_it_stopped(folder: Path, tmp_path: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    with serve(folder, cut_after={"model.safetensors": 20_000}) as hub:
        answer = ask(hub.url, tmp_path / "home")
        if "error" in answer:
            # It may be left to the user to run again.
            assert answer["error"] == "MissingResourceError"
            assert "goes on where it stopped" in answer["message"]
            answer = ask(hub.url, tmp_path / "home")
        spans = [span for name, span in hub.downloads if name == "model.safetensors"]
    assert answer["revision"] == COMMIT
    starts = [int(s.removeprefix("bytes=").partition("-")[0]) if s else 0 for s in spans]
    assert starts[0] == 0 and 15_000 < starts[-1] <= 20_000 < size, starts


@pytest.mark.slow
def test_a_download_that_never_arrives(folder: Path, tmp_path: Path) -> None:
    """The library tries several times (with pauses), then gives up."""
    with serve(folder, cut_after={"model.safetensors": 0}, cut_always=True) as hub:
        answer = ask(hub.url, tmp_path / "home")
    assert answer["error"] == "MissingResourceError", answer
    assert "org/tiny: could not be downloaded" in answer["message"]
    assert "goes on where it stopped" in answer["message"]


def test_shards_are_fetched_by_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    tiny.write_checkpoint(folder, shards=2)
    (folder / "model-00001-of-00002.safetensors.bak").write_bytes(b"x")
    with serve(folder) as hub:
        answer = ask(hub.url, tmp_path / "home", revision="v2")
    assert answer["revision"] == COMMIT
    assert [n for n in hub.fetched if "safetensors" in n] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "server", "error", "parts"),
    [
        ({"model": "org/other"}, {}, "SourceError", ["org/other: there is no such model"]),
        ({"revision": "v9"}, {}, "SourceError", ["org/tiny: there is no revision 'v9'"]),
        ({}, {"gated": True}, "SourceError", ["org/tiny: access to this model is restricted",
                                              "HF_TOKEN"]),
        # The hub's library tries again for 24 s.
        pytest.param({}, {"down": True}, "MissingResourceError",
                     ["org/tiny: could not be downloaded", "Run the same command again"],
                     marks=pytest.mark.slow),
        ({"model": "org/na--me"}, {}, "SourceError", ["org/na--me: not a valid hub id"]),
    ],
)  # fmt: skip
def test_what_the_hub_refuses(
    folder: Path,
    tmp_path: Path,
    options: dict[str, Any],
    server: dict[str, Any],
    error: str,
    parts: list[str],
) -> None:
    with serve(folder, **server) as hub:
        answer = ask(hub.url, tmp_path / "home", **options)
        assert no_weights(hub)
    assert answer["error"] == error, answer
    assert all(part in answer["message"] for part in parts), answer["message"]


@pytest.mark.slow
def test_no_hub_at_all(tmp_path: Path) -> None:
    answer = ask("http://127.0.0.1:9", tmp_path / "home")
    assert answer["error"] == "MissingResourceError", answer
    assert "org/tiny" in answer["message"]


@pytest.mark.parametrize("kind", ["unknown", "adapter", "no-config"])
def test_refused_before_the_weights_are_fetched(folder: Path, tmp_path: Path, kind: str) -> None:
    parts = {
        "unknown": ["model type 'frobnicator' is not supported", "llama"],
        "adapter": ["adapter (LoRA) for 'org/base'", "Merge it first"],
        "no-config": ["there is no config.json"],
    }[kind]
    if kind == "unknown":
        tiny.write_json(folder / "config.json", tiny.make_config(model_type="frobnicator"))
    else:
        (folder / "config.json").unlink()
    if kind == "adapter":
        base = {"base_model_name_or_path": "org/base"}
        tiny.write_json(folder / "adapter_config.json", base)
    with serve(folder) as hub:
        answer = ask(hub.url, tmp_path / "home")
        assert no_weights(hub), hub.asked
    assert "error" in answer and all(part in answer["message"] for part in parts), answer


def test_a_dry_run_fetches_no_weights(folder: Path, tmp_path: Path) -> None:
    with serve(folder) as hub:
        found = _run(hub.url, tmp_path / "home", "convert", "org/tiny", "--dry-run", "--json")
        assert only_small(hub), hub.downloads
    value = json.loads(found.stdout)
    assert value["recipe"] == DEFAULT_RECIPE and value["parameters"] > 0
    assert any("not fetched yet" in note for note in value["notes"])


@pytest.mark.parametrize("problem", ["recipe", "config", "tokenizer", "sampling"])
def test_what_the_small_files_tell_is_judged_first(
    folder: Path, tmp_path: Path, problem: str
) -> None:
    options: dict[str, Any] = {}
    part = {"recipe": "does not divide", "config": "max_position_embeddings",
            "tokenizer": "The id 999", "sampling": "top_p"}[problem]  # fmt: skip
    if problem == "recipe":
        options["recipe"] = "w4g256"
    elif problem == "config":
        config = tiny.make_config(max_position_embeddings=-1)
        tiny.write_json(folder / "config.json", config)
    elif problem == "tokenizer":
        tiny.write_json(folder / "generation_config.json", {"eos_token_id": [1, 999]})
    else:
        tiny.write_json(folder / "generation_config.json", {"do_sample": True, "top_p": 0})
    with serve(folder) as hub:
        answer = ask(hub.url, tmp_path / "home", **options)
        assert only_small(hub), hub.downloads
    assert part in answer["message"], answer


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("pytorch_model.bin", "the weights are pickled (pytorch_model.bin)"),
        ("model-Q4_0.gguf", "holds GGUF files, no safetensors (model-Q4_0.gguf)"),
    ],
)
def test_a_repository_without_safetensors(tmp_path: Path, name: str, part: str) -> None:
    folder = tmp_path / "repository"
    tiny.write_checkpoint(folder)
    (folder / "model.safetensors").rename(folder / name)
    (folder / "training_args.bin").write_bytes(b"x")
    with serve(folder) as hub:
        answer = ask(hub.url, tmp_path / "home")
        assert only_small(hub), hub.downloads
        found = _run(hub.url, tmp_path / "home", "inspect", "org/tiny", "--json")
    assert answer["error"] == "UnsupportedError" and part in answer["message"], answer
    assert found.returncode == 0 and part in json.loads(found.stdout)["unsupported"]
