"""An exported model in ONNX Runtime, fed as people feed decoders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mnnsmith.onnx_runtime import onnx_runtime

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
# What stands at padded positions, which must not matter.
_PAD = 7


class OnnxModel:
    """One conversation at a time; the cache is kept where the model has one."""

    def __init__(self, path: Path) -> None:
        runtime = onnx_runtime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = runtime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self._caches = [i for i in self.session.get_inputs() if i.name.startswith("past")]
        self._past: list[np.ndarray] = []
        self._mask = np.zeros((0, 0), np.int64)

    def start(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Feed texts padded on the left to one length; logits [batch, longest, vocab]."""
        longest = max(map(len, texts))
        ids = np.full((len(texts), longest), _PAD, np.int64)
        self._mask = np.zeros((len(texts), longest), np.int64)
        for row, text in enumerate(texts):
            ids[row, longest - len(text) :] = text
            self._mask[row, longest - len(text) :] = 1
        self._past = [
            np.zeros((len(texts), i.shape[1], 0, i.shape[3]), _TYPES[i.type]) for i in self._caches
        ]
        return self._run(ids, np.maximum(self._mask.cumsum(1) - 1, 0))

    def go_on(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Feed more tokens [batch, n] behind what the cache holds; logits [batch, n, vocab]."""
        ids = np.array(tokens, np.int64)
        self._mask = np.concatenate([self._mask, np.ones_like(ids)], axis=1)
        return self._run(ids, (self._mask.cumsum(1) - 1)[:, -ids.shape[1] :])

    def _run(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        feeds = {
            "input_ids": ids, "attention_mask": self._mask, "position_ids": positions,
            **{i.name: cache for i, cache in zip(self._caches, self._past, strict=True)},
        }  # fmt: skip
        names = ["logits", *(i.name.replace("past_key_values", "present") for i in self._caches)]
        logits, *self._past = self.session.run(names, feeds)
        return logits
