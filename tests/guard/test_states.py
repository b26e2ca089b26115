"""Snapshots in memory: which one is restored, what is damaged, and what a check of them leaves as it was."""

import pytest
import torch

from stabletrain.checkpoint.capture import capture
from stabletrain.checkpoint.tree import to_host
from stabletrain.guard.policy import NoGuard, RollbackGuard
from stabletrain.guard.states import KeptStates
from stabletrain.records import TrainState
from stabletrain.tracking.tracker import NoTracker
from tests.guard.given import batches, network, same
from tests.trainer.given import Recorder

STEPS = 12


class Counting(torch.optim.AdamW):
    """Counts its steps in one of its arguments, as Prodigy does."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-2)
        self.defaults["counted"] = self.param_groups[0]["counted"] = 1.0

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["counted"] += 1


class Kept:
    """States of a short run, taken after every fourth step, and the events."""

    def __init__(self, any_rank=bool, checksum_every=1):
        model = network()
        self.policy = RollbackGuard(snapshot_every=4, healthy_after=0)
        self.policy.check_state_every(checksum_every)
        self.tracker = Recorder()
        self.state = TrainState(model, Counting(model.parameters()))
        self.states = KeptStates(
            self.state,
            {"guard": self.policy},
            guard=self.policy,
            tracker=self.tracker,
            any_rank=any_rank,
        )
        self.taken = {}
        for step, (x, y) in enumerate(batches(STEPS + 1)):
            self.state.step = self.state.executed_steps = step
            if self.states.snapshot_due(step):
                self.states.take_snapshot()
                self.policy.states.promote(step)
                self.states.retain()
                self.taken[step] = self.bits()
            self.state.optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            self.state.optimizer.step()
        self.state.step, self.state.skipped = STEPS + 1, [(3, 5)]

    def bits(self):
        """Copies of the whole state."""
        tree = to_host(capture(self.state, {}))
        state = tree["optimizer"]["state"].items()
        moments = {f"{name} {key}": each for name, values in state for key, each in values.items()}
        return {**tree["model"], **moments, "counted": tree["optimizer"]["param_groups"][0]["counted"]}

    def counts(self):
        """The live counts."""
        return self.state.step, self.state.skipped, self.state.executed_steps

    def damage(self, step):
        """Flips the lowest bit of a weight of a snapshot."""
        tree = self.states.snapshots.newest(step)
        tree["model"]["4.weight"].view(torch.int32)[0, 0] ^= 1


def test_the_newest_healthy_state_is_chosen_and_after_a_slow_spike_one_from_before_it():
    kept = Kept()
    assert kept.policy.states.steps == [4, 8, 12]
    assert kept.states.before_trouble() == 12
    for before, chosen in {20: 12, 11: 8, 8: 8, 5: 4, 3: 4}.items():
        kept.policy.rollback_before = before
        assert kept.states.before_trouble() == chosen


def test_a_restored_snapshot_is_the_state_that_was_taken():
    kept = Kept()
    tree = kept.states.newest_intact(11, step=13)
    kept.states.restore(tree, {})
    assert same(kept.bits(), kept.taken[8])
    assert kept.state.step == 8
    assert not kept.tracker.events


def test_counts_and_budgets_are_kept_when_a_state_is_restored():
    kept = Kept()
    kept.policy.begin_rollback(13, 12)
    kept.states.restore(kept.states.newest_intact(12, step=13), kept.states.cumulative_states())
    assert kept.policy.rollbacks == 1
    kept.states.restore(kept.states.newest_intact(12, step=13), {})
    assert kept.policy.rollbacks == 0


def test_a_damaged_snapshot_is_reported_and_never_used():
    kept = Kept()
    kept.damage(12)
    counts = kept.counts()
    assert kept.states.newest_intact(12, step=13)["step"] == 8
    assert same(kept.bits(), kept.taken[8])
    assert kept.counts() == counts, "prefetching threads read them"
    assert kept.tracker.events == [("corrupt_snapshot", 13, {"snapshot": 12})]
    assert kept.tracker.notes == ["step 13: the snapshot after step 12 is damaged: not used"]
    assert kept.states.newest_intact(12, step=13)["step"] == 8
    assert len(kept.tracker.events) == 1


def test_a_snapshot_that_is_damaged_on_another_rank_is_dropped_here_too():
    answers = [True, False]
    kept = Kept(any_rank=lambda here: here or answers.pop(0))
    assert kept.states.newest_intact(12, step=13)["step"] == 8
    assert [fields["snapshot"] for _, _, fields in kept.tracker.events] == [12]
    assert not answers


@pytest.mark.parametrize("what", ["a weight is not finite", "a mean of squares is negative"])
def test_without_checksums_a_snapshot_must_still_be_sound(what):
    kept = Kept(checksum_every=0)
    kept.damage(12)
    assert kept.states.newest_intact(12, step=13)["step"] == 12, "nothing tells that it was changed"
    tree = kept.states.snapshots.newest(12)
    if what == "a weight is not finite":
        tree["model"]["4.weight"].fill_(torch.inf)
    else:
        tree["optimizer"]["state"]["4.weight"]["exp_avg_sq"].view(-1)[3] = -1e-3
    assert kept.states.newest_intact(12, step=13)["step"] == 8


@pytest.mark.parametrize("damaged", [(), (12,), (4, 8, 12)])
def test_a_check_before_a_snapshot_is_saved_leaves_the_present_state_as_it_was(damaged):
    kept = Kept()
    for step in damaged:
        kept.damage(step)
    before, counts = kept.bits(), kept.counts()
    found = kept.states.newest_intact_to_save(12)
    assert same(kept.bits(), before)
    assert kept.counts() == counts
    assert (found and found["step"]) == {0: 12, 1: 8, 3: None}[len(damaged)]
    assert [fields["snapshot"] for _, _, fields in kept.tracker.events] == [*reversed(damaged)]
    assert kept.states.newest_intact_to_save(3) is None


def test_a_check_before_a_snapshot_is_saved_keeps_the_checksums_of_the_last_update():
    kept = Kept()
    check = kept.policy.state_check
    from stabletrain.buffers import buffers_of

    check.after_update(kept.state, buffers_of(kept.state.model).save())
    kept.states.newest_intact_to_save(12)
    with torch.no_grad():
        kept.state.model[4].weight[0, 0] += 1
    assert not check.holds(kept.state)


def test_a_guard_without_rollbacks_keeps_no_states():
    model = network()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    states = KeptStates(state, {}, guard=NoGuard(), tracker=NoTracker())
    assert not states.snapshot_due(0)
    states.take_snapshot()
    assert states.before_trouble() is None
    assert states.newest_intact(None, step=0) is None
    assert states.newest_intact(0, step=0) is None
