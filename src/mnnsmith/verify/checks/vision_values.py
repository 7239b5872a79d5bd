"""Values inside a bundle's vision: read off its own graph, as the engine computes it.

As for text, a twin of the bundle is made whose vision has a few more operators; here they only
bring packed channels into plain order, and the engine gives any value of the graph by its name.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from mnnsmith.bundle import Bundle
from mnnsmith.engine import Engine
from mnnsmith.engine.converter import graph_json_to_mnn
from mnnsmith.engine.mapped import clear_unused
from mnnsmith.errors import BundleError
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import DType, Layout, Value
from mnnsmith.mnn.config_files import VISION_MODEL_FILE
from mnnsmith.mnn.graph_json import Json, Weights, graph_json
from mnnsmith.mnn.net_extension import extend_net, tensor_names
from mnnsmith.models.canvas import ENCODE, FEATURES
from mnnsmith.verify.checks.probe import moved_behind, no_vector
from mnnsmith.verify.references.reference import F32


def seen_values(graph: Graph) -> list[Value]:
    """The values of a vision's graph that are rows of one tile, in the order of computation."""
    return [
        value
        for node in graph.nodes
        for value in node.outputs
        if value.dtype is DType.FLOAT
        and (value.layout is Layout.NC4HW4 or node.kind == "full_attention")
    ]


class VisionProbe:
    """A bundle at work whose vision gives inner values; use it in a `with` block."""

    def __init__(
        self,
        bundle: Bundle,
        graph: Graph,
        names: Sequence[str],
        open_engine: Callable[..., Engine],
    ) -> None:
        """names: of `seen_values`.  open_engine: `Engine`, or a function that adds settings to it.

        Raises BundleError where the bundle's own graph lacks one.
        """
        known = {value.name: value for value in seen_values(graph)}
        self._values = [known[name] for name in dict.fromkeys(names)]
        self._stack = ExitStack()
        try:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mnnsmith-"))
            twin = Path(folder) / "bundle"
            _write_twin(bundle, self._values, twin)
            self._stack.callback(clear_unused)
            self._engine = self._stack.enter_context(open_engine(twin))
        except BaseException:
            self._stack.close()
            raise

    def run(self, pixels: F32) -> dict[str, F32]:
        """Each value for one tile, float32 [3, S, S]: float32 [rows, width]."""
        wanted = {_given_name(value): value for value in self._values}
        found = self._engine.vision_values(pixels, list(wanted))
        out = {}
        for name, value in wanted.items():
            width = value.shape[1] if value.layout is Layout.NC4HW4 else found[name].shape[-1]
            assert isinstance(width, int)
            out[value.name] = found[name].reshape(-1, width)
        return out

    def __enter__(self) -> VisionProbe:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def _given_name(value: Value) -> str:
    return f"probe/{value.name}/nchw" if value.layout is Layout.NC4HW4 else value.name


def _write_twin(bundle: Bundle, values: Sequence[Value], folder: Path) -> None:
    """A folder like the bundle's, whose vision has `values` in plain order, too."""
    net = (bundle.path / VISION_MODEL_FILE).read_bytes()
    canvas = bundle.manifest.model["vision"].get("profile") == "canvas"
    # Where it takes whole pictures, tiles are encoded by a part.
    part = ENCODE if canvas else None
    names = tensor_names(net, part)
    index = {name: i for i, name in enumerate(names)}
    for value in values:
        if value.name not in index:
            raise BundleError(
                f"{bundle.path}: its vision has no value {value.name!r}, which this version of "
                "mnnsmith gives to such a model.",
                "Convert the model again, or check it with the version that the manifest names.",
            )
    folder.mkdir()
    packed = [value for value in values if value.layout is Layout.NC4HW4]
    tail = _tail_json(packed, [index[value.name] for value in packed], len(names))
    source = folder / "tail.json"
    source.write_text(json.dumps(tail), encoding="utf-8")
    graph_json_to_mnn(source, folder / "tail.mnn")
    # The engine opens a graph by its output.
    renamed = {index[FEATURES]: "image_embeds"} if canvas else {}
    twin = extend_net(net, (folder / "tail.mnn").read_bytes(), renamed, part)
    (folder / VISION_MODEL_FILE).write_bytes(twin)
    for name in ("tail.json", "tail.mnn"):
        (folder / name).unlink()
    for path in bundle.path.iterdir():
        if path.name != VISION_MODEL_FILE:
            os.symlink(path.resolve(), folder / path.name)


def _tail_json(values: Sequence[Value], indexes: Sequence[int], count: int) -> Json:
    """The operators, as a graph whose tensors count on from `count`."""
    tail = Graph("probe/")
    for value in values:
        x = tail.add("input", f"probe/{value.name}", (), [(value.shape, value.layout, value.dtype)])
        tail.convert(x, Layout.NCHW, f"probe/{value.name}/nchw")
    return moved_behind(graph_json(tail, Weights({}, no_vector)), tail, indexes, count)
