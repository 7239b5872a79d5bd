"""Rotary position embedding: the frequencies of each scaling type, and exact tables of any length.

The formulas are those of transformers' `modeling_rope_utils` (default, linear, llama3, yarn,
longrope); frequencies are rounded to float32 as there.  A type that depends on the run-time length
in a way that a table cannot hold is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.graph.graph import Graph
from mnnsmith.graph.values import Value
from mnnsmith.models.config import ConfigReader

# Positions are split as 4096 * high + low, so that two small tables give any position.
LOW_POSITIONS = 4096
# Positions that the tables have at least.
_TABLE_POSITIONS = 1 << 18
# What transformers takes where a config names no base.
_DEFAULT_THETA = 10000.0
# Beyond these nothing in use comes near, and the formulas leave the range of their numbers.
_LARGEST_THETA, _LARGEST_FACTOR, _LARGEST_BETA = 1e15, 1e6, 1e4
_LEAST_POSITIONS = 2
# The types that we can write, and what transformers reads of a rope object of each.
_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
         "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    ),
    "longrope": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "short_factor",
         "long_factor"}
    ),
}  # fmt: skip
# `finetuned` records a fact of the training, in checkpoints that were stretched by others.
_COMMON_KEYS = frozenset({"rope_type", "rope_theta", "partial_rotary_factor", "finetuned"})
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeFrequencies:
    """What a model's rope needs.

    inverse: float32 [rotary_dim / 2], radians per position.
    factor: multiplies cos and sin (the "attention factor" of yarn and longrope).
    longest: the longest context for which these frequencies are those of the model, or None.
    """

    inverse: npt.NDArray[np.float32]
    factor: float = 1.0
    longest: int | None = None

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inverse)


@dataclass(frozen=True)
class RopeRules:
    """Where a family's class reads the rope fields otherwise.

    theta: what a config without `rope_theta` means.
    kinds: the types that it takes.  renamed: older names of these.
    original_positions: its default of the field `original_max_position_embeddings`, if it has one.
    partial: whether its attention can rotate a part of a head.
    """

    theta: float = _DEFAULT_THETA
    kinds: tuple[str, ...] = tuple(_KEYS)
    renamed: Mapping[str, str] = field(default_factory=dict)
    original_positions: int | None = None
    partial: bool = False


COMMON_RULES = RopeRules()


def rope_settings(config: ConfigReader, rules: RopeRules = COMMON_RULES) -> dict[str, Any]:
    """The rope fields of a config as one mapping with `rope_theta` and `rope_type`.

    Reads both spellings: `rope_parameters`, and `rope_theta` with `rope_scaling`.
    """
    parameters, scaling = (rope_object(config, k) for k in ("rope_parameters", "rope_scaling"))
    # Where both stand, transformers takes rope_scaling alone.
    settings = dict(scaling or parameters or {})
    theta = config.raw("rope_theta") if config.contains("rope_theta") else rules.theta
    complete(config, settings, theta, rules)
    if settings["rope_type"] not in _WITH_ORIGINAL:
        return settings
    # The field beside the rope object goes before the one inside.
    key = "original_max_position_embeddings"
    if config.contains(key) or rules.original_positions is not None:
        settings[key] = config.integer(key, rules.original_positions, least=_LEAST_POSITIONS)
    elif key not in settings:
        settings[key] = config.integer("max_position_embeddings")
    return settings


def rope_object(config: ConfigReader, key: str) -> Mapping[str, Any] | None:
    """The fields under `key`, or None."""
    value = config.raw(key)
    if value is not None and not isinstance(value, Mapping):
        raise config.error(f"{key} must be an object, not {value!r:.60}")
    return value


def complete(
    config: ConfigReader,
    settings: dict[str, Any],
    theta: Any,
    rules: RopeRules = COMMON_RULES,
) -> None:
    """Fill in what every rope object has, as `standardize_rope_params` of transformers does."""
    older_name = settings.pop("type", "default")
    settings.setdefault("rope_type", older_name)
    settings.setdefault("rope_theta", theta)
    kind = settings["rope_type"]
    if not isinstance(kind, str):
        raise config.error(f"rope_type must be a text, not {kind!r:.60}")
    kind = settings["rope_type"] = rules.renamed.get(kind, kind)
    if kind not in rules.kinds:
        raise config.unsupported(
            f"rope_type = {kind!r:.60} is not supported; only {', '.join(rules.kinds)} are. "
            "Other rope types are not ones whose tables we can write exactly."
        )
    for key, value in settings.items():
        if key not in _KEYS[kind] | _COMMON_KEYS and value is not None:
            raise config.unsupported(
                f"{key} = {value!r:.60} in the rope settings is not supported: "
                f"rope of type {kind!r} does not read it"
            )
    share = config.raw("partial_rotary_factor")
    if share is not None:
        settings.setdefault("partial_rotary_factor", share)
    if not rules.partial:
        # The default type ignores it in transformers, and with the others its attention fails.
        reader = ConfigReader(settings, "config.json (rope)")
        if reader.number("partial_rotary_factor", 1.0) != 1:
            raise config.unsupported(
                f"partial_rotary_factor = {settings['partial_rotary_factor']!r:.60} is not "
                "supported: the attention of this model type rotates whole heads"
            )


def rope_frequencies(
    config: ConfigReader, settings: Mapping[str, Any], head_dim: int, max_positions: int
) -> RopeFrequencies:
    """Frequencies for `settings`, which are those of `rope_settings`."""
    reader = ConfigReader(settings, "config.json (rope)")
    theta = reader.number("rope_theta", most=_LARGEST_THETA)
    if theta <= 1:
        raise config.error(f"rope_theta {theta} must be above 1")
    rotary_dim = int(head_dim * reader.number("partial_rotary_factor", 1.0, most=1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise config.error(f"rope would rotate {rotary_dim} of {head_dim} elements of a head")
    base = _base_frequencies(theta, rotary_dim)
    kind = settings["rope_type"]
    with np.errstate(all="ignore"):
        rope = _scaled(reader, kind, base, theta, max_positions)
    if not np.isfinite(rope.inverse).all() or not math.isfinite(rope.factor):
        raise config.error(f"the rope settings give frequencies that are no numbers: {kind}")
    return rope


def _scaled(
    reader: ConfigReader,
    kind: str,
    base: npt.NDArray[np.float32],
    theta: float,
    max_positions: int,
) -> RopeFrequencies:
    """The frequencies of one scaling type; `reader` reads the rope settings."""
    if kind == "default":
        return RopeFrequencies(base)
    if kind == "linear":
        factor = np.float32(reader.number("factor", most=_LARGEST_FACTOR))
        return RopeFrequencies((base / factor).astype(np.float32))
    original = reader.integer("original_max_position_embeddings", least=_LEAST_POSITIONS)
    if kind == "llama3":
        return RopeFrequencies(_llama3(reader, base, original))
    if kind == "yarn":
        return _yarn(reader, base, theta, original, max_positions)
    assert kind == "longrope"
    return _longrope(reader, base, original, max_positions)


def _base_frequencies(theta: float, rotary_dim: int) -> npt.NDArray[np.float32]:
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    inverse: npt.NDArray[np.float32] = np.float32(1) / np.float32(theta) ** exponents
    return inverse


def _llama3(
    reader: ConfigReader, base: npt.NDArray[np.float32], original: int
) -> npt.NDArray[np.float32]:
    factor = reader.number("factor", most=_LARGEST_FACTOR)
    low = reader.number("low_freq_factor", most=_LARGEST_FACTOR)
    high = reader.number("high_freq_factor", most=_LARGEST_FACTOR)
    if high <= low:
        raise reader.error(f"high_freq_factor {high} must be above low_freq_factor {low}")
    wavelength = 2 * math.pi / base.astype(np.float64)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * base / factor + smooth * base
    scaled = np.where(wavelength > original / low, base / factor, blended)
    return np.where(wavelength < original / high, base, scaled).astype(np.float32)


def _yarn(
    reader: ConfigReader,
    base: npt.NDArray[np.float32],
    theta: float,
    original: int,
    max_positions: int,
) -> RopeFrequencies:
    """Peng et al. 2023, as transformers computes it."""
    factor = _factor(reader, original, max_positions)
    dim = 2 * len(base)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(_number_or(reader, "beta_fast", _LARGEST_BETA) or 32.0)
    high = dimension_of(_number_or(reader, "beta_slow", _LARGEST_BETA) or 1.0)
    # null is no default here: transformers takes it for false.
    if not reader.contains("truncate") or (reader.has("truncate") and reader.flag("truncate")):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    inverse = base / factor * interpolated + base * (1 - interpolated)
    return RopeFrequencies(inverse.astype(np.float32), _yarn_attention_factor(reader, factor))


def _yarn_attention_factor(reader: ConfigReader, factor: float) -> float:
    if reader.has("attention_factor"):
        return reader.number("attention_factor")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    part = _number_or(reader, "mscale", _LARGEST_FACTOR)
    whole = _number_or(reader, "mscale_all_dim", _LARGEST_FACTOR)
    if part is not None and whole is not None:
        return mscale(part) / mscale(whole)
    return mscale(1.0)


def _number_or(reader: ConfigReader, key: str, most: float) -> float | None:
    """A number; None where it is absent, null or zero, which transformers all takes for absent."""
    value = reader.raw(key)
    if value is None or (type(value) in (int, float) and value == 0):
        return None
    return reader.number(key, most=most)


def _factor(reader: ConfigReader, original: int, max_positions: int) -> float:
    """How far the context is stretched; null means by what the two numbers of positions say."""
    if reader.contains("factor") and not reader.has("factor"):
        return max_positions / original
    return reader.number("factor", most=_LARGEST_FACTOR)


def _longrope(
    reader: ConfigReader, base: npt.NDArray[np.float32], original: int, max_positions: int
) -> RopeFrequencies:
    """Ding et al. 2024.  transformers turns from the short to the long factors once a text is
    longer than `original`, and re-reads nothing that is cached; a table holds the short ones."""
    short = reader.raw("short_factor")
    if (
        not isinstance(short, list)
        or len(short) != len(base)
        or not all(type(f) in (int, float) and 0 < f <= _LARGEST_FACTOR for f in short)
    ):
        raise reader.error(f"longrope short_factor must be {len(base)} numbers above zero")
    reader.raw("long_factor")
    factor = reader.number("factor", max_positions / original, most=_LARGEST_FACTOR)
    scale = 1.0
    if reader.has("attention_factor"):
        scale = reader.number("attention_factor")
    elif factor > 1:
        scale = math.sqrt(1 + math.log(factor) / math.log(original))
    inverse = base / np.array(short, dtype=np.float32)
    return RopeFrequencies(inverse.astype(np.float32), scale, longest=original)


def rope_tables(
    g: Graph, positions: Value, rope: RopeFrequencies, max_context: int, name: str
) -> tuple[Value, Value]:
    """cos and sin of every position of the input, [seq, rotary_dim].

    positions: [seq] int32.  With p = 4096 h + l the angles add: cos(p w) = cos(4096 h w) cos(l w)
    - sin(4096 h w) sin(l w).  No product of position and frequency is formed on the device, where
    fp16 would ruin it.  Angles of the low table are rounded to float32 as transformers rounds them,
    so the first 4096 positions (h = 0) are those of transformers, rounding included.  The tables
    reach beyond `max_context`: the engine does not know the limit, and an app that goes on should
    meet a model outside of its range rather than memory outside of a table.
    """
    low_positions = np.arange(LOW_POSITIONS, dtype=np.float32)
    low_angles = (low_positions[:, None] * rope.inverse).astype(np.float64)
    high_rows = -(-max(max_context, _TABLE_POSITIONS) // LOW_POSITIONS)
    high_positions = np.arange(high_rows) * float(LOW_POSITIONS)
    high_angles = high_positions[:, None] * rope.inverse.astype(np.float64)
    step = g.integers([LOW_POSITIONS], ())
    high = g.binary("divide", positions, step, f"{name}/high")
    low = g.binary(
        "subtract", positions, g.binary("multiply", high, step, f"{name}/base"), f"{name}/low"
    )

    def looked_up(values: npt.NDArray[np.float64], index: Value, part: str) -> Value:
        table = g.table(f"{name}/table/{part}", values.astype(np.float32))
        return g.gather(table, index, f"{name}/{part}")

    cos_high = looked_up(np.cos(high_angles) * rope.factor, high, "cos_high")
    sin_high = looked_up(np.sin(high_angles) * rope.factor, high, "sin_high")
    cos_low = looked_up(np.cos(low_angles), low, "cos_low")
    sin_low = looked_up(np.sin(low_angles), low, "sin_low")

    def product(a: Value, b: Value, part: str) -> Value:
        return g.binary("multiply", a, b, f"{name}/{part}")

    cos = g.binary(
        "subtract", product(cos_high, cos_low, "cc"), product(sin_high, sin_low, "ss"),
        f"{name}/cos/half",
    )  # fmt: skip
    sin = g.binary(
        "add", product(sin_high, cos_low, "sc"), product(cos_high, sin_low, "cs"),
        f"{name}/sin/half",
    )  # fmt: skip
    return g.concat([cos, cos], -1, f"{name}/cos"), g.concat([sin, sin], -1, f"{name}/sin")
