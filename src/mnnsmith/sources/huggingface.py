"""A Hugging Face folder as a `Checkpoint`: config, safetensors shards, tokenizer, template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.files import (
    check_json_bounds,
    is_file,
    parse_json,
    read_json_object,
    read_text,
)
from mnnsmith.sources.chat_template import read_chat_template, read_special_tokens
from mnnsmith.sources.checkpoint import Checkpoint, Tensor, TokenizerFiles
from mnnsmith.sources.experts import mixtral_names, split_experts
from mnnsmith.sources.fp8 import join_scales
from mnnsmith.sources.safetensors import open_safetensors

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = "adapter_config.json"
_PROCESSOR = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# The largest config in use has some 100 kB.
_CONFIG_LIMIT_BYTES = 4 << 20
_MAX_SHARDS = 4096


def open_folder(
    folder: Path,
    origin: str | None = None,
    revision: str | None = None,
    *,
    weights: bool = True,
) -> Checkpoint:
    """Open a folder as `transformers` saves it; no weight is read.

    Raises `SourceError` for anything missing, damaged or contradictory, `UnsupportedError` for
    formats that we refuse (pickled weights, foreign quantization).
    """
    origin = origin or str(folder)
    config = read_config(folder)
    config_path = folder / "config.json"
    generation_path = folder / "generation_config.json"
    generation = (
        read_json_object(generation_path, _CONFIG_LIMIT_BYTES) if generation_path.is_file() else {}
    )
    processor_files = [folder / name for name in _PROCESSOR if (folder / name).is_file()]
    processor = {p.name: read_json_object(p, _CONFIG_LIMIT_BYTES) for p in processor_files}
    tokenizer, tokenizer_files, notes = _tokenizer(folder, config, generation, processor)
    tensors, weight_files = open_weights(folder) if weights else ({}, [])
    quantization = config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        raise SourceError(f"{config_path}: quantization_config must be an object.")
    files = [config_path, *processor_files, *tokenizer_files, *weight_files]
    if generation_path.is_file():
        files.append(generation_path)
    split = split_experts(join_scales(tensors, quantization, origin), origin)
    return Checkpoint(
        origin=origin,
        format="safetensors",
        config=config,
        tensors=mixtral_names(split) if config.get("model_type") == "mixtral" else split,
        tokenizer=tokenizer,
        files=tuple(sorted(files)),
        generation=generation,
        processor=processor,
        revision=revision,
        notes=notes,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; a LoRA adapter has none, and is refused by name."""
    path = folder / "config.json"
    if not path.is_file() and (folder / _ADAPTER).is_file():
        base = read_json_object(folder / _ADAPTER, _CONFIG_LIMIT_BYTES).get(
            "base_model_name_or_path"
        )
        raise UnsupportedError(
            f"{folder}: this is an adapter (LoRA) for {base!r:.200}, not a whole model.",
            "Merge it first, with peft: `AutoPeftModelForCausalLM.from_pretrained(folder)"
            ".merge_and_unload().save_pretrained(merged)`; then convert `merged`. Merged into "
            "weights that are quantized already, it would lose much of its effect.",
        )
    if not path.is_file():
        raise SourceError(
            f"{folder}: there is no config.json.",
            "Give the folder of a transformers checkpoint, a .gguf file, or a hub id (org/name).",
        )
    return read_json_object(path, _CONFIG_LIMIT_BYTES)


def open_weights(folder: Path) -> tuple[dict[str, Tensor], list[Path]]:
    """All tensors of a folder by name, and the files that hold them."""
    # Where both are there, the single file wins, as in transformers.
    single = folder / _SINGLE
    if single.is_file():
        return dict(open_safetensors(single)), [single]
    index_path = folder / _INDEX
    if index_path.is_file():
        return _sharded(folder, index_path)
    pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(
        p.name for p in folder.glob("*.pt*")
    )
    if pickles:
        raise UnsupportedError(
            f"{folder}: the weights are pickled ({pickles[0]}); loading a pickle runs code in it.",
            "Take a revision with safetensors, or resave with "
            "`model.save_pretrained(folder, safe_serialization=True)`.",
        )
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    raise SourceError(
        f"{folder}: neither {_SINGLE} nor {_INDEX} is there"
        + (f", only {', '.join(others[:4])}." if others else "."),
        "The download is incomplete; fetch the missing files.",
    )


def _sharded(folder: Path, index_path: Path) -> tuple[dict[str, Tensor], list[Path]]:
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise SourceError(f"{index_path}: weight_map must map tensor names to file names.")
    if len(set(weight_map.values())) > _MAX_SHARDS:
        raise SourceError(f"{index_path}: names more than {_MAX_SHARDS} shards.")
    tensors: dict[str, Tensor] = {}
    files = [index_path]
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        # A name from an untrusted file must not lead out of the folder.
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise SourceError(f"{index_path}: {shard!r:.80} is not the name of a shard.")
        if not is_file(path):
            raise SourceError(
                f"{index_path}: the shard {shard!s:.200} is missing.",
                "The download is incomplete; fetch the missing file.",
            )
        files.append(path)
        for name, tensor in open_safetensors(path).items():
            if weight_map.get(name) != shard:
                there = weight_map.get(name, "no shard")
                raise SourceError(f"{path}: holds {name}, which the index places in {there}.")
            tensors[name] = tensor
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise SourceError(
            f"{index_path}: {len(absent)} tensors are in no shard, the first is {absent[0]} "
            f"(expected in {weight_map[absent[0]]})."
        )
    return tensors, files


def _tokenizer(
    folder: Path,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    processor: Mapping[str, Mapping[str, Any]],
) -> tuple[TokenizerFiles, list[Path], tuple[str, ...]]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        hint = "Open it once with transformers' AutoTokenizer and save it: that writes the file."
        raise SourceError(f"{folder}: there is no tokenizer.json.", hint)
    special = read_special_tokens(folder)
    names = (
        "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
        "chat_template.json",
    )  # fmt: skip
    text = read_text(path)
    check_json_bounds(text, str(path))
    files = [path, *(folder / n for n in names if (folder / n).is_file())]
    template, note = read_chat_template(folder, processor)
    return (
        TokenizerFiles(
            tokenizer_json=text,
            chat_template=template,
            bos_token=special.bos,
            eos_token=special.eos,
            stop_ids=_stop_ids(text, special.eos, config, generation, folder),
            special_tokens=special.named,
        ),
        files,
        () if note is None else (note,),
    )


def _stop_ids(
    tokenizer_json: str,
    eos_token: str | None,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    folder: Path,
) -> tuple[int, ...]:
    """Ids that end an answer: generation_config first, then config, then the tokenizer's eos."""
    ids: list[int] = []
    for source in (generation, config):
        given = source.get("eos_token_id")
        for value in given if isinstance(given, list) else [given]:
            if value is None:
                continue
            if type(value) is not int or not 0 <= value < 1 << 31:
                raise SourceError(f"{folder}: bad eos_token_id {value!r:.40}.")
            ids.append(value)
    eos = _added_token_id(tokenizer_json, eos_token, folder)
    if eos is not None:
        ids.append(eos)
    return tuple(dict.fromkeys(ids))


def _added_token_id(tokenizer_json: str, token: str | None, folder: Path) -> int | None:
    if token is None:
        return None
    parsed = parse_json(tokenizer_json, str(folder / "tokenizer.json"))
    added = parsed.get("added_tokens") if isinstance(parsed, dict) else None
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == token:
            value = entry.get("id")
            if type(value) is not int or not 0 <= value < 1 << 31:
                raise SourceError(f"{folder}: tokenizer.json: bad id {value!r:.40} of {token!r}.")
            return value
    return None
