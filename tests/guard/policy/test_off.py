"""`NoGuard` applies every update; only loss scaling skips some."""

import math

from stabletrain.guard.policy import NoGuard
from stabletrain.records import Verdict
from tests.guard.policy.given import gate, reading


def test_no_guard_counts_the_skips_of_loss_scaling():
    guard = NoGuard()
    assert guard.judge(reading(norm=math.inf, applied=False, overflow=True)) is Verdict.SKIP
    assert guard.judge(reading()) is Verdict.APPLY
    assert guard.skips == {"overflow": 1}


def test_the_gate_is_open_whatever_the_numbers_say():
    assert gate(NoGuard(), math.nan, math.inf, bad_data=True)


def test_two_guards_share_no_part_that_changes():
    one, other = NoGuard(), NoGuard()
    one.update_check.copies, one.recheck.found = True, "a fault"
    assert (other.update_check.copies, other.recheck.found) == (False, None)
