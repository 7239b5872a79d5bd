"""Chat templates: messages in, the prompt text out, as transformers 5 renders it.

The template is jinja2 source from an untrusted file.  It is compiled and rendered in a child
process (`render_child.py`) with a limit on time, memory and output, because nothing inside a Python
process can bound what a template may ask for.  The child starts once per template, in about a tenth
of a second, and a render costs it well under a millisecond.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mnnsmith.errors import MissingResourceError, TemplateError, UsageError

MAX_SOURCE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 16 << 20
MEMORY_BYTES = 512 << 20
START_LIMIT_S = 60.0
# Messages and variables are JSON-like values; deeper nesting than this is a mistake.
_MAX_DEPTH = 64
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled chat template.

    source: jinja2 source, at most 1 MiB.
    bos_token, eos_token: their text, visible to the template; None leaves the name undefined.
    special_tokens: further names the template may use, such as `pad_token`.
    time_limit_s: seconds that compiling, and each render, may take.

    Raises TemplateError when the source does not compile, with the line.  Safe to use from several
    threads; renders are done one after the other.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        time_limit_s: float = 5.0,
    ) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(
                f"The chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are "
                "accepted.",
                "Is this really a chat template? Real ones have some thousand characters.",
            )
        self.source = source
        self._names = dict(special_tokens or {})
        if bos_token is not None:
            self._names["bos_token"] = bos_token
        if eos_token is not None:
            self._names["eos_token"] = eos_token
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._end_child: weakref.finalize[..., Any] | None = None
        with self._lock:
            self._literals = self._start()

    @property
    def literal_text(self) -> str:
        """The text and string constants that the template itself may write, joined with NUL."""
        return self._literals

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text for a dialogue.

        messages: mappings with `role`, `content` and whatever else the template reads; JSON values.
        variables: further names for the template, such as `enable_thinking` or `tools`.

        Raises TemplateError when the template refuses the dialogue (its own words are in the
        message), fails, or passes a limit; UsageError for an empty dialogue or a value that is
        nested too deeply.
        """
        if not messages:
            raise UsageError("The dialogue is empty: a chat template needs at least one message.")
        values = {
            "tools": None,
            "documents": None,
            **self._names,
            **{name: _plain(value) for name, value in variables.items()},
            "messages": [_normalized(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        with self._lock:
            if self._child is None:
                self._start()
            reply = self._ask({"variables": values, "max_chars": MAX_OUTPUT_CHARS})
        text = reply["text"]
        assert isinstance(text, str)
        return text

    def close(self) -> None:
        """End the child process; the next render starts a new one."""
        with self._lock:
            self._drop_child()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> str:
        self._child = _Child()
        self._end_child = weakref.finalize(self, self._child.end)
        # Not the current folder: a file in it could pose as a module.
        path = [entry for entry in sys.path if entry]
        setup = {"path": path, "memory_bytes": MEMORY_BYTES}
        self._ask(setup, START_LIMIT_S)
        return str(self._ask({"source": self.source})["literals"])

    def _drop_child(self) -> None:
        if self._end_child is not None:
            self._end_child()
        self._child = self._end_child = None

    def _ask(self, request: dict[str, Any], limit_s: float | None = None) -> dict[str, Any]:
        child = self._child
        assert child is not None
        request["cpu_seconds"] = max(1, round(self._time_limit_s))
        try:
            reply = child.ask(json.dumps(request), limit_s or self._time_limit_s)
        except _ChildGoneError as error:
            self._drop_child()
            raise TemplateError(
                f"The chat template was stopped: {error}.",
                "It loops or grows without end, or is not a chat template. "
                "Give another one, or use the model without a template.",
            ) from None
        except BaseException:
            # Interrupted halfway: the child's next answer would be for this question.
            self._drop_child()
            raise
        if "error" in reply:
            if "source" in request:
                self._drop_child()
            raise _template_error(reply)
        return reply


def _template_error(reply: Mapping[str, Any]) -> TemplateError:
    message, line = str(reply["message"]), reply["line"]
    if reply["error"] == "refused":
        return TemplateError(
            f"The model's chat template refuses this dialogue: {message}",
            "Change the messages as it asks; the words are the template's own.",
        )
    where = f", line {line}" if isinstance(line, int) else ""
    return TemplateError(f"The chat template fails{where}: {message.rstrip('.')}.")


def _normalized(message: Message) -> dict[str, Any]:
    """A message as transformers shows it to a template.

    Keys whose value is None are left out, and reasoning is given under each name templates use.
    """
    plain = _plain(message)
    if not isinstance(plain, dict):
        raise UsageError(f"A chat message is a mapping with role and content, not {message!r:.80}.")
    kept = {key: value for key, value in plain.items() if value is not None}
    reasoning = next((kept[key] for key in _REASONING_KEYS if key in kept), None)
    if reasoning is not None:
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


def _plain(value: Any, depth: int = 0) -> Any:
    """`value` rebuilt from JSON types; an object of another type becomes "<its type>".

    Media objects in a message only have to be present: templates never read their values.
    """
    if depth > _MAX_DEPTH:
        raise UsageError(f"A message or template variable is nested deeper than {_MAX_DEPTH}.")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name), depth + 1) for field in fields}
    return f"<{type(value).__name__}>"


class _ChildGoneError(Exception):
    """The child did not answer; the text says why."""


class _Child:
    """One running `render_child.py`."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("render_child.py")
        if not sys.executable:
            raise MissingResourceError(
                "Chat templates need a Python program to run, none is known."
            )
        try:
            # A session of its own: Ctrl-C in a terminal is for us, not for the child.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",
                start_new_session=True,
            )
        except OSError as error:
            raise MissingResourceError(
                f"The chat template renderer could not be started: {error}."
            ) from error

    def ask(self, request: str, limit_s: float) -> dict[str, Any]:
        """Send a line and give the answer; after `_ChildGoneError` the child is gone."""
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(limit_s, stop)
        timer.daemon = True
        timer.start()
        try:
            self._send(request)
            assert self._process.stdout is not None
            # A character takes at most 12 bytes of JSON (a surrogate pair of \uXXXX).
            line = self._process.stdout.readline(12 * MAX_OUTPUT_CHARS + 4096)
        finally:
            timer.cancel()
        if line.endswith("\n"):
            reply = json.loads(line)
            assert isinstance(reply, dict)
            return reply
        self.end()
        if late.is_set() or self._process.returncode == -24:  # SIGXCPU
            raise _ChildGoneError(f"it did not finish within {limit_s:g} s")
        raise _ChildGoneError(f"it crashed the renderer (status {self._process.returncode})")

    def end(self) -> None:
        """Kill the process and reap it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    # Unsent bytes for a process that is gone.
                    continue

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            # The child is gone; reading its answer tells how it ended.
            return
