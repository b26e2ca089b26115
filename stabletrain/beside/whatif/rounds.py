"""Runs the arms of a round: in this process, several at once in processes of their own, or as an array job of Slurm.

An arm that is over is not run again, and the others go on where they stopped. So a what-if that was interrupted is
continued by the same command.

The last round is repeated with other seeds: the data in another order, and other random numbers. A seed is a setting
that a resume may change. The start is resumed with it and saved again before its first step. So all arms of a seed
start from one state, read identical batches, and differ only by what each arm changes. Everything of a seed lies in
`<folder of the what-if>/seed-<seed>/`.
"""

import multiprocessing
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from stabletrain.beside.whatif.arm_run import ArmRun, run_arm, run_in_process
from stabletrain.beside.whatif.arms import MEAN, Arm
from stabletrain.beside.whatif.array import ArmArray, check_not_queued, run_array
from stabletrain.beside.whatif.base import KEEP_ONE_CHECKPOINT, QUIET_OVERRIDES, BaseRun
from stabletrain.beside.whatif.job import train_until
from stabletrain.beside.whatif.outcome import Outcome, StartFacts, read_outcome, start_facts
from stabletrain.beside.whatif.plan import Plan
from stabletrain.beside.whatif.report import ending
from stabletrain.beside.whatif.start import start_of
from stabletrain.checkpoint.folder import find
from stabletrain.checkpoint.reader import Checkpoint
from stabletrain.config.arguments import merged, parse_arguments
from stabletrain.errors import Interrupted, StabletrainError
from stabletrain.machine.signals import StopRequest
from stabletrain.printable import say

POLL_S = 0.2
"""Seconds between two looks at the processes."""


def run_arms(
    runs: Sequence[ArmRun], jobs: int, on_finished: Callable[[ArmRun], None], slurm: ArmArray | None = None
) -> None:
    """Runs arms.

    Args:
        runs: the arms, of which those that are over are not run.
        jobs: number of processes; 1 for this one.
        on_finished: called with each arm that is over.
        slurm: runs them as an array job instead; it has a limit of its own.

    Raises:
        Interrupted: a signal arrived; the states are saved.
        StabletrainError: an arm ended with an error.
    """
    for run in runs:
        if run.over:
            on_finished(run)
    left = [run for run in runs if not run.over]
    if slurm is not None:
        run_array(left, slurm, on_finished)
        return
    check_not_queued(left)
    if jobs == 1:
        for run in left:
            run_arm(run, live=True)
            on_finished(run)
    elif left:
        run_processes(left, jobs, on_finished)


def run_processes(runs: Sequence[ArmRun], jobs: int, on_finished: Callable[[ArmRun], None]) -> None:
    """Runs arms in processes of their own, at most `jobs` at a time; raises as `run_arms`."""
    import torch

    context = multiprocessing.get_context("spawn")
    threads = torch.get_num_threads()  # another number would round sums differently: the arms must compare
    waiting, running = list(runs), list[tuple[ArmRun, BaseProcess]]()
    failed: list[str] = []
    stopping = False
    with StopRequest() as request:
        while running or (waiting and not request.name and not failed):
            # Start as many as may run at once; after a signal or an error no further one.
            while waiting and len(running) < jobs and not request.name and not failed:
                run = waiting.pop(0)
                process = context.Process(target=run_in_process, args=(run, threads), name=run.arm.name)
                process.start()
                running.append((run, process))
            time.sleep(POLL_S)
            # The others stop too, once each has saved its state: the same command goes on with them.
            if (request.name or failed) and not stopping:
                stopping = True
                for _, process in running:
                    process.terminate()
            for run, process in [each for each in running if not each[1].is_alive()]:
                running.remove((run, process))
                if process.exitcode == 0:
                    on_finished(run)
                elif not stopping:
                    failed.append(f"the arm {run.arm.name} ended with exit code {process.exitcode}")
    if failed:
        raise StabletrainError(f"{'; '.join(failed)}; what it printed is above; fix: leave it out with --arms")
    if request.name:
        raise Interrupted(f"{request.name}: the arms were stopped", saved=True)


def with_other_seeds(
    planned: Plan,
    start: Checkpoint,
    starts: Mapping[str, Path],
    arms: Sequence[Arm],
    stop: int,
    jobs: int = 1,
    slurm: ArmArray | None = None,
) -> dict[int, list[Outcome]]:
    """Runs arms up to a step with each of the other seeds, and returns how they ended, in their order, by seed.

    Args:
        planned: with the seeds.
        start: of the run's own seed.
        starts: by arm, the checkpoint that it resumes with the run's own seed.
        arms: those of the last round.
        stop: the step.
        jobs, slurm: how the arms run, see `run_arms`.

    Raises:
        Interrupted: a signal arrived; the same call goes on.
        StabletrainError: an arm ended with an error.
    """
    runs: dict[int, list[ArmRun]] = {}
    facts: dict[Path, tuple[int, StartFacts]] = {}
    for seed in planned.seeds:
        arguments = merged(planned.base.arguments, parse_arguments([f"seed={seed}"]))
        base, folder = replace(planned.base, arguments=arguments), planned.folder / f"seed-{seed}"
        own = seed_start(base, start, folder / "start", seed)
        known = start_facts(own)
        runs[seed] = []
        for arm in arms:
            mean = [find(starts[arm.name])] if arm.edit == MEAN else None
            place = start_of(arm, own, planned.trouble, base, folder, mean).path
            runs[seed].append(ArmRun(base, arm, place, folder / arm.folder, stop))
            facts[folder / arm.folder] = seed, known
    width = max(len(arm.name) for arm in arms)

    def on_finished(run: ArmRun) -> None:
        seed, known = facts[run.folder]
        line = ending(read_outcome(run.arm, run.folder, known, stop))
        say(f"seed {seed}  {run.arm.name:<{width}}  {line}", flush=True)

    # An array has the arms of one folder, so there is one for each seed.
    groups = [*runs.values()] if slurm else [[run for each in runs.values() for run in each]]
    for group in groups:
        run_arms(group, jobs, on_finished, slurm)
    return {
        seed: [read_outcome(run.arm, run.folder, facts[run.folder][1], stop) for run in each]
        for seed, each in runs.items()
    }


def seed_start(base: BaseRun, start: Checkpoint, folder: Path, seed: int) -> Checkpoint:
    """Returns the start as a resume with another seed has it before its first step.

    Args:
        base: the run, whose arms have the other seed.
        start: of the run's own seed.
        folder: the run folder of that resume.
        seed: the seed.
    """
    saved = folder / "checkpoints" / start.path.name
    if not saved.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        arguments = base.resumed(start.path, (*QUIET_OVERRIDES, *KEEP_ONE_CHECKPOINT), folder)
        train_until(arguments, lambda run: True, f"seed {seed}", live=False)
    return find(saved)
