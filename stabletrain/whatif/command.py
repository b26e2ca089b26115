"""The command `stabletrain whatif`: from what the user typed to the ranking.

Everything lies in `<run>/whatif/step-XXXXXXXX/`, named after the state from which the arms start: `start/` with the
state, a run folder for each arm, `whatif.json` and `whatif.html`. The same command goes on with what is there.
"""

import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.data.order import position
from stabletrain.errors import ConfigError, Interrupted
from stabletrain.parallel.ranks import current_ranks
from stabletrain.printable import one_line, say
from stabletrain.stored.json_files import DamagedFile, read_record
from stabletrain.tracking.metrics import replace
from stabletrain.whatif.arms import Arm
from stabletrain.whatif.averaging import MissingState
from stabletrain.whatif.opening import opening, seeds_text
from stabletrain.whatif.outcome import Facts, Outcome, facts_of, read_outcome
from stabletrain.whatif.page import write_whatif_page
from stabletrain.whatif.plan import FEWEST, Asked, Plan, plan
from stabletrain.whatif.ranking import Ranking, finalists, rank, to_reference
from stabletrain.whatif.report import Found, about_table, command, ending, rows, table, write_json
from stabletrain.whatif.rounds import Leg, run_legs
from stabletrain.whatif.seeds import with_other_seeds
from stabletrain.whatif.start import prepare, start_of

FIRST_ROUND = "first_round.json"
"""In the folder of a what-if: how its first round ended."""


class FirstRound(TypedDict):
    """The content of that file: what was asked for, and which arms go on."""

    stop: int
    best: int
    arms: list[str]
    going: list[str]


def whatif(asked: Asked) -> None:
    """Runs a what-if, and prints what it found.

    Raises:
        ConfigError: what was asked for cannot be done.
        Interrupted: a signal arrived; the same command goes on.
    """
    if current_ranks().launched:
        raise ConfigError("the arms run in one process each; fix: run stabletrain whatif without torchrun")
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
    """Runs the rounds and ranks the arms; raises as `whatif`."""
    base, trouble, folder = planned.base, planned.trouble, planned.folder
    start = prepare(base, planned.origin, folder)
    facts = facts_of(start)
    planned, starts = starts_of(planned, start)
    first, *later = planned.rounds
    compared = trouble.last if trouble.last + FEWEST <= first else facts.step
    ranking = run_round(planned, starts, facts, planned.arms, first, compared, asked)
    going = going_on(folder, ranking, first, asked.best)
    if not going or not (later or planned.seeds):
        return Found(base, trouble, facts.step, folder, [first], ranking, [], starts, planned.refused, compared)
    arms = [arm for arm in planned.arms if arm.name in going]
    stop, after = first, compared
    if later:
        # With a single arm left there is nothing to compare, and whether it relapses is still worth knowing. Later
        # batches than those that chose the arms. An arm that skipped data has read some of them in the first round.
        stop, after = later[0], first
        say(f"\nsecond round, to step {stop:,}: {', '.join(going)}", flush=True)
        final = run_round(planned, starts, facts, arms, stop, after, asked)
    else:
        final = ranked([each.outcome for each in ranking.places if each.outcome.arm in arms], facts, after)
    if planned.seeds:
        say(f"\nwith {seeds_text(planned.seeds)}, to step {stop:,}: {', '.join(going)}", flush=True)
        outcomes = {each.outcome.arm.name: each.outcome for each in final.places}
        others = with_other_seeds(planned, start, starts, arms, stop, asked)
        final = ranked([outcomes[arm.name] for arm in arms], facts, after, others, planned.seed)
    out = [each for each in ranking.places if each.outcome.arm.name not in going]
    if final.reference:
        reference = next(each.outcome for each in ranking.places if each.outcome.arm.name == final.reference)
        place = position(compared, facts.skipped)
        out = [to_reference(each, reference, place) for each in out]
    seeds = [planned.seed, *planned.seeds] if planned.seeds else []
    return Found(base, trouble, facts.step, folder, planned.rounds, final, out, starts, planned.refused, after, seeds)


def starts_of(planned: Plan, start: Checkpoint) -> tuple[Plan, dict[str, Path]]:
    """Returns the checkpoint that each arm resumes, and the plan without the arms that turn out not to have one."""
    starts, refused = dict[str, Path](), [*planned.refused]
    for arm in planned.arms:
        try:
            starts[arm.name] = start_of(arm, start, planned.trouble, planned.base, planned.folder).path
        except MissingState as error:
            refused.append(dataclasses.replace(arm, refused=str(error)))
            say(one_line(f"{arm.name} does not apply: {error}"), flush=True)
    arms = [arm for arm in planned.arms if arm.name in starts]
    return dataclasses.replace(planned, arms=arms, refused=refused), starts


def run_round(
    planned: Plan,
    starts: Mapping[str, Path],
    facts: Facts,
    arms: Sequence[Arm],
    stop: int,
    compared: int,
    asked: Asked,
) -> Ranking:
    """Runs arms to a step, and ranks them by the batches that follow step `compared`."""
    legs = [Leg(planned.base, arm, starts[arm.name], planned.folder / arm.folder, stop) for arm in arms]
    width = max(len(arm.name) for arm in arms)

    def told(leg: Leg) -> None:
        say(f"{leg.arm.name:<{width}}  {ending(read_outcome(leg.arm, leg.folder, facts, stop))}", flush=True)

    run_legs(legs, asked.jobs, told, asked.slurm)
    return ranked([read_outcome(leg.arm, leg.folder, facts, stop) for leg in legs], facts, compared)


def ranked(
    outcomes: Sequence[Outcome],
    facts: Facts,
    compared: int,
    others: Mapping[int, Sequence[Outcome]] | None = None,
    seed: int = 0,
) -> Ranking:
    """Ranks arms by the batches that follow step `compared`; for `others` and `seed` see `rank`."""
    first_loss = facts.first_loss
    if math.isnan(first_loss):  # at step 0 the run has learnt nothing yet: take the first batch that an arm has read
        first_loss = next((loss for each in outcomes for _, loss in sorted(each.losses.items())[:1]), math.nan)
    return rank(outcomes, position(compared, facts.skipped), first_loss, others, seed)


def going_on(folder: Path, ranking: Ranking, stop: int, count: int) -> list[str]:
    """Returns the arms of the second round. They are recorded: a what-if that goes on must not choose others."""
    file, arms = folder / FIRST_ROUND, sorted(each.outcome.arm.name for each in ranking.places)
    asked = {"stop": stop, "best": count, "arms": arms}
    with suppress(DamagedFile):
        known: dict[str, Any] = dict(read_record(file, FirstRound))
        if {key: known[key] for key in asked} == asked and {*known["going"]} <= {*arms}:
            return known["going"]
    going = finalists(ranking, count)
    replace(file, json.dumps({**asked, "going": going}, indent=2) + "\n")
    return going


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """A context in which no other process may run the what-if of a folder.

    Raises:
        ConfigError: another one does, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
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
