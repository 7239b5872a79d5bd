"""What a rewrite rule is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView

if TYPE_CHECKING:
    from onnx import NodeProto


@dataclass(frozen=True)
class Rule:
    """A defect of the engine or its converter, and the form that it computes rightly.

    name: as reports and `--json` show it.  operators: the op types it looks at.
    reason: what the engine does wrong, for reports.  engines: versions that have the defect.
    cures: node cases of the `onnx` package that pass with the rule alone, or "" patterns of them.
    rewrite: the nodes to put in place of one, or None where the rule has nothing to do.
    """

    name: str
    operators: frozenset[str]
    reason: str
    engines: tuple[str, ...]
    cures: tuple[str, ...]
    rewrite: Callable[[NodeProto, GraphView], Sequence[NodeProto] | None]
