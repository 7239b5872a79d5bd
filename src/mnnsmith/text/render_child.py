"""The child process that compiles and renders one chat template.

A template is a program from an untrusted file.  The sandbox keeps it from reaching Python, but not
from looping or from growing a string for ever (`range` in `range`, `'a' * 10**10`, `'%999999999d'`,
`|center(10**10)`, macros that call each other, constants folded while compiling, ...).  Time and
memory are therefore bounded by the operating system, on a process that can be killed.

The file is run by path (`python -I -S render_child.py`) and imports only the standard library and
jinja2.  It speaks one JSON object a line: {"path", "memory_bytes"} -> {"ready"}, then
{"source"} -> {"literals"} once, then {"variables", "cpu_seconds", "max_chars"} -> {"text"}, each
time.  A failure is {"error": kind, "message", "line"}; a process that ends instead of answering was
killed by one of its limits, or crashed.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any

# What a template can raise while it is compiled or rendered, besides jinja2's own errors.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    StopIteration,
    BufferError,
    OSError,
)


def make_environment() -> Any:
    """The environment that transformers 5 renders chat templates in, with the same extensions."""
    import jinja2
    from jinja2 import ext, nodes, sandbox, utils

    class Refusal(jinja2.TemplateError):
        """Raised by the template itself through `raise_exception`."""

    class Generation(ext.Extension):
        """`{% generation %}...{% endgeneration %}` marks assistant text; it renders as its body."""

        tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_body")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            return str(caller())

    class TemplateNamespace(utils.Namespace):
        """A namespace without underscore names, so that it cannot hold Python internals."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            values = dict(*args[1:], **kwargs)
            for name in values:
                _check_name(name)
            utils.Namespace.__init__(args[0], values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            utils.Namespace.__setitem__(self, name, value)

    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")

    class TemplateDict:
        """`dict(...)` and `dict.fromkeys(...)` without the class itself."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def raise_exception(message: object) -> None:
        raise Refusal(str(message))

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own filter escapes <, >, & and ' for HTML, which a prompt must not have.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=strftime_now,
        dict=TemplateDict(),
        namespace=TemplateNamespace,
    )
    return environment


def literal_text(environment: Any, source: str) -> str:
    """All text and string constants of the template, joined with NUL.

    Joined so that a search cannot match across two of them: it tells which added tokens the
    template itself writes.
    """
    from jinja2 import nodes

    tree = environment.parse(source)
    found = {node.data for node in tree.find_all(nodes.TemplateData)}
    found |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(sorted(found))


def render(template: Any, variables: dict[str, Any], max_chars: int) -> str:
    """Render piece by piece, so that an endless output ends at `max_chars`."""
    pieces: list[str] = []
    total = 0
    for piece in template.generate(**variables):
        total += len(piece)
        if total > max_chars:
            raise OverflowError(f"the output is longer than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def describe(error: BaseException) -> dict[str, Any]:
    """The reply for a failure; `line` counts from 1 in the template's source, or is None."""
    line = None if isinstance(error, SyntaxError) else getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        # jinja2 rewrites the frames of compiled code, so that they name the template's own lines;
        # the innermost is the one to show.
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    kind = "refused" if type(error).__name__ == "Refusal" else "failed"
    if isinstance(error, RecursionError):
        message = "it recurses too deeply"
    elif isinstance(error, MemoryError):
        message = "it needs too much memory"
    else:
        message = str(error) or type(error).__name__
    return {"error": kind, "message": message[:2000], "line": line}


def limit_cpu(seconds: int) -> None:
    """Let the process use `seconds` more of processor time, in case its parent is gone."""
    if sys.platform == "win32":
        return
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    allowed = int(used.ru_utime + used.ru_stime) + 1 + seconds
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, hard))


def limit_memory(size_bytes: int) -> None:
    """Bound the address space; on systems without such a limit only the time limit holds."""
    if sys.platform == "win32":
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = size_bytes if hard == resource.RLIM_INFINITY else min(size_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    setup = json.loads(sys.stdin.readline())
    sys.path[:] = setup["path"]
    import jinja2

    environment = make_environment()
    limit_memory(setup["memory_bytes"])
    template: Any = None
    failures = (*_FAILURES, jinja2.TemplateError, MemoryError)
    print(json.dumps({"ready": True}), flush=True)  # noqa: T201 - the pipe to the parent
    for line in sys.stdin:
        request = json.loads(line)
        limit_cpu(request["cpu_seconds"])
        try:
            if "source" in request:
                template = environment.from_string(request["source"])
                reply = {"literals": literal_text(environment, request["source"])}
            else:
                text = render(template, request["variables"], request["max_chars"])
                reply = {"text": text}
            answer = json.dumps(reply)
        except failures as error:
            answer = json.dumps(describe(error))
        print(answer, flush=True)  # noqa: T201 - the pipe to the parent


if __name__ == "__main__":
    main()
