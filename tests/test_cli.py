"""The program as people run it: in a process, with right and wrong arguments."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mnnsmith.cli.main import _report_bug
from mnnsmith.conversion.convert import convert
from mnnsmith.selftest import write_tiny_checkpoint
from mnnsmith.version import __version__

PROGRAM = [sys.executable, "-m", "mnnsmith.cli"]
COMMANDS = (
    "convert",
    "run",
    "chat",
    "inspect",
    "check",
    "verify",
    "report",
    "profile",
    "canvas",
    "export",
    "devices",
    "doctor",
    "demo",
)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{{ messages[-1].content }}{{ extra }}"
)


def mnnsmith(
    *arguments: str | bytes | Path, stdin: bytes = b"", **variables: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        input=stdin,
        capture_output=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200", **variables},
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that goes on with the following bytes: "abc" -> "defgh..."."""
    folder = tmp_path_factory.mktemp("cli") / "größe model"
    write_tiny_checkpoint(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    return convert(checkpoint, checkpoint.parent / "the bundle").path


# --- no engine -------------------------------------------------------------------------------


def test_help_and_version() -> None:
    found = mnnsmith("--help")
    assert found.returncode == 0 and found.stderr == b""
    assert all(command in found.stdout.decode() for command in COMMANDS)
    assert mnnsmith("--version").stdout.decode() == f"mnnsmith {__version__}\n"
    assert mnnsmith().returncode == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_its_options_are_documented(command: str) -> None:
    document = (Path(__file__).parents[1] / "docs" / "cli.md").read_text(encoding="utf-8")
    found = mnnsmith(command, "--help")
    assert found.returncode == 0
    options = {w for w in found.stdout.decode().replace(",", " ").split() if w.startswith("--")}
    assert {"--help", "--verbose"} < options
    section = document.split(f"## mnnsmith {command}\n")[1].split("\n## ")[0]
    shared = document.split("## Options of every command\n")[1].split("\n## ")[0]
    if command in ("run", "chat"):
        shared += document.split("## Options of run and chat\n")[1].split("\n## ")[0]
    assert [option for option in sorted(options) if f"`{option}" not in section + shared] == []


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, mnnsmith.cli.main; "
        "print([m for m in ('numpy', 'tokenizers', 'jinja2', 'rich', 'MNN', 'torch', 'gguf',"
        " 'huggingface_hub') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert found.stdout.decode().strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["bogus"], 2, "No such command"),
        (["run"], 2, "Missing argument"),
        (["run", "x", "--bogus"], 2, "No such option"),
        (["run", "/no/such/dir", "-p", "hi"], 6, "no such folder"),
        (["run", "/dev/null", "-p", "hi"], 6, "no such folder"),
        (["run", "/", "-p", "hi"], 6, "no mnnsmith bundle"),
        (["run", "/", "--max-tokens", "0", "-p", "hi"], 2, "max-tokens"),
        (["run", "/", "--max-tokens", "many", "-p", "hi"], 2, "max-tokens"),
        (["run", "/", "--template-var", "x", "-p", "hi"], 2, "NAME=VALUE"),
        (["run", "/", "--raw", "--system", "s", "-p", "hi"], 2, "--raw"),
        (["chat", "/no/such/dir"], 6, "no such folder"),
        (["check", "/no/such/dir"], 6, "no such folder"),
        (["inspect", "/"], 3, "config.json"),
        (["inspect", "/no/such/model.gguf"], 3, "/no/such/model.gguf"),
        (["convert", "x"], 2, "-o DIR"),
        (["convert", "/", "-o", "/no/such"], 3, "config.json"),
        (["convert", "/", "-o", "/no/such", "--recipe", "w6g48"], 2, "w6g48"),
    ],
)
def test_wrong_usage_gives_an_error_and_its_exit_code(
    arguments: list[str], status: int, words: str
) -> None:
    found = mnnsmith(*arguments)
    assert (found.returncode, found.stdout) == (status, b"")
    assert words in found.stderr.decode()
    assert "Traceback" not in found.stderr.decode()


def test_verbose_shows_the_traceback_wherever_it_stands() -> None:
    for arguments in (["-v", "check", "/"], ["check", "/", "-v"], ["check", "--verbose", "/"]):
        found = mnnsmith(*arguments)
        assert found.returncode == 6
        assert "Traceback" in found.stderr.decode()


def test_verbose_shows_our_log_alone() -> None:
    """Other packages write hosts and more of their requests into theirs."""
    code = (
        "import logging, sys; from mnnsmith import api; from mnnsmith.inspection.check import"
        " CheckReport; "
        "log = lambda *a, **k: (logging.getLogger('httpx').info('GET secret.example'),"
        " logging.getLogger('mnnsmith.x').info('ours'), CheckReport('/', ()))[-1]; "
        "api.check = log; sys.argv = ['mnnsmith', 'check', '/', *sys.argv[1:]]; "
        "from mnnsmith.cli.main import main; main()"
    )
    for arguments, expected in ((["-v"], True), ([], False)):
        found = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)
        assert found.returncode == 0
        assert (b"mnnsmith.x: ours" in found.stderr) == expected
        assert b"secret" not in found.stderr


@pytest.mark.parametrize("message", ["broken \x1b]0;title\x07", "two\nlines"])
def test_a_bugs_message_does_not_steer_the_terminal(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Screen()
    monkeypatch.setattr(sys, "stderr", shown)
    _report_bug(ValueError(message), verbose=True)
    assert "\x1b" not in shown.getvalue() and "\x07" not in shown.getvalue()
    assert shown.getvalue().count("\n") == shown.getvalue().count("NoneType: None\n") + 1


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bug_leaves_its_traceback_in_a_file(tmp_path: Path) -> None:
    code = (
        "import sys; from mnnsmith import api; "
        "api.check = lambda *a, **k: 1 / 0; "
        "sys.argv = ['mnnsmith', 'check', '/']; "
        "from mnnsmith.cli.main import main; main()"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert found.returncode == 1
    message = found.stderr.decode()
    assert "bug" in message and "ZeroDivisionError" in message and "Traceback" not in message
    (log,) = tmp_path.glob("mnnsmith-*.log")
    assert str(log) in message and "ZeroDivisionError" in log.read_text()


def test_prompts_that_are_no_text_are_refused(tmp_path: Path) -> None:
    found = mnnsmith("run", "/", "--system", b"\xff", "-p", "hi")
    assert found.returncode == 2 and "UTF-8" in found.stderr.decode()


# --- with the engine -------------------------------------------------------------------------

engine = pytest.mark.engine


@engine
def test_convert_inspect_check_run(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "made 東"
    plan = mnnsmith("convert", checkpoint, "--dry-run", "--json")
    assert json.loads(plan.stdout)["model_type"] == "llama"
    made = mnnsmith("convert", checkpoint, "-o", target, "--recipe", "w8g32", "--json")
    assert made.returncode == 0 and json.loads(made.stdout)["recipe"] == "w8g32"
    assert made.stderr == b"", "progress is quiet without a terminal"
    again = mnnsmith("convert", checkpoint, "-o", target)
    assert again.returncode == 2 and b"--force" in again.stderr
    assert mnnsmith("convert", checkpoint, "-o", target, "--force").returncode == 0

    model = json.loads(mnnsmith("inspect", checkpoint, "--json").stdout)
    assert model["unsupported"] is None and model["layers"] == 2
    assert b"supported" in mnnsmith("inspect", checkpoint).stdout
    facts = json.loads(mnnsmith("inspect", target, "--json").stdout)
    assert facts["recipe"]["name"] == "w4g32-head8"
    assert b"w4g32-head8" in mnnsmith("inspect", target).stdout

    checked = mnnsmith("check", target, "--load", "--json")
    assert checked.returncode == 0 and json.loads(checked.stdout)["passed"] is True
    weights = target / "llm.mnn.weight"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    broken = mnnsmith("check", target)
    assert broken.returncode == 6
    assert b"FAIL llm.mnn.weight is unchanged" in broken.stdout and b"1 of" in broken.stderr


@engine
def test_check_shows_hostile_names_as_text(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    (copy / "x\x1b[2J\nok   everything: fine").write_text("")
    with Terminal("check", copy) as terminal:
        terminal.wait_for("checks failed")
        assert terminal.process.wait(30) == 6
    assert b"\x1b[2J" not in terminal.seen and b"\nok   everything" not in terminal.seen
    assert b"\\x1b[2J" in terminal.seen


@engine
def test_run_streams_the_answer_to_stdout(bundle: Path) -> None:
    found = mnnsmith("run", bundle, "-p", "abc", "--max-tokens", "5")
    assert found.returncode == 0
    assert found.stdout == b"defgh\n"
    assert b"--max-tokens" in found.stderr


@engine
def test_run_reads_standard_input(bundle: Path) -> None:
    found = mnnsmith("run", bundle, "-p", "-", "--max-tokens", "3", stdin=b"abc\n")
    assert found.stdout == b"def\n"
    found = mnnsmith("run", bundle, stdin=b"\xff")
    assert found.returncode == 2 and b"not UTF-8" in found.stderr


@engine
def test_run_json(bundle: Path) -> None:
    found = mnnsmith(
        *("run", bundle, "-p", "abc", "--json", "--stop", "|", "--temperature", "0"),
        *("--seed", "5", "--system", "sys", "--template-var", "extra=w"),
    )
    value = json.loads(found.stdout)
    assert (value["text"], value["finish_reason"]) == ("xyz{", "stop")
    assert (value["stop_string"], value["reasoning"]) == ("|", "")
    assert value["tokens"]["prompt"] == len("sys" + "abc" + "w")
    assert value["tokens"]["answer_ids"] == list(b"xyz{|")
    assert value["seed"] == 5
    assert value["timings"]["total_s"] > 0


@engine
def test_run_stop_raw_and_sampling_options(bundle: Path) -> None:
    options = ["--temperature", "0.1", "--top-k", "1", "--top-p", "0.9", "--min-p", "0.1"]
    more = ["--repetition-penalty", "1", "--presence-penalty", "0", "--frequency-penalty", "0"]
    engine_options = ["--threads", "1", "--memory", "high", "--precision", "high"]
    found = mnnsmith(
        "run", bundle, "--raw", "-p", "abc", "--stop", "hi", *options, *more, *engine_options
    )
    assert (found.returncode, found.stdout) == (0, b"defg\n")
    for wrong in (["--temperature", "-1"], ["--top-p", "2"], ["--memory", "huge"]):
        found = mnnsmith("run", bundle, "-p", "abc", *wrong)
        assert found.returncode == 2 and found.stdout == b""


@engine
def test_special_tokens_in_the_prompt_stay_text_unless_asked(bundle: Path) -> None:
    for arguments, tokens in (([], 7), (["--allow-special"], 4)):
        found = mnnsmith("run", bundle, "-p", "abc</s>", "--json", "--max-tokens", "1", *arguments)
        assert json.loads(found.stdout)["tokens"]["prompt"] == tokens


@engine
def test_a_prompt_longer_than_the_context_and_an_empty_one(bundle: Path) -> None:
    found = mnnsmith("run", bundle, stdin=b"a" * 300)
    assert found.returncode == 7 and b"256" in found.stderr
    found = mnnsmith("run", bundle, "-p", "", "--raw")
    assert found.returncode == 2 and b"empty" in found.stderr


@engine
def test_the_answer_ends_with_the_context(bundle: Path) -> None:
    found = mnnsmith("run", bundle, "--json", "-p", "\x01" * 200 + "a")
    value = json.loads(found.stdout)
    assert value["finish_reason"] == "context"
    assert value["tokens"]["prompt"] + value["tokens"]["answer"] == 257


@engine
def test_a_reader_that_goes_away_is_no_error(bundle: Path) -> None:
    with subprocess.Popen(
        [*PROGRAM, "run", bundle, "-p", "!"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        message = process.stderr.read()
    assert process.returncode == 141
    assert message == b""


@engine
def test_a_damaged_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    for name, data in (("tokenizer.json", b""), ("mnnsmith.json", b"{"), ("llm.mnn", None)):
        copy = tmp_path / name
        shutil.copytree(bundle, copy)
        if data is None:
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(data)
        found = mnnsmith("run", copy, "-p", "abc")
        assert found.returncode == 6, found.stderr
        assert name in found.stderr.decode()


@engine
def test_chat_from_a_pipe(bundle: Path) -> None:
    lines = (
        "abc\n\n/system 123\n/system\nabc\n/reset\n/nothing\n/help\n/system -\nxyz\n/exit\nabc\n"
    )
    found = mnnsmith("chat", bundle, "--max-tokens", "3", stdin=lines.encode())
    assert found.returncode == 0
    answers = [line for line in found.stdout.decode().splitlines() if len(line) == 3]
    assert answers == ["def", "def", "{|}"]
    assert "/reset" in found.stdout.decode()
    assert "123" in found.stderr.decode() and "/nothing" in found.stderr.decode()


@engine
def test_chat_ends_with_its_input(bundle: Path) -> None:
    assert mnnsmith("chat", bundle, "--max-tokens", "3", stdin=b"abc").stdout == b"def\n"
    assert mnnsmith("chat", bundle).returncode == 0
    found = mnnsmith("chat", bundle, stdin=b"a" * 300 + b"\n")
    assert found.returncode == 7 and found.stderr.count(b"error:") == 1


class Terminal:
    """A program on a pseudo-terminal of its own, so that Ctrl-C typed there reaches it."""

    _OWN_TERMINAL = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )

    def __init__(self, *arguments: str | Path) -> None:
        self.main, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", self._OWN_TERMINAL, *PROGRAM, *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(other)
        self.seen = b""

    def send(self, text: str) -> None:
        self.seen = b""
        os.write(self.main, text.encode())

    def wait_for(self, text: str, limit_s: float = 60) -> None:
        end = time.monotonic() + limit_s
        while text.encode() not in self.seen:
            ready, _, _ = select.select([self.main], [], [], max(0, end - time.monotonic()))
            assert ready, (text, self.seen)
            try:
                self.seen += os.read(self.main, 4096)
            except OSError as error:
                raise AssertionError((text, self.seen)) from error

    def interrupt_prompt(self, text: str) -> None:
        """Ctrl-C at a prompt until `text` answers.

        One that comes after Python wrote the prompt and before it reads is seen only with the next.
        """
        self.send("\x03")
        for _ in range(11):
            try:
                return self.wait_for(text, limit_s=5)
            except AssertionError:  # noqa: PERF203 - each try is a press of its own
                assert self.process.poll() is None
                os.write(self.main, b"\x03")
        return self.wait_for(text)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.main)


@pytest.fixture(scope="module")
def endless(checkpoint: Path) -> Path:
    """The same model without an end token and with a long context."""
    folder = checkpoint.parent / "endless"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(eos_token_id=None, max_position_embeddings=65536)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    return convert(folder, folder.parent / "endless bundle").path


ON_AND_ON = ("--max-tokens", "60000")


@engine
def test_ctrl_c_ends_the_answer_not_the_chat(endless: Path) -> None:
    with Terminal("chat", endless, *ON_AND_ON) as terminal:
        terminal.wait_for("> ")
        terminal.send("abc\n")
        terminal.wait_for("defghijkl")
        terminal.send("\x03")
        terminal.wait_for("(cancelled)")
        terminal.wait_for("> ")
        terminal.interrupt_prompt("/exit")
        terminal.send("half of \\\n")
        terminal.wait_for(". ")
        terminal.send("wxy\n")
        terminal.wait_for("z{|}")
        terminal.send("\x03")
        terminal.wait_for("(cancelled)")
        terminal.send("/exit\n")
        assert terminal.process.wait(30) == 0


@engine
def test_ctrl_d_leaves_the_chat(bundle: Path) -> None:
    with Terminal("chat", bundle) as terminal:
        terminal.wait_for("> ")
        terminal.send("\x04")
        assert terminal.process.wait(30) == 0


@engine
def test_ctrl_c_ends_run(endless: Path) -> None:
    with Terminal("run", endless, *ON_AND_ON, "-p", "abc") as terminal:
        terminal.wait_for("defghijkl")
        terminal.send("\x03")
        assert terminal.process.wait(30) == 130


@engine
def test_an_interrupted_run_leaves_no_process(endless: Path) -> None:
    import psutil

    command = [*PROGRAM, "run", endless, *ON_AND_ON, "-p", "abc"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(10)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    process.stdout.close()
    assert psutil.wait_procs(children, timeout=10)[1] == []


@engine
def test_doctor() -> None:
    found = mnnsmith("doctor", "--json")
    value = json.loads(found.stdout)
    assert found.returncode == 0 and value["self_test"]["passed"] is True
    assert value["packages"]["mnn"] == "3.6.1" and value["disk"]["here"]["free_bytes"] > 0
    text = mnnsmith("doctor", "--no-self-test").stdout.decode()
    assert "processor" in text and "Python" in text


@engine
def test_no_prompt_on_a_terminal_is_an_error_not_a_wait(bundle: Path) -> None:
    with Terminal("run", bundle) as terminal:
        terminal.wait_for("There is no prompt")
        assert terminal.process.wait(30) == 2
