"""Edits of a state, for the arms that need what no override can change. Each returns a new tree.

| edit | what it changes |
|---|---|
| `skip` | adds the span of the trouble to the data positions that are never read, as a rollback does |
| `moments` | sets all numbers of the optimizer's state to 0, as an optimizer has them before its first update |
| `brief` | lowers the learning rate for a while, as the guard does after a rollback |
| `mean` | takes the mean of the weights of the last healthy states (`averaging.py`) |
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from stabletrain.beside.whatif.arms import BRIEF, BRIEF_STEPS, MEAN, MOMENTS, SKIP, Arm
from stabletrain.beside.whatif.averaging import mean_weights
from stabletrain.beside.whatif.trouble import Trouble
from stabletrain.checkpoint.tree import Tree
from stabletrain.data.order import position

STEPS_BEFORE = 10
"""Steps before the trouble whose batches `skip` leaves out too: the update that did the harm comes before the spike."""


def apply_edit(tree: Tree, arm: Arm, trouble: Trouble, models: Sequence[Mapping[str, Tensor]] = ()) -> Tree:
    """Returns a state as an arm needs it.

    Args:
        tree: the state.
        arm: with an edit.
        trouble: of the run.
        models: for `mean`, the `state_dict` of each state, the newest last.
    """
    if arm.edit == SKIP:
        return {**tree, "skipped": [*tree["skipped"], [*skipped_span(tree, trouble)]]}
    if arm.edit == BRIEF:
        guard = tree["parts"]["guard"]
        lowered = lowered_rate(guard["lowered"], tree["step"], trouble.last + BRIEF_STEPS, arm.factor)
        return {**tree, "parts": {**tree["parts"], "guard": {**guard, "lowered": lowered}}}
    if arm.edit == MEAN:
        return {**tree, "model": mean_weights(models)}
    assert arm.edit == MOMENTS
    optimizer = tree["optimizer"]
    return {**tree, "optimizer": {**optimizer, "state": with_zeros(optimizer["state"])}}


def skipped_span(tree: Tree, trouble: Trouble) -> tuple[int, int]:
    """Returns the data positions `[start, stop)` that `skip` leaves out: of the trouble, and `STEPS_BEFORE` before it.

    This includes what its rollbacks have skipped: bad data may be longer than what one rollback skips. Step s, counted
    from 1, reads the batch of step number s - 1.
    """
    start = max(tree["step"], trouble.first - 1 - STEPS_BEFORE)
    stop = max(start, trouble.last - 1)
    return position(start, tree["skipped"]), max(position(stop, tree["skipped"]) + 1, trouble.read)


def lowered_rate(lowered: Sequence[Any], step: int, stop: int, factor: float) -> list[Any]:
    """Returns the guard's lowered learning rate: start step, stop step (exclusive) and factor.

    Args:
        lowered: the one of an earlier rollback. The guard has one span only. So if that one has not ended, the new one
            has the product of both factors and the later stop: this arm's rate is never above that of `nothing`.
        step: steps done.
        stop: the last step with the lowered rate, counted from 1.
        factor: of the learning rate.
    """
    first, last, earlier = lowered
    return [step, max(stop, last), factor * earlier] if first <= step < last else [step, stop, factor]


def with_zeros(node: Any) -> Any:
    """Returns an optimizer's state with 0 in place of every number, and the same shapes and dtypes."""
    if isinstance(node, dict):
        return {key: with_zeros(child) for key, child in node.items()}
    if isinstance(node, Tensor):
        return node.new_zeros(node.shape)
    return type(node)(0) if isinstance(node, int | float) and not isinstance(node, bool) else node
