"""The guard's gate on the device, and its verdicts on the host."""

import math
from types import SimpleNamespace

import pytest

from stabletrain.guard.policy import NoGuard, SkipGuard
from stabletrain.records import Verdict
from tests.guard.policy.given import feed, gate, reading

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("loss", [1.0, NAN, INF, -INF])
@pytest.mark.parametrize("norm", [0.0, 1.0, 9.9e17, NAN, INF])
def test_the_gate_is_open_exactly_if_both_are_finite(loss, norm):
    assert gate(SkipGuard(max_consecutive=10), loss, norm) == (math.isfinite(loss) and math.isfinite(norm))
    assert gate(NoGuard(), loss, norm)


@pytest.mark.parametrize("sigma", [6.0, INF])
def test_the_gate_is_closed_to_a_gradient_whose_square_a_moment_cannot_hold(sigma):
    assert not gate(SkipGuard(max_consecutive=10, sigma=sigma), 1.0, 1.1e18)


def test_skips_are_counted_by_kind_and_an_overflow_does_not_end_consecutive_skips():
    guard = SkipGuard(max_consecutive=3)
    assert guard.judge(reading()) is Verdict.APPLY
    assert guard.judge(reading(loss=NAN, applied=False)) is Verdict.SKIP
    assert guard.judge(reading(norm=INF, applied=False, overflow=True, scale=1024.0)) is Verdict.SKIP
    assert guard.judge(reading(norm=INF, applied=False)) is Verdict.SKIP
    assert guard.skips == {
        "bad_data": 0,
        "nonfinite": 2,
        "spike": 0,
        "overflow": 1,
        "state": 0,
        "recheck": 0,
        "update": 0,
    }
    assert guard.consecutive == 2


def test_three_bad_updates_in_a_row_halt_and_say_nothing_against_the_weights():
    guard = SkipGuard()
    for _ in range(2):
        assert [guard.judge(reading(applied=False)._replace(bad_update=True)) for _ in range(2)] == [
            Verdict.SKIP,
            Verdict.SKIP,
        ]
        assert (guard.kind, guard.trouble, guard.healthy) == ("update", 0, True)
        guard.judge(reading())
    verdicts = [guard.judge(reading(applied=False)._replace(bad_update=True)) for _ in range(3)]
    assert verdicts == [Verdict.SKIP, Verdict.SKIP, Verdict.HALT]
    assert "in 3 steps in a row: other batches do not help" in guard.reason


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


def test_the_counts_go_through_a_checkpoint():
    guard = SkipGuard(max_consecutive=5)
    guard.judge(reading(loss=NAN, applied=False))
    other = SkipGuard(max_consecutive=5)
    other.load_state_dict(guard.state_dict())
    assert (other.skips, other.consecutive) == (guard.skips, guard.consecutive)
    other.judge(reading(loss=NAN, applied=False))
    assert guard.skips["nonfinite"] == 1, "the two share no memory"


def test_bad_data_closes_the_gate_whatever_the_numbers_say():
    assert gate(SkipGuard(), 1.0, 1.0)
    assert not gate(SkipGuard(), 1.0, 1.0, bad_data=True)
    assert gate(NoGuard(), 1.0, 1.0, bad_data=True)


def test_bad_data_is_counted_separately_and_the_weights_stay_healthy():
    guard = SkipGuard()
    assert guard.judge(reading(loss=NAN, applied=False, bad_data=True)) is Verdict.SKIP
    assert (guard.kind, guard.skips["bad_data"], guard.skips["nonfinite"]) == ("bad_data", 1, 0)
    assert guard.healthy


def test_bad_data_without_end_halts_with_its_own_fix():
    guard = SkipGuard(max_consecutive=3)
    verdicts = [guard.judge(reading(applied=False, bad_data=True)) for _ in range(3)]
    assert verdicts[-1] is Verdict.HALT
    assert guard.reason.endswith("look at the data; events.jsonl names each sample")


def test_a_state_is_healthy_after_as_many_applied_steps_as_were_skipped():
    guard = SkipGuard()
    assert guard.healthy, "a run begins healthy"
    healthy = []
    for loss in [NAN, NAN, 1.0, NAN, 1.0, 1.0, 1.0, NAN]:
        guard.judge(reading(loss, applied=loss == 1.0))
        healthy.append(guard.healthy)
    assert healthy == [False, False, False, False, False, True, True, False]


def test_a_spike_is_skipped_counted_and_kept_out_of_its_window():
    guard = SkipGuard(window=20)
    assert feed(guard, [2.0 + 0.01 * (i % 3) for i in range(30)]) == [Verdict.APPLY] * 30
    before = guard.limits.state_dict()
    assert feed(guard, [9.0]) == [Verdict.SKIP]
    assert (guard.kind, guard.skips["spike"]) == ("spike", 1)
    assert guard.reason == f"loss 9 is a spike, above {guard.limits.loss.value:.4g}"
    assert guard.limits.state_dict() == before
    assert feed(guard, [9.0, 2.0, 9.0]) == [Verdict.SKIP, Verdict.APPLY, Verdict.SKIP], "it is no new normal"


def test_windows_go_through_a_checkpoint():
    guard, other = SkipGuard(window=20), SkipGuard(window=20)
    feed(guard, [2.0 + 0.01 * (i % 3) for i in range(30)])
    other.load_state_dict(guard.state_dict())
    assert (other.limits.loss.value, other.limits.norm.value) == (guard.limits.loss.value, guard.limits.norm.value)
    assert other.state_dict() == guard.state_dict()
    assert feed(other, [9.0]) == [Verdict.SKIP]
    assert feed(SkipGuard(window=20), [2.0, 5.0]) == [Verdict.APPLY] * 2, "without the window it would have passed"


def test_a_checkpoint_of_another_guard_is_loaded_as_far_as_possible():
    guard = SkipGuard()
    guard.load_state_dict({"skips": {"overflow": 4}})
    assert guard.skips == {
        "bad_data": 0,
        "nonfinite": 0,
        "spike": 0,
        "overflow": 4,
        "state": 0,
        "recheck": 0,
        "update": 0,
    }
    assert guard.healthy


def test_buffers_that_are_not_finite_close_the_gate_and_are_named():
    guard = SkipGuard()
    assert not gate(guard, 1.0, 1.0, buffers=INF)
    assert not gate(guard, 1.0, 1.0, buffers=NAN)
    guard.judge(reading(applied=False, buffers=INF))
    assert (guard.kind, guard.reason) == ("nonfinite", "norm of the buffers is inf")


def test_inputs_far_larger_than_before_are_a_spike():
    guard = SkipGuard(window=20)
    for _ in range(30):
        guard.judge(reading(inputs=2.5))
    assert gate(guard, 1.0, 1.0, inputs=49.0)
    assert not gate(guard, 1.0, 1.0, inputs=51.0)
    guard.judge(reading(applied=False, inputs=250.0))
    assert (guard.kind, guard.reason) == ("spike", "an input of magnitude 250 is a spike, above 50")
    assert gate(SkipGuard(), 1.0, 1.0, inputs=1e30), "nothing is known of the first"


def test_the_first_lines_say_what_a_halt_starts_and_how_often_checksums_are_made():
    assert "what-if" not in SkipGuard().note
    assert "; a halt starts a what-if of up to 2,000 steps)" in SkipGuard(escalate="whatif", whatif_steps=2000).note
    for every, said in ((0, "no checksums"), (1, "checksums every update"), (7, "checksums every 7 updates")):
        guard = SkipGuard()
        guard.state_check = SimpleNamespace(every=every)
        assert f"; {said})" in guard.note


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        (None, "lower optimizer.lr, lengthen warmup.steps"),
        ([], "lower optimizer.lr, lengthen warmup.steps"),
        (["optimizer.lr=0.003"], "every batch fails on these weights; fix: optimizer.lr=0.003"),
    ],
)
def test_a_halt_gives_the_advice_of_its_incident(fix, said):
    guard = SkipGuard(max_consecutive=2)
    guard.judge(reading(math.nan, applied=False, step=1))
    if fix is not None:
        guard.note_mistake(SimpleNamespace(fix=fix, verdict="", cause="lr_too_high"))
    assert guard.judge(reading(math.nan, applied=False, step=2)) is Verdict.HALT
    assert said in guard.reason


@pytest.mark.parametrize(("loss", "kept"), [(None, True), (1.0, True), (1000.0, False)])
def test_with_other_settings_limits_are_kept_unless_the_first_loss_is_above_them(loss, kept):
    guard = SkipGuard()
    feed(guard, [1.0 + 0.01 * (step % 3) for step in range(200)])
    limits = guard.limits
    guard.reset_for_new_settings(loss)
    assert (guard.limits is limits) == kept
