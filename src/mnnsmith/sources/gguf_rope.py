"""Rope scaling of a GGUF model as the `rope_scaling` of a `config.json`.

The file states linear and YaRN scaling in its metadata.  Longrope (phi3) comes as two tensors of
factors, and llama3 as one, `rope_freqs.weight`, from which its four parameters are recovered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import SourceError, UnsupportedError
from mnnsmith.sources.checkpoint import F32, Tensor, read_whole
from mnnsmith.sources.gguf_metadata import Metadata, shortest

# The factors are float32 and so are the frequencies; both round, in an order that differs by maker.
_TOLERANCE = 1e-5
_FACTORS_LIMIT = 4096
_LONGEST_CONTEXT = 1 << 30
_LLAMA3_ORIGINALS = (8192, 4096, 2048, 16384, 32768, 65536, 131072, 1024, 512, 256, 128, 64)


def rope_scaling(
    meta: Metadata, config: Mapping[str, Any], long: Tensor | None, short: Tensor | None
) -> dict[str, Any] | None:
    """`rope_scaling` from the metadata and phi3's factors; None without scaling.

    UnsupportedError for a type that no transformers config expresses.
    """
    # A factor without a type means linear, and the first files had the factor under another name.
    kind = meta.text("rope.scaling.type", "linear")
    old = meta.number("rope.scale_linear", 0.0)
    factor = meta.number("rope.scaling.factor", old) or 1.0
    if long is not None or short is not None:
        if kind not in ("longrope", "none") and factor != 1.0:
            raise UnsupportedError(
                f"{meta.origin}: longrope factors together with rope scaling {kind!r:.40} are not "
                "supported."
            )
        return _longrope(meta, config, long, short)
    if kind == "longrope":
        raise SourceError(
            f"{meta.origin}: rope.scaling.type is longrope, but rope_factors_long.weight and "
            "rope_factors_short.weight are missing."
        )
    if kind == "none" or factor == 1.0:
        return None
    if config["model_type"] == "phi3" or kind not in ("linear", "yarn"):
        raise UnsupportedError(
            f"{meta.origin}: rope scaling {kind!r:.40} is not supported for {config['model_type']}."
        )
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return _yarn(meta, factor)


def _yarn(meta: Metadata, factor: float) -> dict[str, Any]:
    for key, harmless in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        value = meta.number(f"rope.scaling.{key}", harmless)
        if value != harmless:
            raise UnsupportedError(
                f"{meta.origin}: rope.scaling.{key} = {value} is not supported; "
                f"only {harmless} is what transformers computes."
            )
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": meta.integer("rope.scaling.original_context_length"),
    }
    # The converter writes transformers' attention_factor to yarn_attn_factor as it is.
    for key, name in (
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if meta.get(f"rope.scaling.{key}") is not None:
            scaling[name] = meta.number(f"rope.scaling.{key}")
    return scaling


def _longrope(
    meta: Metadata, config: Mapping[str, Any], long: Tensor | None, short: Tensor | None
) -> dict[str, Any]:
    if long is None or short is None:
        raise SourceError(f"{meta.origin}: one of the two tensors of longrope factors is missing.")
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    for key, tensor in (("long_factor", long), ("short_factor", short)):
        rotated = int(config["head_dim"] * config["partial_rotary_factor"])
        values = _factors(meta.origin, tensor, rotated // 2)
        scaling[key] = [shortest(value) for value in values.tolist()]
    original = config["original_max_position_embeddings"]
    if original < 2:
        raise SourceError(
            f"{meta.origin}: longrope needs rope.scaling.original_context_length; it is {original}."
        )
    stretch = config["max_position_embeddings"] / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    stated = meta.number("rope.scaling.attn_factor", usual)
    if abs(stated - usual) > 1e-5 * usual:
        scaling["attention_factor"] = stated
    return scaling


def _factors(origin: str, tensor: Tensor, count: int) -> F32:
    """The factors of a rope tensor, checked: float32 [count], all above zero."""
    if tensor.shape != (count,) or not 0 < count <= _FACTORS_LIMIT:
        raise SourceError(
            f"{origin}: {tensor.name} has the shape {list(tensor.shape)}; [{count}] was expected."
        )
    values = read_whole(tensor)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise SourceError(f"{origin}: {tensor.name} holds factors that are not above zero.")
    return values


def llama3_scaling(
    origin: str, tensor: Tensor, theta: float, head_dim: int
) -> dict[str, Any] | None:
    """The llama3 parameters whose divisors of the frequencies are those of `rope_freqs.weight`.

    None if all are one.  The divisor of a frequency with the wavelength w is 1 where
    w < original / high, `factor` where w > original / low, and between them 1 / (s + (1 - s) /
    factor) with s = (original / w - low) / (high - low).  So s is a line over 1 / w, and two points
    on it give original / (high - low) and low / (high - low); the three are free up to a common
    factor, which is set so that low is about 1 and original a whole number.  UnsupportedError where
    no parameters give these divisors.
    """
    divisors = _factors(origin, tensor, head_dim // 2).astype(np.float64)
    if (divisors == 1).all():
        return None
    if theta < 1:
        raise SourceError(f"{origin}: rope.freq_base {theta} does not go with rope_freqs.weight.")
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.float32(theta) ** exponents).astype(np.float64)
    turns = frequencies / (2 * math.pi)  # 1 / wavelength
    factor = shortest(float(divisors.max()))
    candidates = [(float(original), 1.0, 4.0) for original in _LLAMA3_ORIGINALS]
    between = (divisors > 1 + _TOLERANCE) & (divisors < factor * (1 - _TOLERANCE))
    if between.sum() >= 2:
        candidates.extend(_fitted(turns[between], divisors[between], factor))
    for original, low, high in candidates:
        found = _llama3_divisors(turns, factor, original, low, high)
        if np.allclose(found, divisors, rtol=_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": round(original),
            }
    raise UnsupportedError(
        f"{origin}: rope_freqs.weight holds divisors (1 to {factor}) that llama3 rope scaling does "
        "not give, and no other scaling is known to write them."
    )


def _fitted(
    turns: npt.NDArray[np.float64], divisors: npt.NDArray[np.float64], factor: float
) -> list[tuple[float, float, float]]:
    """(original, low, high) of the line through the first and the last of the blended points."""
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    run = float(turns[0] - turns[-1])
    if run <= 0:
        return []
    slope = float(smooth[0] - smooth[-1]) / run
    level = float(smooth[0]) - slope * float(turns[0])
    if not slope > 0 > level or -slope / level > _LONGEST_CONTEXT:
        return []
    original = -slope / level
    scale = max(1.0, round(original)) / original
    return [(original * scale, scale, (1 - 1 / level) * scale)]


def _llama3_divisors(
    turns: npt.NDArray[np.float64], factor: float, original: float, low: float, high: float
) -> npt.NDArray[np.float64]:
    smooth = (original * turns - low) / (high - low)
    blended = 1 / np.maximum(smooth + (1 - smooth) / factor, 1e-9)
    blended = np.where(turns * original > high, 1.0, blended)
    return np.where(turns * original < low, factor, blended)
