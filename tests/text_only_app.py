"""An app that sends text to the engine, pictures named in it: `run_app`, and the script it starts.

Nothing of mnnsmith is in it but the bundle.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Turn:
    """ids: of the text, by the engine's tokenizer.  logits: float32 [len(ids), vocab].

    answer: the best tokens after it, one by one; the last of them was not fed.
    """

    ids: list[int]
    logits: np.ndarray
    answer: list[int]


def run_app(bundle: Path, texts: Sequence[str], scratch: Path, tokens: int = 1) -> list[Turn]:
    """Feed each text after what came before it, and `tokens` of an answer to it, at the exact tier.

    A picture is `<img><hw>HEIGHT,WIDTH</hw>PATH</img>`.
    """
    given, results = scratch / "texts.json", scratch / "turns.npz"
    given.write_text(json.dumps(list(texts)))
    command = [sys.executable, __file__, bundle, given, results, tokens]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    with np.load(results) as found:
        return [
            Turn(found[f"ids{i}"].tolist(), found[f"logits{i}"], found[f"answer{i}"].tolist())
            for i in range(len(texts))
        ]


def main(bundle: str, given: str, results: str, tokens: str) -> None:
    import MNN.llm

    llm = MNN.llm.create(str(Path(bundle) / "config.json"))._c_obj
    exact = {"memory": "high", "precision": "high", "thread_num": 2, "all_logits": True}
    llm.set_config(json.dumps(exact))
    assert llm.load()
    found: dict[str, np.ndarray] = {}
    for i, text in enumerate(json.loads(Path(given).read_text())):
        ids = list(llm.tokenizer_encode(text))
        llm.set_context({"gen_seq_len": 0})
        logits = _read(llm.forward(ids))
        found[f"ids{i}"], found[f"logits{i}"] = np.array(ids), logits
        answer = [int(logits[-1].argmax())]
        while len(answer) < int(tokens):
            llm.set_context({"gen_seq_len": 1})
            answer.append(int(_read(llm.forward([answer[-1]]))[-1].argmax()))
        found[f"answer{i}"] = np.array(answer)
    np.savez(results, **found)


def _read(variable: object) -> np.ndarray:
    # The array must be gone before the model is.
    values = np.array(variable.read(), dtype=np.float32)
    return values.reshape(-1, values.shape[-1]).copy()


if __name__ == "__main__":
    main(*sys.argv[1:])
