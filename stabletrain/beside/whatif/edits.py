"""Edits of a state, for the arms that need what no override can change. Each returns a new tree.

| edit | what it changes |
|---|---|
| `skip` | adds the span of the trouble to the data positions that are never read, as a rollback does |
| `moments` | sets all numbers of the optimizer's state to 0, as an optimizer has them before its first update |
| `brief` | lowers the learning rate for a while, as the guard does after a rollback |
| `mean` | takes the mean of the weights of the last healthy states |

The mean is that of latest weight averaging (Kaddour, arXiv 2209.14981). If the weights swing around a minimum, their
mean lies nearer to it than any of them. Moments and counters are those of the newest state. The running statistics of
BatchNorm are averaged like weights. That is an approximation: the statistics of the mean weights are not the mean of
the statistics, and the first steps bring them nearer to those.

The states are checkpoints of the run from before the trouble, and, if the start is computed again, states that this
run saves on its way. The initial weights are none of them, nor are states from before a change of settings.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stabletrain.beside.whatif.arms import BRIEF, BRIEF_STEPS, MEAN, MOMENTS, SKIP, Arm
from stabletrain.beside.whatif.base import BaseRun
from stabletrain.beside.whatif.trouble import Trouble
from stabletrain.checkpoint.folder import Folder
from stabletrain.checkpoint.reader import Checkpoint, UnusableCheckpoint
from stabletrain.checkpoint.tree import Tree
from stabletrain.config.resuming import acting
from stabletrain.data.order import position
from stabletrain.errors import ConfigError

MAX_STATES = 3
"""Most states that are averaged, the start included."""

EARLIER_STATES = "before"
"""In the folder of a what-if: states that were saved while the start was computed again."""


class MissingState(ConfigError):
    """A state of the mean cannot be read, so the arm does not apply after all."""


def averaged_steps(base: BaseRun, step: int, tick: int, computed_from: int) -> tuple[int, ...]:
    """Returns the steps of the states that are averaged, oldest first; the last one is the start.

    Args:
        base: the run.
        step, tick: of the start.
        computed_from: the step from which the start is computed again; `step` if it was kept.
    """
    every = base.guard_steps["every"]
    changes = base.record.get("changes", [])
    changed = max((each["step"] for each in changes if each["step"] <= step and acting(each["keys"])), default=0)
    on_the_way = [each for each in range(every, step, every) if each > computed_from][-MAX_STATES + 1 :]
    kept = (each.step for each in kept_before(base.run, step, tick))
    found = [*on_the_way, *islice(kept, MAX_STATES - 1 - len(on_the_way))]
    return (*sorted(each for each in found if each > changed), step)


def kept_before(run: Path, step: int, tick: int) -> Iterator[Checkpoint]:
    """Returns the healthy checkpoints of at most `step - 1` steps, newest first, without that of step 0.

    Args:
        run: its folder.
        step: of the start.
        tick: steps that the run had executed by then. A checkpoint that was written later is left out.
    """
    known = Folder(run / "checkpoints", tell=lambda line: None).known()
    return written_before([each for each in known if each.healthy and each.step], step - 1, tick - 1)


def written_before(known: Sequence[Checkpoint], step: int, tick: int) -> Iterator[Checkpoint]:
    """Yields the checkpoints of at most `step` steps that a run wrote before it had executed `tick`, newest first.

    Args:
        known: the checkpoints, oldest first.
    """
    for each in reversed(known):
        executed = executed_steps(each) if each.step <= step else None
        if executed is not None and executed <= tick - (step - each.step):
            yield each


def executed_steps(checkpoint: Checkpoint) -> int | None:
    """Returns the steps that a run had executed when it wrote a checkpoint; None if this cannot be read."""
    try:
        return int(checkpoint.load().get("tick", checkpoint.step))
    except UnusableCheckpoint:
        return None


def states_at(steps: Sequence[int], base: BaseRun, start: Checkpoint, folder: Path) -> list[Checkpoint]:
    """Returns the states after `steps`, oldest first, the last of which is the start.

    Args:
        steps: of `averaged_steps`.
        base: the run.
        start: the start.
        folder: of the what-if.

    Raises:
        MissingState: one of them cannot be read, or was not healthy when it was computed again.
    """
    computed = [each for each in Folder(folder / EARLIER_STATES, tell=lambda line: None).known() if each.healthy]
    kept = kept_before(base.run, start.step, executed_steps(start) or start.step)
    found = {each.step: each for each in (*islice(kept, MAX_STATES), *computed)} | {start.step: start}
    for step in steps:
        if step not in found:
            raise MissingState(
                f"the state after step {step} is not in {base.run / 'checkpoints'}, or was not healthy; fix: leave "
                "this arm out"
            )
    return [found[step] for step in steps]


def mean_weights(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the mean of `state_dict`s, computed in float64; integers are those of the last.

    Raises:
        MissingState: they are not of the same model.
    """
    newest = models[-1]
    first, *others = ({name: each.shape for name, each in model.items()} for model in models)
    if any(shapes != first for shapes in others):
        raise MissingState("the states are not of the same model; fix: leave this arm out")
    return {
        name: sum((model[name].double() for model in models), torch.zeros_like(last, dtype=torch.float64))
        .div(len(models))
        .to(last.dtype)
        if last.is_floating_point()
        else last
        for name, last in newest.items()
    }


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
