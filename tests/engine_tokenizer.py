"""The engine's own tokenizer, in a child process, on the smallest model that it loads.

A tokenizer cannot be had from the engine alone, so a bundle is made whose graph is one operator.
`python engine_tokenizer.py FOLDER` is the child: it loads the bundle, reads `texts.json` and writes
`ids.json`: what each text becomes, and the bytes that each id is shown as.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_CHILD_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class EngineTokens:
    """ids of each text, the bytes of each id, and the rendered dialogues asked for."""

    ids: list[list[int]]
    shown: list[bytes]
    rendered: list[str]

    def decode(self, ids: list[int]) -> str:
        """The text that an app puts together out of single tokens."""
        return b"".join(self.shown[number] for number in ids).decode("utf-8", "replace")


def write_model(folder: Path) -> None:
    """A model of one operator, and the settings that load it with `tokenizer.mtok`."""
    from mnnsmith.engine.converter import graph_json_to_mnn

    folder.mkdir(parents=True)
    (folder / "graph.json").write_text(json.dumps(_graph()))
    graph_json_to_mnn(folder / "graph.json", folder / "llm.mnn")
    (folder / "llm.mnn.weight").write_bytes(bytes(16))
    (folder / "embeddings_bf16.bin").write_bytes(bytes(16))
    sizes = {"hidden_size": 4, "layer_nums": 1, "max_position_embeddings": 64}
    kind = {"model_type": "llama", "attention_mask": "float", "attention_type": "full"}
    (folder / "llm_config.json").write_text(json.dumps({**kind, **sizes, "is_mrope": False}))
    files = {"llm_model": "llm.mnn", "llm_weight": "llm.mnn.weight"}
    run = {"backend_type": "cpu", "thread_num": 1, "tokenizer_file": "tokenizer.mtok"}
    (folder / "config.json").write_text(json.dumps({**files, **run}))


def _graph() -> dict[str, object]:
    inputs = {
        "input_ids": ([-1, 1, 4], "DT_FLOAT"),
        "attention_mask": ([1, 1, -1, -1], "DT_FLOAT"),
        "position_ids": ([1, -1], "DT_INT32"),
        "logits_index": ([1], "DT_INT32"),
    }
    operators: list[dict[str, object]] = [
        {
            "type": "Input",
            "name": name,
            "outputIndexes": [index],
            "main_type": "Input",
            "main": {"dims": dims, "dtype": dtype, "dformat": "NCHW"},
        }
        for index, (name, (dims, dtype)) in enumerate(inputs.items())
    ]
    operators.append(
        {
            "type": "UnaryOp",
            "name": "logits",
            "inputIndexes": [0],
            "outputIndexes": [4],
            "main_type": "UnaryOp",
            "main": {"opType": "ABS", "T": "DT_FLOAT"},
        }
    )
    names = [*inputs, "logits"]
    return {
        "bizCode": "test",
        "extraInfo": {"version": "3.6.1"},
        "oplists": operators,
        "outputName": ["logits"],
        "tensorName": names,
        "tensorNumber": len(names),
        "usage": "INFERENCE",
    }


def run_engine(
    model: Path,
    tokenizer: Path,
    texts: list[str],
    dialogues: list[list[dict[str, str]]] | None = None,
) -> EngineTokens:
    """Encode `texts` and show every id, with the engine, in a child process."""
    folder = tokenizer.parent
    for name in ("llm.mnn", "llm.mnn.weight", "embeddings_bf16.bin", "llm_config.json"):
        if not (folder / name).exists():
            (folder / name).symlink_to(model / name)
    shutil.copy(model / "config.json", folder)
    if tokenizer.name != "tokenizer.mtok":
        raise ValueError(tokenizer)
    request = {"texts": texts, "dialogues": dialogues or []}
    (folder / "texts.json").write_text(json.dumps(request))
    (folder / "ids.json").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        capture_output=True,
        timeout=_CHILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    answer = json.loads((folder / "ids.json").read_text())
    shown = [bytes.fromhex(data) for data in answer["shown"]]
    return EngineTokens(answer["ids"], shown, answer["rendered"])


def _child(folder: Path) -> None:
    import struct

    import MNN.llm

    request = json.loads((folder / "texts.json").read_text())
    llm = MNN.llm.create(str(folder / "config.json"))._c_obj
    if not llm.load():
        raise SystemExit("the engine does not load the model")
    data = (folder / "tokenizer.mtok").read_bytes()
    shown = [_show(llm, number).hex() for number in range(_vocab_size(data, struct))]
    ids = [llm.tokenizer_encode(text) for text in request["texts"]]
    rendered = [llm.apply_chat_template(dialogue) for dialogue in request["dialogues"]]
    answer = {"ids": ids, "shown": shown, "rendered": rendered}
    (folder / "ids.json").write_text(json.dumps(answer))


def _vocab_size(data: bytes, struct: object) -> int:
    from mnnsmith.mnn.mtok_reader import parse_mtok

    return len(parse_mtok(data).model.vocab)


def _show(llm: object, number: int) -> bytes:
    """The binding makes a str of the bytes, and fails on half a character; the error has them."""
    try:
        return llm.tokenizer_decode(number).encode("utf-8")  # type: ignore[attr-defined]
    except UnicodeDecodeError as error:
        return error.object


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
