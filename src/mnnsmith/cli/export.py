"""`mnnsmith export`: a checkpoint becomes an ONNX model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mnnsmith.cli import options as o
from mnnsmith.cli.console import ProgressBars, clean, format_bytes, say, say_json, table

Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Where to write the model; weights go to FILE.data."
    ),
]
ElementType = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="fp32; fp16; or fp16-weights, which stores fp16 and computes in float32.",
    ),
]
Opset = Annotated[
    int | None, typer.Option(metavar="N", help="ONNX operator set, 13 to 23 [default: 18].")
]
KvCache = Annotated[
    bool,
    typer.Option(
        "--kv-cache/--no-kv-cache", help="Cached keys and values as inputs and outputs, or none."
    ),
]
Mla = Annotated[
    str,
    typer.Option(
        metavar="FORM", help="Latent attention (DeepSeek): expanded, or latent (a small cache)."
    ),
]
Part = Annotated[
    str,
    typer.Option(
        metavar="PART",
        help="text; of a model that sees also vision, embeddings, and the decoder of both.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there already.")]


def export(
    model: o.ModelName,
    output: Output,
    dtype: ElementType = "fp32",
    opset: Opset = None,
    kv_cache: KvCache = True,
    mla: Mla = "expanded",
    part: Part = "text",
    max_context: o.MaxContext = None,
    revision: o.Revision = None,
    offline: o.Offline = False,
    force: Force = False,
    json_output: o.Json = False,
) -> None:
    """Write a checkpoint as a standard ONNX model, with batches and a KV cache.

    Needs the extra: pip install "mnnsmith[onnx]"
    """
    from mnnsmith import api

    with ProgressBars() as progress:
        exported = api.export_onnx(
            model,
            output,
            dtype=dtype,
            opset=opset,
            kv_cache=kv_cache,
            mla=mla,
            part=part,
            max_context=max_context,
            revision=revision,
            offline=offline,
            force=force,
            progress=progress,
        )
    facts = {
        "model": str(exported.path),
        "weights": str(exported.data),
        "model_type": exported.model_type,
        "part": part,
        "dtype": dtype,
        "opset": exported.opset,
        "max_context": exported.max_context,
        "bytes": exported.size_bytes,
    }
    if json_output:
        say_json({**facts, "notes": list(exported.notes)})
        return
    facts["bytes"] = format_bytes(exported.size_bytes)
    say(table([(name, str(value)) for name, value in facts.items()], ""))
    for text in exported.notes:
        say(clean(f"note: {text}", sys.stdout))
