"""llama.cpp as a process to measure: one request a line on stdin, one answer a line on stdout.

`python llamacpp_child.py MODEL.gguf THREADS`; a request is {"ids": [...], "decode": N} in JSON: the
ids are fed to an empty cache, then N tokens are decoded one by one, best token each time.  The
answer is {"prefill_s": ..., "decode_s": ...}.  Calls llama.cpp's own functions through
llama-cpp-python's thin bindings.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

CONTEXT_TOKENS = 2048


class Runner:
    """A loaded model and its context."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = CONTEXT_TOKENS
        params.n_threads = threads
        params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def reset(self) -> None:
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_clear(memory, True)

    def feed(self, ids: list[int]) -> int:
        """The best next token after `ids`."""
        array = (llama_cpp.llama_token * len(ids))(*ids)
        batch = llama_cpp.llama_batch_get_one(array, len(ids))
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama_decode failed")
        logits: Any = llama_cpp.llama_get_logits_ith(self.context, -1)
        floats = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(floats, shape=(self.vocab_size,)).argmax())


def main() -> None:
    path, threads = sys.argv[1:]
    silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silence, ctypes.c_void_p(0))
    runner = Runner(path, int(threads))
    for line in sys.stdin:
        request = json.loads(line)
        runner.reset()
        begin = time.perf_counter()
        token = runner.feed(request["ids"])
        middle = time.perf_counter()
        for _ in range(request["decode"]):
            token = runner.feed([token])
        end = time.perf_counter()
        answer = {"prefill_s": middle - begin, "decode_s": end - middle}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
