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
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

from stabletrain.checkpoint.folder import find, number, steps_in
from stabletrain.checkpoint.tree import Tree
from stabletrain.checkpoint.writer import remove, write
from stabletrain.comparison.pages.at_end import write_if_missing
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
from stabletrain.stored.json_files import Count, DamagedFile, read_record
from stabletrain.stored.run_json import RUN, read_run_record
from stabletrain.tracking import metrics
from stabletrain.trainer.run import TrainingRun
from stabletrain.trainer.saved_states import HealingRecord
from stabletrain.whatif.arms import NOTHING
from stabletrain.whatif.command import locked
from stabletrain.whatif.halts import Course, Halt, read_course
from stabletrain.whatif.opening import kept, steps_text
from stabletrain.whatif.page import write_whatif_page
from stabletrain.whatif.plan import Asked, Plan, plan
from stabletrain.whatif.report import Found, write_json
from stabletrain.whatif.within import Within, check_not_stopped

WINNER = "healing.json"
"""In the folder of a what-if: the arm that the run goes on with."""

NO_NUMBERS: Mapping[str, Any] = MappingProxyType({})

Ready = Callable[[TrainingRun], None]
"""Receives a run that is built, before its first step."""


class Winner(TypedDict):
    """The content of that file; for the last seven keys see `halts.Healing`.

    Attributes:
        start: the checkpoint that the arm resumed.
        origin: step of the state from which the other arms started.
        skipped: data positions `[start, stop)` that are never read in that state.
        why: in a sentence, why the run goes on with this arm, or with none.
    """

    start: str
    origin: Count
    skipped: list[list[Count]]
    why: str
    to: Count
    arm: str
    settings: list[str]
    base: list[str]
    arms: list[str]
    steps: Count


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
        course = self._on_main(self._resumed_course) if cfg.resume == "auto" else Course()
        while True:
            winner = None if course.halt is None else self._heal(course, course.halt, cfg.guard.whatif_steps)
            try:
                return self._go_on(cfg, course, winner)
            except TrainingHalted as error:
                halted = TrainingHalted(str(error))  # a new one: the traceback holds the model
                halted.advice = self._advice = error.advice
            gc.collect()
            course = self._on_main(lambda: read_course(self._folder))
            if course.halt is None:  # the machine is at fault, or no update was applied: no setting would help
                raise halted

    def _on_main(self, work: Callable, otherwise: Callable | None = None):
        return run_on_main(self._ranks, work, otherwise)

    # ---- the run

    def _resumed_course(self) -> Course:
        """Returns the course of a run that is resumed. A halt is over if the user resumes with another setting."""
        course = read_course(self._folder)
        if course.halt is None or not acting({key: ["", ""] for key in self._changed_keys()}):
            return course
        if read_winner(self._place(course.halt)) is not None:
            return course
        self._record("unhealed", course.halt, dict(no_winner(course.halt.step, "resumed with other settings")))
        return replace(course, halt=None)

    def _changed_keys(self) -> set[str]:
        """Returns the keys that the user has typed for this start, otherwise than for the run's first one."""
        first = {*recorded_arguments(self._folder).overrides}
        return {key_of(each) for each in self._typed if each not in first}

    def _go_on(self, cfg: Any, course: Course, winner: Winner | None) -> float | None:
        """Trains the run from where it is, with the overrides of its healings."""

        def ready(run: TrainingRun) -> None:
            resumed, arms = ([], []) if winner is None else ([winner["to"]], [winner["arm"]])
            spent = course.spent + (0 if winner is None else winner["steps"])
            run.saved.healing = HealingRecord(sorted({*course.kept, *resumed}), [*course.healed_by, *arms], spent)
            if winner is not None and course.halt is not None:
                self._announce(run, course.halt, winner)

        settings = course.settings if winner is None else winner["settings"]
        if not settings and winner is None:
            return self._train(cfg, ready)
        losses = []

        def job(cfg: Any, folder: Path) -> None:
            del folder
            check(cfg)
            losses.append(self._train(cfg, ready))

        run_as_job(self._arguments([*settings]), conf_folder(), job)
        return losses[0]

    def _arguments(self, settings: list[str]) -> Arguments:
        """Returns the command line that goes on in the run's folder with further overrides."""
        changed = self._changed_keys()  # what the user types now takes precedence
        options = self._on_main(lambda: recorded_arguments(self._folder).options)
        added = parse_arguments([each for each in settings if key_of(each) not in changed])
        arguments = with_overrides(merged(Arguments(options, self._typed), added), "resume=auto")
        arguments = in_folder(arguments, "hydra.run.dir", self._folder)
        return arguments if self._ranks.is_main else with_overrides(arguments, "hydra.output_subdir=null")

    def _announce(self, run: TrainingRun, halt: Halt, winner: Winner) -> None:
        """Records in the healed run's log where it goes on, and with what."""
        tracker = run.output.tracker
        tracker.mark(winner["to"], halt.tick)
        text = (
            f"step {halt.step}: halted: {halt.reason}: healed by {winner['arm']}, from step {winner['to']} on; "
            f"{winner['steps']:,} steps were spent on {len(winner['arms'])} arms. {winner['why']}"
        )
        tracker.event("heal", halt.step, tick=halt.tick, reason=halt.reason, **winner, text=text)
        tracker.note(text)
        tracker.alert("heal", text)
        healed_by = run.saved.healing.healed_by
        tracker.summary({"guard/healings": len(healed_by), "guard/healed_by": ", ".join(healed_by)})
        self._on_main(lambda: drop_states(self._place(halt)))

    # ---- the what-if

    def _place(self, halt: Halt) -> Path:
        return self._folder / "whatif" / f"halt-{halt.tick:08d}"

    def _heal(self, course: Course, halt: Halt, budget: int) -> Winner:
        """Returns the arm to go on with, from the checkpoint that is now the run's newest.

        Raises:
            TrainingHalted: there is none.
            Interrupted: a signal arrived; the states are saved.
        """
        place = self._place(halt)
        with ExitStack() as stack:
            signals = stack.enter_context(StopRequest() if self._listening else NoStopRequest())
            self._on_main(lambda: stack.enter_context(locked(place)), lambda: None)
            winner = self._on_main(lambda: read_winner(place))
            if winner is None:
                self._set_status("running", None)
                with self._noting_interruption():
                    winner = self._try(course, halt, place, budget - course.spent, signals)
                self._on_main(lambda: metrics.replace(place / WINNER, json.dumps(winner, indent=2) + "\n"))
            if not winner["arm"]:
                self._on_main(lambda: self._record("unhealed", halt, dict(winner)))
                self._on_main(lambda: drop_states(place))
                spent = {"guard/whatif_steps": course.spent + winner["steps"]}
                self._set_status("halted", f"step {halt.step}: {halt.reason}; {winner['why']}", spent)
                # The page was written at the halt, before anything was tried.
                self._on_main(lambda: write_if_missing(self._folder, self._report))
                halted = TrainingHalted(f"step {halt.step}: {halt.reason}; {winner['why']}")
                halted.advice = self._advice
                raise halted
            self._on_main(lambda: install(self._folder, halt, winner))
            with self._noting_interruption():
                check_not_stopped(self._ranks, signals)  # the run itself listens only from its first step on
        return winner

    @contextmanager
    def _noting_interruption(self) -> Generator[None]:
        """A context in which an interruption is written into `run.json`."""
        try:
            yield
        except Interrupted as error:
            self._set_status("preempted", f"{error}, while fixes were tried after a halt")
            raise

    def _try(
        self, course: Course, halt: Halt, place: Path, budget: int, signals: StopRequest | NoStopRequest
    ) -> Winner:
        """Runs a what-if, and returns its winner; raises Interrupted."""
        none = no_winner()
        try:
            planned = self._on_main(lambda: plan_after(halt, course, self._folder, place))
        except ConfigError as error:
            return {**none, "why": f"no fix could be tried: {error}"}
        none: Winner = {**no_winner(planned.origin.step), "base": [*planned.base.changes]}
        within = Within(planned, budget, self._ranks, self._tell, self._live, signals)
        if not planned.arms:
            return {**none, "why": f"no fix is left to try from step {planned.origin.step}"}
        if not within.affordable:
            return {
                **none,
                "why": f"trying a fix takes {planned.origin.steps + within.length:,} steps, and {max(budget, 0):,} of "
                "guard.whatif_steps are left; fix: raise it",
            }
        if self._ranks.is_main:
            for line in opening(within, halt):
                self._tell(line)
        try:
            found = within.run()
        except ConfigError as error:
            return {**none, "why": f"no fix could be tried: {error}", "steps": within.spent}
        none |= {"arms": within.tried, "steps": within.spent}
        return self._on_main(lambda: winner_of(found, none))

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

    def _record(self, kind: str, halt: Halt, fields: dict) -> None:
        """Appends an event to the log of a run that is not running."""
        log = metrics.Metrics(self._folder)
        log.event(kind, halt.step, tick=halt.tick, reason=halt.reason, **fields)
        log.close()


def no_winner(step: int = 0, why: str = "") -> Winner:
    """Returns that there is no winner among arms from a step, none of which was tried so far."""
    return {
        "start": "",
        "origin": step,
        "skipped": [],
        "why": why,
        "to": step,
        "arm": "",
        "settings": [],
        "base": [],
        "arms": [],
        "steps": 0,
    }


def read_winner(place: Path) -> Winner | None:
    """Returns the winner of a what-if; None if it is not over."""
    try:
        return read_record(place / WINNER, Winner)
    except DamagedFile:
        return None


def plan_after(halt: Halt, course: Course, run: Path, place: Path) -> Plan:
    """Returns what to try after a halt: all arms that apply but those that were tried from the same state before.

    `nothing` is not among them: that is what has halted.

    Raises:
        ConfigError: there is no state to start from.
    """
    planned = plan(Asked(run))
    tried = {NOTHING, *course.tried(planned.origin.step, planned.base.changes)}
    return replace(planned, place=place, arms=[arm for arm in planned.arms if arm.name not in tried])


def opening(within: Within, halt: Halt) -> list[str]:
    """Returns what the user is told before the first arm."""
    planned, count = within.plan, len(within.plan.arms)
    origin, trouble = planned.origin, planned.trouble
    second = f", {within.longer:,} more for the best two" if within.longer else ""
    return [
        f"what-if  step {halt.step:,}: halted: {halt.reason}",
        f"what-if  the trouble: {steps_text(trouble)}; fixes are tried from step {origin.step:,}, {kept(origin)}",
        f"what-if  up to {count} arms of {within.length:,} steps{second}, within {within.budget:,} steps: "
        f"{', '.join(arm.name for arm in planned.arms)}",
    ]


def winner_of(found: Found | None, none: Winner) -> Winner:
    """Returns the arm to go on with, and writes the what-if's table and page. It is called on the main process only."""
    assert found is not None
    write_json(found)
    page = write_whatif_page(found)
    name = found.ranking.winner
    if not name:
        return {**none, "why": f"none of {len(none['arms'])} fixes holds ({page})"}
    arm = next(each.outcome.arm for each in found.ranking.places if each.outcome.arm.name == name)
    state = find(found.starts[name])
    settings = merged(Arguments([], none["base"]), parse_arguments([*arm.overrides])).overrides
    return {
        **none,
        "arm": name,
        "why": f"{found.ranking.verdict}",
        "settings": settings,
        "start": str(state.path),
        "to": state.step,
        "skipped": [[int(first), int(last)] for first, last in state.load()["skipped"]],
    }


def install(run: Path, halt: Halt, winner: Winner) -> None:
    """Makes the state from which an arm started the newest checkpoint of the run, which goes on from there.

    Time, data and counts go on from the halt, as after a rollback. The guard's retained states are forgotten, as in the
    arm itself: a rollback goes back to this state at most.
    """
    start = find(Path(winner["start"]))
    tree = start.load()
    write(
        run / "checkpoints",
        {**tree, "tick": halt.tick, "parts": going_on_with(tree, halt)},
        step=start.step,
        info=start.info,
        healthy=True,
        val_loss=start.val_loss,
    )
    for path in steps_in(run / "checkpoints"):
        if number(path) > start.step:
            remove(path)


def drop_states(place: Path) -> None:
    """Deletes the states of a what-if that is over: the run has the one that it goes on from."""
    for folder in place.iterdir():
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def going_on_with(tree: Tree, halt: Halt) -> Tree:
    """Returns the parts of a state, with the counts that going back does not undo."""
    parts = {name: {**part, **halt.counts.get(name, {})} for name, part in tree["parts"].items()}
    guard, history = tree["parts"]["guard"], parts["history"]
    budgets = {name: guard[name] for name in ("in_vain", "beyond", "lowered") if name in guard}
    parts["guard"] |= {**budgets, "waiting": [], "known": []}
    lost = history["seconds"] - tree["parts"]["history"]["seconds"]
    history["lost_steps"] += halt.step - tree["step"]
    history["lost_seconds"] += lost
    return parts
