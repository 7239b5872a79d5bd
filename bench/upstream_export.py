"""Run MNN's own exporter out of a source checkout, without its telemetry.

`python upstream_export.py CHECKOUT ARGUMENTS...` runs CHECKOUT/transformers/llm/export/llmexport.py
with ARGUMENTS, in an environment that has torch, transformers, onnx, onnxslim, onnxscript, yaspin
and MNN.  The exporter's converter is `MNN.tools.mnnconvert`; importing it installs a package and
reports usage over the network.  Here that name leads to the same native converter without either.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path


def main() -> None:
    checkout, *arguments = sys.argv[1:]
    folder = Path(checkout).resolve() / "transformers" / "llm" / "export"
    script = folder / "llmexport.py"
    if not script.is_file():
        raise SystemExit(f"{script}: no such file; is this a checkout of MNN?")
    import _tools  # the native converter of the MNN wheel

    converter = types.ModuleType("MNN.tools.mnnconvert")
    converter.main = lambda: _tools.mnnconvert(["mnnconvert", *sys.argv[1:]])  # type: ignore[attr-defined]
    tools = types.ModuleType("MNN.tools")
    tools.__path__ = []
    tools.mnnconvert = converter  # type: ignore[attr-defined]
    sys.modules["MNN.tools"] = tools
    sys.modules["MNN.tools.mnnconvert"] = converter
    sys.path[0] = str(folder)
    sys.argv = [str(script), *arguments]
    importlib.import_module("llmexport").main()


if __name__ == "__main__":
    main()
