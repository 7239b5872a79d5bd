"""From a checkpoint to an ONNX model: one file of operators, and one of weights beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mnnsmith.bundle.staging import partial_folder, sync_files
from mnnsmith.conversion.prepare import with_tensors
from mnnsmith.conversion.stream import disk_error
from mnnsmith.errors import UsageError
from mnnsmith.extras import require_packages
from mnnsmith.files import user_path
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.mla import EXPANDED, LATENT
from mnnsmith.models.registry import build_language_model, require_supported
from mnnsmith.onnx.decoder import DEFAULT_OPSET, check_options, draft_decoder, draft_embeddings
from mnnsmith.onnx.draft import Draft
from mnnsmith.onnx.model import assemble, used_weights, write_model
from mnnsmith.onnx.vision import draft_vision
from mnnsmith.onnx.weights import lay_out, write_weights
from mnnsmith.sources.checkpoint import Checkpoint, read_model_type
from mnnsmith.sources.open import open_checkpoint

# The stage ("weights"), bytes done, bytes in all.
ProgressCallback = Callable[[str, int, int], None]
# Room for the file of operators.
_GRAPH_BYTES = 64 << 20
PARTS = ("text", "decoder", "embeddings", "vision")


@dataclass(frozen=True)
class Exported:
    """What was written: the model, and the weights beside it; notes say what to know of them."""

    path: Path
    model_type: str
    opset: int
    max_context: int
    notes: tuple[str, ...]

    @property
    def data(self) -> Path:
        return _data_path(self.path)

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size + self.data.stat().st_size


def export_onnx(
    model: str | Path,
    output: str | Path,
    *,
    dtype: str = "fp32",
    opset: int | None = None,
    kv_cache: bool = True,
    mla: str = "expanded",
    part: str = "text",
    revision: str | None = None,
    offline: bool = False,
    max_context: int | None = None,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> Exported:
    """Write a checkpoint as an ONNX model to `output`, its weights to `output`.data beside it.

    model: a Hugging Face folder, a `.gguf` file (dequantized), or a hub id.  dtype: "fp32", "fp16",
    or "fp16-weights", which stores fp16 and computes in float32.  kv_cache: with
    past_key_values.N.key and .value as inputs and present.N.key and .value as outputs.
    opset: of ONNX, 18 by default.  mla: the form of latent attention (DeepSeek), "expanded" or
    "latent".  part: of a model that sees, "vision" writes what makes embeddings of its tiles,
    "embeddings" what makes them of ids, and "decoder" what takes both; "text" takes ids alone.
    revision, offline: for hub ids.  force: replace existing files.

    Raises `MnnsmithError` of the kind that fits; then nothing was written.
    """
    require_packages("onnx")
    target = user_path(output)
    _check_target(target, force)
    version = DEFAULT_OPSET if opset is None else opset
    _check_options(dtype, version, mla, part)
    checkpoint = _open(model, revision, offline, weights=False)
    decoder, unread = build_language_model(
        checkpoint.model_type, checkpoint.config, checkpoint.origin, ContextLimits(max_context, mla)
    )
    draft = _draft(decoder, part, dtype, version, kv_cache)
    if not checkpoint.tensors:
        # Of a hub model the weights come last, once all else is known to be right.
        checkpoint = _open(model, checkpoint.revision, offline, weights=True)
    _check_sources_apart(target, checkpoint)
    checkpoint, notes = with_tensors(checkpoint, decoder, unread)
    _write(target, draft, checkpoint, _metadata(checkpoint, decoder, dtype, part), force, progress)
    return Exported(
        target, checkpoint.model_type, version, decoder.max_context,
        (*checkpoint.notes, *decoder.notes, *notes),
    )  # fmt: skip


def _draft(model: LanguageModel, part: str, dtype: str, opset: int, kv_cache: bool) -> Draft:
    if part == "vision":
        return draft_vision(model, dtype=dtype, opset=opset)
    if part == "embeddings":
        return draft_embeddings(model, dtype=dtype, opset=opset)
    return draft_decoder(
        model, dtype=dtype, opset=opset, kv_cache=kv_cache, embedded=part == "decoder"
    )


def _check_options(dtype: str, opset: int, mla: str, part: str) -> None:
    check_options(dtype, opset)
    if part not in PARTS:
        raise UsageError(f"part {part!r:.40} is not one of {', '.join(PARTS)}.")
    if mla not in (EXPANDED, LATENT):
        raise UsageError(f"mla {mla!r:.40} is not one of {EXPANDED}, {LATENT}.")


def _open(model: str | Path, revision: str | None, offline: bool, *, weights: bool) -> Checkpoint:
    return open_checkpoint(
        model, revision=revision, offline=offline, weights=weights,
        accept=lambda config: require_supported(read_model_type(config, str(model)), str(model)),
    )  # fmt: skip


def _write(
    target: Path,
    draft: Draft,
    checkpoint: Checkpoint,
    metadata: Mapping[str, str],
    replace: bool,
    progress: ProgressCallback | None,
) -> None:
    report = progress or (lambda stage, done, total: None)
    wanted = used_weights(draft, draft.outputs)
    weights = {name: weight for name, weight in draft.weights.items() if name in wanted}
    places, size = lay_out(weights)
    data = _data_path(target).name
    with partial_folder(target, "the model", needed_bytes=size + _GRAPH_BYTES) as folder:
        try:
            write_weights(
                weights, places, checkpoint, folder / data,
                lambda done, total: report("weights", done, total),
            )  # fmt: skip
            write_model(
                assemble(draft, places, data, draft.outputs, metadata), folder / target.name
            )
            sync_files(folder)
            _install(folder, target, replace)
        except OSError as error:
            raise disk_error(target, error) from error


def _metadata(
    checkpoint: Checkpoint, model: LanguageModel, dtype: str, part: str
) -> dict[str, str]:
    origin = checkpoint.origin if checkpoint.revision else Path(checkpoint.origin).name
    facts = {
        "model_type": checkpoint.model_type,
        "source": os.fsencode(origin).decode("utf-8", "replace"),
        "source_format": checkpoint.format,
        "dtype": dtype,
        "max_context": str(model.max_context),
        "part": part,
    }
    if model.vision is not None:
        facts |= {
            "image_token_id": str(model.vision.image_token),
            "image_size": str(model.vision.tile),
            "image_seq_len": str(model.vision.tile_tokens),
        }
    return facts if checkpoint.revision is None else {**facts, "revision": checkpoint.revision}


def _data_path(target: Path) -> Path:
    return target.with_name(target.name + ".data")


def _check_target(target: Path, replace: bool) -> None:
    """Whether the two files may be written, before any work is done."""
    name = str(target)
    if name != os.fsencode(name).decode("utf-8", "replace"):
        raise UsageError(
            f"{name!a}: the path is not UTF-8 text, and the model must name its weights.",
            "Choose another output.",
        )
    try:
        for path in (target, _data_path(target)):
            _check_free(path, replace)
    except OSError as error:
        raise disk_error(target, error) from error


def _check_free(path: Path, replace: bool) -> None:
    if path.is_dir():
        raise UsageError(f"{path}: is a folder.", "Choose another output, such as model.onnx.")
    if not replace and os.path.lexists(path):
        raise UsageError(
            f"{path}: exists already.", "Choose another output, or replace it with --force."
        )
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is no regular file.", "Choose another output.")


def _check_sources_apart(target: Path, checkpoint: Checkpoint) -> None:
    outputs = {target.resolve(), _data_path(target).resolve()}
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
    data = _data_path(target)
    os.replace(folder / data.name, data)
    os.replace(folder / target.name, target)
