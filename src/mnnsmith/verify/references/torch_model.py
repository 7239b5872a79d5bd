"""Models of transformers: built without weights, or loaded from a folder; never by network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mnnsmith.errors import MissingResourceError, SourceError, UnsupportedError
from mnnsmith.files import read_json_object
from mnnsmith.sources.checkpoint import Checkpoint
from mnnsmith.sources.safetensors import SafeTensor

# Files that may name code of the checkpoint.
_CONFIGS = (
    "tokenizer_config.json", "config.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
_FLOATS = ("F32", "F16", "BF16")
# Keys of a config that say how weights are stored, or name code; neither is for us.
_STORAGE_KEYS = ("quantization_config", "auto_map", "dtype", "torch_dtype", "transformers_version")
# What transformers raises for a config that it does not take.
_CONFIG_ERRORS = (
    ValueError, KeyError, TypeError, AttributeError, ImportError, OSError, RuntimeError,
    ArithmeticError,
)  # fmt: skip
_ATTENTION = "sdpa"


def torch_and_transformers() -> tuple[Any, Any]:
    """The two modules; raises `MissingResourceError` that says how to install them."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingResourceError(
            f"The reference needs torch and transformers: {error}.",
            "Install them with: pip install 'mnnsmith[reference]'",
        ) from error
    return torch, transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers, which must be there, from printing progress and advice."""
    import transformers

    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, by transformers' own classes; torch is not needed.

    Raises `UnsupportedError` where the folder asks for code of its own, which is never run, and
    whatever transformers raises for files that it does not take.
    """
    import transformers

    _refuse_code(folder, "AutoTokenizer")
    with quiet():
        return transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )


def load_processor(folder: Path) -> Any:
    """As `load_tokenizer`, with what prepares pictures, by Pillow."""
    import transformers

    _refuse_code(folder, "AutoTokenizer", "AutoProcessor", "AutoImageProcessor")
    with quiet():
        return transformers.AutoProcessor.from_pretrained(
            str(folder), backend="pil", local_files_only=True, trust_remote_code=False
        )


def _refuse_code(folder: Path, *classes: str) -> None:
    for name in _CONFIGS:
        path = folder / name
        code = read_json_object(path).get("auto_map") if path.is_file() else None
        # A list is how it was once written for tokenizers.
        if isinstance(code, list) or (isinstance(code, dict) and code.keys() & set(classes)):
            raise UnsupportedError(f"{name} names code of the checkpoint, which is not run")


def own_folder(checkpoint: Checkpoint) -> Path | None:
    """The Hugging Face folder that transformers can load as it is: plain floats in safetensors."""
    plain = all(
        isinstance(tensor, SafeTensor) and tensor.dtype in _FLOATS
        for tensor in checkpoint.tensors.values()
    )
    configs = [path for path in checkpoint.files if path.name == "config.json"]
    quantized = checkpoint.config.get("quantization_config") is not None
    return configs[0].parent if plain and len(configs) == 1 and not quantized else None


def decoder_of(model: Any) -> Any:
    """The part of a model that has the blocks of the text: of one that sees, a part of its base."""
    base = model.base_model
    return base.text_model if hasattr(base, "text_model") else base


def _kind(checkpoint: Checkpoint) -> Any:
    """The class of transformers that opens it."""
    _, transformers = torch_and_transformers()
    if "vision_config" in checkpoint.config:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def load_folder(folder: Path, checkpoint: Checkpoint) -> Any:
    """The folder's model in float32, by transformers' own reader."""
    torch, _ = torch_and_transformers()
    with quiet():
        try:
            model, report = _kind(checkpoint).from_pretrained(
                folder, dtype=torch.float32, attn_implementation=_ATTENTION, use_safetensors=True,
                local_files_only=True, trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
        except _CONFIG_ERRORS as error:
            raise _refused(checkpoint, error) from error
    lost = sorted({*report["missing_keys"], *map(str, report["mismatched_keys"])})
    if lost:
        raise SourceError(
            f"{checkpoint.origin}: transformers finds no tensor for {lost[0]} "
            f"({len(lost)} in all), and would make it up.",
            "Either config.json belongs to another model, or this is a variant we do not know.",
        )
    return model.eval()


def build(checkpoint: Checkpoint) -> Any:
    """The model of a config: buffers computed in float32, parameters on the meta device."""
    torch, transformers = torch_and_transformers()
    fields = {k: v for k, v in checkpoint.config.items() if k not in _STORAGE_KEYS}
    with quiet(), _parameters_on_meta(torch):
        try:
            config = transformers.CONFIG_MAPPING[checkpoint.model_type].from_dict(fields)
            model = _kind(checkpoint).from_config(
                config, dtype=torch.float32, attn_implementation=_ATTENTION,
                trust_remote_code=False,
            )  # fmt: skip
        except _CONFIG_ERRORS as error:
            raise _refused(checkpoint, error) from error
    return model.eval()


@contextmanager
def _parameters_on_meta(torch: Any) -> Iterator[None]:
    """Parameters made within take no memory; buffers, such as the frequencies of rope, are real."""
    module = torch.nn.Module
    register = module.register_parameter

    def register_on_meta(self: Any, name: str, param: Any) -> None:
        register(self, name, param)
        # One that is there already is tied, and must stay the same object.
        if param is not None and param.device.type != "meta":
            empty = torch.nn.Parameter(param.to("meta"), requires_grad=False)
            self._parameters[name] = empty

    module.register_parameter = register_on_meta
    try:
        yield
    finally:
        module.register_parameter = register


def _refused(checkpoint: Checkpoint, error: Exception) -> UnsupportedError:
    _, transformers = torch_and_transformers()
    return UnsupportedError(
        f"{checkpoint.origin}: transformers {transformers.__version__} does not build "
        f"{checkpoint.model_type}: {type(error).__name__}: {str(error)!s:.300}",
        "Another version of transformers may; see pyproject.toml for those that are tested.",
    )
