"""Runs the arms of a round: in this process, several at once in processes of their own, or as an array job of Slurm.

An arm that is over is not run again, and the others go on where they stopped. So a what-if that was interrupted is
continued by the same command.
"""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

from stabletrain.beside.whatif.arm_run import ArmRun, run_arm, run_in_process
from stabletrain.beside.whatif.array import ArmArray, check_not_queued, run_array
from stabletrain.errors import Interrupted, StabletrainError
from stabletrain.machine.signals import StopRequest

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
