"""Schedulers of the learning rate: stepped first, twice, never, for another optimizer, or overwritten."""

import itertools
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from stabletrain.beside.preflight.finding import Finding
from stabletrain.beside.preflight.loop import Loop
from stabletrain.beside.preflight.recording import Event, RecordedStep


def schedulers(loop: Loop, steps: list[RecordedStep], *, whole: bool) -> list[Finding]:
    """Checks a loop's schedulers.

    Args:
        loop: after the steps.
        steps: the loop's first ones.
        whole: whether they are more than an epoch.
    """
    found = []
    for index, scheduler in enumerate(loop.schedulers):
        optimizer = optimizer_of(scheduler, loop)
        if optimizer is None:
            text = f"schedulers.{index} steps an optimizer that is not the loop's: the learning rate stays where it is"
            fix = "make the scheduler after the optimizer, of the optimizer that the loop steps"
            found.append(Finding("order", "fault", text, (f"schedulers.{index}",), fix=fix))
        else:
            found += (
                never(index, steps, whole=whole and not isinstance(scheduler, ReduceLROnPlateau))
                or [*comes_first(index, optimizer, steps), *twice(index, optimizer, steps)]
                or overwritten(index, optimizer, loop, steps)
            )
    return found


def optimizer_of(scheduler: Any, loop: Loop) -> int | None:
    """Returns the number of the optimizer whose groups a scheduler sets; None if it is none of the loop's.

    A wrapped optimizer is known by its groups. A scheduler that does not say its optimizer is taken for the first's.
    """
    groups = [id(group) for group in getattr(getattr(scheduler, "optimizer", None), "param_groups", ())]
    if not groups:
        return 0
    for index, optimizer in enumerate(loop.optimizers):
        if any(id(group) in groups for group in optimizer.param_groups):
            return index
    return None


def is_step(event: Event, optimizer: int) -> bool:
    """Whether an optimizer steps."""
    return event.kind == "optimizer" and event.index == optimizer


def is_schedule(event: Event, index: int) -> bool:
    """Whether a scheduler steps."""
    return event.kind == "scheduler" and event.index == index


def never(index: int, steps: list[RecordedStep], *, whole: bool) -> list[Finding]:
    """Finds a scheduler that does not step: for certain if `whole`, which one that waits for evaluations never is."""
    if any(is_schedule(event, index) for step in steps for event in step.events):
        return []
    text = f"schedulers.{index} has not stepped in {len(steps)} steps"
    text += (
        ", more than an epoch: the learning rate stays where it is"
        if whole
        else "; it may do so after an epoch or an evaluation"
    )
    fix = "call scheduler.step() after optimizer.step()"
    return [Finding("order", "fault" if whole else "note", text, (f"schedulers.{index}",), fix=fix)]


def comes_first(index: int, optimizer: int, steps: list[RecordedStep]) -> list[Finding]:
    """Finds a scheduler that steps before its optimizer has stepped for the first time.

    Steps in which the optimizer does not step are left out: a scheduler may count steps of another optimizer too.
    """
    events = next((step.events for step in steps if any(is_step(event, optimizer) for event in step.events)), [])
    early = [*itertools.takewhile(lambda event: not is_step(event, optimizer), events)]
    early = [event for event in early if is_schedule(event, index)]
    if not early:
        return []
    text = f"schedulers.{index} steps before optimizers.{optimizer}: its first learning rate is never used"
    fix = "call scheduler.step() after optimizer.step()"
    return [Finding("order", "fault", text, (f"schedulers.{index}",), early[0].line, fix)]


def twice(index: int, optimizer: int, steps: list[RecordedStep]) -> list[Finding]:
    """Finds a scheduler that steps again before its optimizer has, each time that it steps."""
    stepping, again, lines = 0, 0, []
    for step in steps:
        kept = [event for event in step.events if is_schedule(event, index) or is_step(event, optimizer)]
        pairs = [two for one, two in itertools.pairwise(kept) if one.kind == two.kind == "scheduler"]
        stepping += any(event.kind == "scheduler" for event in kept)
        again += bool(pairs)
        lines += [event.line for event in pairs]
    if again < 2 or again < stepping:  # once is the end of an epoch, or of a part of a schedule
        return []
    text = f"schedulers.{index} steps more than once for each step of optimizers.{optimizer} "
    text += f"({1 + len(lines) / again:g} times a step): the learning rate changes too fast"
    fix = "call scheduler.step() in one place, once for each optimizer.step()"
    return [Finding("order", "fault", text, (f"schedulers.{index}",), lines[0], fix)]


def overwritten(index: int, optimizer: int, loop: Loop, steps: list[RecordedStep]) -> list[Finding]:
    """Finds learning rates that are not the scheduler's when the optimizer steps.

    A rate that never changes although the scheduler's does is overwritten. If it changes too, something else, such as
    a warmup, may adjust it on purpose.
    """
    siblings = [place for place, each in enumerate(loop.schedulers) if optimizer_of(each, loop) == optimizer]
    steps = [step for step in steps if optimizer in step.lrs]
    # In a script a scheduler may be made after the first step.
    steps = [step for step in steps if len(step.rates(optimizer, index)) == len(step.lrs[optimizer]) > 0]
    differ = [step for step in steps if all(step.lrs[optimizer] != step.rates(optimizer, each) for each in siblings)]
    if not differ:
        return []
    groups = range(len(differ[0].lrs[optimizer]))
    used = [[step.lrs[optimizer][group] for step in steps] for group in groups]
    wanted = [[step.rates(optimizer, index)[group] for step in steps] for group in groups]
    fixed = [group for group in groups if len(set(used[group])) == 1 < len(set(wanted[group]))]
    group = fixed[0] if fixed else 0
    places = (f"schedulers.{index}", f"optimizers.{optimizer}.param_groups[{group}].lr")
    text = f"the learning rate of optimizers.{optimizer} is not the one that schedulers.{index} sets: "
    if fixed:
        text += f"it is {used[group][0]:g} in each of {len(steps)} steps, and the scheduler's goes from "
        text += f"{wanted[group][0]:g} to {wanted[group][-1]:g}; it is overwritten"
    else:
        one = differ[0]
        text += f"it is {one.lrs[optimizer][0]:g} where the scheduler's is {one.rates(optimizer, index)[0]:g}"
    fix = "do not set group['lr'] beside a scheduler"
    return [Finding("order", "fault" if fixed else "note", text, places, fix=fix)]
