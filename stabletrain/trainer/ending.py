"""What is said of a run that has finished its steps, although nothing went wrong that a step could show.

| remark | if |
|---|---|
| no progress | the median of the last training losses is not below that of the first ones |
| worse than its best | the final validation loss is above the best by more than its noise |

A run whose updates were all withheld has not trained: it has halted.
"""

import math
from pathlib import Path

from stabletrain.checkpoint.off import NoCheckpoints
from stabletrain.checkpoint.reader import UnusableCheckpoint
from stabletrain.errors import TrainingHalted
from stabletrain.guard.policy import NoGuard
from stabletrain.guard.policy.slow import validation_bound
from stabletrain.monitors.change_point import median
from stabletrain.trainer.history import ENDS, History


def remarks(history: History, best: Path | None) -> list[str]:
    """Returns one line for each remark on a finished run.

    Args:
        best: the checkpoint with the lowest validation loss; None if there is none.
    """
    found = []
    first, last = history.first_losses, history.last_losses
    if history.updates >= 2 * ENDS and len(first) == len(last) == ENDS and median(last) >= median(first):
        found.append(
            f"no progress: the training loss of the last {ENDS} steps, {median(last):.4g}, is not below that of the "
            f"first {ENDS}, {median(first):.4g}; fix: another optimizer.lr"
        )
    losses = [loss for loss in history.val_losses if math.isfinite(loss)]
    if len(losses) >= 2:
        bound = validation_bound(losses[:-1])
        if losses[-1] > min(losses) + bound:
            where = f"; its checkpoint: {best}" if best is not None else ""
            found.append(
                f"the final validation loss {losses[-1]:.4g} is above the best, {min(losses):.4g} at step "
                f"{history.best_step}, by more than its noise ({bound:.2g}){where}"
            )
    return found


def best_path(checkpoints: NoCheckpoints) -> Path | None:
    """Returns the checkpoint with the lowest validation loss; None without one, or if it cannot be read any more.

    A run that has finished stays finished: it may be deleted or damaged while this rank looks at it.
    """
    try:
        best = checkpoints.best()
    except (UnusableCheckpoint, OSError):
        return None
    return None if best is None else best.path


def check_updated(step: int, history: History, guard: NoGuard) -> None:
    """Checks that a run which has done all its steps has trained at all.

    Raises:
        TrainingHalted: no update was applied.
    """
    if step and not history.updates:
        raise TrainingHalted(f"step {step}: no update was applied; the last reason: {guard.reason or 'unknown'}")
