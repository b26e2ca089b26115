"""Healing: a run with `guard.escalate=whatif` that halts tries fixes by itself, and goes on with the best.

    halt -> the newest healthy state from before the trouble -> arms within the budget -> the best arm's state becomes
    the run's newest checkpoint -> the run goes on from there, in its folder, with the arm's overrides

All ranks run all steps of this. The main process decides and writes, and tells the others. A run that is killed
anywhere in between comes to the same end when it is resumed: each decision is on disk before it is acted on (the event
`halt`, the arms' own checkpoints, `healing.json` with the winner, the event `heal`), and a step is a pure function.
"""

import gc
import json
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stabletrain.beside.comparison.pages.at_end import PageAtEnd
from stabletrain.beside.whatif.arms import NOTHING
from stabletrain.beside.whatif.budget import BudgetedWhatIf, check_not_stopped
from stabletrain.beside.whatif.driver import locked
from stabletrain.beside.whatif.halts import Halt, HaltHistory, Healing, HealingRecord, healing_of, read_halt_history
from stabletrain.beside.whatif.opening import origin_text, steps_text
from stabletrain.beside.whatif.page import write_whatif_page
from stabletrain.beside.whatif.plan import Plan, WhatIfOptions, plan
from stabletrain.beside.whatif.report import WhatIfResult, write_json
from stabletrain.checkpoint.folder import find, number, steps_in
from stabletrain.checkpoint.tree import Tree
from stabletrain.checkpoint.writer import remove, write
from stabletrain.config.arguments import (
    Arguments,
    in_folder,
    job_overrides,
    key_of,
    merged,
    parse_arguments,
    recorded_arguments,
    with_overrides,
)
from stabletrain.config.checks import check
from stabletrain.config.jobs import run_as_job
from stabletrain.config.resuming import acting
from stabletrain.errors import ConfigError, Interrupted, TrainingHalted
from stabletrain.machine.signals import NoStopRequest, StopRequest
from stabletrain.parallel.ranks import current_ranks, run_on_main
from stabletrain.program import conf_folder
from stabletrain.stored.json_files import DamagedFile, read_record
from stabletrain.stored.run_files import RUN, read_run_record
from stabletrain.tracking import metrics
from stabletrain.trainer.history import HealingHistory
from stabletrain.trainer.run import TrainingRun

HEALING = "healing.json"
"""In the folder of a what-if: the arm that the run goes on with."""

BEST = 2
"""Number of arms in the second round."""

NO_NUMBERS: Mapping[str, Any] = MappingProxyType({})

Ready = Callable[[TrainingRun], None]
"""Receives a run that is built, before its first step."""


class Healer:
    """Trains a run, and heals it where the guard halts it.

    Call it inside the run's Hydra job.

    Args:
        folder: the run folder.
        train: trains the run of a composed configuration in that folder; returns the last validation loss, in nats.
        tell: shows the user a line.
        live: whether an arm may show a live line.
        listening: whether signals stop the arms; otherwise the handlers of the program stay as they are.
    """

    def __init__(
        self,
        folder: Path,
        train: Callable[[Any, Ready], float | None],
        tell: Callable[[str], None],
        live: bool,
        listening: bool = True,
    ) -> None:
        self._folder, self._train, self._tell, self._live = folder, train, tell, live
        self._ranks, self._listening = current_ranks(), listening
        self._typed = [each for each in job_overrides() if key_of(each) != "resume"]
        self._advice, self._report = "", False

    def run(self, cfg: Any) -> float | None:
        """Trains the run to its end; returns the last validation loss, in nats.

        Args:
            cfg: as it was typed, and checked. With `resume=auto` the overrides of earlier healings are added.

        Raises:
            TrainingHalted: the guard gave up, and no arm holds, or none can be tried.
            Interrupted: a signal arrived; the state is saved.
        """
        self._report = bool(cfg.report)
        history = self._on_main(self._resumed_history) if cfg.resume == "auto" else HaltHistory()
        while True:
            # If the last halt has no outcome yet, try fixes first. Then train on with the best fix.
            halt, healing = history.halt, None
            if halt is not None:
                healing = self._heal(history, halt, cfg.guard.whatif_steps)
                history = history.after(healing)
            try:
                return self._go_on(cfg, history, halt, healing)
            except TrainingHalted as error:
                halted = TrainingHalted(str(error))  # a new one: the traceback holds the model
                halted.advice = self._advice = error.advice
            gc.collect()  # the arms need the memory of the model that has halted
            history = self._on_main(lambda: read_halt_history(self._folder))
            if history.halt is None:  # the machine is at fault, or no update was applied: no setting would help
                raise halted

    def _on_main(self, work: Callable, otherwise: Callable | None = None):
        return run_on_main(self._ranks, work, otherwise)

    # ---- the run

    def _resumed_history(self) -> HaltHistory:
        """Returns the halts of a run that is resumed. A halt is over if the user resumes with another setting."""
        history = read_halt_history(self._folder)
        if history.halt is None or not acting({key: ["", ""] for key in self._changed_keys()}):
            return history
        if read_healing(self._whatif_folder(history.halt)) is not None:
            return history
        step = history.halt.step
        self._record("unhealed", history.halt, Healing(origin=step, to=step, why="resumed with other settings"))
        return replace(history, halt=None)

    def _changed_keys(self) -> set[str]:
        """Returns the keys that the user has typed for this start with another value than at the first start."""
        first = {*recorded_arguments(self._folder).overrides}
        return {key_of(each) for each in self._typed if each not in first}

    def _go_on(self, cfg: Any, history: HaltHistory, halt: Halt | None, healing: Healing | None) -> float | None:
        """Trains the run from where it is, with the overrides of its healings; after a healing it says so first."""

        def ready(run: TrainingRun) -> None:
            run.saved.healing = HealingHistory(history.kept, history.healed_by, history.spent)
            if halt is not None and healing is not None:
                self._announce(run, halt, healing)

        if not history.settings and healing is None:
            return self._train(cfg, ready)
        losses = []

        def job(cfg: Any, folder: Path) -> None:
            check(cfg)
            losses.append(self._train(cfg, ready))

        run_as_job(self._arguments(history.settings), conf_folder(), job)
        return losses[0]

    def _arguments(self, settings: list[str]) -> Arguments:
        """Returns the command line that goes on in the run's folder with further overrides."""
        changed = self._changed_keys()  # what the user types now takes precedence
        options = self._on_main(lambda: recorded_arguments(self._folder).options)
        added = parse_arguments([each for each in settings if key_of(each) not in changed])
        arguments = with_overrides(merged(Arguments(options, self._typed), added), "resume=auto")
        arguments = in_folder(arguments, "hydra.run.dir", self._folder)
        return arguments if self._ranks.is_main else with_overrides(arguments, "hydra.output_subdir=null")

    def _announce(self, run: TrainingRun, halt: Halt, healing: Healing) -> None:
        """Records in the healed run's log where it goes on, and with what."""
        tracker = run.output.tracker
        tracker.mark(healing.to, halt.tick)
        text = (
            f"step {halt.step}: halted: {halt.reason}: healed by {healing.arm}, from step {healing.to} on; "
            f"{healing.steps:,} steps were spent on {len(healing.arms)} arms. {healing.why}"
        )
        tracker.event("heal", halt.step, tick=halt.tick, reason=halt.reason, **asdict(healing), text=text)
        tracker.note(text)
        tracker.alert("heal", text)
        healed_by = run.saved.healing.healed_by
        tracker.summary({"guard/healings": len(healed_by), "guard/healed_by": ", ".join(healed_by)})
        self._on_main(lambda: drop_states(self._whatif_folder(halt)))

    # ---- the what-if

    def _whatif_folder(self, halt: Halt) -> Path:
        return self._folder / "whatif" / f"halt-{halt.tick:08d}"

    def _heal(self, history: HaltHistory, halt: Halt, budget: int) -> Healing:
        """Returns the arm to go on with, from the checkpoint that is now the run's newest.

        Raises:
            TrainingHalted: there is none.
            Interrupted: a signal arrived; the states are saved.
        """
        folder = self._whatif_folder(halt)
        with ExitStack() as stack:
            signals = stack.enter_context(StopRequest() if self._listening else NoStopRequest())
            self._on_main(lambda: stack.enter_context(locked(folder)), lambda: None)

            # The decision is on disk before it is acted on: a process that resumes a killed one does not decide again.
            healing = self._on_main(lambda: read_healing(folder))
            if healing is None:
                self._set_status("running", None)
                with self._noting_interruption():
                    healing = self._try(history, halt, folder, budget - history.spent, signals)
                self._on_main(lambda: metrics.replace(folder / HEALING, json.dumps(asdict(healing), indent=2) + "\n"))

            # No arm holds: the run ends as it would have ended without a what-if, and says what was tried.
            if not healing.arm:
                self._on_main(lambda: self._record("unhealed", halt, healing))
                self._on_main(lambda: drop_states(folder))
                reason = f"step {halt.step}: {halt.reason}; {healing.why}"
                self._set_status("halted", reason, {"guard/whatif_steps": history.spent + healing.steps})
                # The page was written at the halt, before anything was tried.
                if self._report:
                    self._on_main(PageAtEnd(self._folder).write_if_missing)
                halted = TrainingHalted(reason)
                halted.advice = self._advice
                raise halted

            # The start of the best arm becomes the newest checkpoint of the run, which then resumes it as any other.
            self._on_main(lambda: install(self._folder, halt, healing))
            with self._noting_interruption():
                check_not_stopped(self._ranks, signals)  # the run itself listens only from its first step on
        return healing

    @contextmanager
    def _noting_interruption(self) -> Generator[None]:
        """A context in which an interruption is written into `run.json`."""
        try:
            yield
        except Interrupted as error:
            self._set_status("preempted", f"{error}, while fixes were tried after a halt")
            raise

    def _try(
        self, history: HaltHistory, halt: Halt, folder: Path, budget: int, signals: StopRequest | NoStopRequest
    ) -> Healing:
        """Runs a what-if, and returns its winner; raises Interrupted."""
        try:
            planned = self._on_main(lambda: plan_after(halt, history, self._folder, folder))
        except ConfigError as error:
            return Healing(why=f"no fix could be tried: {error}")
        step = planned.origin.step
        none = Healing(origin=step, to=step, base=[*planned.base.changes])
        if not planned.arms:
            return replace(none, why=f"no fix is left to try from step {step}")
        what_if = BudgetedWhatIf(planned, budget=budget, show=self._tell, live=self._live, signals=signals)
        if not what_if.affordable:
            why = (
                f"trying a fix takes {planned.origin.steps + what_if.first_round_steps:,} steps, and "
                f"{max(budget, 0):,} of guard.whatif_steps are left; fix: raise it"
            )
            return replace(none, why=why)
        if self._ranks.is_main:
            for line in opening(what_if, halt):
                self._tell(line)
        try:
            result = what_if.run()
        except ConfigError as error:
            return replace(none, why=f"no fix could be tried: {error}", steps=what_if.spent)
        tried = replace(none, arms=[*what_if.starts], steps=what_if.spent)
        return self._on_main(lambda: winner_of(result, tried))

    # ---- the record

    def _set_status(self, status: str, reason: str | None, final: Mapping[str, Any] = NO_NUMBERS) -> None:
        """Writes a status into `run.json`: while fixes are tried, the run is neither over nor halted.

        Args:
            final: numbers to add to the final ones.
        """

        def set_status() -> None:
            with suppress(DamagedFile, OSError):
                record = {**read_run_record(self._folder), "status": status, "reason": reason}
                record["final"] = {**record.get("final", {}), **final}
                metrics.replace(self._folder / RUN, json.dumps(record, indent=2) + "\n")

        self._on_main(set_status)

    def _record(self, kind: str, halt: Halt, healing: Healing) -> None:
        """Appends an event to the log of a run that is not running."""
        log = metrics.Metrics(self._folder)
        log.event(kind, halt.step, tick=halt.tick, reason=halt.reason, **asdict(healing))
        log.close()


def read_healing(folder: Path) -> Healing | None:
    """Returns what a what-if has decided; None if it is not over."""
    try:
        return healing_of(read_record(folder / HEALING, HealingRecord))
    except DamagedFile:
        return None


def plan_after(halt: Halt, history: HaltHistory, run: Path, folder: Path) -> Plan:
    """Returns what to try after a halt: all arms that apply, without those already tried from this state.

    `nothing` is left out: the run that halted was this arm.

    Raises:
        ConfigError: there is no state to start from.
    """
    planned = plan(WhatIfOptions(run, best=BEST))
    tried = {NOTHING, *history.tried(planned.origin.step, planned.base.changes)}
    return replace(planned, place=folder, arms=[arm for arm in planned.arms if arm.name not in tried])


def opening(what_if: BudgetedWhatIf, halt: Halt) -> list[str]:
    """Returns what the user is told before the first arm."""
    planned = what_if.plan
    origin, steps = planned.origin, what_if.second_round_steps
    second = f", {steps:,} more for the best two" if steps else ""
    return [
        f"what-if  step {halt.step:,}: halted: {halt.reason}",
        f"what-if  the trouble: {steps_text(planned.trouble)}; fixes are tried from step {origin.step:,}, "
        f"{origin_text(origin)}",
        f"what-if  up to {len(planned.arms)} arms of {what_if.first_round_steps:,} steps{second}, within "
        f"{what_if.budget:,} steps: {', '.join(arm.name for arm in planned.arms)}",
    ]


def winner_of(result: WhatIfResult, tried: Healing) -> Healing:
    """Returns the arm to go on with, and writes the what-if's table and page. It is called on the main process only.

    Args:
        result: of the what-if.
        tried: the healing without an arm.
    """
    write_json(result)
    page = write_whatif_page(result)
    name = result.ranking.winner
    if not name:
        return replace(tried, why=f"none of {len(tried.arms)} fixes holds ({page})")
    arm = next(each.outcome.arm for each in result.ranking.places if each.outcome.arm.name == name)
    state = find(result.starts[name])
    return replace(
        tried,
        arm=name,
        why=result.ranking.verdict,
        settings=merged(Arguments([], tried.base), parse_arguments([*arm.overrides])).overrides,
        start=str(state.path),
        to=state.step,
        skipped=[[int(first), int(last)] for first, last in state.load()["skipped"]],
    )


def install(run: Path, halt: Halt, healing: Healing) -> None:
    """Makes the state from which an arm started the newest checkpoint of the run, which goes on from there.

    Time, data and counts go on from the halt, as after a rollback. The guard's retained states are forgotten, as in the
    arm itself: a rollback goes back to this state at most.
    """
    start = find(Path(healing.start))
    tree = start.load()
    write(
        run / "checkpoints",
        {**tree, "tick": halt.tick, "parts": with_counts_of_halt(tree, halt)},
        step=start.step,
        info=start.info,
        healthy=True,
        val_loss=start.val_loss,
    )
    for path in steps_in(run / "checkpoints"):
        if number(path) > start.step:
            remove(path)


def drop_states(folder: Path) -> None:
    """Deletes the states of a what-if that is over: the run has the one that it goes on from."""
    for each in folder.iterdir():
        shutil.rmtree(each / "checkpoints", ignore_errors=True)


def with_counts_of_halt(tree: Tree, halt: Halt) -> Tree:
    """Returns the parts of a state, with the counts that going back does not undo."""
    parts = {name: {**part, **halt.counts.get(name, {})} for name, part in tree["parts"].items()}
    guard, history = tree["parts"]["guard"], parts["history"]
    budgets = {name: guard[name] for name in ("in_vain", "beyond", "lowered") if name in guard}
    parts["guard"] |= {**budgets, "waiting": [], "known": []}
    lost = history["seconds"] - tree["parts"]["history"]["seconds"]
    history["lost_steps"] += halt.step - tree["step"]
    history["lost_seconds"] += lost
    return parts
