"""Which values of our graph a module of the original computes too, and where they are taken.

Landmarks say it for the parts of a block.  Inside a block the weights do: a linear layer that reads
`M.weight` gives what module M gives, a norm likewise, and what goes in goes in there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mnnsmith.graph.core import Node
from mnnsmith.graph.graph import Graph
from mnnsmith.graph.weights import MatrixSlot, Role, VectorSlot
from mnnsmith.verify.references.module_weights import module_of_tensor

_WEIGHT = ".weight"
# The head gives logits; a convolution over patches gives rows and columns of them.
_APART = (Role.HEAD, Role.PATCH)


@dataclass(frozen=True)
class ModuleValue:
    """A module's input (`takes_input`) or output, and which of its columns; None takes all."""

    module: str
    takes_input: bool = False
    columns: npt.NDArray[np.int64] | None = None


def module_values(graph: Graph, modules: Collection[str]) -> dict[str, ModuleValue]:
    """By name of the graph's value; `modules` are those that the original has.

    Values inside of experts are not among them: an expert sees only the tokens sent to it.
    """
    found = {
        mark.value.name: ModuleValue(mark.module)
        for mark in graph.landmarks
        if mark.module in modules
    }
    for name, value in (*_linear(graph), *_norms(graph), *_mixtures(graph)):
        if value.module in modules:
            found.setdefault(name, value)
    return found


def _linear(graph: Graph) -> Iterator[tuple[str, ModuleValue]]:
    """Outputs and inputs of linear layers.

    One tensor may be read by several operators (parts of a fused one, parts of heads).  They are
    the module's own outputs only if all get one input; in latent attention they do not, there a
    weight stands in another place than in the original.
    """
    nodes: dict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        slot = node.slots.get("weight")
        if isinstance(slot, MatrixSlot) and slot.role not in _APART:
            nodes[slot.tensor].append(node)
    for tensor, readers in nodes.items():
        module = _owner(tensor)
        inputs = {node.inputs[0].name for node in readers}
        if module is None or len(inputs) > 1:
            continue
        for node in readers:
            slot = node.slots["weight"]
            assert isinstance(slot, MatrixSlot)
            if not slot.transposed:
                yield node.outputs[0].name, ModuleValue(module, columns=slot.source_rows())
        yield inputs.pop(), ModuleValue(module, takes_input=True)


def _norms(graph: Graph) -> Iterator[tuple[str, ModuleValue]]:
    """Outputs of norms, and the sums that fused ones compute before."""
    for node in graph.nodes:
        gain = node.slots.get("gain")
        module = _owner(gain.tensor) if isinstance(gain, VectorSlot) else None
        if module is None:
            continue
        yield node.outputs[-1].name, ModuleValue(module)
        if len(node.outputs) == 2:
            yield node.outputs[0].name, ModuleValue(module, takes_input=True)


def _mixtures(graph: Graph) -> Iterator[tuple[str, ModuleValue]]:
    """What the chosen experts give together."""
    for node in graph.nodes:
        if node.kind != "mixture":
            continue
        slots = (n.slots.get("weight") for n in node.graphs[0].all_nodes())
        first = next(slot for slot in slots if isinstance(slot, MatrixSlot))
        module = module_of_tensor(first.tensor)
        if ".experts." in module:
            yield node.outputs[0].name, ModuleValue(module.partition(".experts.")[0] + ".experts")


def _owner(tensor: str) -> str | None:
    """The module whose weight a tensor is."""
    name = module_of_tensor(tensor)
    return name.removesuffix(_WEIGHT) if name.endswith(_WEIGHT) else None


def wanted_by_module(
    values: Mapping[str, ModuleValue], names: Collection[str]
) -> dict[tuple[str, bool], list[str]]:
    """The wanted names by module and whether its input is taken."""
    wanted: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for name in names:
        wanted[values[name].module, values[name].takes_input].append(name)
    return wanted
