"""A saved reference answers as the one it was made of, and a damaged file is refused."""

from __future__ import annotations

import errno
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exact import prompt
from mnnsmith.api import prepare
from mnnsmith.conversion.prepare import Prepared
from mnnsmith.errors import MissingResourceError, SourceError, UsageError
from mnnsmith.verify.references.saved_reference import (
    RecordingReference,
    SavedReference,
    save_reference,
)
from mnnsmith.verify.references.transformers_reference import open_transformers
from peaky import CASES, MIXTURES, make_checkpoint

pytestmark = [pytest.mark.reference]

IDS = np.array([prompt(40, seed) for seed in range(3)])
VALUE = "layer1/mlp/down"


def make(folder: Path, name: str = "llama-tied", dtype: str = "float16") -> Prepared:
    make_checkpoint({**CASES, **MIXTURES}[name], folder, dtype=dtype)
    return prepare(folder, recipe="fp16")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Prepared]:
    folder = tmp_path_factory.mktemp("saved")
    ready = make(folder / "source")
    with open_transformers(ready.checkpoint, ready.model, threads=1) as reference:
        runs = [reference.run(IDS, [VALUE])]
        save_reference(folder / "run.npz", reference, runs, ready)
    return folder / "run.npz", ready


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_answers_as_the_reference_does(tmp_path: Path, dtype: str) -> None:
    ready = make(tmp_path / "source", "deepseek_v2", dtype)
    value = "layer1/mlp/mixture"
    with RecordingReference(open_transformers(ready.checkpoint, ready.model, threads=1)) as record:
        expected = record.run(IDS, [value])
        logits = record.logits(expected.hidden[0])
        decisive = record.decisive(IDS)
        save_reference(tmp_path / "run.npz", record, record.runs, ready)
    with SavedReference(tmp_path / "run.npz") as found:
        assert found.name == f"{record.name}, saved"
        assert set(found.available()) == {value}
        found.check_original(ready)
        order = [2, 0]
        run = found.run(IDS[order], [value])
        np.testing.assert_array_equal(run.hidden, expected.hidden[order])
        np.testing.assert_array_equal(run.values[value], expected.values[value][order])
        np.testing.assert_allclose(found.logits(expected.hidden[0]), logits, atol=1e-4)
        np.testing.assert_array_equal(found.decisive(IDS), decisive)
        # The beginning of a window.
        np.testing.assert_array_equal(found.run(IDS[:, :7]).hidden, expected.hidden[:, :7])


def test_runs_that_others_begin_with_are_not_kept() -> None:
    from mnnsmith.verify.references.reference import ReferenceRun

    class Stub:
        name = "stub"

        def run(self, ids: np.ndarray, values: Any = ()) -> ReferenceRun:
            return ReferenceRun(ids, np.zeros((*ids.shape, 2), np.float32), dict.fromkeys(values))

    record = RecordingReference(Stub())  # type: ignore[arg-type]
    for n in (5, 6, 7):
        record.run(IDS[:2, :n])
    assert [run.ids.shape for run in record.runs] == [(2, 7)]
    record.run(IDS[:1, :3])
    assert len(record.runs) == 1
    record.run(IDS[:1, :3], ["a"])
    record.run(IDS[2:, :3])
    assert len(record.runs) == 3


def test_what_it_does_not_hold_is_named(saved: tuple[Path, Prepared], tmp_path: Path) -> None:
    path, _ = saved
    with SavedReference(path) as found:
        with pytest.raises(UsageError, match="no run of these 40 tokens"):
            found.run(IDS + 1)
        with pytest.raises(UsageError, match="no run of these 41 tokens"):
            found.run(np.concatenate([IDS, IDS[:, :1]], axis=1))
        with pytest.raises(UsageError, match="layer0/mlp/down"):
            found.run(IDS, ["layer0/mlp/down"])
        with pytest.raises(UsageError, match=r"\[rows, 128\]"):
            found.logits(np.zeros((1, 3), dtype=np.float32))
        make(tmp_path / "other", "llama")
        with pytest.raises(SourceError, match=r"another original: config\.json, model\.safet"):
            found.check_original(prepare(tmp_path / "other", recipe="fp16"))
    with pytest.raises(SourceError, match="no such file"):
        SavedReference(tmp_path / "none.npz")


def test_every_byte_counts(saved: tuple[Path, Prepared], tmp_path: Path) -> None:
    """Cut anywhere, or with a byte changed anywhere: refused, or as it was."""
    data = saved[0].read_bytes()
    with SavedReference(saved[0]) as sound:
        expected = sound.run(IDS, [VALUE])
    random = np.random.default_rng(0)
    target = tmp_path / "damaged.npz"
    refused = 0
    for turn in range(300):
        damaged = bytearray(data)
        at = int(random.integers(len(data)))
        if turn % 3 == 0:
            del damaged[at:]
        else:
            # Half of them where the directory and the description are.
            at = at if turn % 3 == 1 else len(data) - 1 - int(random.integers(4000))
            damaged[at] ^= 1 << int(random.integers(8))
        target.write_bytes(damaged)
        try:
            with SavedReference(target) as found:
                run = found.run(IDS, [VALUE])
                np.testing.assert_array_equal(run.hidden, expected.hidden)
                np.testing.assert_array_equal(run.values[VALUE], expected.values[VALUE])
        except (SourceError, UsageError):
            refused += 1
    assert refused > 200


def rewrite(path: Path, target: Path, **members: bytes | None) -> Path:
    """The same archive with members replaced, by names with `/` as `__`; None leaves one out."""
    changed = {key.replace("__", "/") + ".npy": value for key, value in members.items()}
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = changed.get(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return target


def npy(array: np.ndarray) -> bytes:
    import io

    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def test_hostile_members_are_refused(saved: tuple[Path, Prepared], tmp_path: Path) -> None:
    path, _ = saved
    target = tmp_path / "hostile.npz"
    huge = npy(np.zeros((40, 128), np.float32)).replace(b"(40, 128)", b"(1<<40,)!")
    wide = npy(np.zeros((40, 128), np.float32)).replace(b"(40, 128), }", b"(9**9, 128)}")
    cases: list[dict[str, bytes | None]] = [
        {"hidden__0": npy(np.array([object()], dtype=object))},
        {"hidden__0": huge},
        {"hidden__0": wide},
        {"hidden__0": npy(np.zeros((39, 128), np.float32))},
        {"hidden__0": npy(np.full((40, 128), np.nan, np.float32))},
        {"hidden__1": None},
        {"head": npy(np.zeros((384, 64), np.float32))},
        {"head": npy(np.zeros((384, 128), np.float64))},
        {"ids__2": npy(np.zeros((4, 4), np.int64))},
        {"meta": npy(np.frombuffer(b"[" * 5000, np.uint8))},
        {"meta": npy(np.frombuffer(b'{"format": 2}', np.uint8))},
        {"meta": npy(np.frombuffer(json.dumps({
            "format": 1, "name": "x", "files": {},
            "windows": [{"decisive": 1, "values": []}]}).encode(), np.uint8))},
    ]  # fmt: skip
    for members in cases:
        rewrite(path, target, **members)
        with pytest.raises((SourceError, UsageError)), SavedReference(target) as found:
            found.run(IDS)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("meta.npy", bytes(1 << 24))
    with pytest.raises(SourceError, match="compressed"):
        SavedReference(target)


def test_places_where_nothing_can_be_saved(
    saved: tuple[Path, Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ready = saved
    with SavedReference(path) as found:
        runs = [found.run(IDS)]
        with pytest.raises(UsageError, match="there is no folder"):
            save_reference(tmp_path / "none" / "run.npz", found, runs, ready)
        with pytest.raises(UsageError, match="no reference run"):
            save_reference(tmp_path / "run.npz", found, [], ready)

        def full(fd: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch, pytest.raises(MissingResourceError, match="No space"):
            patch.setattr(os, "fsync", full)
            save_reference(tmp_path / "run.npz", found, runs, ready)
        assert os.listdir(tmp_path) == []
        # A stand-in for a device such as /dev/null, which must stay what it is.
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(UsageError, match="no regular file"):
            save_reference(tmp_path / "pipe", found, runs, ready)
        assert (tmp_path / "pipe").is_fifo()
        (tmp_path / "link").symlink_to("behind")
        name = "x" * 250
        for place in ("link", name):
            save_reference(tmp_path / place, found, runs, ready)
        assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["behind", "link", "pipe", name]
