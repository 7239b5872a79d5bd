"""DeepSeek-V3, V3.1 and R1: latent attention, and experts chosen by corrected sigmoid scores."""

from __future__ import annotations

from dataclasses import replace

from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.deepseek import build_deepseek, read_groups
from mnnsmith.models.language_model import IgnoredTensors, LanguageModel
from mnnsmith.models.moe import Routing


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graph of `DeepseekV3ForCausalLM`."""
    config.only(
        "scoring_func", ("sigmoid",), "sigmoid", "The authors' code of this family has no other."
    )
    config.only(
        "topk_method", ("noaux_tc",), "noaux_tc", "The authors' code of this family has no other."
    )
    experts = config.either_integer("n_routed_experts", "num_local_experts", 256)
    chosen = config.integer("num_experts_per_tok", 8)
    # A group's score is the sum of its two best.
    groups, kept = read_groups(config, experts, chosen, default=(8, 4), least_size=2)
    routing = Routing(
        experts, chosen, "sigmoid",
        groups=groups, groups_kept=kept, group_score="top2",
        normalized=config.flag("norm_topk_prob", True),
        factor=config.number("routed_scaling_factor", 2.5),
    )  # fmt: skip
    model = build_deepseek(
        config, limits,
        lambda prefix: replace(routing, correction=f"{prefix}.gate.e_score_correction_bias"),
        interleaved=config.flag("rope_interleave", True),
    )  # fmt: skip
    return replace(model, ignored=(*model.ignored, *_extra_layers(config, model.layers)))


def _extra_layers(config: ConfigReader, layers: int) -> tuple[IgnoredTensors, ...]:
    """Blocks after the last one predict further tokens; answers are the same without them."""
    key = "num_mtp_layers" if config.has("num_mtp_layers") else "num_nextn_predict_layers"
    config.raw("num_mtp_layers")
    extra = config.integer(key, 1, least=0)
    reason = "multi-token prediction, which speeds up decoding on servers and changes no answer"
    return tuple(IgnoredTensors(f"model.layers.{layers + i}.*", reason) for i in range(extra))
