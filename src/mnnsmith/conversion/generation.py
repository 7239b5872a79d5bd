"""What `generation_config.json` says on how the next token is chosen, as our sampling options.

The meaning of a key that is absent is that of transformers' GenerationConfig: greedy unless
`do_sample` is true; then temperature 1, the 50 best tokens and no limit on probability.  A
repetition penalty counts in greedy decoding too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mnnsmith.engine.sampling import SamplingOptions
from mnnsmith.errors import SourceError, UsageError

# By key, what transformers takes where the file says nothing.
_SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
_ALWAYS = {"repetition_penalty": 1.0}
# No vocabulary is larger; the engine reads 32 bits.
_MAX_TOP_K = 1 << 20
# Keys that change which token is chosen and that no sampling option of ours stands for, with the
# values that switch them off (None always does).
_LEFT_OUT: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1,), "top_h": (), "epsilon_cutoff": (0,), "eta_cutoff": (0,),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,), "bad_words_ids": ([],), "force_words_ids": ([],),
    "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "sequence_bias": ([], {}), "exponential_decay_length_penalty": (),
    "guidance_scale": (1,), "num_beams": (1,), "penalty_alpha": (0,), "dola_layers": (),
    "min_length": (0,), "min_new_tokens": (0,), "stop_strings": ([], ""), "constraints": ([],),
    "watermarking_config": (),
}  # fmt: skip
_ONLY_SAMPLED = ("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")


@dataclass(frozen=True)
class Recommended:
    """How the model's authors would have it sampled.

    values: keywords of `SamplingOptions` that differ from its defaults; {} means greedy.
    notes: what of the file is left out, or works otherwise in the engine's own sampler.
    """

    values: dict[str, Any]
    notes: tuple[str, ...] = ()


def recommended_sampling(generation: Mapping[str, Any], origin: str) -> Recommended:
    """Read `generation_config.json`.

    Raises `SourceError` for a value that `SamplingOptions` does not take.
    """
    where = f"{origin}: generation_config.json"
    sampled = generation.get("do_sample")
    if sampled is not None and type(sampled) is not bool:
        raise SourceError(f"{where}: do_sample must be true or false, not {sampled!r:.60}.")
    found: dict[str, Any] = {}
    for key, default in ({**_SAMPLED, **_ALWAYS} if sampled else _ALWAYS).items():
        value = generation.get(key)
        found[key] = default if value is None else _number(value, key, where)
    try:
        SamplingOptions(**found)
    except UsageError as error:
        raise SourceError(
            f"{where}: {error.message}", "Correct the file, or take the key out."
        ) from error
    notes = _left_out(generation, bool(sampled))
    if sampled and found["temperature"] == 0:
        notes.append("generation_config.json samples at temperature 0: the best token is taken")
        found = {key: found[key] for key in _ALWAYS}
    if "top_k" in found:
        found["top_k"] = min(found["top_k"], _MAX_TOP_K)
    defaults = SamplingOptions()
    values = {key: value for key, value in found.items() if value != getattr(defaults, key)}
    if "min_p" in values:
        notes.append(
            "the engine's own sampler takes min_p as a probability, mnnsmith and transformers as "
            "a share of the best token's"
        )
    if values.get("repetition_penalty", 1.0) < 1.0:
        notes.append("the engine's own sampler ignores a repetition_penalty below 1")
    return Recommended(values, tuple(notes))


def _number(value: Any, key: str, where: str) -> Any:
    if key == "top_k" and isinstance(value, float) and value.is_integer():
        # JSON written by other tools may say 50.0.
        value = int(value)
    if isinstance(value, int) and value.bit_length() > 62:
        raise SourceError(
            f"{where}: {key} has {value.bit_length()} bits.",
            "Correct the file, or take the key out.",
        )
    return value


def _left_out(generation: Mapping[str, Any], sampled: bool) -> list[str]:
    keys = [
        key
        for key, off in _LEFT_OUT.items()
        if generation.get(key) is not None
        and generation[key] not in off
        and (sampled or key not in _ONLY_SAMPLED)
    ]
    if not keys:
        return []
    return [f"of generation_config.json, without effect here: {', '.join(keys)}"]
