"""Graph JSON or ONNX to the engine's graph, in a child process that cannot hurt this one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mnnsmith.engine.exits import describe_exit, log_tail
from mnnsmith.errors import BundleError, ConversionError, MissingResourceError, SourceError
from mnnsmith.files import check_json_bounds

CONVERTER_MEMORY_LIMIT_BYTES = 4 << 30
CONVERTER_TIMEOUT_S = 300.0
# Far above the graphs of the largest mixtures of experts (30 MB, as JSON 100 MB).
GRAPH_LIMIT_BYTES = 512 << 20
JSON_LIMIT_BYTES = 256 << 20
LOG = "log"
# A disk this full has most likely cut the output short; the converter does not notice.
DISK_FULL_BYTES = 64 << 10
# What the converter prints when it has written an ONNX model; the exit status says nothing.
_SUCCESS = "Converted Success!"
# Inputs keep their layout, and GELU its exact form.  To the converter a flag without a value, or
# with the value `true`, is off.
_ONNX_OPTIONS = ("--keepInputFormat=1", "--useGeluApproximation", "0")


def graph_json_to_mnn(
    json_path: Path,
    mnn_path: Path,
    *,
    memory_limit_bytes: int = CONVERTER_MEMORY_LIMIT_BYTES,
    timeout_s: float = CONVERTER_TIMEOUT_S,
) -> None:
    """Convert the graph JSON at `json_path` and put the result at `mnn_path`, whole or not at all.

    The child works in a temporary folder beside `mnn_path`, where both files have plain names, so
    any path that the file system takes will do.  `memory_limit_bytes` bounds the child's address
    space, `timeout_s` its life.  An existing `mnn_path` is replaced only on success.

    Raises ConversionError, with the end of the converter's log, when the child fails, crashes,
    runs out of time or leaves no valid file; MissingResourceError when the disk is full.
    """
    json_path = Path(json_path).absolute()
    mnn_path = Path(mnn_path).absolute()
    if not json_path.is_file():
        raise ConversionError(f"{json_path}: the graph to convert does not exist.")
    try:
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=mnn_path.parent) as folder:
            work = Path(folder)
            (work / "graph.json").symlink_to(json_path)
            status = _run_child(
                *(work, "to-mnn", "graph.json", "graph.mnn"),
                *(memory_limit_bytes, GRAPH_LIMIT_BYTES, timeout_s),
            )
            log = log_tail(work / LOG)
            if status != 0:
                raise ConversionError(
                    f"{json_path}: the engine's converter {describe_exit(status)}. "
                    f"Its last output:\n{log}",
                    "An operator or parameter name that the engine does not know does this.",
                )
            _check_output(work / "graph.mnn", json_path, log)
            os.replace(work / "graph.mnn", mnn_path)
    except subprocess.TimeoutExpired as error:
        raise ConversionError(
            f"{json_path}: the engine's converter did not finish within {timeout_s:g} s.",
            "Allow more time, or look at the size of the graph.",
        ) from error
    except OSError as error:
        raise MissingResourceError(
            f"{mnn_path.parent}: cannot write the converted graph: {error.strerror or error}.",
            "Check free space and permissions of the output folder.",
        ) from error


def onnx_to_mnn(
    onnx_path: Path,
    mnn_path: Path,
    options: Sequence[str] = (),
    *,
    memory_limit_bytes: int,
    timeout_s: float = CONVERTER_TIMEOUT_S,
) -> None:
    """Convert the ONNX model at `onnx_path`, which has its data within; what comes may be wrong.

    options: more of the converter's own.  The child works in the folder of `mnn_path`, which should
    hold nothing else.  Raises ConversionError, with the end of the converter's log.
    """
    work = mnn_path.parent
    limit = GRAPH_LIMIT_BYTES + 4 * onnx_path.stat().st_size
    try:
        status = _run_child(
            *(work, "from-onnx", str(onnx_path.absolute()), mnn_path.name),
            *(memory_limit_bytes, limit, timeout_s, (*_ONNX_OPTIONS, *options)),
        )
    except subprocess.TimeoutExpired as error:
        raise ConversionError(
            f"the engine's converter did not finish within {timeout_s:g} s."
        ) from error
    log = log_tail(work / LOG)
    if status != 0:
        raise ConversionError(
            f"the engine's converter {describe_exit(status)}. Its last output:\n{log}"
        )
    if _SUCCESS not in log:
        raise ConversionError(f"the engine's converter failed. Its last output:\n{log}")
    _check_output(mnn_path, onnx_path, log)


def mnn_to_graph_json(
    mnn_path: Path, *, output_limit_bytes: int = JSON_LIMIT_BYTES
) -> dict[str, Any]:
    """A binary graph as the JSON object of the engine's schema; floats come rounded.

    Raises BundleError when the engine cannot read it back, or the JSON would be longer than
    `output_limit_bytes` or hold more values than `mnnsmith.files` accepts.
    """
    mnn_path = Path(mnn_path).absolute()
    with tempfile.TemporaryDirectory(prefix="mnnsmith-") as folder:
        work = Path(folder)
        try:
            status = _run_child(
                *(work, "to-json", str(mnn_path), "graph.json"),
                *(CONVERTER_MEMORY_LIMIT_BYTES, output_limit_bytes, CONVERTER_TIMEOUT_S),
            )
        except subprocess.TimeoutExpired as error:
            raise BundleError(f"{mnn_path}: reading it back did not end in time.") from error
        dumped = work / "graph.json"
        size_bytes = dumped.stat().st_size if dumped.is_file() else 0
        if status == -signal.SIGXFSZ or size_bytes > output_limit_bytes:
            raise BundleError(
                f"{mnn_path}: read back, it would be more than {output_limit_bytes} bytes of JSON.",
                "No graph of a language model is so large; convert the model again.",
            )
        if status != 0 or size_bytes == 0:
            raise BundleError(
                f"{mnn_path}: the engine cannot read it back: its converter "
                f"{describe_exit(status)}.",
                "The file is damaged; convert the model again.",
            )
        # Names in a damaged file need be no text.
        text = dumped.read_text(encoding="utf-8", errors="replace")
    try:
        check_json_bounds(text, str(mnn_path))
        graph = json.loads(text)
    except SourceError as error:
        raise BundleError(error.message, "Convert the model again.") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{mnn_path}: the engine reads no graph in it.") from error
    if not isinstance(graph, dict) or not isinstance(graph.get("oplists"), list):
        raise BundleError(f"{mnn_path}: the engine reads no operators in it.")
    return graph


def operators(graph: Mapping[str, Any]) -> Iterator[Any]:
    """Those of the main graph, then those of the experts, each of which is a graph of its own.

    graph: as `mnn_to_graph_json` gives it; what an operator is has not been looked at.  Raises
    BundleError for a part that has none.
    """
    yield from graph["oplists"]
    parts = graph.get("subgraphs", [])
    for part in parts if isinstance(parts, list) else [parts]:
        nodes = part.get("nodes") if isinstance(part, dict) else None
        if not isinstance(nodes, list):
            raise BundleError("The graph has a sub-graph without a list of operators.")
        yield from nodes


def _run_child(
    work: Path,
    direction: str,
    source: str,
    target: str,
    memory_limit_bytes: int,
    output_limit_bytes: int,
    timeout_s: float,
    options: Sequence[str] = (),
) -> int:
    child = Path(__file__).with_name("convert_child.py")
    limits = [str(memory_limit_bytes), str(output_limit_bytes)]
    command = [sys.executable, str(child), direction, source, target, *limits, *options]
    with open(work / LOG, "wb") as log:
        # A session of its own: Ctrl-C reaches the parent, which ends the child by leaving `run`.
        return subprocess.run(
            command,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            start_new_session=True,
            check=False,
        ).returncode


def _check_output(path: Path, json_path: Path, log: str) -> None:
    """A flatbuffer starts with the offset of its root table, which lies inside the file."""
    if not path.is_file():
        raise ConversionError(
            f"{json_path}: the engine's converter wrote nothing. Its last output:\n{log}"
        )
    size_bytes = path.stat().st_size
    if shutil.disk_usage(path.parent).free < DISK_FULL_BYTES:
        raise MissingResourceError(
            f"{path.parent}: the disk is full; the converted graph cannot be trusted.",
            "Free some space and convert again.",
        )
    with open(path, "rb") as file:
        root_offset = int.from_bytes(file.read(4), "little")
    if size_bytes < 8 or not 4 <= root_offset < size_bytes:
        raise ConversionError(
            f"{json_path}: the engine's converter wrote a damaged file of {size_bytes} bytes. "
            f"Its last output:\n{log}"
        )
