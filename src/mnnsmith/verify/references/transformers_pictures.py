"""The vision of a transformers model, and its text with pictures in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np

from mnnsmith.errors import SourceError, UsageError
from mnnsmith.models.language_model import VisionModel
from mnnsmith.verify.references.module_values import module_values
from mnnsmith.verify.references.reference import F32, IDS, Seen
from mnnsmith.verify.references.streaming import StreamedModel
from mnnsmith.verify.references.torch_model import decoder_of
from mnnsmith.verify.references.torch_watch import ValueWatch


class TransformersPictures:
    """`PictureReference` on a model of transformers."""

    def __init__(
        self,
        torch_model: Any,
        vision: VisionModel,
        streaming: StreamedModel | None,
        computing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """streaming: where blocks are filled as they run.  computing: what all work is done in."""
        self._torch_model = torch_model
        self._vision = vision
        self._streaming = streaming
        self._computing = computing
        modules = {name for name, _ in torch_model.named_modules()}
        self._values = module_values(vision.graph, modules)

    def available(self) -> Collection[str]:
        return self._values.keys()

    def see(self, pixels: F32, values: Sequence[str] = ()) -> Seen:
        """As `PictureReference.see`, a tile at a time, which bounds memory."""
        import torch

        if self._streaming is not None:
            self._streaming.fill_rest()
        base = self._torch_model.base_model
        embeddings: list[F32] = []
        found: dict[str, list[F32]] = {name: [] for name in values}
        for tile in pixels:
            watched = ValueWatch(self._torch_model, self._values, values)
            with self._computing(), watched as watch:
                seen = base.vision_model(torch.from_numpy(tile[None])).last_hidden_state
                embeddings.append(base.connector(seen)[0].numpy())
            for name, rows in watch.rows().items():
                found[name].append(rows)
        joined = np.stack(embeddings)
        if not np.isfinite(joined).all():
            raise SourceError("The original's own vision computes values that are not finite.")
        return Seen(joined, {name: np.stack(parts) for name, parts in found.items()})

    def run(self, ids: IDS, embeddings: F32) -> F32:
        """As `PictureReference.run`."""
        import torch

        places = ids == self._vision.image_token
        rows = embeddings.reshape(-1, embeddings.shape[-1])
        if int(places.sum()) != len(rows):
            raise UsageError(f"{int(places.sum())} image tokens, and {len(rows)} embeddings.")
        decoder = decoder_of(self._torch_model)
        with ExitStack() as stack:
            stack.enter_context(self._computing())
            fed = ids[None]
            if self._streaming is not None:
                fed = stack.enter_context(self._streaming.running(fed))
            mixed = decoder.get_input_embeddings()(torch.from_numpy(fed)).clone()
            mixed[0, torch.from_numpy(places)] = torch.from_numpy(rows)
            found: F32 = decoder(inputs_embeds=mixed, use_cache=False).last_hidden_state[0].numpy()
        return found
