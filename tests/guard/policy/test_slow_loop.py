"""Slow spikes in a user's own loop: an alarm only for a change that lasts and that the loop does not make itself."""

import json

import pytest

from stabletrain.errors import ConfigError
from stabletrain.guard.options import make_policy
from stabletrain.guard.policy import SkipGuard
from stabletrain.guard.policy.slow import NoSlowSpikes
from stabletrain.guard.policy.slow_loop import LoopSlowSpikes
from tests.guard.policy.test_slow import clean


def alarms(change=lambda given: {}, steps=300, slow=None):
    """The alarms of a run in which `change` changes each reading."""
    slow = slow or LoopSlowSpikes(0.1)
    readings = map(clean, range(1, steps))
    return [alarm for given in readings for alarm in slow.add(given._replace(**change(given)))]


def risen(*intervals, by=0.6):
    """Raises the loss in the given intervals of steps."""
    return lambda given: {"loss": given.loss + by * any(low <= given.step < high for low, high in intervals)}


def scaled(factor, *at):
    """Scales the weights after the update of the given steps, outside of it."""

    def change(given):
        return {"weights": given.weights * factor ** sum(step < given.step for step in at)}

    return change


def test_a_clean_run_raises_nothing():
    assert alarms() == []


def test_a_loss_that_reaches_zero_has_a_trend_and_one_below_it_has_none():
    def at(level):
        rise = risen((200, 300))
        return lambda given: rise(given) if given.step != 50 else {"loss": level}

    assert [len(alarms(at(level), steps=260)) for level in (0.0, -1e-3)] == [1, 0]


def test_a_rise_that_lasts_is_told_once_with_what_could_be_the_cause():
    (alarm,) = alarms(risen((200, 300)), steps=260)
    assert alarm.kind == "slow_loss"
    assert 198 <= alarm.since <= 201
    assert "above its trend for 4" in alarm.text
    assert "likely cause" not in alarm.text, "nothing is known about the cause"
    assert 'Guard(loss="policy")' in alarm.text


def test_a_rise_that_decays_within_twenty_steps_is_none():
    def decaying(level):
        return lambda given: {"loss": given.loss + (level + 2 * 0.9 ** (given.step - 150) if given.step >= 150 else 0)}

    assert alarms(risen((150, 170))) == alarms(decaying(0.0)) == []
    assert alarms(decaying(0.5)) == [], "it has decayed, to a level that is a little higher"


def test_rises_at_a_constant_interval_are_none_from_the_third_on():
    slow = LoopSlowSpikes(0.1)
    assert [slow._recurs(since) for since in (100, 230, 361, 490, 700)] == [False, False, True, True, False]

    def alternating(given):
        return given._replace(loss=2 + (given.loss - 2) / 10 + 0.6 * (given.step // 100 % 2))

    slow = LoopSlowSpikes(0.1)
    readings = [clean(200 + step % 100)._replace(step=step, update=0.0, weights=0.0) for step in range(1, 1200)]
    found = [alarm.since for given in readings for alarm in slow.add(alternating(given))]
    assert [round(since, -1) for since in found] == [100, 300]


def test_a_loss_that_has_been_negative_has_no_trend():
    negative = lambda given: {"loss": given.loss - 100 + given.step * (given.step > 150)}  # noqa: E731
    positive = lambda given: {"loss": given.loss + given.step * (given.step > 150)}  # noqa: E731
    assert alarms(negative) == []
    assert [each.kind for each in alarms(positive)] == ["slow_loss"]


@pytest.mark.parametrize("loss", ["policy", "adversarial"])
def test_a_loss_that_is_not_minimized_has_no_trend(loss):
    slow = make_policy(loss=loss).slow_spikes
    worse = lambda given: {"loss": given.loss + 3, "grad_norm": 900.0} if given.step > 150 else {}  # noqa: E731
    assert alarms(worse, slow=slow) == []
    assert not slow.suspects
    assert alarms(scaled(0.5, 200), slow=make_policy(loss=loss).slow_spikes), "weights are judged all the same"


def test_an_unknown_kind_of_loss_is_refused():
    with pytest.raises(ConfigError, match=r"Guard\(loss='reward'\) is not one of minimized, policy, adversarial"):
        make_policy(loss="reward")


@pytest.mark.parametrize(("name", "kind"), [("grad_norm", "slow_gradient"), ("update", "update_length")])
def test_gradients_and_updates_may_double_but_not_grow_tenfold_while_the_loss_does_not_fall(name, kind):
    def grown(factor):
        return lambda given: {"loss": 2.0, name: getattr(given, name) * (factor if given.step > 210 else 1)}

    assert alarms(grown(2)) == []
    assert [each.kind for each in alarms(grown(10))] == [kind]


@pytest.mark.parametrize("factor", [0.5, 0.99, 1.01, 2.0])
def test_weights_that_change_by_more_than_the_update_are_told_once(factor):
    (alarm,) = alarms(scaled(factor, 200, 250))
    assert (alarm.kind, alarm.since) == ("weight_growth", 200)
    assert "something else changed them" in alarm.text
    assert "guard.state_replaced()" in alarm.text


def test_growth_within_the_update_is_none_however_it_changes():
    def back_and_forth(given):
        return {"weights": 20 + 0.05 * (given.step > 150), "update": 0.05}

    assert alarms(back_and_forth) == []


def test_a_loop_that_changes_weights_from_the_start_does_so_itself():
    assert alarms(scaled(0.99, *range(20, 300, 10))) == []


def test_after_a_step_that_was_not_measured_weights_may_be_others():
    def loaded(given):
        if given.step == 200:
            return {"weights": 0.0, "update": 0.0}
        return scaled(0.5, 199)(given)

    assert alarms(loaded) == []


@pytest.mark.parametrize("cut", [205, 245])
def test_a_restored_run_gives_the_same_alarms(cut):
    change = lambda given: risen((200, 300))(given) | scaled(0.5, 210, 250)(given)  # noqa: E731
    first, second = LoopSlowSpikes(0.1), LoopSlowSpikes(0.1)
    alarms(change, steps=cut, slow=first)
    alarms(lambda given: {"loss": -1.0}, slow=second)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in range(cut, 299):
        given = clean(step)._replace(**change(clean(step)))
        assert first.add(given) == second.add(given)
    assert first.state_dict() == second.state_dict()


def test_off_stays_off_and_the_users_own_policy_keeps_its_tests():
    mine = SkipGuard(slow="off")
    assert type(make_policy(mine).slow_spikes) is NoSlowSpikes
    mine = SkipGuard()
    assert type(make_policy(mine).slow_spikes) is LoopSlowSpikes
    assert not isinstance(mine.slow_spikes, LoopSlowSpikes)
