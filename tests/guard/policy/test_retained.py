"""Retained states: the steps of the newest healthy states, which a rollback may restore."""

import pytest

from stabletrain.guard.policy.retained import NoRetainedStates, RetainedStates


@pytest.fixture
def states():
    """At most two healthy states, one every ten steps; each counts as healthy four steps later."""
    return RetainedStates(most=2, every=10, healthy_after=4)


def filled(states, *steps):
    for step in steps:
        states.retain(step, healthy=True)
    return states


def test_the_first_state_is_due_at_once_and_always_counts_as_healthy(states):
    assert states.due(7)
    states.retain(7, healthy=False)
    assert (states.healthy, states.candidates, states.target) == ([7], [], 7)
    assert [step for step in range(8, 31) if states.due(step)] == [10, 20, 30]


def test_later_states_wait_and_unhealthy_ones_are_not_retained(states):
    filled(states, 0, 10)
    states.retain(20, healthy=False)
    assert (states.steps, states.candidates, states.target) == ([0, 10], [10], 0)


def test_a_state_is_retained_once_even_if_its_step_is_replayed(states):
    filled(states, 0, 10, 10, 0)
    assert states.steps == [0, 10]


def test_a_state_becomes_healthy_when_it_is_old_enough_and_not_before(states):
    filled(states, 0, 10, 12)
    assert (states.promote(13), states.target) == ([], 0)
    assert (states.promote(14), states.target) == ([10], 10)
    assert (states.healthy, states.candidates) == ([0, 10], [12])
    assert states.promote(14) == []


def test_only_the_newest_healthy_states_are_retained(states):
    filled(states, 0, 10, 20, 30)
    assert states.promote(100) == [10, 20, 30]
    assert (states.healthy, states.candidates, states.steps, states.target) == ([20, 30], [], [20, 30], 30)


def test_after_forget_a_state_is_due_at_once(states):
    filled(states, 0, 10).forget()
    assert (states.steps, states.target) == ([], None)
    assert states.due(13)


def test_the_steps_survive_a_checkpoint_and_later_states_do_not_change_it(states):
    filled(states, 0, 10)
    stored, other = states.state_dict(), RetainedStates(most=2, every=10, healthy_after=4)
    other.load_state_dict(stored)
    assert other == states
    filled(states, 20)
    filled(other, 30)
    assert stored == {"waiting": [10], "known": [0], "pinned": []}
    other.load_state_dict({})
    assert other.steps == [], "a checkpoint of another guard stores no steps"


def test_a_guard_without_rollback_retains_nothing():
    none = NoRetainedStates()
    none.retain(0, healthy=True)
    none.forget()
    assert (none.due(0), none.steps, none.target, none.most_retained) == (False, [], None, 0)


@pytest.mark.parametrize(("healthy_after", "most_retained"), [(0, 4), (20, 4), (50, 4), (51, 5), (100, 5), (101, 6)])
def test_so_many_states_are_retained_together_and_no_more(healthy_after, most_retained):
    states, seen = RetainedStates(most=3, every=50, healthy_after=healthy_after), []
    for step in range(2000):
        states.promote(step)
        if states.due(step):
            states.retain(step, healthy=True)
            seen.append(len(states.steps))
    assert states.most_retained == max(seen) == most_retained
