"""The processes of bench/vision.py: one runtime or one way of feeding in each.

python vision_child.py tower mnn|onnxruntime|torch MODEL THREADS
    answers lines {"batch": n} with seconds and the most memory held so far
python vision_child.py original MODEL PICTURE QUESTION THREADS RESULT.npz
python vision_child.py plain BUNDLE PICTURE QUESTION THREADS RESULT.npz
    a whole prompt: logits of all text after the picture go to RESULT
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).resolve().parent.parent / "tests"
Tower = Callable[[np.ndarray], np.ndarray]


def mnn_tower(bundle: str, threads: int) -> Tower:
    """visual.mnn of a bundle, with the settings that its config.json has."""
    import MNN.expr as expr
    import MNN.nn as nn

    settings = {"backend": 0, "numThread": threads, "precision": "low", "memory": "low"}
    runtime = nn.create_runtime_manager((settings,))
    module = nn.load_module_from_file(
        str(Path(bundle) / "visual.mnn"), ["pixel_values"], ["image_embeds"],
        runtime_manager=runtime, shape_mutable=True,
    )  # fmt: skip

    def run(pixels: np.ndarray) -> np.ndarray:
        found = module.forward([expr.const(pixels, list(pixels.shape), expr.NCHW)])
        # The array must be gone before the module is.
        values = np.array(found[0].read()).copy()
        del found
        return values[:, :, 0]

    return run


def onnxruntime_tower(path: str, threads: int) -> Tower:
    from mnnsmith.onnx_runtime import onnx_runtime

    runtime = onnx_runtime()

    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(None, {"pixel_values": pixels})[0]


def torch_tower(model: str, threads: int) -> Tower:
    import torch
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(threads)
    whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval().model
    tower, connector = whole.vision_model, whole.connector
    del whole.text_model

    def run(pixels: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return connector(tower(torch.from_numpy(pixels)).last_hidden_state).numpy()

    return run


TOWERS = {"mnn": mnn_tower, "onnxruntime": onnxruntime_tower, "torch": torch_tower}


def serve_tower(kind: str, model: str, threads: str) -> None:
    replies = os.fdopen(os.dup(1), "w")
    # The engine prints there.
    os.dup2(2, 1)
    tower = TOWERS[kind](model, int(threads))
    random = np.random.default_rng(0)
    side, last = 512, 0
    for line in sys.stdin:
        batch = json.loads(line)["batch"]
        pixels = random.uniform(-1, 1, (batch, 3, side, side)).astype(np.float32)
        if batch != last:
            # The first batch of a size is not like the others: buffers are laid out for it.
            tower(pixels)
            last = batch
        wall, cpu = time.perf_counter(), time.process_time()
        values = tower(pixels)
        answer = {
            "wall_s": (time.perf_counter() - wall) / batch,
            "cpu_s": (time.process_time() - cpu) / batch,
            "peak_rss_bytes": peak_rss_bytes(),
            "finite": bool(np.isfinite(values).all()),
        }
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def original(model: str, picture: str, question: str, threads: str, result: str) -> None:
    """transformers: its processor and its model."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText

    sys.path.insert(0, str(TESTS))
    from smolvlm_reference import load_processor

    torch.set_num_threads(int(threads))
    processor = load_processor(Path(model), "smolvlm")
    network = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    began = time.perf_counter()
    content = [{"type": "image", "image": Image.open(picture)}, {"type": "text", "text": question}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True,
        return_dict=True, processor_kwargs={"return_tensors": "pt"},
    )  # fmt: skip
    ids = inputs["input_ids"]
    with torch.no_grad():
        logits = network(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[0].numpy()
    first_token_s = time.perf_counter() - began
    _save(result, ids[0].tolist(), logits, network.config.image_token_id, first_token_s)


def plain(bundle: str, picture: str, question: str, threads: str, result: str) -> None:
    """The engine's own way: the picture's path stands in the text, and the engine does the rest."""
    import MNN.llm

    llm = MNN.llm.create(str(Path(bundle) / "config.json"))._c_obj
    llm.set_config(json.dumps({"thread_num": int(threads), "all_logits": True}))
    llm.load()
    config = json.loads((Path(bundle) / "llm_config.json").read_text(encoding="utf-8"))
    began = time.perf_counter()
    ids = list(llm.tokenizer_encode(
        f"<|im_start|>User:<img>{picture}</img>{question}<end_of_utterance>\nAssistant:"
    ))  # fmt: skip
    found = llm.forward(ids)
    logits = np.array(found.read(), dtype=np.float32).reshape(len(ids), -1)
    first_token_s = time.perf_counter() - began
    del found
    _save(result, ids, logits, config["image_pad"], first_token_s)


def _save(
    result: str, ids: list[int], logits: np.ndarray, image_token: int, first_token_s: float
) -> None:
    # One token more closes the picture.
    start = max(place for place, id_ in enumerate(ids) if id_ == image_token) + 2
    np.savez(
        result, ids=np.array(ids), logits=logits[start:], first_token_s=first_token_s,
        peak_rss_bytes=peak_rss_bytes(),
    )  # fmt: skip


def peak_rss_bytes() -> int:
    """The most memory that this process held (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status tells no VmHWM")


if __name__ == "__main__":
    commands: dict[str, Callable[..., Any]] = {
        "tower": serve_tower, "original": original, "plain": plain,
    }  # fmt: skip
    commands[sys.argv[1]](*sys.argv[2:])
