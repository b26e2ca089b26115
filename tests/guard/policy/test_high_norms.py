"""Gradient norms that grow or stay high in a user's loop: what is a spike, what is accepted, what coupling changes."""

import math

import pytest

from stabletrain.guard.options import make_policy
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from stabletrain.guard.policy.high_norms import COUPLED, PERSISTENT
from stabletrain.guard.policy.limits import NORM, Limit
from stabletrain.records import Verdict
from tests.guard.policy.given import feed, reading


def policy_after(steps, norm=1.0, loss=1.0, policy=SkipGuard, **options):
    """The policy of a user's loop after so many ordinary steps."""
    made = make_policy(policy(**options))
    feed(made, [loss] * steps, [norm] * steps)
    return made


def applied(policy, norms, loss=1.0):
    """Whether each of these steps is applied."""
    return [each is Verdict.APPLY for each in feed(policy, [loss] * len(norms), norms)]


def norm_alarms(policy):
    """The new alarms of single norms; slow spikes have tests of their own."""
    return [each for each in policy.new_alarms() if each.kind in ("norm_level", "coupled_spike")]


# ---- growth


@pytest.mark.parametrize("factor", [1.2, 2.0])
@pytest.mark.parametrize("before", [1, 10, 200])
def test_smooth_growth_is_no_spike_in_a_cold_and_in_a_warm_window(before, factor):
    policy = policy_after(before, norm=1e-6)
    assert all(applied(policy, [1e-6 * factor**step for step in range(1, 79)]))
    assert policy.healthy


@pytest.mark.parametrize("before", [5, 20, 40, 63, 64, 128, 300])
def test_a_jump_from_the_recent_level_of_a_grown_norm_is_a_spike(before):
    """In a cold window by the factor of the first steps at most, in a warm one by that of the window."""
    policy = policy_after(1)
    applied(policy, [1.05 ** min(step, 100) for step in range(before)])
    level = 1.05 ** min(before - 1, 100)
    jump = 100.0 if not policy.limits.norm.warm else NORM.recent * 1.11
    assert applied(policy, [jump * level * 1.01]) == [False]


@pytest.mark.parametrize("before", [8, 30, 200])
def test_one_or_two_bad_norms_in_a_row_do_not_open_the_limit(before):
    values = [1.0 + step / 10 for step in range(before)]
    clean, bad = Limit(6.0, 128, NORM), Limit(6.0, 128, NORM)
    for value in values:
        clean.add(value)
        bad.add(value)
    for norm in (90.0, 90.0):
        clean.add(values[-1])
        bad.add(norm)
        assert bad.widened(NORM.recent) <= max(1.5 * clean.value, 4 * NORM.ratio * values[-1])


def test_the_loss_has_no_such_limit():
    growing = [5.0 * 1.2**step for step in range(20)]
    assert SkipGuard().limits.loss._terms.recent == 0
    verdicts = feed(SkipGuard(), growing)
    assert Verdict.SKIP in verdicts, "a loss that grows smoothly diverges"


# ---- a level that persists


@pytest.mark.parametrize("policy", [SkipGuard, RollbackGuard])
@pytest.mark.parametrize("before", [2, 30, 200])
def test_a_norm_that_persists_is_accepted_after_a_few_skips_and_before_a_rollback(before, policy):
    made = policy_after(before, policy=policy)
    level = [300.0, 350.0, 280.0, 310.0, 400.0] + [320.0] * 20
    assert applied(made, level[:PERSISTENT]) == [False] * PERSISTENT
    assert made.healthy, "the skips were no trouble"
    assert all(applied(made, level[PERSISTENT:]))
    assert made.rollbacks == 0
    [alarm] = norm_alarms(made)
    assert alarm.kind == "norm_level"
    assert "in 5 steps in a row, the last one 400, while the loss is within its limit" in alarm.text
    assert not norm_alarms(made)


def test_a_norm_that_persists_does_not_halt_the_loop():
    made = policy_after(30, max_consecutive=PERSISTENT)
    assert Verdict.HALT not in feed(made, [1.0] * 8, [300.0] * 8)
    made = policy_after(30, max_consecutive=PERSISTENT - 1)
    assert Verdict.HALT in feed(made, [1.0] * 8, [300.0] * 8), "the user's own limit comes first"


def test_a_loaded_state_begins_a_new_row():
    made = policy_after(100)
    state = made.state_dict()
    applied(made, [300.0] * 4)
    made.load_state_dict(state)
    assert applied(made, [300.0] * 6) == [False] * PERSISTENT + [True]
    made.load_state_dict(state)
    assert not norm_alarms(made)


def test_norms_agree_up_to_twice_the_smallest():
    made = policy_after(30)
    assert applied(made, [300.0] * 4 + [600.0, 400.0]) == [False] * PERSISTENT + [True]
    made = policy_after(30)
    assert applied(made, [300.0] * 4 + [601.0, 400.0]) == [False] * (PERSISTENT + 1)


def test_norms_that_do_not_agree_are_not_accepted():
    made = policy_after(30)
    running_away = [300.0 * 1.3**step for step in range(12)]
    assert not any(applied(made, running_away))
    assert applied(made, [1e5] * 8) == [False] * 5 + [True] * 3, "and once they agree, they are"


@pytest.mark.parametrize("loss", [math.nan, math.inf, 100.0])
def test_a_loss_that_is_not_finite_or_itself_high_is_never_accepted(loss):
    made = policy_after(100)
    assert not any(applied(made, [300.0] * 40, loss=loss))
    assert not norm_alarms(made)


@pytest.mark.parametrize("norm", [math.nan, math.inf, 1e19])
@pytest.mark.parametrize("sigma", [6.0, math.inf])
def test_a_norm_that_is_not_finite_or_too_large_for_any_limit_is_never_accepted(norm, sigma):
    made = policy_after(100, sigma=sigma)
    assert not any(applied(made, [norm] * 40))
    assert not norm_alarms(made)


def test_another_kind_of_skip_starts_the_row_again():
    made = policy_after(100)
    row = applied(made, [300.0] * 4 + [math.nan] + [300.0] * 7)
    assert row == [False] * 10 + [True] * 2
    row = applied(policy_after(100), [300.0] * 4 + [1.0] + [300.0] * 7)
    assert row == [False] * 4 + [True] + [False] * 5 + [True] * 2, "and so does an applied step"


def test_the_guard_of_a_run_of_train_py_accepts_no_level():
    made = SkipGuard()
    feed(made, [1.0] * 100)
    assert not any(applied(made, [300.0] * 40))


# ---- coupled guards


def coupled_after(steps, **options):
    made = policy_after(steps, **options)
    made.high_norms.coupled = True
    return made


@pytest.mark.parametrize("policy", [SkipGuard, RollbackGuard])
@pytest.mark.parametrize("before", [5, 30, 200])
def test_a_coupled_guard_applies_a_finite_spike_and_raises_one_alarm(before, policy):
    made = coupled_after(before, policy=policy, **({"slow": "rollback"} if policy is RollbackGuard else {}))
    assert all(applied(made, [150.0, 160.0, 1.0, 1.0]))
    [alarm] = norm_alarms(made)
    assert alarm.kind == "coupled_spike"
    assert alarm.text.startswith("gradient norm 150 is a spike, above ")
    assert "another guard's steps alternate" in alarm.text


def test_a_coupled_guard_also_applies_a_high_loss_with_a_rather_high_norm():
    made = coupled_after(100)
    assert all(applied(made, [15.0], loss=9.0))
    [alarm] = norm_alarms(made)
    assert alarm.text.startswith("loss 9 is a spike")


@pytest.mark.parametrize("norm", [1.01 * COUPLED, math.inf, math.nan])
@pytest.mark.parametrize("before", [5, 30, 200])
def test_a_coupled_guard_withholds_what_is_not_finite_or_a_thousandfold(before, norm):
    made = coupled_after(before)
    assert applied(made, [norm, 1.0]) == [False, True]
    assert not norm_alarms(made)


@pytest.mark.parametrize("before", [5, 30, 200])
def test_a_guard_that_is_not_coupled_withholds_the_same_spike(before):
    made = policy_after(before)
    assert applied(made, [150.0]) == [False]
    made.judge(reading(norm=150.0, applied=True))
    assert not norm_alarms(made), "what is not coupled has no alarm of coupled guards"
