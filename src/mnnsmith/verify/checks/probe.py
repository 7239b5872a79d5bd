"""Values inside a bundle: read off its own graph, as the engine computes it.

The engine gives one output, so a twin of the bundle is made: the same operators, byte for byte, and
a few more that bring the wanted values together and go by the name of the logits.  The twin runs on
an ordinary engine, with its KV cache, its settings and its device; all other files are links.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from mnnsmith.bundle import Bundle
from mnnsmith.engine import Engine
from mnnsmith.engine.converter import GRAPH_LIMIT_BYTES, graph_json_to_mnn
from mnnsmith.engine.mapped import clear_unused
from mnnsmith.errors import BundleError, EngineError, MissingResourceError, UsageError
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import DType, Layout, Value
from mnnsmith.mnn.config_files import MODEL_FILE
from mnnsmith.mnn.graph_json import Json, Weights, graph_json
from mnnsmith.mnn.net_extension import extend_net, tensor_names

F32 = npt.NDArray[np.float32]

_LOGITS = "logits"
# The dimensions that stand for tokens; "selected" are all of them where all logits are asked for.
_TOKENS = frozenset({"seq", "selected"})
# Of one piece of the tokens; the engine holds it about three times.
_BUDGET_BYTES = 256 << 20
# The engine's blocks of tokens: whole ones give the same bits however a text is cut.
_BLOCK = 64


class Probe:
    """One conversation with a bundle, as an `Engine` holds, that gives inner values.

    Use it in a `with` block.  What lies within the experts of a mixture cannot be reached: the
    engine runs them as graphs of their own.
    """

    def __init__(
        self,
        bundle: Bundle,
        graph: Graph,
        names: Sequence[str],
        open_engine: Callable[..., Engine],
    ) -> None:
        """names: values of `graph`, which gives their shapes (that of the bundle's recipe).

        open_engine: `Engine`, or a function that adds settings to it.

        Raises UsageError for a name that the graph does not have, or that has no row per token;
        BundleError where the bundle's own graph lacks it, or is larger than any graph;
        MissingResourceError where the temporary folder has no room.
        """
        known = {value.name: value for value in readable(graph)}
        self._values = [known.get(n) or _refuse(graph, n) for n in dict.fromkeys(names)]
        self._vocabulary = bundle.vocab_size
        self._widths = [_width(value) for value in self._values]
        if not self._values:
            raise UsageError("no value was named: there is nothing to read.")
        self._stack = ExitStack()
        try:
            try:
                folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mnnsmith-"))
                twin = Path(folder) / "bundle"
                _write_twin(bundle, self._values, twin)
            except OSError as error:
                raise MissingResourceError(
                    f"No copy of the graph can be made in the temporary folder: {error.strerror}.",
                    "Set TMPDIR to a folder on a disk with room.",
                ) from error
            # Called after the engine has let go of what it mapped, which serves nobody else.
            self._stack.callback(clear_unused)
            self._engine = self._stack.enter_context(open_engine(twin, all_logits=True))
        except BaseException:
            self._stack.close()
            raise

    @property
    def engine(self) -> Engine:
        """The engine at work, for `reset`, `rewind` and `position`."""
        return self._engine

    @property
    def width(self) -> int:
        """How many numbers one token gives."""
        return sum(self._widths)

    def run(self, ids: Sequence[int]) -> dict[str, F32]:
        """Feed `ids` after what the cache holds: each value, float32 [len(ids), width].

        width: what the value has for one token, heads and the like one after another in the graph's
        order.  Integers, such as numbers of experts, come as floats.  Raises as `Engine.forward`.
        """
        # The engine takes the rows' width for the vocabulary, and does not refuse these.
        if any(not 0 <= i < self._vocabulary for i in ids):
            raise UsageError(f"a token id is outside the vocabulary of {self._vocabulary}.")
        total = self.width
        out = {v.name: np.empty((len(ids), w), np.float32) for v, w in self._columns()}
        step = _piece(self._engine.vocab_size)
        for start in range(0, max(len(ids), 1), step):
            rows = self._engine.forward(ids[start : start + step], all_positions=True)
            if rows.shape[1] < total:
                raise EngineError(f"the probe gave {rows.shape[1]} numbers a token, not {total}.")
            at = 0
            for value, width in self._columns():
                out[value.name][start : start + step] = rows[:, at : at + width]
                at += width
        return out

    def close(self) -> None:
        """End the engine and remove the twin; twice is fine."""
        self._stack.close()

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _columns(self) -> list[tuple[Value, int]]:
        return list(zip(self._values, self._widths, strict=True))


def readable(graph: Graph) -> list[Value]:
    """The values of a graph that have a row per token, in the order of computation."""
    values = (v for node in graph.nodes for v in node.outputs)
    return [v for v in values if len(_TOKENS & set(_symbols(v))) == 1 == len(_symbols(v))]


def _piece(width: int) -> int:
    """Tokens that are fed at once."""
    fitting = _BUDGET_BYTES // (4 * width)
    return fitting // _BLOCK * _BLOCK or max(fitting, 1)


def _refuse(graph: Graph, name: str) -> NoReturn:
    if any(name == value.name for value in graph.values):
        raise UsageError(f"{name}: has no row for each token.")
    inner = (v.name for node in graph.nodes for expert in node.graphs for v in expert.values)
    if name in inner:
        raise UsageError(
            f"{name}: lies inside an expert, where nothing can be read.",
            "The sum of the experts can: the value whose name ends in /mixture.",
        )
    raise UsageError(f"{name}: the model's graph has no such value.")


def _symbols(value: Value) -> list[str]:
    return [d for d in value.shape if isinstance(d, str)]


def _width(value: Value) -> int:
    return int(np.prod([d for d in value.shape if isinstance(d, int)], dtype=np.int64))


def _write_twin(bundle: Bundle, values: Sequence[Value], folder: Path) -> None:
    """A folder like the bundle's, whose graph gives `values` as [1, tokens, width]."""
    net = _read_net(bundle.path / MODEL_FILE)
    names = tensor_names(net)
    index = {name: i for i, name in enumerate(names)}
    for name in (_LOGITS, *(v.name for v in values)):
        if name not in index:
            raise BundleError(
                f"{bundle.path}: the graph has no value {name!r}, which this version of mnnsmith "
                "gives to such a model.",
                "Convert the model again, or check it with the version that the manifest names.",
            )
    width = max(sum(map(_width, values)), bundle.vocab_size)
    tail = _tail_json(values, width, [index[v.name] for v in values], len(names))
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="tail-", dir=folder.parent) as work:
        source, made = Path(work) / "tail.json", Path(work) / "tail.mnn"
        source.write_text(json.dumps(tail), encoding="utf-8")
        graph_json_to_mnn(source, made)
        twin = extend_net(net, made.read_bytes(), {index[_LOGITS]: "probe/logits"})
    (folder / MODEL_FILE).write_bytes(twin)
    for path in bundle.path.iterdir():
        if path.name != MODEL_FILE:
            os.symlink(path.resolve(), folder / path.name)


def _read_net(path: Path) -> bytes:
    """The graph, if it has a size that a graph may have (a sparse file has any)."""
    try:
        with open(path, "rb") as file:
            net = file.read(GRAPH_LIMIT_BYTES + 1)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}.") from error
    if len(net) > GRAPH_LIMIT_BYTES:
        raise BundleError(f"{path}: has more than the {GRAPH_LIMIT_BYTES} bytes that we accept.")
    return net


def _tail_json(values: Sequence[Value], width: int, indexes: Sequence[int], count: int) -> Json:
    """The operators that bring `values` together, as a graph whose tensors count on from `count`.

    width: of a row of the output, which zeros fill up: the engine takes it for the vocabulary's
    size.  indexes: those of `values` in the graph that it is added to.
    """
    tail = Graph("probe/")
    rows = []
    for value in values:
        name = f"probe/{value.name}"
        x = tail.add("input", name, (), [(value.shape, value.layout, value.dtype)])
        tokens, size = _symbols(value)[0], _width(value)
        if x.layout is Layout.NC4HW4:
            x = tail.convert(x, Layout.NCHW, f"{name}/nchw")
        x = tail.reshape(x, [1, tokens, size], f"{name}/rows")
        if x.dtype is not DType.FLOAT:
            x = tail.to_float(x, f"{name}/float")
        # One name for both, or they would not join.
        rows.append(Value(x.index, x.name, (1, "seq", size), x.layout, x.dtype))
    joined = rows[0] if len(rows) == 1 else tail.concat(rows, 2, "probe/joined")
    total = joined.shape[-1]
    assert isinstance(total, int)
    if total < width:
        joined = tail.pad_last(joined, width, "probe/padded")
    tail.reshape(joined, [1, "seq", width], _LOGITS)
    return moved_behind(graph_json(tail, Weights({}, no_vector)), tail, indexes, count)


def moved_behind(net: Json, tail: Graph, indexes: Sequence[int], count: int) -> Json:
    """The JSON of `tail` as operators behind a graph of `count` tensors, whose `indexes` they take
    for the inputs."""
    given = [node.outputs[0].index for node in tail.nodes if node.kind == "input"]
    place = dict(zip(given, indexes, strict=True))
    made = [i for i in range(len(tail.values)) if i not in place]
    place |= {i: count + n for n, i in enumerate(made)}
    for operator in net["oplists"]:
        for key in ("inputIndexes", "outputIndexes"):
            if key in operator:
                operator[key] = [place[i] for i in operator[key]]
    net["oplists"] = [o for o in net["oplists"] if o["type"] != "Input"]
    net["tensorName"] = [net["tensorName"][i] for i in made]
    net["tensorNumber"] = len(made)
    return net


def no_vector(slot: object) -> F32:
    """For the weights of a probe, which has none."""
    raise AssertionError(f"a probe has no weights: {slot}")
