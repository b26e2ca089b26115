"""A what-if within a budget of steps, run by all ranks of a run: the arms one after the other, in this process.

The arms run in their order for as long as the budget lasts. Part of it is set aside for the second round, and for the
best arm from step 0: the state before the trouble can be damaged already, as by a learning rate that was too high from
the start. What each arm has cost is recorded, so a what-if that was interrupted spends the same budget in the same way.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict

from stabletrain.checkpoint.folder import Folder
from stabletrain.data.order import position
from stabletrain.errors import ConfigError, Interrupted
from stabletrain.machine.signals import NoStopRequest, StopRequest
from stabletrain.parallel.ranks import Ranks, run_on_main
from stabletrain.stored.json_files import Count, DamagedFile, read_record
from stabletrain.stored.run_json import read_run_record
from stabletrain.tracking import metrics
from stabletrain.whatif.arms import SKIP, Arm
from stabletrain.whatif.command import going_on, ranked
from stabletrain.whatif.outcome import Facts, Outcome, facts_of, read_outcome
from stabletrain.whatif.plan import FEWEST, Plan
from stabletrain.whatif.ranking import to_reference
from stabletrain.whatif.report import Found, ending
from stabletrain.whatif.rounds import Leg, run_leg
from stabletrain.whatif.start import Origin, newest, on_data_of, prepare, start_of

BEST = 2
"""Number of arms in the second round."""

SHARE = 0.25
"""Share of the budget above which the best arm is not tried from step 0."""

FROM_0 = "from_step_0"
"""What the name of that arm begins with."""

COSTS = "costs.json"
"""In the folder of a what-if: what each arm has cost in each round."""


class Costs(TypedDict):
    """The content of that file: the steps that were executed, by `<arm> to <last step of the round>`."""

    steps: dict[str, Count]


@dataclass
class Within:
    """A what-if of a run that has halted.

    Attributes:
        plan: with the arms in the order in which they are tried.
        budget: number of steps, those to compute the state included, below which another arm may be started.
        ranks: those of the run.
        tell: shows the user a line; called on the main process only.
        live: whether an arm may show a live line.
        signals: what asks all of it to stop, also between two arms; it is listened to already.
        spent: steps executed so far.
        tried: names of the arms that were started.
    """

    plan: Plan
    budget: int
    ranks: Ranks
    tell: Callable[[str], None]
    live: bool
    signals: StopRequest | NoStopRequest
    spent: int = 0
    tried: list[str] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Steps of an arm in the first round."""
        return self.plan.rounds[0] - self.plan.origin.step

    @property
    def longer(self) -> int:
        """Steps of an arm in the second round; 0 if the budget has no room for it beside two arms of the first."""
        steps = self.plan.rounds[-1] - self.plan.rounds[0]
        return steps if self.plan.origin.steps + 2 * self.length + BEST * steps <= self.budget else 0

    @property
    def anew(self) -> int:
        """Steps of the best arm from step 0; 0 if that is not tried."""
        if not (self.plan.origin.step and self.plan.base.began_at_0):
            return 0
        steps = self.plan.rounds[-1] if self.longer else self.plan.rounds[0]
        first = self.plan.origin.steps + 2 * self.length + BEST * self.longer
        return steps if first + steps <= self.budget and steps <= SHARE * self.budget else 0

    @property
    def affordable(self) -> bool:
        """Whether the budget has room for one arm."""
        return self.plan.origin.steps + self.length <= self.budget

    def run(self) -> Found | None:
        """Runs the rounds and ranks the arms; returns what was found, and None on the other ranks.

        Raises:
            Interrupted: a signal arrived; the states are saved.
            ConfigError: the state cannot be computed.
        """
        base, trouble, folder = self.plan.base, self.plan.trouble, self.plan.folder
        start = prepare(base, self.plan.origin, folder, self._listening)
        facts, first = facts_of(start), self.plan.rounds[0]
        self.spent = self.plan.origin.steps
        compared = trouble.last if trouble.last + FEWEST <= first else facts.step
        outcomes: dict[str, Outcome] = {}
        starts: dict[str, Path] = {}
        for arm in self.plan.arms:
            if self.tried and self.spent + self.length + BEST * self.longer + self.anew > self.budget:
                break
            try:
                starts[arm.name] = start_of(arm, start, trouble, base, folder).path
            except ConfigError as error:  # a state that it needs cannot be read
                self._say(f"{arm.name} does not apply: {error}")
                continue
            self._run_arm(arm, starts[arm.name], facts, first, outcomes)
            self.tried.append(arm.name)
        going, ranking = [], None
        if self.ranks.is_main:
            ranking = ranked([*outcomes.values()], facts, compared)
            going = going_on(folder, ranking, first, BEST)
        going = run_on_main(self.ranks, lambda: going)
        self._drop_states([name for name in self.tried if name not in going])
        final, rounds, after, ended = ranking, [first], compared, outcomes
        if self.longer and going:
            rounds, after, ended = [first, first + self.longer], first, {}
            self._say(f"second round, to step {rounds[1]:,}: {', '.join(going)}")
            for arm in [each for each in self.plan.arms if each.name in going]:
                self._run_arm(arm, starts[arm.name], facts, rounds[1], ended)
            final = ranked([*ended.values()], facts, first) if self.ranks.is_main else None
        best = run_on_main(self.ranks, lambda: final.winner if final is not None and self.anew else "")
        if arm := next((each for each in self.plan.arms if each.name == best and each.edit in ("", SKIP)), None):
            self._run_from_0(arm, facts, rounds[-1], starts, ended)
            final = ranked([*ended.values()], facts, after) if self.ranks.is_main else None
        if final is None or ranking is None:
            return None
        out = [each for each in ranking.places if each.outcome.arm.name not in ended]
        if final.reference:
            reference = outcomes.get(final.reference) or ended[final.reference]
            out = [to_reference(each, reference, position(compared, facts.skipped)) for each in out]
        return Found(base, trouble, facts.step, folder, rounds, final, out, starts, self.plan.refused, after)

    def _run_from_0(
        self, arm: Arm, other: Facts, stop: int, starts: dict[str, Path], outcomes: dict[str, Outcome]
    ) -> None:
        """Runs an arm from step 0 on the batches of the others; adds its start and, on the main process, its end."""
        base, folder = self.plan.base, self.plan.folder / FROM_0
        known = Folder(base.run / "checkpoints", tell=lambda line: None)
        # After an earlier healing, the checkpoint of step 0 may be one with the ticks of its halt: not the first state.
        first = run_on_main(self.ranks, lambda: Origin(0, 0, newest(known.known(), 0, 0)))
        start = on_data_of(other.skipped, prepare(base, first, folder, self._listening), base, folder)
        anew = replace(arm, name=f"{FROM_0}:{arm.name}", about=f"{arm.about or 'the same'}, from step 0")
        starts[anew.name] = start_of(arm, start, self.plan.trouble, base, folder).path
        self._say(f"{arm.name} from step 0, to step {stop:,}")
        self._run_arm(anew, starts[anew.name], facts_of(start), stop, outcomes)
        self.tried.append(anew.name)

    def _run_arm(self, arm: Arm, start: Path, facts: Facts, stop: int, outcomes: dict[str, Outcome]) -> None:
        """Runs an arm to a step unless it is over, counts its steps, and adds how it ended on the main process."""
        leg = Leg(self.plan.base, arm, start, self.plan.folder / arm.folder, stop)
        check_not_stopped(self.ranks, self.signals)
        if not run_on_main(self.ranks, lambda: leg.over):
            run_leg(leg, self.live, self._listening)
        self.spent += run_on_main(self.ranks, lambda: self._cost(leg, facts))
        if self.ranks.is_main:
            outcomes[arm.name] = read_outcome(arm, leg.folder, facts, stop)
            self._say(f"{arm.name}: {ending(outcomes[arm.name])}")
            if outcomes[arm.name].broke:
                self._drop_states([arm.name])

    def _cost(self, leg: Leg, facts: Facts) -> int:
        """Returns the steps that an arm has executed in a round, and records them."""
        file, known = self.plan.folder / COSTS, dict[str, int]()
        with suppress(DamagedFile):
            known = read_record(file, Costs)["steps"]
        name = f"{leg.arm.name} to {leg.stop}"
        if name not in known:
            ticks = 0
            with suppress(DamagedFile):  # an arm that could not be built has no record
                ticks = int(read_run_record(leg.folder).get("final", {}).get("ticks", facts.tick)) - facts.tick
            known[name] = ticks - sum(cost for each, cost in known.items() if each.startswith(f"{leg.arm.name} to "))
            metrics.replace(file, json.dumps({"steps": known}, indent=2) + "\n")
        return known[name]

    def _drop_states(self, names: Sequence[str]) -> None:
        """Deletes the checkpoints of arms that do not go on: each is as large as one of the run."""
        for arm in self.plan.arms if self.ranks.is_main else ():
            if arm.name in names:
                shutil.rmtree(self.plan.folder / arm.folder / "checkpoints", ignore_errors=True)

    @property
    def _listening(self) -> bool:
        return isinstance(self.signals, StopRequest)

    def _say(self, text: str) -> None:
        if self.ranks.is_main:
            self.tell(f"what-if  {text}")


def check_not_stopped(ranks: Ranks, signals: StopRequest | NoStopRequest) -> None:
    """Raises Interrupted if a signal has arrived at the main process between two arms; all states are saved then."""
    if name := run_on_main(ranks, lambda: signals.name):
        raise Interrupted(f"{name}: stopped between two arms, the states are saved", saved=True)
