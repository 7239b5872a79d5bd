"""Set up what the benchmarks compare with: MNN's exporter and llama-cpp-python.

Makes WORK/peers with a checkout of alibaba/MNN at the tag of the engine we run, an environment for
its exporter, and one with llama-cpp-python, which is compiled for this machine (10 minutes on two
cores).  Needs git, a C++ compiler, the network and 3 GB of disk.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from common import WORK

MNN_SOURCE = "https://github.com/alibaba/MNN"
MNN_TAG = "3.6.1"
EXPORTER_PACKAGES = (
    "torch==2.13.0", "transformers==5.24.0", "onnx==1.23.2", "onnxslim==0.1.98",
    "onnxscript==0.7.2", "yaspin==3.5.1", "tqdm", "sentencepiece", f"MNN=={MNN_TAG}", "numpy",
)  # fmt: skip
LLAMACPP_PACKAGES = ("llama-cpp-python==0.3.36",)


def peers(work: Path) -> dict[str, Path]:
    """Where each part lies; the keys are the options of the benchmark scripts."""
    folder = work / "peers"
    return {
        "upstream": folder / "MNN",
        "upstream-python": folder / "exporter-env" / "bin" / "python",
        "llamacpp-python": folder / "llamacpp-env" / "bin" / "python",
    }


def make_peers(work: Path, source: str, *, llamacpp: bool) -> None:
    """Make every part that is not there."""
    found = peers(work)
    if not found["upstream"].is_dir():
        clone = ["git", "clone", "--quiet", "--depth", "1", "--filter=blob:none", "--sparse"]
        _run([*clone, "--branch", MNN_TAG, source, found["upstream"]])
        git = ["git", "-C", found["upstream"]]
        _run([*git, "sparse-checkout", "set", "transformers/llm/export"])
    _environment(found["upstream-python"], EXPORTER_PACKAGES)
    if llamacpp:
        _environment(found["llamacpp-python"], LLAMACPP_PACKAGES)


def _environment(python: Path, packages: tuple[str, ...]) -> None:
    if python.exists():
        return
    _run([sys.executable, "-m", "venv", python.parent.parent])
    _run([python, "-m", "pip", "install", "--quiet", *packages])


def _run(command: list[str | Path]) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--work", type=Path, default=WORK, help="folder to write to")
    options.add_argument("--source", default=MNN_SOURCE, help="git repository of MNN")
    options.add_argument("--no-llamacpp", action="store_true", help="leave llama-cpp-python out")
    chosen = options.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    make_peers(chosen.work.resolve(), chosen.source, llamacpp=not chosen.no_llamacpp)
