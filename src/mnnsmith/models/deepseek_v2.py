"""DeepSeek-V2, V2-Lite and Coder-V2: latent attention, and experts chosen by softmax scores."""

from __future__ import annotations

from mnnsmith.models.config import ConfigReader
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.deepseek import build_deepseek, read_groups
from mnnsmith.models.language_model import LanguageModel
from mnnsmith.models.moe import Routing


def build(config: ConfigReader, limits: ContextLimits) -> LanguageModel:
    """The graph of `DeepseekV2ForCausalLM`."""
    config.only(
        "norm_topk_prob", (False,), False,
        "transformers ignores it in this family, where the authors' own code does not.",
    )  # fmt: skip
    config.only(
        "scoring_func", ("softmax",), "softmax", "The authors' code of this family has no other."
    )
    method = config.only(
        "topk_method", ("greedy", "group_limited_greedy"), "greedy",
        "The authors' code of this family has no other.",
    )  # fmt: skip
    experts = config.either_integer("n_routed_experts", "num_experts", 64)
    chosen = config.integer("num_experts_per_tok")
    groups, kept = read_groups(config, experts, chosen) if method != "greedy" else (1, 1)
    for unread in ("n_group", "topk_group"):
        config.raw(unread)
    routing = Routing(
        experts, chosen, "softmax",
        groups=groups, groups_kept=kept, group_score="max",
        factor=config.number("routed_scaling_factor", 1.0),
    )  # fmt: skip
    return build_deepseek(config, limits, lambda prefix: routing, interleaved=True)
