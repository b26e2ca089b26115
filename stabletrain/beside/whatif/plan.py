"""What a what-if is going to do: the trouble, the state before it, the arms that apply, and how far each round goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stabletrain.beside.whatif.arms import Arm, catalogue, choose_arms, own_arm, with_fixes
from stabletrain.beside.whatif.array import ArmArray
from stabletrain.beside.whatif.averaging import averaged_steps
from stabletrain.beside.whatif.base import BaseRun, read_base
from stabletrain.beside.whatif.judging import judge_all, usual_lr
from stabletrain.beside.whatif.start import Origin, check_repeatable, find_origin
from stabletrain.beside.whatif.statistics import MIN_BLOCKS
from stabletrain.beside.whatif.target import find_target
from stabletrain.beside.whatif.trouble import Trouble, find_trouble
from stabletrain.errors import ConfigError
from stabletrain.stored.trusted import check_links

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
