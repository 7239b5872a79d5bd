"""The process of the engine's converter: limits itself, then makes `.mnn` of JSON or ONNX, or back.

Run as `python convert_child.py to-mnn|to-json|from-onnx IN OUT MEMORY_LIMIT_BYTES
OUTPUT_LIMIT_BYTES [OPTION...]`; options are the converter's own, for `from-onnx` alone.  The
converter is native code that segfaults on some bad input, prints to stdout and reports failure by a
printed line alone, so the parent judges only the exit status and the output file.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

USAGE = (
    "convert_child.py to-mnn|to-json|from-onnx IN OUT MEMORY_LIMIT_BYTES OUTPUT_LIMIT_BYTES "
    "[OPTION...]"
)
ARGUMENTS = 6
# The converter's own options by direction: format of the input, then names of input and output.
DIRECTIONS = {
    "to-mnn": ("JSON", "--modelFile", "--MNNModel"),
    "to-json": ("MNN", "--modelFile", "--JsonFile"),
    "from-onnx": ("ONNX", "--modelFile", "--MNNModel"),
}


def limit_this_process(memory_limit_bytes: int, output_limit_bytes: int) -> None:
    """Bound the address space and each file, write no core file, die with the parent (Linux)."""
    import resource

    limits = {
        resource.RLIMIT_AS: memory_limit_bytes,
        resource.RLIMIT_FSIZE: output_limit_bytes,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))
    # Python ignores it, and the converter does not look whether it could write.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def main(arguments: list[str]) -> int:
    if len(arguments) < ARGUMENTS or arguments[1] not in DIRECTIONS:
        sys.stderr.write(f"usage: {USAGE}\n")
        return 2
    _, direction, source, target, memory_limit, output_limit, *options = arguments
    # This file's folder is first on the path; nothing here may shadow what the engine imports.
    sys.path.pop(0)
    limit_this_process(int(memory_limit), int(output_limit))
    # `_tools` is the converter's module and lies beside the MNN package.  The `MNN.tools` package
    # must not be imported: it installs packages and reports usage over the network.
    import _tools

    form, source_option, target_option = DIRECTIONS[direction]
    _tools.mnnconvert(
        ["mnnconvert", "-f", form, source_option, source, target_option, target, *options]
    )
    # No interpreter shutdown: destructors of the native code have nothing to add.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
