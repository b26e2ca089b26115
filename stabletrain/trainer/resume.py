"""Restores the checkpoint with which a run begins, if `resume` names one.

| `resume` | checkpoint |
|---|---|
| `none` | none |
| `auto` | the preferred one of this run folder (`Checkpoints.preferred`) |
| a run folder | its preferred one |
| a checkpoint folder | this one |
"""

from pathlib import Path

from stabletrain.checkpoint.capture import restore, sharded_tensors
from stabletrain.checkpoint.reader import Checkpoint, UnusableCheckpoint
from stabletrain.errors import ConfigError
from stabletrain.guard.policy import NoGuard
from stabletrain.tracking.tracker import NoTracker
from stabletrain.trainer.saved_states import SavedStates


def restore_state(saved: SavedStates, guard: NoGuard, tracker: NoTracker, resume: str, steps: int) -> None:
    """Restores the checkpoint that `resume` names, if any, and reports it.

    Raises:
        ConfigError: the checkpoint is already past `steps`, or none of this run can be used.
    """
    if resume != "none":
        restore_checkpoint(saved, tracker, resume)
    if resume != "auto":
        guard.states.forget()  # the states that it retained are in another run folder
    if saved.state.step > steps:
        raise ConfigError(f"steps={steps} is below the {saved.state.step} steps already done: raise steps")
    tracker.rewind(saved.state.executed_steps)


def restore_checkpoint(saved: SavedStates, tracker: NoTracker, resume: str) -> None:
    """Restores the checkpoint that `resume` names, which is not `none`, and reports it."""
    if resume == "auto":
        found = load_preferred(saved)
    else:
        found = saved.checkpoints.find(Path(resume))
        load(saved, found)
    if found is not None:
        saved.resumed_healthy = found.healthy
        tracker.event("resume", saved.state.step, checkpoint=found.path.name, healthy=found.healthy)
        tracker.note(f"resumed after step {saved.state.step}, from {found.path}")
        # If the folder was searched, the search has reported this already.
        if not found.healthy and Path(resume).absolute() == found.path.absolute():
            tracker.note(f"resume: {found.path.name} is not healthy: its weights or moments may not be finite")
    elif tracker.started():
        tracker.event("restart", 0, reason="no usable checkpoint")
        tracker.note("resume: no usable checkpoint is left here; the run starts again from step 0")


def load(saved: SavedStates, found: Checkpoint) -> None:
    """Restores a checkpoint, after fitting it to changed settings.

    Raises:
        UnusableCheckpoint: it cannot be used.
    """
    tree = found.load(sharded_tensors(saved.state))
    try:
        restore(saved.resumption.resume(found, tree), saved.state, saved.parts)
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # written by another version
        raise UnusableCheckpoint(f"{found.path}: its state has another form ({error!r})") from error


def load_preferred(saved: SavedStates) -> Checkpoint | None:
    """Restores the preferred checkpoint that can be used; returns it, or None if there is none.

    Raises:
        ConfigError: there are checkpoints that verify, and none of them can be used. The run does not start again from
            step 0.
    """
    faults = []
    while (found := saved.checkpoints.preferred()) is not None:
        fault = ""
        try:
            load(saved, found)
        except UnusableCheckpoint as error:
            fault = str(error)
        if saved.checkpoints.accept(found, fault):
            return found
        faults.append(fault)
    if faults:
        raise ConfigError(
            f"no checkpoint of this run can be restored ({faults[0]}): resume with the version of stabletrain that "
            "wrote them, or start a new run in another folder"
        )
    return None
