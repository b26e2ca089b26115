"""Trains a run of a what-if in this process up to a step, and leaves a state from which it can go on.

The loop stops as it does after a signal: the state is saved after the step, and the run is `preempted`. So an arm is
the run that the same resume gives, bit for bit, up to where it stops.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from stabletrain.config.arguments import Arguments, with_overrides
from stabletrain.config.checks import check
from stabletrain.config.jobs import run_as_job
from stabletrain.errors import Interrupted, TrainingHalted
from stabletrain.machine.signals import NoStopRequest, StopRequest
from stabletrain.parallel.ranks import current_ranks
from stabletrain.program import called, conf_folder
from stabletrain.tracking.progress import InSweep
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from stabletrain.trainer.run import TrainingRun

STEPS_PER_LINE = 50
"""Steps between two lines of an arm's `output.txt`."""

REACHED, NOT_FINITE = "what-if", "the loss is not finite"
"""Why a run of a what-if stops: the reason in its `run.json` begins with one of these."""


class StopWhen(NoStopRequest):
    """Asks the run to stop when a condition holds, or when a signal arrives.

    Args:
        over: returns why the run is over; empty if it is not.
        listening: whether signals count; if not, the handlers of the program stay as they are.
    """

    def __init__(self, over: Callable[[], str], listening: bool = True) -> None:
        self._signals, self._over = StopRequest() if listening else NoStopRequest(), over

    def __enter__(self) -> "StopWhen":
        self._signals.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Restores the handlers of signals."""
        self._signals.__exit__(*raised)

    @property
    def name(self) -> str:
        """The name of the signal that arrived; empty if none did."""
        return self._signals.name

    @property
    def agreed(self) -> str:
        """Why the run is over, the same on all ranks; empty if it is not."""
        return self._over()


def train_until(
    arguments: Arguments, reached: Callable[[TrainingRun], bool], label: str, live: bool, listening: bool = True
) -> None:
    """Trains the run of a command line until `reached`, the end of the run, or its halt.

    Args:
        arguments: with `resume` and `hydra.run.dir`.
        reached: whether the run has done its steps.
        label: in front of the live line.
        live: whether to show one; no other run of this terminal may have one.
        listening: whether signals stop it.

    Raises:
        Interrupted: a signal arrived; the state is saved.
        ConfigError: the run cannot be built.
    """

    def job(cfg: DictConfig, folder: Path) -> None:
        check(cfg)
        run = build(cfg, folder, InSweep(STEPS_PER_LINE, folder, label, live))
        if reached(run):  # nothing is left to train: the state at step 0, or that of the resume, is saved as it is
            run.saved.save(None, healthy=True)
            run.saved.checkpoints.wait()
            run.data.batches.close()
            run.output.tracker.close(0)
            run.output.folder.finish("preempted", REACHED, {"steps": run.state.step, "ticks": run.state.executed_steps})
            return
        # An arm is stopped as a signal stops a run, so no setting differs from those of the resume that it is. A lower
        # `steps`, for one, would change the learning rates of its schedule.
        until = StopWhen(lambda: reason_over(run, reached), listening)
        try:
            train(run, until)
        except TrainingHalted:  # a result
            pass
        except Interrupted as stopped:
            if run.parallel.any_rank(bool(until.name)) or not str(stopped).startswith((REACHED, NOT_FINITE)):
                raise

    if not current_ranks().is_main:  # only the main process writes `.hydra/`
        arguments = with_overrides(arguments, "hydra.output_subdir=null")
    words = [*arguments.options, *arguments.overrides]
    with called(words, words):
        run_as_job(arguments, conf_folder(), job)


def reason_over(run: TrainingRun, reached: Callable[[TrainingRun], bool]) -> str:
    """Returns why a run of a what-if is over; empty if it is not."""
    if reached(run):
        return REACHED
    losses = run.history.last_losses
    return NOT_FINITE if losses and not math.isfinite(losses[-1]) else ""
