"""Slow spikes: each kind is seen once, with the step and the likely cause; clean series raise nothing."""

import json
import math
import random

import pytest

from stabletrain.errors import ConfigError
from stabletrain.guard.policy import NoGuard, RollbackGuard, SkipGuard
from stabletrain.guard.policy.slow import SlowSpikes, validation_bound
from stabletrain.monitors.update_length import NoLengths
from stabletrain.records import Verdict
from tests.guard.policy.given import reading

QUICK = {"window": 20, "patience": 3, "snapshots": 2, "snapshot_every": 10, "healthy_after": 4}


def clean_run(steps=301):
    """Readings of a clean run: warmup and decay, a falling loss, updates as long as the learning rate implies."""
    weights, readings = 20.0, []
    for step in range(steps):
        drawn = random.Random(step)
        lr = 1e-3 * min((step + 1) / 20, 1) * (1 if step < 120 else 0.5)
        update = 80 * lr * (1 + 0.05 * drawn.gauss(0, 1))
        weights += 0.25 * update
        loss, norm = 2 + 3 * (1 + step / 30) ** -0.5 + 0.1 * drawn.gauss(0, 1), 1 + 0.2 * drawn.random()
        readings.append(reading(loss, norm, step=step)._replace(lr=lr, update=update, weights=weights))
    return readings


CLEAN = clean_run()


def clean(step):
    """The reading of a step of a clean run."""
    return CLEAN[step]


def alarms(change=lambda given: {}, steps=300, at=200, rate=0.1):
    """The alarms of a run that `change` changes from step `at` on."""
    slow, found = SlowSpikes(rate), []
    for step in range(1, steps):
        given = clean(step)
        found += slow.add(given._replace(**change(given)) if step >= at else given)
    return found


def test_a_clean_run_raises_nothing():
    assert alarms() == []


@pytest.mark.parametrize(
    ("change", "kind", "cause"),
    [
        (lambda given: {"loss": given.loss + 0.4}, "slow_loss", "other data since step"),
        (lambda given: {"grad_norm": 4 * given.grad_norm}, "slow_gradient", "other data since step"),
        (lambda given: {"update": 20 * given.update}, "update_length", "the learning rate that the optimizer uses"),
        (lambda given: {"weights": given.weights * 1.01 ** (given.step - 199)}, "weight_growth", "changes the weights"),
        (lambda given: {"weights": given.weights * 0.99 ** (given.step - 199)}, "weight_growth", "changes the weights"),
        (lambda given: {"loss": given.loss + 0.4, "lr": 2 * given.lr, "update": 2 * given.update}, "slow_loss", "rose"),
    ],
)
def test_each_kind_of_change_is_seen_dated_and_explained(change, kind, cause):
    first, *more = alarms(change, steps=235)
    assert (first.kind, more) == (kind, [])
    assert 190 <= first.since <= 203
    assert cause in first.text
    evidence = kind == "weight_growth" or cause == "rose"
    assert ("likely cause" if evidence else "possible causes") in first.text


def test_a_loss_that_rises_by_thousands_is_told():
    (first, *_) = alarms(lambda given: {"loss": 5000.0})
    assert (first.kind, "5e+03 above its trend" in first.text) == ("slow_loss", True)


def test_gradients_that_grow_while_the_loss_falls_are_no_change():
    fast = lambda given: {"loss": 3 - 0.05 * (given.step - 200), "grad_norm": 4 * given.grad_norm}  # noqa: E731
    assert alarms(fast, steps=230) == []


def calm(step):
    """The reading of a step of a run without noise: its loss falls by 3."""
    lr, update = 1e-3, 0.08
    given = reading(5 - 3 * min(step / 100, 1), 1.0, step=step)
    return given._replace(lr=lr, update=update, weights=20 + 0.25 * update * step)


def shifted(given, kind, shift):
    """A reading with one series shifted: the loss in nats, the others in their logarithm or in lengths of updates."""
    return {
        "slow_loss": lambda: given._replace(loss=given.loss + shift),
        "slow_gradient": lambda: given._replace(grad_norm=given.grad_norm * math.exp(shift)),
        "update_length": lambda: given._replace(update=given.update * math.exp(shift)),
        "weight_growth": lambda: given._replace(weights=given.weights + shift * given.update * (given.step - 200)),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "least"), [("slow_loss", 0.06), ("slow_gradient", 0.25), ("update_length", 0.4), ("weight_growth", 0.15)]
)
def test_where_nothing_varied_a_change_counts_from_the_least_deviation_on(kind, least):
    found = []
    for times in (0.4, 4):
        slow = SlowSpikes(0.1)
        readings = [calm(step) if step <= 200 else shifted(calm(step), kind, times * least) for step in range(1, 300)]
        found.append([alarm.kind for given in readings for alarm in slow.add(given)][:1])
    assert found == [[], [kind]]


def test_lengths_begin_a_new_series_when_the_learning_rate_jumps():
    at_decay = lambda given: {"lr": given.lr / 10}  # noqa: E731  of rounding to bf16, the update keeps its length
    assert alarms(at_decay) == []
    by_half = lambda given: {"lr": 1.5 * given.lr, "update": 20 * given.update, "weights": 0.0}  # noqa: E731
    assert alarms(by_half) == [], "this counts as a jump"


def test_steps_that_are_not_measured_still_show_their_loss():
    found = alarms(lambda given: {"loss": given.loss + 0.4, "update": 0.0, "weights": 0.0})
    assert [each.kind for each in found][:1] == ["slow_loss"]


def test_a_validation_loss_alarms_once_if_it_stays_above_the_best_by_more_than_its_noise():
    slow = SlowSpikes(0.1)
    losses = [3.0, 2.5, 2.6, 2.2, 2.25, 2.1, 2.9, 2.05, 2.8, 2.9, 2.95]
    found = [(step, each.since) for step, loss in enumerate(losses) for each in slow.add_validation(step, loss)]
    assert found == [(10, 8)], "a single high one, at 6, is BatchNorm's noise"
    assert validation_bound([3.0, 2.5, 2.6, 2.2, 2.1]) == pytest.approx(0.4)
    assert validation_bound([1.0, 0.0]) == pytest.approx(0.05)


def test_a_restored_run_gives_the_same_alarms():
    def risen(step):
        given = clean(step)
        return given._replace(loss=given.loss + 0.4 * (step >= 200))

    first, found = SlowSpikes(0.1), []
    for step in range(1, 205):
        found += first.add(risen(step))
    assert not found
    second = SlowSpikes(0.1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(205, 230):
        one, other = first.add(risen(step)), second.add(risen(step))
        assert one == other
        found += one
    assert len(found) == 1
    assert second.state_dict() == first.state_dict()


# ---- in the guard


def run_guard(guard, change=lambda given: {"loss": given.loss + 0.4}, steps=240, at=200):
    """Feeds steps and retains states as the loop does; returns step and verdict of the first that is not APPLY."""
    guard.states.retain(0, True)
    for step in range(1, steps):
        given = clean(step)
        verdict = guard.judge(given._replace(**change(given)) if step >= at else given)
        if verdict is not Verdict.APPLY:
            return step, verdict
        if guard.states.due(step):
            guard.states.retain(step, guard.healthy)
    return None


def test_an_alarm_alone_changes_no_verdict():
    guard = SkipGuard()
    assert run_guard(guard) is None
    assert [each.kind for each in guard.new_alarms()] == ["slow_loss"]
    assert guard.new_alarms() == []


def test_a_rollback_wants_a_state_from_before_the_change_and_one_is_left():
    guard = RollbackGuard(**QUICK, slow="rollback")
    found = run_guard(guard)
    assert found is not None
    step, verdict = found
    assert (verdict, guard.reason.startswith("slow spike: the loss")) == (Verdict.ROLLBACK, True)
    assert guard.rollback_before is not None
    assert 185 <= guard.rollback_before <= 199
    assert [each for each in guard.states.steps if each <= guard.rollback_before], "suspicion must keep an older state"
    guard.begin_rollback(step, 190)
    assert guard.rollback_before is None


def test_while_a_change_is_suspected_no_newer_state_pushes_out_the_older_ones():
    guard = RollbackGuard(**QUICK | {"snapshot_every": 6}, slow="rollback")
    found = run_guard(guard, lambda given: {"loss": given.loss + 0.3})
    assert found is not None
    assert found[0] >= 204 + 6 + 4, "without suspicion two states from after the change would be healthy by now"
    assert guard.rollback_before is not None
    assert [each for each in guard.states.steps if each <= guard.rollback_before]


def test_without_progress_only_the_alarm_is_left():
    guard = RollbackGuard(**QUICK, slow="rollback", max_rollbacks=0)
    assert run_guard(guard) is None
    assert guard.new_alarms()


def test_without_progress_the_run_halts_if_other_fixes_are_tried_then():
    guard = RollbackGuard(**QUICK, slow="rollback", max_rollbacks=0, escalate="whatif")
    found = run_guard(guard)
    assert found is not None
    assert found[1] is Verdict.HALT
    assert "guard.max_rollbacks=0 rollbacks did not help" in guard.reason
    assert guard.since is not None
    assert 190 <= guard.since <= 205


def test_validation_losses_roll_back_too():
    guard = RollbackGuard(slow="rollback")
    losses = [3.0, 2.5, 2.0, 1.8, 1.5, 2.5, 2.5, 2.5]
    verdicts = [guard.judge_validation(step, loss) for step, loss in enumerate(losses)]
    assert verdicts == [Verdict.APPLY] * 7 + [Verdict.ROLLBACK]


@pytest.mark.parametrize(("escalate", "then"), [("halt", Verdict.APPLY), ("whatif", Verdict.HALT)])
def test_a_rise_of_the_validation_loss_is_gone_back_for_once_until_there_is_a_better_one(escalate, then):
    """An overfitting model would go back again and again."""
    guard = RollbackGuard(slow="rollback", escalate=escalate)

    def judged(step, losses):
        return [guard.judge_validation(step + each, loss) for each, loss in enumerate(losses)][-1]

    assert judged(0, [3.0, 2.5, 2.0, 1.8, 1.5]) is Verdict.APPLY
    before = guard.state_dict()
    assert judged(5, [2.5, 2.5, 2.5]) is Verdict.ROLLBACK
    guard.begin_rollback(7, 4)
    cumulative = guard.cumulative_state()
    guard.load_state_dict(before)
    guard.load_cumulative_state(cumulative)
    guard.new_alarms()
    assert judged(5, [2.5, 2.5, 2.5]) is then
    assert guard.new_alarms()
    if then is Verdict.HALT:
        assert guard.reason.endswith("and a rollback did not help")
    assert judged(8, [1.4, 1.3, 1.2]) is Verdict.APPLY
    assert judged(11, [9.0, 9.0, 9.0]) is Verdict.ROLLBACK


def test_off_measures_nothing_and_sees_nothing():
    for guard in (NoGuard(), SkipGuard(slow="off")):
        assert type(guard.lengths) is NoLengths
        assert run_guard(guard) is None
        assert guard.judge_validation(7, 9.0) is Verdict.APPLY
        assert guard.new_alarms() == []


def test_unknown_modes_and_rates_are_refused():
    with pytest.raises(ConfigError, match=r"guard\.slow=rollback: .*use guard=rollback"):
        SkipGuard(slow="rollback")
    with pytest.raises(ConfigError, match=r"guard\.slow=loud is not one of off, alarm"):
        SkipGuard(slow="loud")
    for rate in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(ConfigError, match=r"guard\.slow_rate"):
            RollbackGuard(slow_rate=rate)


def test_a_checkpoint_with_the_old_name_of_the_lowered_rate_is_read():
    guard = RollbackGuard()
    state = guard.state_dict()
    del state["lowered"]
    guard.load_state_dict({**state, "slow": [5, 9, 0.5]})
    assert (guard.lr_multiplier(6), guard.lr_multiplier(9), guard.slow) == (0.5, 1.0, "alarm")
