"""The state from which the arms start: which one, where it comes from, and its edited copies.

The state is the newest one from before the trouble that the guard would take for healthy. If its checkpoint is on disk,
it is copied by hard links. If not, the run is repeated from an older checkpoint, or from step 0, up to that step. This
gives the same bits, because a step is a pure function of state and step number. On a card without `determinism=strict`
the state only comes close, and its losses have to show that it does (`MAX_LOSS_CHANGE`).

A checkpoint that was written after the trouble, such as the one of a rollback, is not used: its guard has counted the
trouble already, and it skips data.

Some arms need what no override can change (`edits.py`), so they start from an edited copy.
"""

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from stabletrain.beside.whatif.arms import Arm
from stabletrain.beside.whatif.base import QUIET_OVERRIDES, BaseRun
from stabletrain.beside.whatif.edits import (
    EARLIER_STATES,
    MAX_STATES,
    apply_edit,
    executed_steps,
    states_at,
    written_before,
)
from stabletrain.beside.whatif.job import train_until
from stabletrain.beside.whatif.trouble import Trouble
from stabletrain.checkpoint.folder import Folder, find
from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.checkpoint.tree import Tree
from stabletrain.checkpoint.writer import write
from stabletrain.config import trust
from stabletrain.config.arguments import Arguments
from stabletrain.config.resuming import acting, changed_keys, recorded_settings, steps_of_changes
from stabletrain.errors import ConfigError
from stabletrain.parallel.ranks import current_ranks, run_on_main
from stabletrain.stored.run_files import RUN
from stabletrain.tracking.metrics import read_jsonl, replace

MAX_LOSS_CHANGE = 0.1
"""How far the losses of a repetition may be from the run's if kernels round differently each time.

It is a share of the loss's own change from one logged step to the next, both as medians. With a small GPT on a CPU, 300
steps: sums in other parts gave at most 0.00004, bf16 in place of fp32 0.07, another order of the data 0.44 or more,
half the learning rate 0.6 or more.
"""


@dataclass(frozen=True)
class Origin:
    """Where the state comes from.

    Attributes:
        step: of the state.
        tick: steps executed by then.
        source: the checkpoint to copy, or to repeat the run from; None for step 0.
    """

    step: int
    tick: int
    source: Checkpoint | None

    @property
    def steps(self) -> int:
        """Steps to compute again."""
        return self.step - (0 if self.source is None else self.source.step)


def find_origin(guard_steps: Mapping[str, int], run: Path, trouble: Trouble, named: int | None) -> Origin:
    """Returns where to take the state from.

    Args:
        guard_steps: `every` and `after`, see `BaseRun.guard_steps`.
        run: its folder.
        trouble: before which the state lies.
        named: the step that the user named; None for the newest healthy state.
    """
    known = [each for each in Folder(run / "checkpoints", tell=lambda line: None).known() if each.healthy]
    if named is not None:
        for each in known:
            if each.step == named and executed_steps(each) is not None:  # as it is: the user named it
                return Origin(named, executed_steps(each) or 0, each)
        return Origin(named, trouble.tick_of(named), newest_checkpoint(known, named, trouble.tick_of(named)))
    # The guard keeps a state at every multiple of `every`, and takes it for healthy `after` steps later. So this is the
    # newest one from before the trouble. A checkpoint that lies between it and the trouble is as good, and is at hand.
    latest = max(0, trouble.first - 1 - guard_steps["after"])
    earliest = latest // guard_steps["every"] * guard_steps["every"]
    found = newest_checkpoint(known, latest, trouble.tick_of(latest))
    step = found.step if found is not None and found.step >= earliest else earliest
    if found is None or found.step > step:
        found = newest_checkpoint(known, step, trouble.tick_of(step))
    return Origin(step, trouble.tick_of(step), found)


def newest_checkpoint(known: list[Checkpoint], step: int, tick: int) -> Checkpoint | None:
    """Returns the newest checkpoint of at most `step` steps that the run wrote before it had executed `tick` steps."""
    return next(written_before(known, step, tick), None)


def check_repeatable(base: BaseRun, origin: Origin) -> None:
    """Checks that the steps to compute again all had the settings of the last of them.

    Raises:
        ConfigError: a resume changed them in between.
    """
    begin = 0 if origin.source is None else origin.source.step
    for step in steps_of_changes(base.run) if origin.steps else ():
        earlier = recorded_settings(base.run, step)
        changed = acting(changed_keys(earlier, base.settings)) if earlier is not None else []
        if begin < step <= origin.step and changed:
            raise ConfigError(
                f"the state after step {origin.step} was not kept, and cannot be computed again from step {begin}: "
                f"after step {step} a resume changed {', '.join(changed[:3])}; fix: --from step-<a checkpoint that is "
                f"left in {base.run / 'checkpoints'}>"
            )


def prepare(base: BaseRun, origin: Origin, folder: Path, listening: bool = True) -> Checkpoint:
    """Returns the checkpoint from which the arms start, in `<folder>/start`; computes it if it was not kept.

    Args:
        base: the run.
        origin: where the state comes from.
        folder: of the what-if.
        listening: whether signals stop the computation.

    Raises:
        Interrupted: a signal arrived; the next call goes on.
        ConfigError: the run cannot be repeated.
    """
    ranks = current_ranks()
    # `run.json` is written last, so a start that has one is complete; an interrupted call makes it again.
    if not run_on_main(ranks, (folder / "start" / RUN).exists):
        if origin.source is None or origin.steps:
            check_repeatable(base, origin)
            compute_again(base, origin, folder / "again", listening)
        run_on_main(ranks, lambda: publish_start(base, origin, folder))
    return find(folder / "start" / "checkpoints" / f"step-{origin.step:08d}")


def publish_start(base: BaseRun, origin: Origin, folder: Path) -> None:
    """Makes `start/` of the state: a copy of the run's checkpoint by links, or the one that was computed again."""
    place = folder / "start" / "checkpoints"
    shutil.rmtree(folder / "start", ignore_errors=True)
    if origin.source is not None and not origin.steps:
        shutil.copytree(origin.source.path, place / origin.source.path.name, copy_function=link_or_copy)
    else:
        found = find(folder / "again" / "checkpoints" / f"step-{origin.step:08d}")
        info = {"run": base.record.get("id"), "settings": base.settings._asdict()}
        write(place, found.load(), step=origin.step, info=info, healthy=True, val_loss=found.val_loss)
        keep_states(folder / "again", folder / EARLIER_STATES, origin)
        shutil.rmtree(folder / "again", ignore_errors=True)
    make_run_folder(base, folder / "start", f"the state of {base.run} after step {origin.step}")


def compute_again(base: BaseRun, origin: Origin, folder: Path, listening: bool) -> None:
    """Repeats the run up to the state, whose checkpoint is then in a folder.

    Raises:
        Interrupted: a signal arrived; the next call goes on.
        ConfigError: the run did not get there, or its losses are not those that the run had.
    """
    ranks, saved = current_ranks(), folder / "checkpoints" / f"step-{origin.step:08d}"
    if not run_on_main(ranks, saved.is_dir):
        arguments = run_on_main(ranks, lambda: arguments_of_repetition(base, origin, folder))
        train_until(arguments, lambda run: run.state.executed_steps >= origin.tick, "again", True, listening)
    run_on_main(ranks, lambda: check_repetition(base, folder, saved))


def arguments_of_repetition(base: BaseRun, origin: Origin, folder: Path) -> Arguments:
    """Returns the command line that repeats the run in a folder, or goes on with it; empties a folder with no state.

    It is called on the main process only.
    """
    # States on the way are saved where the guard takes its own, for the mean of the last of them. This changes no bit.
    saving = (
        f"checkpoint.every={base.guard_steps['every']}",
        f"checkpoint.keep={MAX_STATES}",
        "checkpoint.keep_best=false",
    )
    words = (*QUIET_OVERRIDES, *saving)
    if has_checkpoint(folder):
        return base.continued(words, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return base.restarted(words, folder) if origin.source is None else base.resumed(origin.source.path, words, folder)


def check_repetition(base: BaseRun, folder: Path, saved: Path) -> None:
    """Checks that the repetition has got to the state, with the losses of the run.

    Raises:
        ConfigError: it has not.
    """
    if not saved.is_dir():
        raise ConfigError(
            f"the run of {base.run} was repeated to reach {saved.name}, and ended before it: see "
            f"{folder / 'events.jsonl'}; fix: --from step-<a checkpoint that is left>"
        )
    then, now = (losses_of(read_jsonl(each / "metrics.jsonl")) for each in (base.run, folder))
    both = sorted(then.keys() & now.keys())
    if not base.repeats_exactly:
        check_close(base.run, then, now, both)
    elif (step := next((tick for tick in both if repr(then[tick]) != repr(now[tick])), None)) is not None:
        raise ConfigError(
            f"the loss of step {step} came out differently than in {base.run}, so the state is another one: code, "
            "packages or machine have changed since; fix: --from step-<a checkpoint that is left>"
        )


def check_close(run: Path, then: Mapping[int, float], now: Mapping[int, float], both: Sequence[int]) -> None:
    """Checks that the losses of a repetition differ from the run's by no more than rounding explains.

    Args:
        run: its folder, for the message.
        then, now: losses of the run, and of the repetition, by tick.
        both: the ticks that both have, in order.

    Raises:
        ConfigError: they differ by more.
    """
    ticks = [tick for tick in both if math.isfinite(then[tick])]
    apart = [abs(now[tick] - then[tick]) for tick in ticks]
    usual = [abs(then[later] - then[earlier]) for earlier, later in itertools.pairwise(ticks)]
    if usual and not median(apart) <= MAX_LOSS_CHANGE * median(usual):
        raise ConfigError(
            f"the losses of steps {ticks[0]} to {ticks[-1]} came out {median(apart):.2g} from those in {run}, whose "
            f"loss itself changes by {median(usual):.2g} from one to the next (medians): rounding differs by at most "
            f"{MAX_LOSS_CHANGE:g} of that, so the state is another one: code, packages, data or machine have changed "
            "since; fix: --from step-<a checkpoint that is left>"
        )


def keep_states(again: Path, place: Path, origin: Origin) -> None:
    """Keeps the states that a repetition has saved on its way."""
    shutil.rmtree(place, ignore_errors=True)
    for each in Folder(again / "checkpoints", tell=lambda line: None).known():
        if origin.step - origin.steps < each.step < origin.step:
            shutil.copytree(each.path, place / each.path.name, copy_function=link_or_copy)


def has_checkpoint(folder: Path) -> bool:
    """Whether a run in a folder has a checkpoint from which `resume=auto` goes on; without one it begins at step 0."""
    return (folder / RUN).exists() and bool(Folder(folder / "checkpoints", tell=lambda line: None).known())


def losses_of(lines: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Returns the logged training losses by tick."""
    return {line.get("tick", line["step"]): line["train/loss"] for line in lines if "train/loss" in line}


def make_run_folder(base: BaseRun, folder: Path, reason: str) -> None:
    """Makes a folder one that a resume accepts as a run's: its record, and Hydra's."""
    trust.remember_arguments(*base.arguments)
    shutil.copytree(base.run / ".hydra", folder / ".hydra", dirs_exist_ok=True)
    record = {
        **base.record,
        "status": "preempted",
        "reason": reason,
        "options": base.arguments.options,
        "overrides": base.arguments.overrides,
        "changes": [change for change in base.record.get("changes", []) if change["step"] <= base.step],
    }
    replace(folder / RUN, json.dumps(record, indent=2) + "\n")  # last: it marks the folder as complete


def link_or_copy(source: str, target: str) -> None:
    """Links a file of a checkpoint, which is never written again; copies it where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


# ---- edited copies


def with_skips_of(skipped: Sequence[Sequence[int]], start: Checkpoint, base: BaseRun, folder: Path) -> Checkpoint:
    """Returns a state that never reads the data positions that a later one has skipped, so both read the same batches.

    Args:
        skipped: positions `[start, stop)` of the later state.
        start: the state.
        base: the run.
        folder: in which the copy is made.
    """
    if not skipped:
        return start

    def edit() -> Tree:
        return {**start.load(), "skipped": [[*span] for span in skipped]}

    return edited_copy(folder / "same-data", edit, start, base, "with the data of a later one")


def edited_copy(own: Path, edit: Callable[[], Tree], start: Checkpoint, base: BaseRun, how: str) -> Checkpoint:
    """Returns the only checkpoint of a run folder, an edited copy of a state; makes both unless they are there.

    Args:
        own: the folder.
        edit: returns the edited state; called on the main process only.
        start: the state.
        base: the run.
        how: says how the state was edited.
    """
    place = own / "checkpoints"

    def make() -> None:
        if (own / RUN).exists():
            return
        tree = edit()
        shutil.rmtree(own, ignore_errors=True)
        write(place, tree, step=start.step, info=start.info, healthy=True, val_loss=start.val_loss)
        make_run_folder(base, own, f"the state of {base.run} after step {start.step}, {how}")

    run_on_main(current_ranks(), make)
    return find(place / start.path.name)


def start_of(
    arm: Arm,
    start: Checkpoint,
    trouble: Trouble,
    base: BaseRun,
    folder: Path,
    states: Sequence[Checkpoint] | None = None,
) -> Checkpoint:
    """Returns the checkpoint that an arm resumes: the start, or an edited copy of it.

    Args:
        arm: the arm.
        start: the start.
        trouble: of the run.
        base: the run.
        folder: in which the copy is made.
        states: whose weights are averaged; None for those that the arm names.

    Raises:
        ConfigError: a state that the arm needs cannot be read.
    """
    if not arm.edit:
        return start

    def edit() -> Tree:
        averaged = states_at(arm.states, base, start, folder) if states is None and arm.states else states or ()
        return apply_edit(start.load(), arm, trouble, [each.load_model() for each in averaged])

    return edited_copy(folder / f"start-{arm.folder}", edit, start, base, f"edited: {arm.about}")
