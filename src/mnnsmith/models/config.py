"""Strict reading of a `config.json`: a field is there with the right type, or it is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mnnsmith.errors import SourceError, UnsupportedError

# Keys that every transformers config carries and that do not change what is computed.  is_decoder
# is one: these classes are decoders either way.  pretraining_tp once said in how many slices a
# product is formed; transformers 5 reads it nowhere.
_WITHOUT_EFFECT = frozenset(
    """_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path
    architectures attention_dropout attn_implementation auto_map bos_token_id
    cache_implementation chunk_size_feed_forward dtype embd_pdrop eos_token_id finetuning_task
    id2label initializer_range is_decoder label2id model_type name_or_path
    output_attentions output_hidden_states pad_token_id prefix problem_type
    quantization_config resid_pdrop return_dict sep_token_id task_specific_params
    tie_encoder_decoder tokenizer_class torch_dtype torchscript transformers_version
    transformers.js_config unsloth_fixed unsloth_version use_bfloat16 use_cache
    decoder_start_token_id pretraining_tp
    """.split()  # noqa: SIM905 (a list of 50 lines says no more)
)
# What no model comes near: a config that asks for more is damaged, and would cost time and memory
# before its missing tensors show.
_LARGEST = {
    "num_hidden_layers": 1024,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 24,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "max_position_embeddings": 1 << 28,
    "image_size": 4096,
    "patch_size": 4096,
    "scale_factor": 64,
}
_LARGEST_OTHER = (1 << 31) - 1
_LEAST_NUMBER = 1e-30
_SHOWN_CHARS = 60


class ConfigReader:
    """Typed access to a config, which remembers what was read."""

    def __init__(self, config: Mapping[str, Any], origin: str) -> None:
        self._config = config
        self._origin = origin
        self._used: set[str] = set()

    @property
    def origin(self) -> str:
        """Where the config is from, for messages."""
        return self._origin

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        self._used.add(key)
        return self._config.get(key) is not None

    def contains(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return key in self._config

    def raw(self, key: str) -> Any:
        """The value as it stands, None if it is absent."""
        self._used.add(key)
        return self._config.get(key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`; absent or null gives the default, if there is one."""
        value = self._value(key, default)
        most = _LARGEST.get(key, _LARGEST_OTHER)
        if type(value) is not int or not least <= value <= most:
            self._fail(key, f"a whole number from {least} to {most}", value)
        return int(value)

    def number(self, key: str, default: float | None = None, *, most: float = 1e30) -> float:
        """A number above zero; one over `most`, or too small for float32, is damage."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not _LEAST_NUMBER <= value <= most:
            self._fail(key, f"a number from {_LEAST_NUMBER:g} to {most:g}", value)
        return float(value)

    def either_integer(self, key: str, other: str, default: int) -> int:
        """A whole number that goes by two names; under both it must be the same."""
        named = [self.integer(name) for name in (key, other) if self.has(name)]
        if len(set(named)) > 1:
            raise self.error(f"{key} is {named[0]} and {other} is {named[1]}; they mean the same")
        return named[0] if named else default

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._value(key, default)
        if type(value) is not bool:
            self._fail(key, "true or false", value)
        return bool(value)

    def only(self, key: str, allowed: Sequence[Any], default: Any, why: str) -> Any:
        """One of the values that we can express; anything else is refused by name."""
        value = self._value(key, default)
        # 0 == False and 1 == True in Python, not in a config.
        if not any(value == a and type(value) is type(a) for a in allowed):
            wanted = " or ".join(repr(a) for a in allowed)
            raise UnsupportedError(
                f"{self._origin}: {key} = {_show(value)} is not supported; only {wanted} is. {why}"
            )
        return value

    def absent(self, key: str, why: str) -> None:
        """A key that must be null or absent, because we cannot express what it asks for."""
        if self.has(key):
            raise UnsupportedError(
                f"{self._origin}: {key} = {_show(self._config[key])} is not supported. {why}"
            )

    def unused(self) -> tuple[str, ...]:
        """Keys that nobody read and that may have a meaning, sorted."""
        return tuple(sorted(set(self._config) - self._used - _WITHOUT_EFFECT))

    def error(self, message: str) -> SourceError:
        """A contradiction between fields."""
        return SourceError(
            f"{self._origin}: {message}", "Is config.json the one that belongs to these weights?"
        )

    def unsupported(self, message: str) -> UnsupportedError:
        """A combination that we refuse."""
        return UnsupportedError(f"{self._origin}: {message}")

    def _value(self, key: str, default: Any) -> Any:
        self._used.add(key)
        value = self._config.get(key)
        if value is not None:
            return value
        if default is None:
            raise SourceError(
                f"{self._origin}: config.json lacks {key}.",
                "Compare it with the config.json of the original model.",
            )
        return default

    def _fail(self, key: str, wanted: str, value: Any) -> None:
        raise SourceError(f"{self._origin}: {key} must be {wanted}, not {_show(value)}.")


def _show(value: Any) -> str:
    return repr(value)[:_SHOWN_CHARS]
