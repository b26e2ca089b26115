"""Repeats the arms of the last round with other seeds: the data in another order, and other random numbers.

A seed is a setting that a resume may change. The start is resumed with it, and saved again before its first step, so
all arms of a seed start from one state, read identical batches, and change no more than the arm does. Everything of a
seed lies in `<folder of the what-if>/seed-<seed>/`.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stabletrain.checkpoint.folder import find
from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.config.arguments import merged, parse_arguments
from stabletrain.printable import say
from stabletrain.whatif.arms import MEAN, Arm
from stabletrain.whatif.base import KEEPING, QUIET, Base
from stabletrain.whatif.job import train_until
from stabletrain.whatif.outcome import Facts, Outcome, facts_of, read_outcome
from stabletrain.whatif.plan import Asked, Plan
from stabletrain.whatif.report import ending
from stabletrain.whatif.rounds import Leg, run_legs
from stabletrain.whatif.start import start_of


def with_other_seeds(
    planned: Plan, start: Checkpoint, starts: Mapping[str, Path], arms: Sequence[Arm], stop: int, asked: Asked
) -> dict[int, list[Outcome]]:
    """Runs arms up to a step with each of the other seeds, and returns how they ended, in their order, by seed.

    Args:
        planned: with the seeds.
        start: of the run's own seed.
        starts: by arm, the checkpoint that it resumes with the run's own seed.
        arms: those of the last round.
        stop: the step.
        asked: how the arms run.

    Raises:
        Interrupted: a signal arrived; the same call goes on.
        StabletrainError: an arm ended with an error.
    """
    legs: dict[int, list[Leg]] = {}
    facts: dict[Path, tuple[int, Facts]] = {}
    for seed in planned.seeds:
        base, folder = seeded(planned.base, seed), planned.folder / f"seed-{seed}"
        own = seed_start(base, start, folder / "start", seed)
        known = facts_of(own)
        legs[seed] = []
        for arm in arms:
            mean = [find(starts[arm.name])] if arm.edit == MEAN else None
            place = start_of(arm, own, planned.trouble, base, folder, mean).path
            legs[seed].append(Leg(base, arm, place, folder / arm.folder, stop))
            facts[folder / arm.folder] = seed, known
    width = max(len(arm.name) for arm in arms)

    def told(leg: Leg) -> None:
        seed, known = facts[leg.folder]
        line = ending(read_outcome(leg.arm, leg.folder, known, stop))
        say(f"seed {seed}  {leg.arm.name:<{width}}  {line}", flush=True)

    # An array has the arms of one folder, so there is one for each seed.
    groups = [*legs.values()] if asked.slurm else [[leg for each in legs.values() for leg in each]]
    for group in groups:
        run_legs(group, asked.jobs, told, asked.slurm)
    return {
        seed: [read_outcome(leg.arm, leg.folder, facts[leg.folder][1], stop) for leg in each]
        for seed, each in legs.items()
    }


def seeded(base: Base, seed: int) -> Base:
    """Returns a run whose arms have another seed."""
    return replace(base, arguments=merged(base.arguments, parse_arguments([f"seed={seed}"])))


def seed_start(base: Base, start: Checkpoint, folder: Path, seed: int) -> Checkpoint:
    """Returns the start as a resume with another seed has it before its first step.

    Args:
        base: of `seeded`.
        start: of the run's own seed.
        folder: the run folder of that resume.
        seed: the seed.
    """
    saved = folder / "checkpoints" / start.path.name
    if not saved.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        arguments = base.resumed(start.path, (*QUIET, *KEEPING), folder)
        train_until(arguments, lambda run: True, f"seed {seed}", live=False)
    return find(saved)
