"""Prompts of a reference in as few runs as possible: each run of a streamed one reads all weights.

Shorter prompts are filled up on the right, where a causal model's earlier tokens do not look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mnnsmith.verify.references.reference import IDS, Reference, ReferenceRun

# A prompt joins longer ones of a run if so much of the run's length is its own: where weights stay
# in memory, what is filled up costs as much as tokens do.
_LEAST_PART = 0.75


def run_together(
    reference: Reference, prompts: Sequence[IDS], values: Sequence[str] = ()
) -> tuple[ReferenceRun, ...]:
    """What `Reference.run` gives for each prompt, int64 [n] each, as a run of one window."""
    found: dict[int, ReferenceRun] = {}
    for places in _groups(prompts):
        length = prompts[places[0]].size
        fed = np.stack([_filled(prompts[place], length) for place in places])
        run = reference.run(fed, values)
        for row, place in enumerate(places):
            found[place] = _part(run, row, prompts[place].size)
    return tuple(found[place] for place in range(len(prompts)))


def _groups(prompts: Sequence[IDS]) -> Iterator[list[int]]:
    """The places of prompts that run together, the longest of each group first."""
    group: list[int] = []
    for place in sorted(range(len(prompts)), key=lambda i: -prompts[i].size):
        if group and prompts[place].size < _LEAST_PART * prompts[group[0]].size:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


def _filled(ids: IDS, length: int) -> IDS:
    """Its last token again and again: an id that the model knows, whatever it is."""
    return np.concatenate([ids, np.full(length - ids.size, ids[-1], dtype=np.int64)])


def _part(run: ReferenceRun, row: int, n: int) -> ReferenceRun:
    part = slice(row, row + 1), slice(0, n)
    return ReferenceRun(
        run.ids[part], run.hidden[part], {name: value[part] for name, value in run.values.items()}
    )
