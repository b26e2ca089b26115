"""The command `stabletrain whatif`: from what the user typed to the ranking.

Everything lies in `<run>/whatif/step-XXXXXXXX/`, named after the state from which the arms start: `start/` with the
state, a run folder for each arm, `whatif.json` and `whatif.html`. The same command goes on with what is there.

`WhatIf` carries out the plan: the start, the rounds, the other seeds, the ranking. It runs all arms. `BudgetedWhatIf`
(`budget.py`) is the same within a budget of steps, for a run that heals itself.
"""

import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from stabletrain.beside.whatif.arm_run import ArmRun
from stabletrain.beside.whatif.arms import Arm
from stabletrain.beside.whatif.array import ArmArray
from stabletrain.beside.whatif.edits import MissingState
from stabletrain.beside.whatif.opening import opening, seeds_text
from stabletrain.beside.whatif.outcome import Outcome, StartFacts, read_outcome, start_facts
from stabletrain.beside.whatif.page import write_whatif_page
from stabletrain.beside.whatif.plan import MIN_BATCHES, Plan, WhatIfOptions, plan
from stabletrain.beside.whatif.ranking import Ranking, finalists, rank, to_reference
from stabletrain.beside.whatif.report import WhatIfResult, about_table, command, ending, rows, table, write_json
from stabletrain.beside.whatif.rounds import run_arms, with_other_seeds
from stabletrain.beside.whatif.start import prepare, start_of
from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.data.order import position
from stabletrain.errors import ConfigError, Interrupted
from stabletrain.parallel.ranks import Ranks, current_ranks, run_on_main
from stabletrain.printable import one_line, say
from stabletrain.stored.json_files import DamagedFile, read_record
from stabletrain.tracking.metrics import replace

FIRST_ROUND = "first_round.json"
"""In the folder of a what-if: how its first round ended."""


class FirstRound(TypedDict):
    """The content of that file: what was asked for, and which arms go on."""

    stop: int
    best: int
    arms: list[str]
    going: list[str]


@dataclass
class WhatIf:
    """A what-if in which all arms run, on one process: the command `stabletrain whatif`.

    Attributes:
        plan: what to run.
        jobs: number of arms that run at once.
        slurm: runs them as an array job instead; None for on this machine.
        ranks: this process among those that run the what-if.
        starts: by arm, the checkpoint that it resumes, for the arms that were started.
        unusable: the arms whose start could not be made.
    """

    plan: Plan
    jobs: int = 1
    slurm: ArmArray | None = None
    ranks: Ranks = field(default_factory=current_ranks)
    starts: dict[str, Path] = field(default_factory=dict)
    unusable: list[Arm] = field(default_factory=list)

    def run(self) -> WhatIfResult:
        """Runs the rounds and ranks the arms.

        With several ranks, only the main process reads how arms ended, so the ranking of the others is empty.

        Raises:
            Interrupted: a signal arrived; the states are saved, and the next call goes on.
            ConfigError: the state cannot be computed.
            StabletrainError: an arm ended with an error.
        """
        plan, trouble, first = self.plan, self.plan.trouble, self.plan.rounds[0]
        # One state for all arms, so that arms differ only in what they change.
        start = self.prepare_start()
        facts = start_facts(start)

        # First round: all arms, to a little past the trouble. They are compared on batches after the trouble, because
        # an arm that never reads those of the trouble has no losses on them; if too few are left, on all.
        compared = trouble.last if trouble.last + MIN_BATCHES <= first else facts.step
        outcomes = first_outcomes = self.run_arms(self.startable(start, first), facts)
        ranking = final = ranked(outcomes, facts, compared)
        going = self.going_on(ranking, first)
        arms = [arm for arm in plan.arms if arm.name in going]
        rounds, after = [first], compared

        # Second round: the best of them, far enough to show whether a fix only delays the trouble. A single arm runs
        # too: there is nothing to compare, and whether it relapses is still worth knowing. It is judged by later
        # batches than those that chose the arms. An arm that skipped data has read some of them in the first round.
        if going and self.second_round_steps:
            rounds, after = [first, first + self.second_round_steps], first
            self.announce(f"second round, to step {rounds[1]:,}: {', '.join(going)}")
            outcomes = self.run_arms((self.arm_run(arm, rounds[1]) for arm in arms), facts)
            final = ranked(outcomes, facts, after)

        # Other seeds: the same arms on the data in another order, so that no arm wins by its batches alone.
        seeds = plan.seeds if going else ()
        if seeds:
            self.announce(f"with {seeds_text(seeds)}, to step {rounds[-1]:,}: {', '.join(going)}")
            others = with_other_seeds(plan, start, self.starts, arms, rounds[-1], self.jobs, self.slurm)
            outcomes = [outcome for outcome in outcomes if outcome.arm in arms]
            final = ranked(outcomes, facts, after, others, plan.seed)

        if more := self.run_from_step_0(final, facts, rounds[-1]):
            outcomes = [*outcomes, *more]
            final = ranked(outcomes, facts, after)

        # The arms that ended with the first round stay in the table, compared to the same reference on its batches.
        names = {outcome.arm.name for outcome in outcomes}
        first_round_only = [place for place in ranking.places if place.outcome.arm.name not in names]
        if final.reference:
            reference = {each.arm.name: each for each in (*outcomes, *first_outcomes)}[final.reference]
            place = position(compared, facts.skipped)
            first_round_only = [to_reference(each, reference, place) for each in first_round_only]
        return WhatIfResult(
            *(plan.base, trouble, facts.step, plan.folder, rounds, final, first_round_only, self.starts),
            refused=[*plan.refused, *self.unusable],
            compared=after,
            seeds=[plan.seed, *seeds] if seeds else [],
        )

    def startable(self, start: Checkpoint, stop: int) -> Iterator[ArmRun]:
        """Yields the arms of the first round one by one, each when its start is made, for as long as there is room."""
        plan = self.plan
        for arm in plan.arms:
            if not self.has_room:
                return
            try:
                self.starts[arm.name] = start_of(arm, start, plan.trouble, plan.base, plan.folder).path
            except MissingState as error:
                self.unusable.append(dataclasses.replace(arm, refused=str(error)))
                self.tell(f"{arm.name} does not apply: {error}")
            else:
                yield self.arm_run(arm, stop)

    def arm_run(self, arm: Arm, stop: int) -> ArmRun:
        """Returns an arm up to a step."""
        return ArmRun(self.plan.base, arm, self.starts[arm.name], self.plan.folder / arm.folder, stop)

    def going_on(self, ranking: Ranking, stop: int) -> list[str]:
        """Returns the arms of the second round, best first."""
        return run_on_main(self.ranks, lambda: recorded_finalists(self.plan.folder, ranking, stop, self.plan.best))

    # ---- what is different within a budget

    listening = True
    """Whether signals stop the arms and the computation of the state."""

    has_room = True
    """Whether another arm may be started."""

    @property
    def second_round_steps(self) -> int:
        """Steps of an arm in the second round; 0 if there is none."""
        return self.plan.rounds[-1] - self.plan.rounds[0]

    def prepare_start(self) -> Checkpoint:
        """Returns the state from which the arms start; computes it if it was not kept."""
        return prepare(self.plan.base, self.plan.origin, self.plan.folder, self.listening)

    def run_arms(self, runs: Iterable[ArmRun], facts: StartFacts) -> list[Outcome]:
        """Runs arms, and returns how they ended."""
        runs = [*runs]
        width = max(len(run.arm.name) for run in runs)

        def on_finished(run: ArmRun) -> None:
            say(f"{run.arm.name:<{width}}  {ending(read_outcome(run.arm, run.folder, facts, run.stop))}", flush=True)

        run_arms(runs, self.jobs, on_finished, self.slurm)
        return [read_outcome(run.arm, run.folder, facts, run.stop) for run in runs]

    def run_from_step_0(self, final: Ranking, facts: StartFacts, stop: int) -> list[Outcome]:
        """Runs no arm from step 0."""
        return []

    def announce(self, text: str) -> None:
        """Says which arms run next."""
        say(f"\n{text}", flush=True)

    def tell(self, text: str) -> None:
        """Shows the user a line."""
        say(one_line(text), flush=True)


def ranked(
    outcomes: Sequence[Outcome],
    facts: StartFacts,
    compared: int,
    others: Mapping[int, Sequence[Outcome]] | None = None,
    seed: int = 0,
) -> Ranking:
    """Ranks arms by the batches that follow step `compared`; for `others` and `seed` see `rank`."""
    first_loss = facts.first_loss
    if math.isnan(first_loss):  # at step 0 the run has learnt nothing yet: take the first batch that an arm has read
        first_loss = next((loss for each in outcomes for _, loss in sorted(each.losses.items())[:1]), math.nan)
    return rank(outcomes, position(compared, facts.skipped), first_loss, others, seed)


def recorded_finalists(folder: Path, ranking: Ranking, stop: int, count: int) -> list[str]:
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


def whatif(options: WhatIfOptions) -> WhatIfResult:
    """Runs a what-if, prints the result, and returns it.

    Raises:
        ConfigError: it cannot be run as the options say.
        Interrupted: a signal arrived; the same command goes on.
    """
    if current_ranks().launched:
        raise ConfigError("the arms run in one process each; fix: run stabletrain whatif without torchrun")
    planned = plan(options)
    say(opening(planned, options), flush=True)
    with locked(planned.folder):
        try:
            result = WhatIf(planned, options.jobs, options.slurm).run()
        except Interrupted:
            raise Interrupted("the what-if was stopped, its states are saved; fix: type it again", saved=True) from None
    say(f"\n{table(rows(result))}\n")
    for line in (*about_table(result), result.ranking.verdict):
        say(one_line(line))
    if typed := command(result):
        say(f"continue {typed}")
    say(f"page     {write_whatif_page(result)}")
    say(f"numbers  {write_json(result)}")
    return result
