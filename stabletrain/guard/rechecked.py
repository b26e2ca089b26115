"""What the repetition of a step says about the ranks: lines for the user, and which rank a comparison of them names."""

import platform
from dataclasses import replace

from stabletrain.guard.checks.neighbours import blame
from stabletrain.guard.checks.recheck import Finding
from stabletrain.guard.read_step import ReadStep

RANK_DIFFERS = "a rank computed other bits than another rank for the same micro-batch"


def blame_neighbour(step: ReadStep, place: str, own: Finding) -> Finding:
    """Returns what a comparison of ranks found, if no rank's own repetition differs; else `own`.

    All ranks must call it. Waits for the device.

    Args:
        step: a step whose repetition, or whose comparison of ranks, differs.
        place: device, host and number of this rank.
        own: what is known about this rank's repetition.
    """
    table, guard, rank = step.guard.recheck.table, step.guard, step.parallel.ranks.rank
    if table is None or step.parallel.any_rank(own.differs):
        return own
    found = blame(table)  # every rank has the same table
    if found is None:
        return own
    everyones = step.parallel.gather((place, platform.node()))
    guard.reason = RANK_DIFFERS
    return replace(
        own,
        part="neighbour",
        differs=rank in found.suspects,
        agreed=guard.recheck.agreed("neighbour"),
        place="; ".join(everyones[each][0] for each in found.suspects),
        blame=found,
        hosts=[*dict.fromkeys(everyones[each][1] for each in found.suspects)],
    )


def report_varying(step: ReadStep, part: str) -> None:
    """Tells the user that a part never comes out the same with this model, so that it is judged otherwise from now."""
    step.tracker.event("recheck_varies", step.number, part=part, tick=step.tick)
    line = (
        f"a second computation of the {part} never gives the same bits with this model: its code may depend on more "
        "than weights, buffers, batch and random numbers; the recheck now compares with a limit that is learnt"
    )
    if part == "neighbour":
        line = (
            "no two ranks get the same bits from the same micro-batch: the model's code may read which rank it runs "
            "on, or, with two ranks, one of them may compute wrongly since the start; ranks are not compared any more"
        )
    step.tracker.note(f"step {step.number}: {line}")


def report_recheck(step: ReadStep) -> None:
    """Tells the user once that ranks cannot be compared, or that repetitions end because memory does not suffice."""
    recheck, tracker = step.guard.recheck, step.tracker
    if why := recheck.news():
        tracker.event("recheck_across_off", step.number, reason=why, tick=step.tick)
        tracker.note(f"step {step.number}: guard.recheck_across=ranks does not compare the ranks: {why}")
    if not recheck.runs_out_of_memory(step.reading):
        return
    tracker.event("recheck_off", step.number, reason="out of memory", tick=step.tick)
    tracker.note(
        f"step {step.number}: too little memory to compute a gradient and an update twice, so arithmetic is not "
        "checked in this process; training is not affected. fix: a smaller batch_size, or more grad_accum_steps"
    )
