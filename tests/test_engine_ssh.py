"""Bundles on another host: a stand-in for ssh that runs the command here, and a real sshd."""

from __future__ import annotations

import getpass
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mnnsmith.engine import Engine, parse_device, ssh
from mnnsmith.engine.device import RUNNER
from mnnsmith.engine.module import MODULE_RUNNER, Module
from mnnsmith.engine.ssh import RECEIVER, SshDevice
from mnnsmith.errors import EngineError, MissingResourceError, UsageError
from tiny_bundle import TinyLlama
from tiny_onnx import dense, to_mnn

engine = pytest.mark.engine
Tiny = tuple[Path, TinyLlama]
IDS = [5, 9, 100, 7]

# As sshd does: the words of the command become one text for a shell, with little around it.
STAND_IN = """#!/bin/sh
printf '%s\\n' "$@" | head -n {options} >> {log}
for last; do :; done
cd {home} || exit 255
{before}
env -i HOME={home} TMPDIR={tmp} PATH=/usr/bin:/bin sh -c "$last"
"""


@dataclass
class Host:
    """folder: ours on the host.  tmp: its temporary files.  bin: the stand-in's place on PATH."""

    folder: Path
    tmp: Path
    bin: Path
    log: Path

    @property
    def device(self) -> SshDevice:
        return SshDevice("somebody@host", 2222, str(self.folder))

    def behave(self, before: str = "") -> None:
        """What happens before the command is run."""
        text = STAND_IN.format(
            home=self.tmp.parent, tmp=self.tmp, log=self.log, before=before, options=13
        )
        self.bin.mkdir(exist_ok=True)
        (self.bin / "ssh").write_text(text)
        (self.bin / "ssh").chmod(0o755)

    def objects(self) -> dict[str, float]:
        return {path.name: path.stat().st_mtime for path in (self.folder / "objects").iterdir()}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host(
        tmp_path / "far away" / "our's", tmp_path / "tmp", tmp_path / "bin", tmp_path / "l"
    )
    found.tmp.mkdir()
    found.folder.mkdir(parents=True)
    (found.folder / "venv").symlink_to(sys.prefix)
    found.behave()
    monkeypatch.setenv("PATH", f"{found.bin}:{os.environ['PATH']}")
    return found


@engine
def test_another_model_runs_there_by_two_scripts(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = to_mnn(dense(16, 2), folder)
    feeds = {"x": np.linspace(-1, 1, 48, dtype=np.float32).reshape(3, 16)}
    with Module(path, threads=1) as module:
        expected = module.run(feeds)["y"]
    with Module(path, threads=1, device=host.device) as module:
        np.testing.assert_array_equal(module.run(feeds)["y"], expected)
    copied = host.objects()
    for script in (RUNNER, MODULE_RUNNER, path):
        assert hashlib.sha256(script.read_bytes()).hexdigest() in copied


@engine
def test_a_bundle_runs_there_and_is_copied_once(
    host: Host, tiny_bundle: Tiny, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle[0], bundle)
    expected = tiny_bundle[1].logits(IDS)
    with Engine(bundle, device=host.device, memory="high", call_timeout_s=20) as found:
        assert len(list(host.tmp.iterdir())) == 1
        logits = found.forward(IDS, all_positions=True)
        assert np.abs(logits - expected).max() < 1e-3 * expected.std()
        assert found._call_timeout_s == 200 and found.mapping.state == "off"
    assert list(host.tmp.iterdir()) == []
    called = host.log.read_text().splitlines()
    assert called[:3] == ["-T", "-o", "BatchMode=yes"]
    assert called[called.index("-p") :][:4] == ["-p", "2222", "--", "somebody@host"]

    before = host.objects()
    assert hashlib.sha256(RUNNER.read_bytes()).hexdigest() in before
    with Engine(bundle, device=host.device) as found:
        found.forward(IDS)
    assert host.objects() == before

    # A changed file is another one, the rest stays.
    config = json.loads((bundle / "config.json").read_text())
    (bundle / "config.json").write_text(json.dumps({**config, "thread_num": 1}))
    with Engine(bundle, device=host.device) as found:
        assert found.settings["thread_num"] == 1
    after = host.objects()
    assert len(after) == len(before) + 1 and before.items() <= after.items()
    # One that was cut short by a full disk is not taken for whole.
    victim = max((host.folder / "objects").iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(victim, 100)
    with Engine(bundle, device=host.device, memory="high") as found:
        assert np.abs(found.forward(IDS) - expected[-1]).max() < 1e-3 * expected.std()


@pytest.mark.parametrize(
    ("before", "error", "message"),
    [
        ("echo 'Permission denied (publickey).' >&2; exit 255", EngineError, "Permission denied"),
        ("echo Welcome to this host", EngineError, "Welcome to this host"),
        ("kill -9 $$", EngineError, "ended with exit status"),
        ("exec sleep 60", EngineError, "no sign of life"),
        ("echo '[]'; cat > /dev/null", EngineError, "no object"),
        ("""echo '{"python": "3.9.1"}'; cat > /dev/null""", MissingResourceError, "3.10"),
        ("""echo '{"python": 5}'; cat > /dev/null""", MissingResourceError, "3.10"),
        ("""echo '{"python": "3.12.1", "numpy": "2"}'; cat >/dev/null""", MissingResourceError,
         "MNN 3.6.1 is needed there, found none"),
        ("""echo '{"python": "3.12.1", "MNN": "3.1.0", "numpy": "2"}'; cat >/dev/null""",
         MissingResourceError, r"MNN 3\.6\.1 is needed there, found '3\.1\.0'"),
        ("""echo '{"python": "3.12.1", "MNN": "3.6.1"}'; cat >/dev/null""", MissingResourceError,
         "numpy"),
        ("""echo '{"python": "3.12.1", "MNN": "3.6.1", "numpy": "2", "missing": ["/etc/passwd"]}'
         cat > /dev/null""", EngineError, "not offered"),
        ("""echo '{"python": "3.12.1", "MNN": "3.6.1", "numpy": "2", "missing": 4}'
         cat > /dev/null""", EngineError, "which files it lacks"),
        ("""echo '{"error": "/data: No space left on device"}'; cat > /dev/null""", EngineError,
         "No space left"),
        ("yes | tr -d '\\n'", EngineError, "where an answer was expected"),
    ],
)  # fmt: skip
def test_what_can_be_wrong_there(
    host: Host, monkeypatch: pytest.MonkeyPatch, before: str, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(ssh, "SILENCE_S", 2.0)
    host.behave(before)
    with pytest.raises(error, match=message) as caught:
        host.device.launch()
    assert "ssh:somebody@host:2222" in str(caught.value)


def test_no_python_there(host: Host) -> None:
    (host.folder / "venv").unlink()
    host.behave('last="PATH=/nowhere; exec /bin/sh${last#exec sh}"')
    with pytest.raises(EngineError, match="python3"):
        host.device.launch()


def test_no_ssh_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingResourceError, match="ssh is not installed"):
        SshDevice("host").launch()


def test_a_full_disk_there(host: Host) -> None:
    (host.folder / "objects").write_text("a file where the folder should be")
    with pytest.raises(EngineError, match="objects: File exists"):
        host.device.launch()


def receive(folder: Path, entries: list[dict[str, object]], data: bytes) -> list[dict[str, object]]:
    """The receiver alone: its answers."""
    stream = io.BytesIO(json.dumps({"files": entries}).encode() + b"\n" + data)
    done = subprocess.run(
        [sys.executable, "-c", RECEIVER.read_text(), str(folder)],
        input=stream.getvalue(),
        capture_output=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_receiver_keeps_whole_files_only(tmp_path: Path) -> None:
    content = b"some weights"
    sha256 = hashlib.sha256(content).hexdigest()
    entry = {"name": "w", "size_bytes": len(content), "sha256": sha256}
    changed = receive(tmp_path, [entry], b"SOME weights" + b"done\n")
    assert changed[0]["missing"] == [sha256] and "changed on the way" in str(changed[1]["error"])
    assert len(receive(tmp_path, [entry], content[:5])) == 1
    assert list((tmp_path / "objects").iterdir()) == []
    _, last = receive(tmp_path, [entry], content + b"done\n")
    assert (Path(str(last["folder"])) / "w").read_bytes() == content
    again = receive(tmp_path, [entry], b"done\n")
    assert again[0]["missing"] == [] and again[1] == last
    assert len(list((tmp_path / "sets").iterdir())) == 1


def test_hosts_by_name() -> None:
    for text, expected in {
        "ssh:host": SshDevice("host"),
        "ssh:me@host.example": SshDevice("me@host.example"),
        "ssh:me@host:2222/data/my files": SshDevice("me@host", 2222, "/data/my files"),
        "ssh:[::1]:22": SshDevice("[::1]", 22),
        "ssh:host/x": SshDevice("host", None, "/x"),
    }.items():
        assert parse_device(text) == expected and parse_device(text).name == text


@pytest.mark.parametrize(
    "text",
    ["", "-oProxyCommand=evil", "-host", "me@-host", "-me@host", "a b", "host:0", "host:99999",
     "host:x", "@host", "me@", "host;reboot", "$(reboot)", "host/a\nb", "host\n", "a@b@c"],
)  # fmt: skip
def test_what_names_no_host(text: str) -> None:
    with pytest.raises(UsageError):
        parse_device(f"ssh:{text}")


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshDevice]:
    """A real server for this user alone, and a client that finds it by its own configuration."""
    server, client, keygen = (shutil.which(n, path=f"{os.environ['PATH']}:/usr/sbin")
                              for n in ("sshd", "ssh", "ssh-keygen"))  # fmt: skip
    if server is None or client is None or keygen is None:
        pytest.skip("sshd is not installed (apt-get install openssh-server)")
    if os.geteuid() == 0:
        # It drops its rights in this folder, which a boot would have made.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name in ("host", "user"):
        subprocess.run(
            [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True
        )
    shutil.copy(tmp_path / "user.pub", tmp_path / "authorized")
    public = (tmp_path / "host.pub").read_text()
    (tmp_path / "known").write_text(f"[127.0.0.1]:{port} {public}")
    (tmp_path / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path / 'host'}\nPidFile none\n"
        f"AuthorizedKeysFile {tmp_path / 'authorized'}\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        f"SetEnv TMPDIR={tmp_path / 'tmp'}\n"
    )
    (tmp_path / "config").write_text(
        f"Host *\n  IdentityFile {tmp_path / 'user'}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {tmp_path / 'known'}\n"
    )
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "ssh").write_text(f'#!/bin/sh\nexec {client} -F {tmp_path / "config"} "$@"\n')
    (bin_folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    with open(tmp_path / "sshd.log", "wb") as log:
        process = subprocess.Popen(
            [server, "-D", "-e", "-f", str(tmp_path / "sshd_config")], stderr=log
        )
    (tmp_path / "tmp").mkdir()
    folder = tmp_path / "far"
    folder.mkdir()
    (folder / "venv").symlink_to(sys.prefix)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, (tmp_path / "sshd.log").read_text()
            time.sleep(0.05)
        yield SshDevice(f"{getpass.getuser()}@127.0.0.1", port, str(folder))
    finally:
        process.kill()
        process.wait()


@engine
@pytest.mark.slow
def test_a_real_host(sshd: SshDevice, tiny_bundle: Tiny, tmp_path: Path) -> None:
    assert parse_device(sshd.name) == sshd
    expected = tiny_bundle[1].logits(IDS)
    for _ in range(2):
        with Engine(tiny_bundle[0], device=sshd, memory="high") as found:
            logits = found.forward(IDS, all_positions=True)
            assert np.abs(logits - expected).max() < 1e-3 * expected.std()
            assert len(list(found.generate([1, 2], max_new_tokens=4))) == 4
    with Engine(tiny_bundle[0], device=sshd) as found:
        assert found.pid is not None and len(list((tmp_path / "tmp").iterdir())) == 1
        os.kill(found.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="SIGKILL"):
            found.forward(IDS)
        assert found.closed
    deadline = time.monotonic() + 20
    while list((tmp_path / "tmp").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    # The runner saw the end of its input, and its folder went with it.
    assert list((tmp_path / "tmp").iterdir()) == []
    (tmp_path / "authorized").write_text("")
    with pytest.raises(EngineError, match="Permission denied") as caught:
        Engine(tiny_bundle[0], device=sshd)
    assert caught.value.hint is not None and "without a password" in caught.value.hint
    (tmp_path / "known").write_text("")
    with pytest.raises(EngineError, match="Host key verification failed"):
        Engine(tiny_bundle[0], device=sshd)
