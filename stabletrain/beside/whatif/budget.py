"""A what-if within a budget of steps, run by all ranks of a run: the arms one after the other, in this process.

The arms run in their order for as long as the budget lasts. Part of it is set aside for the second round, and for the
best arm from step 0: the state before the trouble can be damaged already, as by a learning rate that was too high from
the start. What each arm has cost is recorded, so a what-if that was interrupted spends the same budget in the same way.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypedDict

from stabletrain.beside.whatif.arm_run import ArmRun, run_arm
from stabletrain.beside.whatif.arms import SKIP
from stabletrain.beside.whatif.driver import WhatIf
from stabletrain.beside.whatif.outcome import Outcome, StartFacts, read_outcome, start_facts
from stabletrain.beside.whatif.ranking import Ranking
from stabletrain.beside.whatif.report import ending
from stabletrain.beside.whatif.start import Origin, newest_checkpoint, prepare, start_of, with_skips_of
from stabletrain.checkpoint.folder import Folder
from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.errors import Interrupted
from stabletrain.machine.signals import NoStopRequest, StopRequest
from stabletrain.parallel.ranks import Ranks, run_on_main
from stabletrain.stored.json_files import Count, DamagedFile, read_record
from stabletrain.stored.run_files import read_run_record
from stabletrain.tracking import metrics

FROM_0_SHARE = 0.25
"""Share of the budget above which the best arm is not tried from step 0."""

FROM_0 = "from_step_0"
"""What the name of that arm begins with."""

COSTS = "costs.json"
"""In the folder of a what-if: what each arm has cost in each round."""


class Costs(TypedDict):
    """The content of that file: the steps that were executed, by `<arm> to <last step of the round>`."""

    steps: dict[str, Count]


@dataclass(kw_only=True)
class BudgetedWhatIf(WhatIf):
    """A what-if of a run that has halted.

    Attributes:
        budget: maximum number of steps to spend, including those that compute the state again. The last arm may exceed
            it: whether another arm may be started is decided before the arm runs.
        show: shows the user a line; called on the main process only.
        live: whether an arm may show a live line.
        signals: what asks the what-if to stop, also between two arms; it is listened to already.
        spent: steps executed so far.
    """

    budget: int
    show: Callable[[str], None]
    live: bool
    signals: StopRequest | NoStopRequest
    spent: int = 0

    # ---- how the budget is divided

    @property
    def first_round_steps(self) -> int:
        """Steps of an arm in the first round."""
        return self.plan.rounds[0] - self.plan.origin.step

    @property
    def second_round_steps(self) -> int:
        """Steps of an arm in the second round; 0 if the budget has no room for it beside two arms of the first."""
        steps = super().second_round_steps
        return steps if self._two_arms + self.plan.best * steps <= self.budget else 0

    @property
    def steps_from_zero(self) -> int:
        """Steps of the best arm from step 0; 0 if that is not tried."""
        if not (self.plan.origin.step and self.plan.base.started_at_step_0):
            return 0
        steps = self.plan.rounds[0] + self.second_round_steps
        total = self._two_arms + self.plan.best * self.second_round_steps + steps
        return steps if total <= self.budget and steps <= FROM_0_SHARE * self.budget else 0

    @property
    def _two_arms(self) -> int:
        """Steps to compute the state, and of two arms in the first round: fewer leave nothing to choose from."""
        return self.plan.origin.steps + 2 * self.first_round_steps

    @property
    def affordable(self) -> bool:
        """Whether the budget has room for one arm."""
        return self.plan.origin.steps + self.first_round_steps <= self.budget

    @property
    def has_room(self) -> bool:
        """Whether another arm may be started without using what is set aside; the first arm always may."""
        set_aside = self.plan.best * self.second_round_steps + self.steps_from_zero
        return not self.starts or self.spent + self.first_round_steps + set_aside <= self.budget

    # ---- what the driver does

    @property
    def listening(self) -> bool:
        """Whether signals stop the arms and the computation of the state."""
        return isinstance(self.signals, StopRequest)

    def prepare_start(self) -> Checkpoint:
        """Returns the state from which the arms start; the steps that compute it are spent."""
        start = super().prepare_start()
        self.spent = self.plan.origin.steps
        return start

    def run_arms(self, runs: Iterable[ArmRun], facts: StartFacts) -> list[Outcome]:
        """Runs arms one after the other, unless they are over; returns how they ended, on the main process."""
        outcomes = []
        for run in runs:
            check_not_stopped(self.ranks, self.signals)
            if not run_on_main(self.ranks, lambda run=run: run.over):
                run_arm(run, self.live, self.listening)
            # Also what an earlier process spent counts, so that the decision about the next arm is the same.
            self.spent += run_on_main(self.ranks, lambda run=run: self._cost(run, facts))
            if self.ranks.is_main:
                outcomes.append(read_outcome(run.arm, run.folder, facts, run.stop))
                self.tell(f"{run.arm.name}: {ending(outcomes[-1])}")
                if outcomes[-1].broke:
                    self._drop_states([run.arm.name])
        return outcomes

    def going_on(self, ranking: Ranking, stop: int) -> list[str]:
        """Returns the arms of the second round, best first; the states of the others are deleted."""
        going = super().going_on(ranking, stop)
        self._drop_states([name for name in self.starts if name not in going])
        return going

    def run_from_step_0(self, final: Ranking, facts: StartFacts, stop: int) -> list[Outcome]:
        """Runs the winner from step 0 on the batches of the others, if the budget has room for it."""
        best = run_on_main(self.ranks, lambda: final.winner if self.steps_from_zero else "")
        # An edit other than `skip` belongs to the state before the trouble; at step 0 it would be another fix.
        arm = next((each for each in self.plan.arms if each.name == best and each.edit in ("", SKIP)), None)
        if arm is None:
            return []
        base, folder = self.plan.base, self.plan.folder / FROM_0
        known = Folder(base.run / "checkpoints", tell=lambda line: None)
        # After an earlier healing, the checkpoint of step 0 may be one with the ticks of its halt: not the first state.
        first = run_on_main(self.ranks, lambda: Origin(0, 0, newest_checkpoint(known.known(), 0, 0)))
        start = with_skips_of(facts.skipped, prepare(base, first, folder, self.listening), base, folder)
        renamed = replace(arm, name=f"{FROM_0}:{arm.name}", about=f"{arm.about or 'the same'}, from step 0")
        self.starts[renamed.name] = start_of(arm, start, self.plan.trouble, base, folder).path
        self.tell(f"{arm.name} from step 0, to step {stop:,}")
        return self.run_arms([self.arm_run(renamed, stop)], start_facts(start))

    def _cost(self, run: ArmRun, facts: StartFacts) -> int:
        """Returns the steps that an arm has executed in a round, and records them."""
        file, known = self.plan.folder / COSTS, dict[str, int]()
        with suppress(DamagedFile):
            known = read_record(file, Costs)["steps"]
        name = f"{run.arm.name} to {run.stop}"
        if name not in known:
            ticks = 0
            with suppress(DamagedFile):  # an arm that could not be built has no record
                ticks = int(read_run_record(run.folder).get("final", {}).get("ticks", facts.tick)) - facts.tick
            known[name] = ticks - sum(cost for each, cost in known.items() if each.startswith(f"{run.arm.name} to "))
            metrics.replace(file, json.dumps({"steps": known}, indent=2) + "\n")
        return known[name]

    def _drop_states(self, names: list[str]) -> None:
        """Deletes the checkpoints of arms that do not go on: each is as large as one of the run."""
        for arm in self.plan.arms if self.ranks.is_main else ():
            if arm.name in names:
                shutil.rmtree(self.plan.folder / arm.folder / "checkpoints", ignore_errors=True)

    def announce(self, text: str) -> None:
        """Says which arms run next."""
        self.tell(text)

    def tell(self, text: str) -> None:
        """Shows the user a line."""
        if self.ranks.is_main:
            self.show(f"what-if  {text}")


def check_not_stopped(ranks: Ranks, signals: StopRequest | NoStopRequest) -> None:
    """Raises Interrupted if a signal has arrived at the main process between two arms; all states are saved then."""
    if name := run_on_main(ranks, lambda: signals.name):
        raise Interrupted(f"{name}: stopped between two arms, the states are saved", saved=True)
