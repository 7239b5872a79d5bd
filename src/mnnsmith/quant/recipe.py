"""A recipe: which weight gets which scheme.  Data, first match wins.

A recipe is a name such as `w4g64-head8`, or a JSON file:

    {"name": "mine", "default": "w4g64", "misfit": "error",
     "rules": [{"role": "head", "scheme": "w8g64"},
               {"layers": [0, 1], "role": "mlp", "scheme": "w8g32"},
               {"tensor": "*.down_proj.weight", "scheme": "w8g64"}],
     "clip": [{"value": "layer3/mlp/act", "limit": 60000}]}

What sees pictures has a default of its own, `"vision": "w8g64"`, fp16 where the file says nothing;
a rule speaks of it where it names role `vision` or a tensor.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mnnsmith.errors import RecipeError
from mnnsmith.quant.scheme import BLOCKS, Scheme, parse_scheme

# Blocks of 32 and 8 bits for the head: half a bit more than w4g64, and measurably closer.
DEFAULT_RECIPE = "w4g32-head8"
KEEP = "keep"
ROLES = ("embedding", "head", "attention", "mlp", "expert", "vision", "patch")
# Those of the part that sees pictures: its linear layers, and the convolution over its patches.
VISION, PATCH = "vision", "patch"
# Forms of latent attention (DeepSeek), the default first.
MLA_FORMS = ("expanded", "latent")
_MISFITS = ("error", "fit")
_NAME = re.compile(
    r"(?P<base>fp32|fp16|w[0-9]{1,4}(?:g[0-9]{1,6})?)(?P<sym>-sym)?(?P<scale32>-scale32)?"
    r"(?:-head(?P<head>[0-9]{1,4}))?(?:-embed(?P<embed>[0-9]{1,4}))?"
    r"(?:-vision(?P<vision>[0-9]{1,4}))?(?P<latent>-latent)?(?P<fit>-fit)?"
)
_FLOAT16 = Scheme(16)
_MAX_RULES = 1_000
_MAX_PATTERN = 500
# The largest number of fp16, for whose range values are clipped.
FP16_MAX = 65504.0


@dataclass(frozen=True)
class Target:
    """One weight as recipes see it."""

    tensor: str
    role: str
    layer: int | None
    rows: int
    cols: int


@dataclass(frozen=True)
class Rule:
    """A condition (every given part must hold) and its scheme."""

    scheme: Scheme
    role: str | None = None
    tensor: str | None = None
    layers: tuple[int, int] | None = None

    def matches(self, target: Target) -> bool:
        if self.role is not None and self.role != target.role:
            return False
        if self.role is None and self.tensor is None and target.role in (VISION, PATCH):
            # A number of a layer alone means one of the language model's.
            return False
        if self.layers is not None and (
            target.layer is None or not self.layers[0] <= target.layer <= self.layers[1]
        ):
            return False
        return self.tensor is None or fnmatch.fnmatchcase(target.tensor, self.tensor)

    def describe(self) -> str:
        """The rule in a few words, for messages."""
        parts = [("role", self.role), ("tensor", self.tensor), ("layers", self.layers)]
        given = ", ".join(f"{key} {value}" for key, value in parts if value is not None)
        return f"{given or 'everything'}: {self.scheme.name}"


@dataclass(frozen=True)
class Clip:
    """Values of the graph that are kept within -limit .. limit.

    value: a name ("layer3/mlp/act"), or a glob.
    """

    value: str
    limit: float

    def matches(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.value)


@dataclass(frozen=True)
class Choice:
    """The scheme for one weight, and the number of the rule that chose it (None: the default).

    note: set where the recipe's wish did not fit.
    """

    scheme: Scheme
    note: str | None = None
    rule: int | None = None


@dataclass(frozen=True)
class Recipe:
    """Rules in order, then the default.

    misfit: what to do where a block does not divide a width: "error", or "fit" (take the widest
    block that does, and record it).
    keep: carry a source's own blocks over where the engine has the same form; rules then speak for
    the other weights only.
    mla: how latent attention is written: "expanded" or "latent"; other models have no such choice.
    vision: the default of what sees pictures.  Its patch embedding, small and sensitive, and with a
    width that blocks seldom divide, is fp16 unless a rule names it.
    clips: values that are kept within a range, for phones that compute in fp16.
    """

    name: str
    default: Scheme
    rules: tuple[Rule, ...] = ()
    misfit: str = "error"
    keep: bool = False
    mla: str = MLA_FORMS[0]
    vision: Scheme = _FLOAT16
    clips: tuple[Clip, ...] = ()

    def choose(self, target: Target) -> Choice:
        """The scheme of one weight; raises `RecipeError` where it cannot be."""
        rule = next((i for i, r in enumerate(self.rules) if r.matches(target)), None)
        scheme = self._default(target.role) if rule is None else self.rules[rule].scheme
        if target.role == "embedding" and scheme.bits == 32:
            note = "embedding at fp16: the engine reads float embeddings at 16 bits only"
            return Choice(Scheme(16), note, rule)
        return replace(self._fit(scheme, target), rule=rule)

    def _default(self, role: str) -> Scheme:
        if role == VISION:
            return self.vision
        if role == PATCH:
            return self.vision if self.vision.is_float else Scheme(16)
        return self.default

    def _fit(self, scheme: Scheme, target: Target) -> Choice:
        if scheme.is_float or target.cols % (scheme.block or 8) == 0:
            return Choice(scheme)
        where = f"{target.tensor} [{target.rows}, {target.cols}]"
        fitting = [b for b in BLOCKS if target.cols % b == 0]
        if self.misfit == "error" or scheme.block == 0 or not fitting:
            options = ", ".join(f"w{scheme.bits}g{b}" for b in fitting) or "fp16"
            hint = f"For this width there are: {options}."
            if self.misfit == "error" and scheme.block and fitting:
                named = _NAME.fullmatch(self.name) is not None
                fit = f"{self.name}-fit" if named else '"misfit": "fit" in its file'
                hint += (
                    f" Or let the recipe choose: {fit} takes the widest block that divides, and "
                    "records it."
                )
            raise RecipeError(
                f"Recipe {self.name}: {scheme.name} does not fit {where}: "
                f"{scheme.block or 8} does not divide {target.cols}.",
                hint,
            )
        block = max((b for b in fitting if b <= scheme.block), default=min(fitting))
        chosen = replace(scheme, block=block)
        return Choice(chosen, f"{chosen.name} in place of {scheme.name}: width {target.cols}")


def parse_recipe_name(name: str) -> Recipe:
    """A recipe from its name: SCHEME[-sym][-scale32][-headN][-embedN][-visionN][-latent][-fit], or
    `keep`.

    -scale32 stores scales and offsets in fp32, for weights that are too small for fp16 ones.
    N is 4, 8 (at the scheme's block) or 16.  The embedding follows the head where nothing is said.
    """
    if name == KEEP:
        return Recipe(KEEP, Scheme(16), keep=True)
    match = _NAME.fullmatch(name)
    if match is None:
        raise RecipeError(
            f"{name!r:.60} is not a recipe.",
            "Recipes are named fp16, fp32, w8g64, w4g32, w4g64-sym, w4g64-scale32, w4g64-head8, "
            "w4g64-head8-embed16, w4g32-head8-vision8, w4g128-fit, keep (GGUF); or give a JSON "
            "file.",
        )
    default = parse_scheme(match["base"], f"recipe {name}")
    if match["sym"]:
        if default.is_float:
            raise RecipeError(f"recipe {name}: -sym means nothing for floats.")
        default = replace(default, symmetric=True)
    if match["scale32"]:
        if default.is_float:
            raise RecipeError(f"recipe {name}: -scale32 means nothing for floats.")
        default = replace(default, scale_bits=32)
    rules = []
    for role in ("head", "embed"):
        if match[role]:
            scheme = _with_bits(default, int(match[role]), name)
            rules.append(Rule(scheme, role="embedding" if role == "embed" else role))
    if match["head"] and not match["embed"]:
        rules.append(Rule(rules[0].scheme, role="embedding"))
    vision = default if default.is_float else Scheme(16)
    if match["vision"]:
        vision = _with_bits(default, int(match["vision"]), name)
    return Recipe(name, default, tuple(rules), misfit="fit" if match["fit"] else "error",
        mla="latent" if match["latent"] else MLA_FORMS[0], vision=vision,
    )  # fmt: skip


def parse_recipe(data: Mapping[str, Any], where: str) -> Recipe:
    """A recipe from the object of a JSON file."""
    known = {"name", "default", "rules", "misfit", "mla", "vision", "clip", "description"}
    _check_keys(data, known, where)
    name = data.get("name", "custom")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,80}", name):
        raise RecipeError(f"{where}: name must be letters, digits, '.', '_' and '-': {name!r:.60}.")
    misfit = data.get("misfit", "error")
    if misfit not in _MISFITS:
        raise RecipeError(
            f"{where}: misfit must be one of {', '.join(_MISFITS)}, not {misfit!r:.60}."
        )
    mla = data.get("mla", MLA_FORMS[0])
    if mla not in MLA_FORMS:
        raise RecipeError(f"{where}: mla must be one of {', '.join(MLA_FORMS)}, not {mla!r:.60}.")
    if "default" not in data:
        raise RecipeError(f"{where}: default is missing.", 'Add, for example, "default": "w4g64".')
    rules = data.get("rules", [])
    if not isinstance(rules, list) or len(rules) > _MAX_RULES:
        raise RecipeError(f"{where}: rules must be a list of at most {_MAX_RULES} objects.")
    clips = data.get("clip", [])
    if not isinstance(clips, list) or len(clips) > _MAX_RULES:
        raise RecipeError(f"{where}: clip must be a list of at most {_MAX_RULES} objects.")
    keep = data["default"] == KEEP
    return Recipe(
        name,
        Scheme(16) if keep else parse_scheme(data["default"], f"{where}: default"),
        tuple(_rule(rule, f"{where}: rule {i}") for i, rule in enumerate(rules)),
        misfit,
        keep=keep,
        mla=mla,
        vision=parse_scheme(data.get("vision", "fp16"), f"{where}: vision"),
        clips=tuple(_clip(clip, f"{where}: clip {i}") for i, clip in enumerate(clips)),
    )


def describe(recipe: Recipe) -> dict[str, Any]:
    """The recipe as the object that `parse_recipe` reads (for the manifest)."""
    described: dict[str, Any] = {
        "name": recipe.name,
        "default": KEEP if recipe.keep else recipe.default.name,
        "misfit": recipe.misfit,
        "mla": recipe.mla,
        "vision": recipe.vision.name,
        "rules": [],
    }
    for rule in recipe.rules:
        entry: dict[str, Any] = {"scheme": rule.scheme.name}
        for key in ("role", "tensor"):
            if getattr(rule, key) is not None:
                entry[key] = getattr(rule, key)
        if rule.layers is not None:
            entry["layers"] = list(rule.layers)
        described["rules"].append(entry)
    if recipe.clips:
        described["clip"] = [{"value": clip.value, "limit": clip.limit} for clip in recipe.clips]
    return described


def _rule(data: Any, where: str) -> Rule:
    if not isinstance(data, Mapping):
        raise RecipeError(f"{where}: must be an object, not {data!r:.60}.")
    _check_keys(data, {"scheme", "role", "tensor", "layers"}, where)
    if "scheme" not in data:
        raise RecipeError(f"{where}: scheme is missing.")
    role, tensor, layers = data.get("role"), data.get("tensor"), data.get("layers")
    if role is not None and role not in ROLES:
        raise RecipeError(f"{where}: role must be one of {', '.join(ROLES)}, not {role!r:.60}.")
    if tensor is not None and not (isinstance(tensor, str) and len(tensor) <= _MAX_PATTERN):
        raise RecipeError(f"{where}: tensor must be a name or glob, not {tensor!r:.60}.")
    if layers is not None:
        if (
            not isinstance(layers, list)
            or len(layers) != 2
            or not all(type(v) is int and v >= 0 for v in layers)
            or layers[0] > layers[1]
        ):
            raise RecipeError(
                f"{where}: layers must be [first, last] (0 is the first), not {layers!r:.60}."
            )
        layers = (layers[0], layers[1])
    return Rule(parse_scheme(data["scheme"], where), role, tensor, layers)


def _clip(data: Any, where: str) -> Clip:
    if not isinstance(data, Mapping):
        raise RecipeError(f"{where}: must be an object, not {data!r:.60}.")
    _check_keys(data, {"value", "limit"}, where)
    value, limit = data.get("value"), data.get("limit")
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_PATTERN:
        raise RecipeError(f"{where}: value must be a name or glob, not {value!r:.60}.")
    if not isinstance(limit, (int, float)) or isinstance(limit, bool) or not 0 < limit <= FP16_MAX:
        raise RecipeError(
            f"{where}: limit must be a number above 0 and at most {FP16_MAX:g}, the largest of "
            f"fp16, not {limit!r:.60}."
        )
    return Clip(value, float(limit))


def _check_keys(data: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(map(str, set(data) - known))
    if unknown:
        raise RecipeError(
            f"{where}: unknown key {unknown[0]!r:.60}.", f"Known are: {', '.join(sorted(known))}."
        )


def _with_bits(scheme: Scheme, bits: int, name: str) -> Scheme:
    if bits in (16, 32):
        return Scheme(bits)
    if scheme.is_float:
        return parse_scheme(f"w{bits}g64", f"recipe {name}")
    return replace(parse_scheme(f"w{bits}", f"recipe {name}"), block=scheme.block,
                   symmetric=scheme.symmetric, scale_bits=scheme.scale_bits)  # fmt: skip
