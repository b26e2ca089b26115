"""When the guard rolls back, to which state, and what a rollback does not restore."""

import math
from types import SimpleNamespace

import pytest

from stabletrain.errors import ConfigError
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from stabletrain.guard.policy.rollback import CUMULATIVE
from stabletrain.records import Verdict
from tests.guard.policy.given import feed, reading

CALM = [2.0 + 0.01 * (i % 3) for i in range(40)]
QUICK = {"window": 20, "patience": 3, "snapshots": 2, "snapshot_every": 10, "healthy_after": 4}


def calm(guard, steps, first_step=1):
    """Feeds clean steps and retains the states that are due, as the loop does."""
    for step in range(first_step, first_step + steps):
        guard.judge(reading(CALM[step % 40], step=step))
        if guard.states.due(step):
            guard.states.retain(step, guard.healthy)
    return guard


def started(**changed):
    guard = RollbackGuard(**(QUICK | changed))
    assert guard.states.due(0)
    guard.states.retain(0, guard.healthy)
    return guard


@pytest.mark.parametrize("factor", [-0.5, 0.0, 1.01])
def test_a_factor_of_the_learning_rate_that_does_not_lower_it_is_refused(factor):
    with pytest.raises(ConfigError, match=r"is outside \(0, 1\]"):
        started(lr_factor=factor)


def test_skips_that_do_not_end_cause_a_rollback():
    guard = calm(started(), 30)
    assert feed(guard, [50.0] * 3, first_step=31) == [Verdict.SKIP, Verdict.SKIP, Verdict.ROLLBACK]
    assert "guard.patience=3" in guard.reason


def test_applied_steps_between_skips_count_against_them():
    guard = calm(started(), 30)
    assert feed(guard, [50.0, 2.0] * 20) == [Verdict.SKIP, Verdict.APPLY] * 20, "every second step may be skipped"
    assert feed(guard, [50.0, 50.0, 2.0, 50.0, 50.0])[-1] is Verdict.ROLLBACK


@pytest.mark.parametrize("harmless", [{"overflow": True}, {"bad_data": True}])
def test_neither_overflows_nor_bad_data_cause_a_rollback(harmless):
    guard = calm(started(), 30)
    for step in range(31, 60):
        assert guard.judge(reading(norm=math.inf, applied=False, step=step, **harmless)) is Verdict.SKIP
    assert guard.trouble == 0


def test_states_are_known_as_healthy_after_clean_steps_and_only_the_newest_are_held():
    guard = started()
    assert (guard.states.healthy, guard.states.candidates) == ([0], []), "the first is taken for healthy"
    calm(guard, 13)
    assert (guard.states.healthy, guard.states.candidates, guard.states.target) == ([0], [10], 0)
    calm(guard, 1, first_step=14)
    assert (guard.states.healthy, guard.states.candidates, guard.states.target) == ([0, 10], [], 10)
    calm(guard, 10, first_step=15)
    assert (guard.states.healthy, guard.states.steps) == ([10, 20], [10, 20]), "snapshots=2"


def test_a_pinned_state_is_the_only_target_until_the_run_has_been_healthy_beyond_it_for_a_window():
    guard = calm(started(), 30)
    guard.states.pin(30)
    assert (guard.states.target, guard.states.steps) == (30, [30]), "older states belong to other settings"
    calm(guard, 23, first_step=31)
    assert (guard.states.pinned, guard.states.target) == (30, 40)
    calm(guard, 1, first_step=54)  # the state of step 50 is healthy: window=20 steps with the new settings
    assert (guard.states.pinned, guard.states.target) == (None, 50)


def test_no_state_becomes_healthy_while_the_run_is_in_trouble():
    guard = calm(started(), 12)
    for step in (13, 14):
        guard.judge(reading(50.0, applied=False, step=step))
    calm(guard, 1, first_step=15)
    assert guard.states.candidates == [10]
    calm(guard, 1, first_step=16)
    assert guard.states.candidates == []


def gone_back(guard, step):
    """Rolls the guard back as the loop does: restores the state of `target`, but keeps counts and budgets."""
    target = guard.states.target
    detour = guard.begin_rollback(step, target)
    cumulative = guard.cumulative_state()
    restored = calm(started(), target)
    guard.states, guard.trouble = restored.states, restored.trouble
    guard.load_cumulative_state(cumulative)
    return detour


def test_the_learning_rate_is_lowered_again_with_each_rollback_in_vain():
    guard = calm(started(lr_steps=5, max_rollbacks=9), 30)
    detours = []
    for _ in range(3):
        feed(guard, [50.0] * 3)
        detours.append(gone_back(guard, 33))
    assert [detour.lr_factor for detour in detours] == [0.5, 0.25, 0.125]
    assert [detour.number for detour in detours] == [1, 2, 3]
    start = detours[-1].until - 5
    assert [guard.lr_multiplier(step) for step in range(start - 1, start + 6)] == [1.0, *[0.125] * 5, 1.0]


def test_rollbacks_in_vain_halt_the_run_and_name_the_fix():
    guard = calm(started(max_rollbacks=1), 30)
    assert feed(guard, [50.0] * 3)[-1] is Verdict.ROLLBACK
    gone_back(guard, 33)
    assert feed(guard, [50.0] * 3)[-1] is Verdict.HALT
    assert "guard.max_rollbacks=1" in guard.reason
    assert "optimizer.lr" in guard.reason


def test_a_healthy_state_beyond_the_trouble_is_progress():
    guard = calm(started(max_rollbacks=1), 30)
    feed(guard, [50.0] * 3, first_step=31)
    gone_back(guard, 33)
    assert guard.rollbacks_without_progress == 1
    calm(guard, 23, first_step=21)
    assert guard.rollbacks_without_progress == 1, "the state after 40 steps lies beyond, but has not proved itself"
    calm(guard, 1, first_step=44)
    assert guard.rollbacks_without_progress == 0
    assert feed(guard, [50.0] * 3)[-1] is Verdict.ROLLBACK


def test_what_patience_would_still_bear_has_no_time_left_at_the_end():
    guard = calm(started(max_rollbacks=1), 30)
    (once,) = feed(guard, [50.0], first_step=31)
    assert guard.at_end(once) is Verdict.SKIP, "a single one is borne"
    (twice,) = feed(guard, [50.0], first_step=32)
    assert guard.at_end(Verdict.APPLY) is Verdict.APPLY
    assert (twice, guard.at_end(twice)) == (Verdict.SKIP, Verdict.ROLLBACK)
    assert guard.reason.endswith("and the run is at its end")


def test_a_state_gone_wrong_without_a_steps_fault_is_computed_again_from_the_same_data_at_the_same_pace():
    guard = calm(started(max_rollbacks=1), 30)
    assert guard.on_machine_fault(33, "the ranks differ", damaged=True) is Verdict.RESTORE
    assert (guard.reason, guard.machine_faults, guard.rollbacks) == ("the ranks differ", 1, 0)
    assert {guard.lr_multiplier(step) for step in range(40)} == {1.0}
    assert guard.on_machine_fault(34, "the ranks differ", damaged=True) is Verdict.HALT
    assert guard.reason == (
        "the ranks differ, guard.max_rollbacks=1 times without progress: resume on another machine, and test this one"
    )


@pytest.mark.parametrize(
    ("again", "fix", "escalate", "verdict"),
    [
        (("unsafe_op", "aten.log"), "clamp the argument", "halt", Verdict.HALT),
        (("unsafe_op", "aten.log"), "clamp the argument", "whatif", Verdict.ROLLBACK),
        (("unsafe_op", "aten.log"), "optimizer.lr=0.001", "halt", Verdict.ROLLBACK),
        (("unsafe_op", "aten.sqrt"), "clamp the argument", "halt", Verdict.ROLLBACK),
    ],
    ids=["same", "same, and a what-if finds how much data is bad", "same, but a lower rate may help", "another"],
)
def test_the_same_mistake_after_a_rollback_ends_the_run_unless_the_next_try_can_differ(again, fix, escalate, verdict):
    def trouble(guard, mistake):
        guard.note_mistake(SimpleNamespace(mistake=mistake, cause=mistake[0], fix=[fix], verdict="log of 0"))
        return feed(guard, [math.nan] * QUICK["patience"])[-1]

    guard = calm(started(escalate=escalate), 30)
    assert trouble(guard, ("unsafe_op", "aten.log")) is Verdict.ROLLBACK
    gone_back(guard, 33)
    guard = resumed(guard, escalate=escalate)
    assert trouble(guard, again) is verdict
    assert ("unsafe_op again after a rollback, with other data. fix: " in guard.reason) == (verdict is Verdict.HALT)


def resumed(guard, **options):
    """The guard of a process that goes on from a checkpoint."""
    other = RollbackGuard(**QUICK | options)
    other.load_state_dict(guard.state_dict())
    return other


def test_progress_restores_the_budget_of_states_that_are_put_back():
    guard = calm(started(max_rollbacks=1), 30)
    assert guard.on_machine_fault(31, "changed", damaged=True) is Verdict.RESTORE
    guard.states.retain(32, True)
    for step in range(32, 80):
        guard.judge(reading(step=step))
    assert guard.on_machine_fault(80, "changed", damaged=True) is Verdict.RESTORE


def test_after_the_checkpoint_of_another_guard_counts_and_budgets_are_those_of_a_new_one():
    guard = calm(started(), 30)
    feed(guard, [50.0] * 3)
    gone_back(guard, 33)
    fresh = RollbackGuard(**QUICK)
    guard.load_state_dict(SkipGuard().state_dict())
    assert {key: guard.state_dict()[key] for key in CUMULATIVE.values()} == {
        key: fresh.state_dict()[key] for key in CUMULATIVE.values()
    }


def test_counts_and_budgets_go_through_a_checkpoint():
    guard = calm(started(), 30)
    feed(guard, [50.0] * 3)
    gone_back(guard, 33)
    other = RollbackGuard(**QUICK)
    other.load_state_dict(guard.state_dict())
    assert other.state_dict() == guard.state_dict()
    counts = (other.rollbacks, other.rollbacks_without_progress, other.skips["spike"], other.lr_multiplier(25))
    assert counts == (1, 1, 3, 0.5)
    stored = {"in_vain", "restored_in_vain", "beyond", "lowered", "rolled_back_for", "risen_since", "taken_again"}
    assert stored | {"restored"} <= guard.state_dict().keys(), "checkpoints of earlier versions have these keys"
    assert not other.states.due(5), "its states are known: none is taken between"
