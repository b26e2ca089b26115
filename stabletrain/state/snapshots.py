"""Snapshots: whole states in the host's memory, to go back to without reading the disk.

Of a sharded model each rank puts its own part by. On CUDA the copy goes to page-locked memory and nobody waits for it;
the weights' next change is queued behind it. Which states are kept, and which of them are healthy, the guard knows by
their step numbers.
"""

from collections.abc import Iterable

import torch

from stabletrain.state.shards import apart, together
from stabletrain.state.tree import Tree, to_host


class Snapshots:
    """States by step."""

    def __init__(self) -> None:
        self._trees: dict[int, Tree] = {}

    def take(self, step: int, tree: Tree) -> None:
        """Copies a state, from `capture`, that is the one after `step` steps."""
        self._trees[step] = to_host(apart(tree), wait=False)

    def keep(self, steps: Iterable[int]) -> None:
        """Drops all states but those of `steps`."""
        wanted = set(steps)
        self._trees = {step: tree for step, tree in self._trees.items() if step in wanted}

    def newest(self, at_most: int) -> Tree | None:
        """The newest state of a step up to `at_most`, with its copy complete; None if there is none."""
        steps = [step for step in self._trees if step <= at_most]
        if not steps:
            return None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return together(self._trees[max(steps)])
