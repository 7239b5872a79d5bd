"""The vision of a model in ONNX Runtime, and its text with pictures in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from mnnsmith.errors import UsageError
from mnnsmith.graph.values import Layout
from mnnsmith.models.language_model import VisionModel
from mnnsmith.onnx.draft import FLOAT, Port
from mnnsmith.verify.checks.vision_values import seen_values
from mnnsmith.verify.references.onnx_session import OnnxGraph, our_errors
from mnnsmith.verify.references.reference import F32, IDS, Seen

_EMBEDS = "image_embeds"


class OnnxPictures:
    """`PictureReference` on ONNX Runtime."""

    def __init__(
        self,
        vision: VisionModel,
        open_graph: Callable[[], OnnxGraph],
        embed: Callable[[IDS], F32],
        hidden: Callable[[F32], F32],
    ) -> None:
        """open_graph: the vision's, opened when it is wanted first.  embed: rows of the embedding,
        [n, width].  hidden: of the text's embeddings [n, width], before the head."""
        self._vision = vision
        self._open_graph = open_graph
        self._graph: OnnxGraph | None = None
        self._embed = embed
        self._hidden = hidden
        self._values = {value.name: value for value in seen_values(vision.graph)}

    def available(self) -> Collection[str]:
        return self._values.keys()

    def see(self, pixels: F32, values: Sequence[str] = ()) -> Seen:
        """As `PictureReference.see`, a tile at a time, which bounds memory."""
        if self._graph is None:
            self._graph = self._open_graph()
        names = [_EMBEDS, *values]
        session = self._graph.giving({name: self._port(name) for name in names})
        found: dict[str, list[F32]] = {name: [] for name in names}
        for tile in pixels:
            with our_errors():
                outputs = session.run(names, {"pixel_values": tile[None]})
            for name, value in zip(names, outputs, strict=True):
                rows = np.asarray(value, dtype=np.float32)
                found[name].append(rows.reshape(-1, rows.shape[-1]))
        joined = {name: np.stack(parts) for name, parts in found.items()}
        return Seen(joined.pop(_EMBEDS), joined)

    def run(self, ids: IDS, embeddings: F32) -> F32:
        """As `PictureReference.run`."""
        places = ids == self._vision.image_token
        rows = embeddings.reshape(-1, embeddings.shape[-1])
        if int(places.sum()) != len(rows):
            raise UsageError(f"{int(places.sum())} image tokens, and {len(rows)} embeddings.")
        mixed = self._embed(ids)
        mixed[places] = rows
        return self._hidden(mixed)

    def close(self) -> None:
        """Let go of the session."""
        if self._graph is not None:
            self._graph.close()

    def _port(self, name: str) -> Port:
        if name == _EMBEDS:
            return Port(FLOAT, ("tiles", "tokens", "width"))
        value = self._values[name]
        sizes = value.shape[:2] if value.layout is Layout.NC4HW4 else value.shape
        # Products of run-time sizes are no names in ONNX.
        return Port(FLOAT, tuple(d if isinstance(d, int) else f"{name}/{i}"
                                 for i, d in enumerate(sizes)))  # fmt: skip
