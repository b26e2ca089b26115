"""A step at which memory or arithmetic failed is taken again, once, and is not counted as skipped."""

import math

import pytest

from stabletrain.guard.policy import RollbackGuard, SkipGuard
from stabletrain.records import Verdict
from tests.guard.policy.given import reading


@pytest.fixture(params=[SkipGuard, RollbackGuard])
def guard(request):
    return request.param()


def test_what_happens_again_in_the_same_step_of_a_verified_state_is_no_fault_of_the_machine():
    guard, changed = RollbackGuard(), reading(applied=False)._replace(step=33, state_changed=True)
    assert guard.judge(changed) is Verdict.RESTORE
    assert guard.skips["state"] == 0, "a step that is taken again is not skipped"
    assert guard.judge(changed) is Verdict.HALT
    assert "so the memory is not at fault" in guard.reason
    assert "guard.checksum_every=0" in guard.reason


def test_a_step_that_is_taken_again_is_noted_with_the_rank_at_fault_if_one_is_known(guard):
    for ranks, known in (((), -1), ((3,), 3)):
        guard.note_retry(33, *ranks)
        assert (guard.retried_step, guard.faulty_rank) == (33, known)


def test_a_step_that_comes_out_wrong_again_is_judged_as_any_other(guard):
    for _ in range(2):
        verdict = guard.judge(reading(math.nan, applied=False))
        verdict = guard.on_machine_fault(33, "not finite", damaged=False, otherwise=verdict)
    assert (verdict, guard.skips["nonfinite"], guard.trouble) == (Verdict.SKIP, 1, 1)


def test_without_an_older_state_a_damaged_one_halts_and_names_what_goes_on():
    guard = SkipGuard()
    assert guard.judge(reading(applied=False)._replace(step=33, state_changed=True)) is Verdict.HALT
    assert "resume=auto continues from the last checkpoint; guard=rollback rolls back" in guard.reason


def test_an_update_that_is_bad_only_once_is_a_fault_of_the_machine(guard):
    guard.note_retry(33, rank=2)
    guard.judge(reading(step=32))
    assert guard.machine_faults == 0
    guard.judge(reading(step=33))
    guard.judge(reading(step=33))
    assert (guard.machine_faults, guard.retried_step, guard.faulty_rank) == (1, 33, 2)


def test_the_steps_that_were_taken_again_go_through_a_checkpoint(guard):
    guard.judge(reading(math.nan, applied=False))
    assert guard.on_machine_fault(7, "not finite", damaged=False) is Verdict.RESTORE
    other = type(guard)()
    other.load_state_dict(guard.state_dict())
    assert (other.machine_faults, other.retried_step, other.skips["nonfinite"]) == (1, 7, 0)
    assert other.on_machine_fault(7, "not finite", damaged=False, otherwise=Verdict.SKIP) is Verdict.SKIP
