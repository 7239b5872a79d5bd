"""Reading what people give us: JSON within its meaning, paths that can be none, exact reads."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from mnnsmith.errors import MissingResourceError, SourceError, UsageError
from mnnsmith.files import (
    is_file,
    output_file,
    parse_json,
    pread_exact,
    read_json_object,
    read_text,
    replace_text,
    sha256_of,
    user_path,
)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "the file is empty"),
        (" \n", "the file is empty"),
        ("{", "not valid JSON"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' stands twice"),
        ('[{"x": {"a": 1, "a": 1}}]', "the key 'a' stands twice"),
        ('"\\ud83d"', "half a surrogate pair"),
        ('{"\\uDC00": 1}', "half a surrogate pair"),
        ("9" * 5000, "not valid JSON"),
        ("[" * 200_000, "nested too deeply"),
    ],
)
def test_json_that_is_refused(text: str, part: str) -> None:
    with pytest.raises(SourceError, match=part) as caught:
        parse_json(text, "here.json")
    assert str(caught.value).startswith("here.json: ") and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "text", ['{"a": {"a": 1}}', '"\\ud83e\\udd99"', "[1, 2.5, null]", '"\\u0041"']
)
def test_json_that_is_read(text: str) -> None:
    assert parse_json(text, "here") == json.loads(text)


def test_a_late_duplicate_among_many_keys_is_found_soon() -> None:
    """Counting every name would take hours here."""
    text = json.dumps({f"k{i}": 0 for i in range(300_000)})[:-1] + ', "k299999": 1}'
    start = time.process_time()
    with pytest.raises(SourceError, match="the key 'k299999' stands twice"):
        parse_json(text, "here")
    assert time.process_time() - start < 2


@pytest.mark.parametrize("item", ["[]", "{}", "0", '"ab"', '[""]'])
def test_json_of_very_many_values_is_refused_soon(item: str) -> None:
    """As nested lists, 60 MB of it would take two gigabytes and a quarter of a minute."""
    text = "[" + f"{item}," * (2_100_000 if item[0] in "[{" else 8_100_000) + "0]"
    start = time.process_time()
    with pytest.raises(SourceError, match="holds more lists, objects or values"):
        parse_json(text, "here")
    assert time.process_time() - start < 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    os.mkfifo(tmp_path / "pipe")
    for path, part in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "bytes", r"not UTF-8 text \(byte 2\)"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "a\0b", "null"),
    ):
        with pytest.raises(SourceError, match=part):
            read_text(path)
    with pytest.raises(SourceError, match="3 bytes are more than the 2 we accept"):
        read_text(tmp_path / "bytes", 2)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(SourceError, match="expected a JSON object, found a list"):
        read_json_object(tmp_path / "list.json")


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/x") == tmp_path / "x"
    (tmp_path / "file").touch()
    for fine in (tmp_path, tmp_path / "absent" / "more", tmp_path / "file" / "below"):
        assert user_path(fine) == fine
    for bad in ("a\0b", "\ud800", "x" * 300, "~nobody-of-this-name/x"):
        with pytest.raises(UsageError, match="cannot be used as a path"):
            user_path(bad)
        assert not is_file(Path(bad))


def test_exact_reads(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(100)))
    fd = os.open(path, os.O_RDONLY)
    try:
        assert pread_exact(fd, 5, 95, "data") == bytes(range(95, 100))
        with pytest.raises(SourceError, match=r"data: the file ends at byte 100, 1 bytes before"):
            pread_exact(fd, 6, 95, "data")
        with pytest.raises(SourceError, match="ends at byte 400"):
            pread_exact(fd, 1, 400, "data")
    finally:
        os.close(fd)
    assert sha256_of(path) == hashlib.sha256(bytes(range(100))).hexdigest()


def test_a_text_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "größe.json"
    replace_text(path, "new ü")
    assert path.read_text(encoding="utf-8") == "new ü"
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    replace_text(link, "through the link")
    assert link.is_symlink() and path.read_text() == "through the link"
    assert path.stat().st_mode & 0o777 == 0o640

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MissingResourceError, match="No space left"):
        replace_text(path, "half")
    assert path.read_text() == "through the link"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["größe.json", "link"]


def test_what_is_no_regular_file_is_written_to_not_replaced(tmp_path: Path) -> None:
    replace_text(Path("/dev/null"), "gone")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(MissingResourceError, match="cannot be written"):
        replace_text(tmp_path, "a folder")
    with pytest.raises(MissingResourceError, match="cannot be written"):
        replace_text(tmp_path / "none" / "x", "text")


def test_where_a_file_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "behind")
    os.mkfifo(tmp_path / "pipe")
    for name in ("new", "link", "größe\n x", "pipe"):
        assert output_file(tmp_path / name) == tmp_path / name
    (tmp_path / "away").symlink_to(tmp_path / "none" / "x")
    wrong = {
        "": "is empty", str(tmp_path): "is a folder", str(tmp_path / "no" / "x"): "no folder",
        str(tmp_path / "away"): "no folder", str(tmp_path / "pipe"): "no regular file",
        str(tmp_path / ("x" * 300)): "cannot be used", "a\0b": "cannot be used",
        "/proc/x": "cannot be written",
    }  # fmt: skip
    if os.geteuid() == 0:
        # Nothing stops this user beforehand.
        del wrong["/proc/x"]
    for path, words in wrong.items():
        with pytest.raises(UsageError, match=words):
            output_file(path, regular=True)
    assert sorted(os.listdir(tmp_path)) == ["away", "link", "pipe"]
