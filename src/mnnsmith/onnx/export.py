"""From a checkpoint to an ONNX model: one file of operators, and one of weights beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mnnsmith.bundle.staging import partial_folder, sync_files
from mnnsmith.conversion.prepare import with_tensors
from mnnsmith.conversion.stream import disk_error
from mnnsmith.errors import UsageError
from mnnsmith.files import user_path
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.registry import build_language_model, require_supported
from mnnsmith.onnx.decoder import DEFAULT_OPSET, draft_decoder
from mnnsmith.onnx.draft import require_onnx
from mnnsmith.onnx.model import assemble, used_weights, write_model
from mnnsmith.onnx.weights import lay_out, write_weights
from mnnsmith.sources.checkpoint import Checkpoint, read_model_type
from mnnsmith.sources.open import open_checkpoint

# The stage ("weights"), bytes done, bytes in all.
ProgressCallback = Callable[[str, int, int], None]
DATA_SUFFIX = ".data"
# Room for the file of operators.
_GRAPH_BYTES = 64 << 20


def export_onnx(
    model: str | Path,
    output: str | Path,
    *,
    dtype: str = "fp32",
    opset: int = DEFAULT_OPSET,
    kv_cache: bool = True,
    mla: str = "expanded",
    revision: str | None = None,
    offline: bool = False,
    max_context: int | None = None,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> Path:
    """Write a checkpoint as an ONNX model to `output`, its weights to `output`.data beside it.

    model: a Hugging Face folder, a `.gguf` file (dequantized), or a hub id.  dtype: "fp32", "fp16",
    or "fp16-weights", which stores fp16 and computes in float32.  kv_cache: with
    past_key_values.N.key and .value as inputs and present.N.key and .value as outputs.
    mla: the form of latent attention (DeepSeek), "expanded" or "latent".  revision, offline: for
    hub ids.  force: replace existing files.

    Raises `MnnsmithError` of the kind that fits; then nothing was written.
    """
    require_onnx()
    target = user_path(output)
    _check_target(target, force)
    checkpoint, decoder = _open(model, ContextLimits(max_context, mla), revision, offline)
    _check_sources_apart(target, checkpoint)
    draft = draft_decoder(decoder, dtype=dtype, opset=opset, kv_cache=kv_cache)
    wanted = used_weights(draft, draft.outputs)
    weights = {name: weight for name, weight in draft.weights.items() if name in wanted}
    places, size = lay_out(weights)
    report = progress or (lambda stage, done, total: None)
    with partial_folder(target, "the model", needed_bytes=size + _GRAPH_BYTES) as folder:
        data = target.name + DATA_SUFFIX
        try:
            write_weights(
                weights, places, checkpoint, folder / data,
                lambda done, total: report("weights", done, total),
            )  # fmt: skip
            facts = _metadata(checkpoint, decoder, dtype)
            proto = assemble(draft, places, data, draft.outputs, facts)
            write_model(proto, folder / target.name)
            sync_files(folder)
            _install(folder, target, force)
        except OSError as error:
            raise disk_error(target, error) from error
    return target


def _open(
    model: str | Path, limits: ContextLimits, revision: str | None, offline: bool
) -> tuple[Checkpoint, LanguageModel]:
    checkpoint = open_checkpoint(
        model, revision=revision, offline=offline, weights=True,
        accept=lambda config: require_supported(read_model_type(config, str(model)), str(model)),
    )  # fmt: skip
    decoder, unread = build_language_model(
        checkpoint.model_type, checkpoint.config, checkpoint.origin, limits
    )
    checkpoint, _ = with_tensors(checkpoint, decoder, unread)
    return checkpoint, decoder


def _metadata(checkpoint: Checkpoint, model: LanguageModel, dtype: str) -> dict[str, str]:
    origin = checkpoint.origin if checkpoint.revision else Path(checkpoint.origin).name
    facts = {
        "model_type": checkpoint.model_type,
        "source": os.fsencode(origin).decode("utf-8", "replace"),
        "source_format": checkpoint.format,
        "dtype": dtype,
        "max_context": str(model.max_context),
    }
    return facts if checkpoint.revision is None else {**facts, "revision": checkpoint.revision}


def _check_target(target: Path, replace: bool) -> None:
    """Whether the two files may be written, before any work is done."""
    for path in (target, target.with_name(target.name + DATA_SUFFIX)):
        if path.is_dir():
            raise UsageError(f"{path}: is a folder.", "Choose another output, such as model.onnx.")
        if not replace and os.path.lexists(path):
            raise UsageError(
                f"{path}: exists already.", "Choose another output, or replace it with --force."
            )


def _check_sources_apart(target: Path, checkpoint: Checkpoint) -> None:
    outputs = {target.resolve(), target.with_name(target.name + DATA_SUFFIX).resolve()}
    for path in checkpoint.files:
        if path.resolve() in outputs:
            raise UsageError(
                f"{path}: is to be exported, and would be replaced.", "Choose another output."
            )


def _install(folder: Path, target: Path, replace: bool) -> None:
    """Move the two files to their places, the model last: without it nothing loads the weights.

    An older model goes first, or it would be seen with the weights of another.
    """
    _check_target(target, replace)
    target.unlink(missing_ok=True)
    data = target.with_name(target.name + DATA_SUFFIX)
    os.replace(folder / data.name, data)
    os.replace(folder / target.name, target)
