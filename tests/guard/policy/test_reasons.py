"""A skipped step has one kind and one reason: those of its most basic fault."""

import math

import pytest

from stabletrain.guard.policy import SkipGuard
from stabletrain.guard.policy.limits import CHANGED, KINDS, Limits, kind_and_reason
from tests.guard.policy.given import reading

NAN, INF = math.nan, math.inf

FAULTS = {
    "state": {"state_changed": True},
    "bad_data": {"bad_data": True},
    "update": {"bad_update": True},
    "overflow": {"overflow": True},
    "nonfinite": {"grad_norm": INF},
    "recheck": {"recheck": INF},
    "spike": {},
}
"""A fault of each kind, the most basic one first."""


@pytest.mark.parametrize("kind", FAULTS)
def test_of_several_faults_the_most_basic_one_is_named(kind):
    kinds = [*FAULTS]
    assert {*kinds} == {*KINDS}
    faults = {name: value for each in kinds[kinds.index(kind) :] for name, value in FAULTS[each].items()}
    found = reading(applied=False)._replace(**faults)
    differs = kinds.index(kind) <= kinds.index("recheck")
    assert kind_and_reason(found, Limits(6.0, 20), gradient_differs=differs)[0] == kind


def test_a_changed_state_is_said_in_words():
    changed = reading(applied=False)._replace(state_changed=True)
    assert kind_and_reason(changed, Limits(6.0, 20), gradient_differs=False) == ("state", CHANGED)


def test_the_reason_says_which_number_was_not_finite():
    guard = SkipGuard(max_consecutive=10)
    guard.judge(reading(loss=NAN, norm=NAN, applied=False))
    assert guard.reason == "loss is nan"
    guard.judge(reading(norm=INF, applied=False))
    assert guard.reason == "gradient norm is inf"
