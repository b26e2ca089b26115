"""What is said of a run that has finished: no progress, worse than its best; and a run without updates has halted."""

from pathlib import Path

import pytest

from stabletrain.errors import TrainingHalted
from stabletrain.guard.policy import SkipGuard
from stabletrain.trainer.history import History
from stabletrain.trainer.reports import check_updated, remarks


def trained(losses, val_losses):
    history = History()
    for loss in losses:
        history.count_update(loss)
    history.val_losses = val_losses
    history.best_loss = min(val_losses)
    history.best_step = 100 * (val_losses.index(history.best_loss) + 1)
    return history


def test_nothing_is_said_of_a_run_that_went_well():
    assert remarks(trained([3.0 - 0.01 * i for i in range(100)], [3.0, 2.5, 2.51]), Path("best")) == []


def test_a_final_validation_loss_above_the_best_is_said_with_bound_and_checkpoint():
    (line,) = remarks(
        trained([3.0 - 0.01 * i for i in range(100)], [3.0, 2.5, 2.8]), Path("run/checkpoints/step-00000200")
    )
    assert "2.8 is above the best, 2.5 at step 200, by more than its noise (0.05)" in line
    assert line.endswith("run/checkpoints/step-00000200")


def test_a_run_without_progress_is_said():
    (line,) = remarks(trained([3.0] * 100, [3.0, 3.0]), None)
    assert line.startswith("no progress: the training loss of the last 16 steps, 3, is not below")
    assert remarks(trained([3.0] * 20, [3.0]), None) == [], "too short to say"


def test_a_run_without_an_update_has_halted():
    guard = SkipGuard()
    guard.reason = "loss is nan"
    with pytest.raises(TrainingHalted, match=r"^step 9: no update was applied; the last reason: loss is nan$"):
        check_updated(9, History(), guard)
    check_updated(9, trained([1.0], [1.0]), guard)
