"""A staged folder takes its place whole or not at all; what a kill leaves is cleared up."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mnnsmith.bundle import staging
from mnnsmith.bundle.manifest import write_manifest
from mnnsmith.bundle.staging import check_target, staged_folder
from mnnsmith.errors import MissingResourceError, UsageError

# Kills itself at the moment that the first argument names.
_CHILD = """
import os, signal, sys
from pathlib import Path
from mnnsmith.bundle import staging

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

moment, target = sys.argv[1:]
real_rename = os.rename
if moment == "lock":
    staging._make = die
elif moment == "sync":
    staging.sync_files = die
elif moment == "installed":
    staging.shutil.rmtree = die
elif moment == "between":
    staging._exchange = lambda a, b: False
    calls = []
    def rename(a, b):
        if calls:
            die()
        calls.append(a)
        real_rename(a, b)
    os.rename = rename
with staging.staged_folder(Path(target), replace=True, needed_bytes=0) as folder:
    (folder / "mnnsmith.json").write_text("new")
    if moment == "filling":
        die()
"""


def fill(folder: Path, text: str) -> None:
    (folder / "mnnsmith.json").write_text(text)


def stage(target: Path, text: str, *, replace: bool = True, needed_bytes: int = 0) -> None:
    with staged_folder(target, replace=replace, needed_bytes=needed_bytes) as folder:
        fill(folder, text)


def content(target: Path) -> str:
    assert os.listdir(target) == ["mnnsmith.json"]
    return (target / "mnnsmith.json").read_text()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "bundle"


def test_new_replaced_empty_and_nested(target: Path) -> None:
    stage(target, "one", replace=False)
    assert content(target) == "one"
    stage(target, "two")
    assert content(target) == "two"
    shutil.rmtree(target)
    target.mkdir()
    stage(target, "three", replace=False)
    assert content(target) == "three" and os.listdir(target.parent) == ["bundle"]
    deep = target.parent / "a" / "b" / "c"
    stage(deep, "four")
    assert content(deep) == "four"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_an_error_leaves_everything_as_it_was(target: Path, error: type[BaseException]) -> None:
    stage(target, "old")
    with pytest.raises(error), staged_folder(target, replace=True, needed_bytes=0) as folder:
        fill(folder, "new")
        raise error
    assert content(target) == "old" and os.listdir(target.parent) == ["bundle"]


@pytest.mark.parametrize("moment", ["lock", "filling", "sync", "installed", "between"])
def test_a_kill_at_any_moment(target: Path, moment: str) -> None:
    stage(target, "old")
    done = subprocess.run([sys.executable, "-c", _CHILD, moment, str(target)], timeout=60)
    assert done.returncode == -9
    if moment == "between":
        assert not target.exists(), "the one instant without a bundle, on old file systems"
    else:
        assert content(target) == ("new" if moment == "installed" else "old")
    assert len(os.listdir(target.parent)) > 1, "the kill left nothing: the test tests nothing"
    # The next run clears up before it looks at anything, even one that then refuses.
    with pytest.raises(UsageError, match="exists already"):
        stage(target, "newer", replace=False)
    assert content(target) == ("new" if moment == "installed" else "old")
    assert os.listdir(target.parent) == ["bundle"]


def test_what_came_to_the_place_during_the_work_stays(target: Path) -> None:
    with (
        pytest.raises(UsageError, match="exists already"),
        staged_folder(target, replace=False, needed_bytes=0) as folder,
    ):
        fill(folder, "new")
        target.mkdir()
        (target / "thesis.txt").write_text("mine")
    assert (target / "thesis.txt").read_text() == "mine"
    assert os.listdir(target.parent) == ["bundle"] and os.listdir(target) == ["thesis.txt"]


@pytest.mark.parametrize("what", ["bundle and notes", "folder", "file", "link"])
def test_what_came_during_the_work_is_not_replaced_either(target: Path, what: str) -> None:
    write_empty_bundle(target)
    other = target.parent / "other"
    with (
        pytest.raises(UsageError, match="bundle"),
        staged_folder(target, replace=True, needed_bytes=0) as folder,
    ):
        fill(folder, "new")
        if what == "bundle and notes":
            (target / "notes.txt").write_text("mine")
        else:
            os.rename(target, other)
            if what == "folder":
                target.mkdir()
                (target / "notes.txt").write_text("mine")
            elif what == "file":
                target.write_text("mine")
            else:
                target.symlink_to(other)
    assert target.is_symlink() == (what == "link") and target.is_file() == (what == "file")
    kept = target if what == "file" else target / "notes.txt"
    assert what == "link" or kept.read_text() == "mine"
    assert set(os.listdir(target.parent)) <= {"bundle", "other"}


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("replace", [True, False])
def test_what_comes_in_the_last_instant_stays(
    target: Path, monkeypatch: pytest.MonkeyPatch, replace: bool, exchange: bool
) -> None:
    """After the last look at the place, before it is taken."""
    real = staging._check_target
    looks = []

    def late(path: Path, may_replace: bool) -> None:
        real(path, may_replace)
        looks.append(path)
        if len(looks) == 2:
            if not replace:
                write_empty_bundle(path)
            (path / "notes.txt").write_text("mine")

    if replace:
        write_empty_bundle(target)
    monkeypatch.setattr(staging, "_check_target", late)
    if not exchange:
        monkeypatch.setattr(staging, "_exchange", lambda a, b: False)
    with pytest.raises(UsageError, match=r"notes\.txt" if replace else "exists already"):
        stage(target, "new", replace=replace)
    assert set(os.listdir(target)) == {"mnnsmith.json", "notes.txt"}
    assert os.listdir(target.parent) == ["bundle"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("call", ["open", "unlink"])
def test_the_lock_of_another_user_does_not_stand_in_the_way(
    target: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """In a sticky folder such as /tmp it can be seen, but neither opened nor removed."""
    theirs = target.parent / ".bundle.mnnsmith-partial-theirs.lock"
    theirs.touch()
    real = getattr(os, call)

    def refuse(path: object, *arguments: object, **options: object) -> object:
        if os.fspath(path) == str(theirs):  # type: ignore[call-overload]
            raise PermissionError(code, os.strerror(code), str(theirs))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, call, refuse)
    stage(target, "new")
    assert content(target) == "new" and theirs.exists()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_only_has_the_name_of_a_lock_does_not_stand_in_the_way(
    target: Path, kind: str
) -> None:
    name = target.parent / ".bundle.mnnsmith-partial-x.lock"
    if kind == "folder":
        name.mkdir()
    else:
        name.symlink_to(target.parent / "elsewhere")
    stage(target, "new")
    assert content(target) == "new" and os.path.lexists(name)


def test_a_live_one_is_left_alone(target: Path) -> None:
    with staged_folder(target, replace=True, needed_bytes=0) as folder:
        fill(folder, "first")
        stage(target, "second")
        assert content(target) == "second" and folder.is_dir()
    assert content(target) == "first" and os.listdir(target.parent) == ["bundle"]


def test_a_lock_that_is_taken_for_stale_before_it_is_held(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes the new lock file in the instant before it is locked."""
    real, removed = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not removed and how == fcntl.LOCK_EX:
            removed.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.unlink(removed[0])
        real(fd, how)

    monkeypatch.setattr(staging.fcntl, "flock", flock)
    stage(target, "new")
    assert removed and content(target) == "new" and os.listdir(target.parent) == ["bundle"]


def test_others_of_a_similar_name_are_not_touched(tmp_path: Path) -> None:
    """`a` must not clear up after `ab`, nor a glob's characters match others."""
    other = tmp_path / ".x[1]y.mnnsmith-partial-abc"
    mine = tmp_path / ".x1y.mnnsmith-partial-abc"
    for folder in (other, mine):
        folder.mkdir()
        folder.with_name(folder.name + ".lock").touch()
    stage(tmp_path / "x[1]y", "new")
    assert mine.is_dir() and not other.exists()
    (tmp_path / ".x[1]yz.mnnsmith-partial-abc.lock").touch()
    stage(tmp_path / "x[1]y", "newer")
    assert (tmp_path / ".x[1]yz.mnnsmith-partial-abc.lock").exists()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_exchange(
    target: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    class Libc:
        @staticmethod
        def renameat2(*_: object) -> int:
            return -1

    stage(target, "old")
    monkeypatch.setattr(staging.ctypes, "CDLL", lambda *_, **__: Libc)
    monkeypatch.setattr(staging.ctypes, "get_errno", lambda: code)
    stage(target, "new")
    assert content(target) == "new" and os.listdir(target.parent) == ["bundle"]
    monkeypatch.setattr(staging.ctypes, "get_errno", lambda: errno.EACCES)
    with pytest.raises(MissingResourceError, match="cannot be replaced: Permission denied"):
        stage(target, "newer")
    assert content(target) == "new" and os.listdir(target.parent) == ["bundle"]


def test_too_little_space(target: Path) -> None:
    stage(target, "old")
    with pytest.raises(MissingResourceError, match=r"the bundle needs .* MB, the disk has .* free"):
        stage(target, "new", needed_bytes=1 << 60)
    assert content(target) == "old" and os.listdir(target.parent) == ["bundle"]


def test_an_error_of_the_last_step(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    stage(target, "old")
    monkeypatch.setattr(staging, "sync_files", full)
    with pytest.raises(MissingResourceError, match="No space left"):
        stage(target, "new")
    assert content(target) == "old" and os.listdir(target.parent) == ["bundle"]


def write_empty_bundle(target: Path) -> None:
    target.mkdir()
    manifest = {"model": {"max_context": 8, "vocab_size": 9, "layers": 1, "model_type": "llama",
                          "stop_ids": []},
                "recipe": {"name": "fp16"}, "generation": {}, "source": {}, "files": {},
                }  # fmt: skip
    write_manifest(target, manifest)


def test_force_refuses_to_delete_what_a_user_put_into_a_bundle(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    write_empty_bundle(target)
    check_target(target, replace=True)
    (target / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        check_target(target, replace=True)
    assert (target / "notes.txt").read_text() == "mine"
