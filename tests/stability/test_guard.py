"""The guard's gate on the device, and its verdicts on the host."""

import math

import pytest
import torch

from stabletrain.errors import ConfigError
from stabletrain.records import GradNorms, LossTerms, Reading, Verdict
from stabletrain.stability.guard import NoGuard, SkipGuard

NAN, INF = math.nan, math.inf


def gate(guard, loss, norm):
    value = torch.tensor(loss)
    return bool(
        guard.gate(LossTerms(value, value, torch.zeros(())), GradNorms(torch.tensor(norm), torch.tensor([norm])))
    )


def reading(loss=1.0, norm=1.0, applied=True, overflow=False, scale=1.0):
    return Reading(7, loss, loss, 0.0, norm, 1.0, 0.0, scale, applied, overflow, 1e-3)


@pytest.mark.parametrize("loss", [1.0, NAN, INF, -INF])
@pytest.mark.parametrize("norm", [0.0, 1.0, 1e30, NAN, INF])
def test_the_gate_is_open_exactly_where_both_are_finite(loss, norm):
    assert gate(SkipGuard(10), loss, norm) == (math.isfinite(loss) and math.isfinite(norm))
    assert gate(NoGuard(), loss, norm)


def test_skips_are_counted_by_kind_and_an_overflow_breaks_no_row():
    guard = SkipGuard(max_consecutive=3)
    assert guard.judge(reading()) is Verdict.APPLY
    assert guard.judge(reading(loss=NAN, applied=False)) is Verdict.SKIP
    assert guard.judge(reading(norm=INF, applied=False, overflow=True, scale=1024.0)) is Verdict.SKIP
    assert guard.judge(reading(norm=INF, applied=False)) is Verdict.SKIP
    assert guard.skips == {"nonfinite": 2, "overflow": 1}
    assert guard.consecutive == 2


def test_skips_in_a_row_halt_and_name_the_bound_and_the_fix():
    guard = SkipGuard(max_consecutive=3)
    verdicts = [guard.judge(reading(loss=NAN, applied=False)) for _ in range(3)]
    assert verdicts == [Verdict.SKIP, Verdict.SKIP, Verdict.HALT]
    assert "guard.max_consecutive=3" in guard.reason
    assert "optimizer.lr" in guard.reason


def test_an_applied_step_ends_the_row():
    guard = SkipGuard(max_consecutive=2)
    for _ in range(5):
        assert guard.judge(reading(loss=NAN, applied=False)) is Verdict.SKIP
        assert guard.judge(reading()) is Verdict.APPLY


def test_the_reason_says_which_number_was_not_finite():
    guard = SkipGuard(10)
    guard.judge(reading(loss=NAN, norm=NAN, applied=False))
    assert guard.reason == "loss is nan"
    guard.judge(reading(norm=INF, applied=False))
    assert guard.reason == "gradient norm is inf"


def test_the_memory_goes_through_a_checkpoint():
    guard = SkipGuard(5)
    guard.judge(reading(loss=NAN, applied=False))
    other = SkipGuard(5)
    other.load_state_dict(guard.state_dict())
    assert (other.skips, other.consecutive) == (guard.skips, guard.consecutive)
    other.judge(reading(loss=NAN, applied=False))
    assert guard.skips["nonfinite"] == 1, "the two share no memory"


def test_no_guard_counts_what_loss_scaling_withholds():
    guard = NoGuard()
    assert guard.judge(reading(norm=INF, applied=False, overflow=True)) is Verdict.SKIP
    assert guard.judge(reading()) is Verdict.APPLY
    assert guard.skips == {"overflow": 1}


def test_bounds_are_named():
    with pytest.raises(ConfigError, match=r"guard\.max_consecutive=0.*guard=off"):
        SkipGuard(0)
