"""What is said before the first arm runs: the trouble, the start, the arms and the price; or the list of all arms."""

from collections.abc import Sequence
from typing import Any

from stabletrain.beside.whatif.arms import Arm
from stabletrain.beside.whatif.base import BaseRun
from stabletrain.beside.whatif.plan import Plan, WhatIfOptions, plan
from stabletrain.beside.whatif.start import Origin
from stabletrain.beside.whatif.trouble import Trouble
from stabletrain.printable import one_line
from stabletrain.stored.run_files import RUN


def opening(planned: Plan, options: WhatIfOptions) -> str:
    """Returns the lines that say what is going to happen, and the price."""
    base, origin, trouble = planned.base, planned.origin, planned.trouble
    count, first = len(planned.arms), planned.rounds[0] - origin.step
    lines = [
        f"run      {base.run}",
        f"trouble  {steps_text(trouble)}: {trouble.text}",
        f"start    the state after step {origin.step:,}, {origin_text(origin, base.repeats_exactly)}",
    ]
    refused = f"; {len(planned.refused)} do not apply (--list says why)" if planned.refused else ""
    lines.append(f"arms     {', '.join(arm.name for arm in planned.arms)}{refused}")
    lines.append(f"how      {how_text(options)}")
    price = f"first round {count} x {first:,} = {count * first:,} steps"
    total = origin.steps + count * first
    most = min(count, options.best + 1)
    if len(planned.rounds) > 1:
        longer = planned.rounds[1] - planned.rounds[0]
        price += f", second at most {most} x {longer:,} = {most * longer:,} steps"
        total += most * longer
    if planned.seeds:
        each, runs = planned.rounds[-1] - origin.step, most * len(planned.seeds)
        price += f", with {seeds_text(planned.seeds)} at most {runs} x {each:,} = {runs * each:,} steps"
        total += runs * each
    again = f"{origin.steps:,} steps to compute the state, " if origin.steps else ""
    done = "; what an earlier call has done is kept" if (planned.folder / "start" / RUN).exists() else ""
    lines.append(f"price    {again}{price}{duration(base, total, options)}{done}")
    return "\n".join(one_line(line) for line in lines)


def seeds_text(seeds: Sequence[int]) -> str:
    """Names the other seeds."""
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"


def steps_text(trouble: Trouble) -> str:
    """Names the steps of a trouble."""
    return (
        f"step {trouble.first:,}" if trouble.first == trouble.last else f"steps {trouble.first:,} to {trouble.last:,}"
    )


def origin_text(origin: Origin, exactly: bool = True) -> str:
    """Says where the state comes from, and whether a state that is computed again has the same bits."""
    if not origin.steps and origin.source is not None:
        return f"from {origin.source.path.name}"
    begin = "step 0" if origin.source is None else origin.source.path.name
    if not origin.steps:
        return "from the run's initial weights"
    alike = "" if exactly else "; on a card without determinism=strict it will be alike, not the same bits"
    return f"which was not kept: computed again from {begin}{alike}"


def how_text(options: WhatIfOptions) -> str:
    """Says how the arms run."""
    if options.slurm is not None:
        return f"as {options.slurm}"
    return (
        "one arm after the other" if options.jobs == 1 else f"{options.jobs} arms at once, each in a process of its own"
    )


def duration(base: BaseRun, steps: int, options: WhatIfOptions) -> str:
    """Returns about how long a number of steps takes; empty if the run has not recorded its speed.

    In Slurm this is the time of all tasks together: the queue decides how many run at once.
    """
    final = base.record.get("final", {})
    seconds, ticks = final.get("seconds"), final.get("ticks", final.get("steps"))
    if not isinstance(seconds, int | float) or not isinstance(ticks, int | float) or ticks <= 0:
        return ""
    spent = seconds / ticks * steps / (1 if options.slurm else options.jobs)
    text = f"; about {spent:.0f} s" if spent < 120 else f"; about {spent / 60:.0f} min"
    return f"{text} in all" if options.slurm else text


def listing(options: WhatIfOptions) -> str:
    """Returns every arm with the reason for which it applies or does not; writes nothing."""
    planned = plan(options)
    head = (
        f"arms from the state after step {planned.origin.step:,} of {planned.base.run}; the trouble: "
        f"{steps_text(planned.trouble)}"
    )
    width = max(len(arm.name) for arm in (*planned.arms, *planned.refused))
    parts = (("these apply:", planned.arms), ("these do not:", planned.refused))
    lines = [head, f"they run {how_text(options)}"]
    for title, arms in parts:
        lines += ["", title] if arms else []
        for arm in arms:
            typed = " ".join(arm.overrides)
            shown = f"{typed}: " if typed and typed != arm.name else ""
            lines.append(one_line(f"  {arm.name:<{width}}  {shown}{reason(arm)}"))
    return "\n".join(lines)


def listing_json(options: WhatIfOptions) -> dict[str, Any]:
    """Returns the same as JSON values."""
    planned = plan(options)
    trouble = planned.trouble
    return {
        "run": str(planned.base.run),
        "start": planned.origin.step,
        "trouble": {"first": trouble.first, "last": trouble.last, "text": trouble.text},
        "arms": [
            {"arm": arm.name, "overrides": arm.overrides, "applies": not arm.refused, "about": reason(arm)}
            for arm in (*planned.arms, *planned.refused)
        ],
    }


def reason(arm: Arm) -> str:
    """Returns why an arm applies, or does not."""
    named = f"named by the {arm.named}; " if arm.named and arm.named != "you" else ""
    return one_line(arm.refused or f"{named}{arm.about}" or "your own")
