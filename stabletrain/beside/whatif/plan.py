"""What a what-if is going to do: the trouble, the state before it, the arms that apply, and how far each round goes.

The checks of a configuration and the table of resumes decide which arms apply, as for a resume that is typed. An arm is
refused with the sentence that refuses the same resume. An arm that changes no step is refused too, because the run has
it already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stabletrain.beside.whatif.arms import NOTHING, RECORDED, Arm, catalogue, choose_arms, own_arm, with_fixes
from stabletrain.beside.whatif.array import ArmArray
from stabletrain.beside.whatif.base import BaseRun, read_base
from stabletrain.beside.whatif.edits import averaged_steps
from stabletrain.beside.whatif.start import Origin, check_repeatable, find_origin
from stabletrain.beside.whatif.statistics import MIN_BLOCKS
from stabletrain.beside.whatif.trouble import Trouble, find_target, find_trouble
from stabletrain.config import arguments, trust
from stabletrain.config.checks import check
from stabletrain.config.jobs import composed
from stabletrain.config.resuming import (
    GROUPS,
    Settings,
    acting,
    changed_keys,
    check_resume,
    recorded_settings,
    row_of,
    settings,
)
from stabletrain.errors import ConfigError
from stabletrain.program import conf_folder
from stabletrain.stored.trusted import check_links


def judged(arm: Arm, base: BaseRun, ended: Settings | None = None) -> Arm:
    """Returns an arm with the reason for which it applies, or does not. Builds and writes nothing.

    Args:
        arm: the arm.
        base: the run.
        ended: the settings with which the run ended; read from its record by default.
    """
    if arm.refused or (arm.edit and not arm.overrides):
        return arm
    if arm.named == RECORDED and (named := trust.foreign_argument([], arm.overrides)):
        return replace(arm, refused=f"the run's record names {named}, which could run any code; fix: type it yourself")
    # Only the folders around this path are read: the state itself may have to be computed first.
    checkpoint = base.run / "checkpoints" / f"step-{base.step:08d}"
    try:
        with composed(base.resumed(checkpoint, arm.overrides, base.run / "whatif"), conf_folder()) as (cfg, choices):
            check(cfg)
            now = settings(cfg, choices)
            check_resume(cfg.resume, now, Path(cfg.resume), before=ended)
            changes = changed_keys(base.settings, now)
    except ConfigError as error:
        return replace(arm, refused=str(error))
    if arm.name != NOTHING and not acting(changes):
        return replace(arm, refused="the run has it already")
    return replace(arm, about=arm.about or about(changes))


def usual_lr(base: BaseRun) -> float | None:
    """Returns the learning rate that the run's option of `optimizer` has by itself; None if it is not known."""
    return arguments.usual_lr(base.arguments.options, base.settings.choices.get("optimizer", ""))


def about(changes: Mapping[str, Sequence[Any]]) -> str:
    """Returns what the table of resumes says of the changed options; the changed keys if it says nothing."""
    rows = [f"{key}: {row_of(key, *changes[key]).text}" for key in acting(changes) if key in GROUPS]
    if rows:
        return "; ".join(rows)
    return ", ".join(f"{key} {changes[key][0]} -> {changes[key][1]}" for key in acting(changes))


def judge_all(arms: Sequence[Arm], base: BaseRun) -> list[Arm]:
    """Returns the arms with their reasons.

    Raises:
        ConfigError: not even `nothing` applies, so the run cannot be resumed at all; or the user's own arm does not.
    """
    ended = recorded_settings(base.run, float("inf"))  # read once: it takes as long as to compose an arm
    found = [judged(arm, base, ended) for arm in arms]
    for arm in found:
        if arm.refused and arm.name == NOTHING:
            raise ConfigError(f"{base.run} cannot be resumed: {arm.refused}")
        if arm.refused and arm.named == "you":
            raise ConfigError(f"the arm {arm.name} does not apply: {arm.refused}")
    return found


MIN_BATCHES = MIN_BLOCKS * MIN_BLOCKS
"""Batches below which a difference has no interval."""


@dataclass(frozen=True)
class WhatIfOptions:
    """What the user asks of a what-if.

    Attributes:
        path: a run folder, an incident or a checkpoint.
        start: step of the state to start from; None for the newest healthy one before the trouble.
        arms: names of the arms; None for all that apply.
        own: arms of the user, each `key=value[,key=value...]`.
        past: steps after the trouble to which the first round goes.
        steps: steps by which the second round is longer; 0 for none.
        best: number of arms in the second round, besides `nothing`.
        jobs: number of arms that run at once.
        seeds: number of seeds with which the arms of the last round are compared, the run's own included.
        slurm: runs them as an array job of Slurm; None for on this machine.
    """

    path: Path
    start: int | None = None
    arms: Sequence[str] | None = None
    own: Sequence[str] = ()
    past: int = 100
    steps: int = 300
    best: int = 3
    jobs: int = 1
    seeds: int = 1
    slurm: ArmArray | None = None

    def check(self) -> None:
        """Checks the numbers; raises ConfigError."""
        bounds = {"--past": (self.past, MIN_BATCHES), "--steps": (self.steps, 0), "--best": (self.best, 1)}
        for name, (value, lowest) in {**bounds, "--jobs": (self.jobs, 1), "--seeds": (self.seeds, 1)}.items():
            if value < lowest:
                raise ConfigError(f"{name} {value} is below {lowest}; fix: {name} {lowest} or more")
        if 0 < self.steps < MIN_BATCHES:
            raise ConfigError(
                f"--steps {self.steps} is below {MIN_BATCHES}; fix: --steps {MIN_BATCHES} or more, or 0 for none"
            )


@dataclass(frozen=True)
class Plan:
    """What a what-if is going to do.

    Attributes:
        base, trouble, origin: the run, its trouble, and where the start state comes from.
        arms: those that apply.
        refused: those that do not.
        rounds: the last step of each round.
        best: number of arms in the second round, besides `nothing`.
        seed: of the run.
        seeds: the other seeds with which the arms of the last round are repeated.
        place: the folder of the what-if; None for the one that is named after the state.
    """

    base: BaseRun
    trouble: Trouble
    origin: Origin
    arms: Sequence[Arm]
    refused: Sequence[Arm]
    rounds: Sequence[int]
    best: int
    seed: int = 0
    seeds: Sequence[int] = ()
    place: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the what-if."""
        return self.place or self.base.run / "whatif" / f"step-{self.origin.step:08d}"


def plan(options: WhatIfOptions) -> Plan:
    """Returns what a what-if is going to do; writes nothing.

    Raises:
        ConfigError: the path, an arm or a number cannot be used, or the run cannot be resumed.
    """
    options.check()
    target = find_target(options.path)
    check_links(target.run)
    named = options.start if options.start is not None else target.checkpoint
    trouble = find_trouble(target, named)
    origin = find_origin(read_base(target.run, trouble.first).guard_steps, target.run, trouble, named)
    base = read_base(target.run, origin.step)
    ended = base.record.get("final", {}).get("steps")
    reached = max(ended, trouble.last) if isinstance(ended, int) and named is None else ended  # before its rollbacks
    if isinstance(reached, int) and origin.step > reached:
        raise ConfigError(
            f"--from step-{origin.step}: {target.run} ended after step {reached}; fix: --from step-<at most {reached}>"
        )
    if origin.step + MIN_BATCHES > base.total:
        raise ConfigError(
            f"the arms would start after step {origin.step}, and the run ends at step {base.total}: too few steps are "
            f"left to compare; fix: --from step-<at most {max(0, base.total - MIN_BATCHES)}>"
        )
    check_repeatable(base, origin)
    own = [own_arm(word) for word in options.own]
    values = base.settings.flat()
    states = averaged_steps(base, origin.step, origin.tick, origin.step - origin.steps)
    usual = usual_lr(base)
    known = catalogue(base.settings.choices, values, base.precision, origin.step, trouble.last, states, usual)
    arms = judge_all(choose_arms(with_fixes(known, trouble.fixes), options.arms, own), base)
    first = min(base.total, max(trouble.last, origin.step) + options.past)
    second = min(base.total, first + options.steps)
    seed = base.get("seed", 0)
    rounds = [first, second] if second - first >= MIN_BATCHES else [first]
    return Plan(
        base,
        trouble,
        origin,
        [arm for arm in arms if not arm.refused],
        [arm for arm in arms if arm.refused],
        rounds,
        options.best,
        seed,
        range(seed + 1, seed + options.seeds),
    )
