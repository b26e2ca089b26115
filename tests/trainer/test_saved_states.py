"""Snapshots that are written to disk as healthy states: only intact ones are."""

import torch

from stabletrain.checkpoint.checkpoints import Checkpoints
from stabletrain.checkpoint.folder import find
from stabletrain.guard.policy import RollbackGuard
from tests.trainer.given import batch, make_run


def run_of(folder, step=13):
    """A run with the snapshots after steps 4, 8 and 12, all of them healthy."""
    guard = RollbackGuard(snapshot_every=4, healthy_after=0)
    guard.check_state_every(1)
    checkpoints = Checkpoints(every=100, keep=9, keep_best=True, asynchronous=False)
    checkpoints.open(folder, lambda *event: None, "tinytiny")
    run = make_run(guard=guard, checkpoints=checkpoints)
    state, saved = run.state, run.saved
    for done in range(step):
        state.step = state.executed_steps = done
        if saved.snapshot_due(done):
            saved.take_snapshot()
            guard.states.promote(done)
            saved.retain()
        torch.nn.functional.cross_entropy(state.model(batch(done).inputs), batch(done).targets).backward()
        state.optimizer.step()
    state.step = state.executed_steps = step
    return run


def weights(run):
    return {name: value.clone() for name, value in run.state.model.state_dict().items()}


def damage(run, step):
    """Flips the lowest bit of a weight of a snapshot."""
    run.saved.snapshots.newest(step)["model"]["weight"].view(torch.int32)[0, 0] ^= 1


def told(run):
    """The steps of the snapshots that were reported as damaged."""
    found = [
        fields["snapshot"] for kind, step, fields in run.tracker.events if (kind, step) == ("corrupt_snapshot", 13)
    ]
    assert run.tracker.notes == [f"step 13: the snapshot after step {each} is damaged: not used" for each in found]
    return found


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_halt_leaves_the_newest_healthy_state_that_is_intact(tmp_path):
    run = run_of(tmp_path)
    wanted = {name: value.clone() for name, value in run.saved.snapshots.newest(8)["model"].items()}
    damage(run, 12)
    present = weights(run)
    assert run.saved.save_last_healthy() == 8
    assert told(run) == [12]
    left = find(tmp_path)
    assert (left.step, left.healthy) == (8, True)
    assert same(left.load_model(), wanted)
    assert left.load()["tick"] == 13
    assert same(weights(run), present)


def test_a_halt_without_an_intact_state_saves_none(tmp_path):
    run = run_of(tmp_path)
    for step in (4, 8, 12):
        damage(run, step)
    assert run.saved.save_last_healthy() is None
    assert told(run) == [12, 8, 4]
    assert not [*(tmp_path / "checkpoints").glob("step-*")]


def test_with_the_present_state_the_oldest_retained_one_is_saved_if_it_is_intact(tmp_path):
    for name, damaged in {"intact": [], "damaged": [4]}.items():
        run = run_of(tmp_path / name)
        for step in damaged:
            damage(run, step)
        present = weights(run)
        run.saved.save(None)
        assert told(run) == damaged
        steps = sorted(int(path.name[5:]) for path in (tmp_path / name / "checkpoints").glob("step-*"))
        assert steps == ([13] if damaged else [4, 13])
        assert same(find(tmp_path / name).load_model(), present)
        assert same(weights(run), present)
