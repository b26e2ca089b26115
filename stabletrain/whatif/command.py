"""The command `stabletrain whatif`: from what the user typed to the ranking.

Everything lies in `<run>/whatif/step-XXXXXXXX/`, named after the state from which the arms start: `start/` with the
state, a run folder for each arm, `whatif.json` and `whatif.html`. The same command goes on with what is there.
"""

import fcntl
import json
import math
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from stabletrain.data.order import position
from stabletrain.errors import ConfigError, Interrupted
from stabletrain.parallel.ranks import current_ranks
from stabletrain.printable import one_line, say
from stabletrain.stored.json_files import DamagedFile, read_record
from stabletrain.stored.run_json import RUN
from stabletrain.tracking.metrics import replace
from stabletrain.whatif.arms import Arm, catalogue, chosen, own_arm, with_fixes
from stabletrain.whatif.base import Base, read_base
from stabletrain.whatif.heats import Leg, run_legs
from stabletrain.whatif.judging import judge_all
from stabletrain.whatif.outcome import Facts, Outcome, facts_of, read_outcome
from stabletrain.whatif.page import write_whatif_page
from stabletrain.whatif.ranking import Ranking, finalists, rank, to_reference
from stabletrain.whatif.report import Found, about_table, command, cut, rows, table, write_json
from stabletrain.whatif.start import Origin, check_repeatable, find_origin, prepare, start_of
from stabletrain.whatif.statistics import LEAST
from stabletrain.whatif.target import find_target
from stabletrain.whatif.trouble import Trouble, find_trouble

FEWEST = LEAST * LEAST
"""Batches below which a difference has no interval."""

FIRST_HEAT = "first_heat.json"
"""In the folder of a what-if: how its first heat ended."""


class FirstHeat(TypedDict):
    """The content of that file: what was asked for, and which arms go on."""

    stop: int
    best: int
    arms: list[str]
    going: list[str]


@dataclass(frozen=True)
class Asked:
    """What the user asked for.

    Attributes:
        path: a run folder, an incident or a checkpoint.
        start: step of the state to start from; None for the newest healthy one before the trouble.
        arms: names of the arms; None for all that apply.
        own: arms of the user, each `key=value[,key=value...]`.
        past: steps after the trouble to which the first heat goes.
        steps: steps by which the second heat is longer; 0 for none.
        best: number of arms in the second heat, besides `nothing`.
        jobs: number of arms that run at once.
    """

    path: Path
    start: int | None = None
    arms: Sequence[str] | None = None
    own: Sequence[str] = ()
    past: int = 100
    steps: int = 300
    best: int = 3
    jobs: int = 1

    def check(self) -> None:
        """Checks the numbers; raises ConfigError."""
        bounds = {"--past": (self.past, FEWEST), "--steps": (self.steps, 0), "--best": (self.best, 1)}
        for name, (value, lowest) in {**bounds, "--jobs": (self.jobs, 1)}.items():
            if value < lowest:
                raise ConfigError(f"{name} {value} is below {lowest}; fix: {name} {lowest} or more")
        if 0 < self.steps < FEWEST:
            raise ConfigError(f"--steps {self.steps} is below {FEWEST}; fix: --steps {FEWEST} or more, or 0 for none")
        if current_ranks().launched:
            raise ConfigError("the arms run in one process each; fix: run stabletrain whatif without torchrun")


@dataclass(frozen=True)
class Plan:
    """What a what-if is going to do.

    Attributes:
        base, trouble, origin: the run, its trouble, and where the start state comes from.
        arms: those that apply.
        refused: those that do not.
        heats: the last step of each heat.
    """

    base: Base
    trouble: Trouble
    origin: Origin
    arms: Sequence[Arm]
    refused: Sequence[Arm]
    heats: Sequence[int]

    @property
    def folder(self) -> Path:
        """The folder of the what-if."""
        return self.base.run / "whatif" / f"step-{self.origin.step:08d}"


def plan(asked: Asked) -> Plan:
    """Returns what a what-if is going to do; writes nothing.

    Raises:
        ConfigError: the path, an arm or a number cannot be used, or the run cannot be resumed.
    """
    asked.check()
    target = find_target(asked.path)
    named = asked.start if asked.start is not None else target.checkpoint
    trouble = find_trouble(target, named)
    origin = find_origin(read_base(target.run, trouble.first).guarded_at, target.run, trouble, named)
    base = read_base(target.run, origin.step)
    reached = base.record.get("final", {}).get("steps")
    if isinstance(reached, int) and origin.step > reached:
        raise ConfigError(
            f"--from step-{origin.step}: {target.run} ended after step {reached}; fix: --from step-<at most {reached}>"
        )
    if origin.step + FEWEST > base.total:
        raise ConfigError(
            f"the arms would start after step {origin.step}, and the run ends at step {base.total}: too few steps are "
            f"left to compare; fix: --from step-<at most {max(0, base.total - FEWEST)}>"
        )
    check_repeatable(base, origin)
    own = [own_arm(word) for word in asked.own]
    values = base.settings.flat()
    there = with_fixes(catalogue(base.settings.choices, values, base.precision, origin.step), trouble.fixes)
    arms = judge_all(chosen(there, asked.arms, own), base)
    first = min(base.total, max(trouble.last, origin.step) + asked.past)
    second = min(base.total, first + asked.steps)
    heats = [first, second] if second - first >= FEWEST else [first]
    return Plan(
        base,
        trouble,
        origin,
        [arm for arm in arms if not arm.refused],
        [arm for arm in arms if arm.refused],
        heats,
    )


def whatif(asked: Asked) -> None:
    """Runs a what-if, and prints what it found.

    Raises:
        ConfigError: what was asked for cannot be done.
        Interrupted: a signal arrived; the same command goes on.
    """
    planned = plan(asked)
    say(opening(planned, asked), flush=True)
    with locked(planned.folder):
        try:
            found = run(planned, asked)
        except Interrupted:
            raise Interrupted("the what-if was stopped, its states are saved; fix: type it again", saved=True) from None
    say(f"\n{table(rows(found))}\n")
    for line in (*about_table(found), found.ranking.verdict):
        say(one_line(line))
    if typed := command(found):
        say(f"continue {typed}")
    say(f"page     {write_whatif_page(found)}")
    say(f"numbers  {write_json(found)}")


def run(planned: Plan, asked: Asked) -> Found:
    """Runs the heats and ranks the arms; raises as `whatif`."""
    base, trouble, folder = planned.base, planned.trouble, planned.folder
    start = prepare(base, planned.origin, folder)
    facts = facts_of(start)
    starts = {arm.name: start_of(arm, start, trouble, base, folder).path for arm in planned.arms}
    first, *later = planned.heats
    compared = trouble.last if trouble.last + FEWEST <= first else facts.step
    ranking = heat(planned, starts, facts, planned.arms, first, compared, asked.jobs)
    going = going_on(folder, ranking, first, asked.best)
    if not later or not going:
        return Found(base, trouble, facts.step, folder, [first], ranking, [], starts, planned.refused, compared)
    # With a single arm left there is nothing to compare, and whether it relapses is still worth knowing.
    say(f"\nsecond heat, to step {later[0]:,}: {', '.join(going)}", flush=True)
    arms = [arm for arm in planned.arms if arm.name in going]
    # Later batches than those that chose the arms. An arm that skipped data has read some of them in the first heat.
    final = heat(planned, starts, facts, arms, later[0], first, asked.jobs)
    out = [each for each in ranking.places if each.outcome.arm.name not in going]
    if final.reference:
        reference = next(each.outcome for each in ranking.places if each.outcome.arm.name == final.reference)
        place = position(compared, facts.skipped)
        out = [to_reference(each, reference, place) for each in out]
    return Found(base, trouble, facts.step, folder, planned.heats, final, out, starts, planned.refused, first)


def heat(
    planned: Plan,
    starts: Mapping[str, Path],
    facts: Facts,
    arms: Sequence[Arm],
    stop: int,
    compared: int,
    jobs: int,
) -> Ranking:
    """Runs arms to a step, and ranks them by the batches that follow step `compared`."""
    legs = [Leg(planned.base, arm, starts[arm.name], planned.folder / arm.folder, stop) for arm in arms]
    width = max(len(arm.name) for arm in arms)

    def told(leg: Leg) -> None:
        say(f"{leg.arm.name:<{width}}  {ending(read_outcome(leg.arm, leg.folder, facts, stop))}", flush=True)

    run_legs(legs, jobs, told)
    outcomes = [read_outcome(leg.arm, leg.folder, facts, stop) for leg in legs]
    first_loss = facts.first_loss
    if math.isnan(first_loss):  # at step 0 the run has learnt nothing yet: take the first batch that an arm has read
        first_loss = next((loss for each in outcomes for _, loss in sorted(each.losses.items())[:1]), math.nan)
    return rank(outcomes, position(compared, facts.skipped), first_loss)


def ending(outcome: Outcome) -> str:
    """Returns how an arm ended, in a line."""
    if outcome.broke:
        return one_line(cut(f"broke at step {outcome.step:,}: {outcome.reason}", 100))
    came_back = f", the trouble came back: {outcome.came_back}" if outcome.came_back else ""
    return f"step {outcome.step:,}, validation loss {outcome.val_loss:.4f}{came_back}"


def going_on(folder: Path, ranking: Ranking, stop: int, count: int) -> list[str]:
    """Returns the arms of the second heat. They are recorded: a what-if that goes on must not choose others."""
    file, arms = folder / FIRST_HEAT, sorted(each.outcome.arm.name for each in ranking.places)
    asked = {"stop": stop, "best": count, "arms": arms}
    with suppress(DamagedFile):
        known: dict[str, Any] = dict(read_record(file, FirstHeat))
        if {key: known[key] for key in asked} == asked and {*known["going"]} <= {*arms}:
            return known["going"]
    going = finalists(ranking, count)
    replace(file, json.dumps({**asked, "going": going}, indent=2) + "\n")
    return going


# ---- what is said


def opening(planned: Plan, asked: Asked) -> str:
    """Returns the lines that say what is going to happen, and the price."""
    base, origin, trouble = planned.base, planned.origin, planned.trouble
    count, first = len(planned.arms), planned.heats[0] - origin.step
    lines = [
        f"run      {base.run}",
        f"trouble  {steps_text(trouble)}: {trouble.text}",
        f"start    the state after step {origin.step:,}, {kept(origin)}",
    ]
    refused = f"; {len(planned.refused)} do not apply (--list says why)" if planned.refused else ""
    lines.append(f"arms     {', '.join(arm.name for arm in planned.arms)}{refused}")
    price = f"first heat {count} x {first:,} = {count * first:,} steps"
    total = origin.steps + count * first
    if len(planned.heats) > 1:
        longer = planned.heats[1] - planned.heats[0]
        most = min(count, asked.best + 1)
        price += f", second at most {most} x {longer:,} = {most * longer:,} steps"
        total += most * longer
    again = f"{origin.steps:,} steps to compute the state, " if origin.steps else ""
    done = "; what an earlier call has done is kept" if (planned.folder / "start" / RUN).exists() else ""
    lines.append(f"price    {again}{price}{duration(base, total, asked.jobs)}{done}")
    return "\n".join(one_line(line) for line in lines)


def steps_text(trouble: Trouble) -> str:
    """Names the steps of a trouble."""
    return (
        f"step {trouble.first:,}" if trouble.first == trouble.last else f"steps {trouble.first:,} to {trouble.last:,}"
    )


def kept(origin: Origin) -> str:
    """Says where the state comes from."""
    if not origin.steps and origin.source is not None:
        return f"from {origin.source.path.name}"
    begin = "step 0" if origin.source is None else origin.source.path.name
    if not origin.steps:
        return "from the run's initial weights"
    return f"which was not kept: computed again from {begin}"


def duration(base: Base, steps: int, jobs: int) -> str:
    """Returns about how long a number of steps takes; empty if the run has not recorded its speed."""
    final = base.record.get("final", {})
    seconds, ticks = final.get("seconds"), final.get("ticks", final.get("steps"))
    if not isinstance(seconds, int | float) or not isinstance(ticks, int | float) or ticks <= 0:
        return ""
    spent = seconds / ticks * steps / jobs
    return f"; about {spent:.0f} s" if spent < 120 else f"; about {spent / 60:.0f} min"


def listing(asked: Asked) -> str:
    """Returns every arm with the reason for which it applies or does not; writes nothing."""
    planned = plan(asked)
    head = (
        f"arms from the state after step {planned.origin.step:,} of {planned.base.run}; the trouble: "
        f"{steps_text(planned.trouble)}"
    )
    width = max(len(arm.name) for arm in (*planned.arms, *planned.refused))
    parts = (("these apply:", planned.arms), ("these do not:", planned.refused))
    lines = [head]
    for title, arms in parts:
        lines += ["", title] if arms else []
        for arm in arms:
            typed = " ".join(arm.overrides)
            shown = f"{typed}: " if typed and typed != arm.name else ""
            lines.append(one_line(f"  {arm.name:<{width}}  {shown}{reason(arm)}"))
    return "\n".join(lines)


def reason(arm: Arm) -> str:
    """Returns why an arm applies, or does not."""
    named = f"named by the {arm.named}; " if arm.named and arm.named != "you" else ""
    return one_line(arm.refused or f"{named}{arm.about}" or "your own")


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """A context in which no other process may run the what-if of a folder.

    Raises:
        ConfigError: another one does, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}); fix: copy the run to another disk"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"{folder}: another process runs this what-if; fix: wait for it, or stop it") from None
    try:
        yield
    finally:
        os.close(lock)
