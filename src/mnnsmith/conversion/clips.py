"""The clips of a recipe, put into a graph where they say."""

from __future__ import annotations

from collections.abc import Iterator

from mnnsmith.errors import RecipeError
from mnnsmith.graph.core import GraphCore
from mnnsmith.graph.values import DType, Value
from mnnsmith.quant.recipe import Recipe

# What is the same for every token, or no activation: the engine's inputs, tables and numbers.
_GIVEN = frozenset({"input", "table", "integers"})


def add_clips(graph: GraphCore, recipe: Recipe) -> tuple[str, ...]:
    """Clip every value that the recipe names, those of experts included; notes for the user.

    The first that matches a value decides.  Raises RecipeError for one that matches none.
    """
    places = list(_places(graph)) if recipe.clips else []
    counts = [0] * len(recipe.clips)
    for part, value in places:
        for number, clip in enumerate(recipe.clips):
            if clip.matches(value.name):
                part.clip(value, clip.limit)
                counts[number] += 1
                break
    if 0 in counts:
        number = counts.index(0)
        raise RecipeError(
            f"Recipe {recipe.name}: clip {number} ({recipe.clips[number].value}) names no value of "
            "the graph that is passed on, or an earlier one takes all that it names.",
            "Values are named as layer3/mlp/act; `mnnsmith verify` shows them.",
        )
    pairs = zip(recipe.clips, counts, strict=True)
    return tuple(
        f"{clip.value} is clipped to {clip.limit:g} ({count} values)" for clip, count in pairs
    )


def _places(graph: GraphCore) -> Iterator[tuple[GraphCore, Value]]:
    """Activations that other operators read, with the graph that each lies in."""
    read = {value for node in graph.nodes for value in node.inputs}
    for node in graph.nodes:
        if node.kind not in _GIVEN:
            for value in node.outputs:
                # A mask has two unknown dimensions.
                tokens = sum(isinstance(dim, str) for dim in value.shape) == 1
                if value in read and value.dtype is DType.FLOAT and tokens:
                    yield graph, value
        for part in node.graphs:
            yield from _places(part)
