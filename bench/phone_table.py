"""What a phone can hold: DeepSeek's models, their size by recipe, and the roof of decode speed.

Nothing is measured here: sizes follow from the configs, and a token cannot come faster than the
weights that it uses can be read, so the roof is memory bandwidth / bytes read per token.
"""

from __future__ import annotations

from common import finish, parser, provenance, table
from deepseek_shapes import CONFIGS, config_of

from mnnsmith.conversion.activity import activity
from mnnsmith.conversion.plan import make_plan
from mnnsmith.conversion.planned import planned_tensors
from mnnsmith.models.context import ContextLimits
from mnnsmith.models.registry import build_language_model
from mnnsmith.quant.recipe import parse_recipe_name
from mnnsmith.sources.checkpoint import Checkpoint, TokenizerFiles

RECIPES = ("w4g64-head8", "w8g64", "fp16")
# Peak of the memory bus in GB/s, as published: clock x width.
CHIPS = {
    "Raspberry Pi 5 (LPDDR4X-4267, 32 bit)": 17.1,
    "Snapdragon 865 (LPDDR5-5500, 64 bit)": 44.0,
    "Snapdragon 8 Gen 2 (LPDDR5X-8400, 64 bit)": 67.2,
    "Snapdragon 8 Gen 3 (LPDDR5X-9600, 64 bit)": 76.8,
}


def main() -> None:
    chosen = parser(__doc__).parse_args()
    rows, results = [], {}
    for name in sorted(CONFIGS, key=lambda n: _facts(n, RECIPES[0])["parameters"]):
        for recipe in RECIPES:
            facts = _facts(name, recipe)
            results[f"{name} {recipe}"] = facts
            roofs = [f"{1e9 * speed / facts['read_bytes']:.1f}" for speed in CHIPS.values()]
            rows.append([
                name, recipe, f"{facts['parameters'] / 1e9:.2f}", f"{facts['active'] / 1e9:.2f}",
                f"{facts['weight_bytes'] / 1e9:.2f}", f"{facts['read_bytes'] / 1e9:.2f}",
                f"{facts['kv_bytes_per_token'] / 1e3:.0f}", *roofs,
            ])  # fmt: skip
    head = ["model", "recipe", "parameters (B)", "of a token (B)", "weights (GB)",
            "read per token (GB)", "cache per token (kB, fp16)",
            *(f"{chip.split(' (')[0]}, tokens/s" for chip in CHIPS)]  # fmt: skip
    finish("phone_table", provenance(1, chips=CHIPS), results, table(head, rows), chosen.json)


def _facts(name: str, recipe: str) -> dict[str, float]:
    config = config_of(name)
    model, _ = build_language_model(config["model_type"], config, name, ContextLimits())
    checkpoint = Checkpoint(
        name, "safetensors", config, planned_tensors(model, "float16"), TokenizerFiles("{}"), ()
    )
    plan = make_plan(model, checkpoint, parse_recipe_name(recipe))
    used = activity(model, plan)
    return {"parameters": plan.parameters, "active": used.parameters,
            "weight_bytes": plan.weight_bytes, "read_bytes": used.read_bytes,
            "kv_bytes_per_token": model.kv_bytes_per_token(2)}  # fmt: skip


if __name__ == "__main__":
    main()
