"""Unpacking packages: what good ones become, and that hostile ones reach nothing."""

from __future__ import annotations

import lzma
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

from deb_samples import ar, deb_of, symlink, tar, write_wheel
from mnnsmith.devices.unpack import unpack_deb, unpack_wheel
from mnnsmith.errors import SourceError


def everything(_: str) -> bool:
    return True


def unpack(data: bytes, tmp_path: Path) -> Path:
    package = tmp_path / "some.deb"
    package.write_bytes(data)
    folder = tmp_path / "inner" / "folder"
    folder.mkdir(parents=True)
    unpack_deb(package, folder, everything)
    return folder


def test_a_package_becomes_its_files(tmp_path: Path) -> None:
    data = tar(
        ("./usr/bin/tool", b"x" * 70_001, 0o755),
        ("./usr/lib/a/" + "long" * 40, b"text", 0o644),
        symlink("./usr/lib/tool", "../bin/tool"),
        symlink("./usr/lib/absolute", "/usr/bin/tool"),
        symlink("./lib", "/usr/lib"),
    )
    folder = unpack(deb_of(data), tmp_path)
    tool = folder / "usr/bin/tool"
    assert tool.read_bytes() == b"x" * 70_001 and tool.stat().st_mode & 0o777 == 0o755
    assert (folder / "usr/lib/a" / ("long" * 40)).stat().st_mode & 0o777 == 0o644
    for link in ("usr/lib/tool", "usr/lib/absolute", "lib/tool"):
        assert (folder / link).resolve() == tool.resolve()
    assert not (folder / "lib").readlink().is_absolute()


def test_only_what_is_wanted(tmp_path: Path) -> None:
    package = tmp_path / "some.deb"
    # What is not wanted may be anything: a device, say, or a link that leads out.
    data = tar(("a/b", b"1", 0o644), ("a/c", "", tarfile.CHRTYPE[0]), symlink("d", "/../../e"))
    package.write_bytes(deb_of(data))
    out = tmp_path / "out"
    out.mkdir()
    unpack_deb(package, out, lambda name: name == "a/b")
    assert [str(path.relative_to(out)) for path in out.rglob("*")] == ["a", "a/b"]


HOSTILE = {
    "absolute": tar(("/evil", b"x", 0o644)),
    "parent": tar(("../evil", b"x", 0o644)),
    "hidden parent": tar(("a/./../../../evil", b"x", 0o644)),
    "link out": tar(symlink("a", "../../evil")),
    "absolute link out": tar(symlink("a", "/../evil")),
    "link to the folder itself": tar(symlink("a", ".")),
    "through a link": tar(symlink("a", "b"), ("a/evil", b"x", 0o644)),
    "over a link": tar(symlink("a", "evil"), ("a", b"x", 0o644)),
    "through a file": tar(("a", b"x", 0o644), ("a/evil", b"x", 0o644)),
    "twice": tar(("a", b"x", 0o644), ("a", b"y", 0o644)),
    "device": tar(("a", "", tarfile.CHRTYPE[0])),
    "fifo": tar(("a", "", tarfile.FIFOTYPE[0])),
    "hard link": tar(("a", "/etc/passwd", tarfile.LNKTYPE[0])),
    "backslash": tar(("..\\evil", b"x", 0o644)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_leaves_the_folder(tmp_path: Path, case: str) -> None:
    before = {"some.deb", "inner", "inner/folder"}
    with pytest.raises(SourceError, match=r"some\.deb"):
        unpack(deb_of(HOSTILE[case]), tmp_path)
    outside = {
        str(path.relative_to(tmp_path))
        for path in tmp_path.rglob("*")
        if "inner/folder/" not in str(path)
    }
    assert outside == before
    assert not list(tmp_path.rglob("*evil"))


GOOD = deb_of(tar(("a", bytes(range(256)) * 64, 0o644), ("b", b"more", 0o644)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"!<arch>\n",
        b"not a package at all",
        ar(("debian-binary", b"2.0\n")),
        ar(("data.tar.xz", b"no xz at all")),
        ar(("data.tar.xz", lzma.compress(b"no tar at all" * 100))),
        GOOD[:-40],
        GOOD[: len(GOOD) // 2],
        b"!<arch>\n" + f"{'data.tar.xz':<48}{'-5':<10}".encode() + b"`\n",
    ],
)
def test_damage_is_our_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SourceError, match=r"some\.deb"):
        unpack(data, tmp_path)


def test_every_cut_of_a_package_is_our_error(tmp_path: Path) -> None:
    for number, cut in enumerate(range(0, len(GOOD) - 12, 7)):
        place = tmp_path / str(number)
        place.mkdir()
        with pytest.raises(SourceError):
            unpack(GOOD[:cut], place)


BOMB = """
import io, lzma, resource, sys, tarfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from deb_samples import deb_of
from mnnsmith.devices.unpack import unpack_deb
from mnnsmith.errors import SourceError

entry = tarfile.TarInfo("zeros")
entry.size = 1 << 40
package = Path("bomb.deb")
package.write_bytes(deb_of(entry.tobuf() + bytes(64 << 20)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Path("out").mkdir()
try:
    unpack_deb(package, Path("out"), lambda name: True)
except SourceError as error:
    print(error.message, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_bomb_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BOMB), str(Path(__file__).parent)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    *message, grown_kb = done.stdout.split()
    assert "unpacks to more than" in " ".join(message) and int(grown_kb) < 100_000
    assert list((tmp_path / "out").iterdir()) == []


def test_an_xz_stream_that_wants_gigabytes_is_refused(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    greedy = lzma.compress(tar(("a", b"x", 0o644)), format=lzma.FORMAT_XZ, filters=filters)
    with pytest.raises(SourceError, match="damaged"):
        unpack(ar(("data.tar.xz", greedy)), tmp_path)


def test_wheels(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "part", "1.0", {"part/__init__.py": b"value = 3\n"})
    (tmp_path / "out").mkdir()
    unpack_wheel(wheel, tmp_path / "out")
    assert (tmp_path / "out/part/__init__.py").read_bytes() == b"value = 3\n"


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a\\evil"])
def test_a_hostile_wheel_is_refused(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.writestr(name, b"x")
    (tmp_path / "out").mkdir()
    with pytest.raises(SourceError, match=r"w\.whl"):
        unpack_wheel(tmp_path / "w.whl", tmp_path / "out")
    assert not list(tmp_path.rglob("*evil"))


def test_a_damaged_wheel_is_our_error(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "part", "1.0", {"part/x": bytes(1000)})
    data = wheel.read_bytes()
    for number, damaged in enumerate((b"", data[:200], data[:60] + b"\xff" * 40 + data[100:])):
        wheel.write_bytes(damaged)
        out = tmp_path / str(number)
        out.mkdir()
        with pytest.raises(SourceError, match=r"part-1\.0"):
            unpack_wheel(wheel, out)
