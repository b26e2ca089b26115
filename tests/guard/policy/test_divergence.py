"""Divergence: found where half of what was learnt is lost, and not in noise."""

import math
import random

import pytest

from stabletrain.guard.policy import RollbackGuard, SkipGuard
from stabletrain.guard.policy.slow import Divergence
from stabletrain.records import Verdict
from tests.guard.policy.given import reading

WINDOW = 32


def found_in(losses, window=WINDOW):
    """The step at which a series of losses is found to have diverged, and where that began."""
    test = Divergence(window)
    for step, loss in enumerate(losses, 1):
        if (found := test.add(step, loss)) is not None:
            return step, found
    return None


def falling(steps):
    return [2.0 + 3.5 * math.exp(-step / 50) for step in range(steps)]


def test_a_run_that_loses_half_of_what_it_had_learnt_has_diverged():
    step, found = found_in([*falling(200), *[4.0] * 100])
    assert 200 + WINDOW // 2 < step <= 200 + WINDOW  # half of what was learnt: 1.7 of the 1.9 by which the loss rises
    assert 150 <= found.since <= 200
    assert found.text.startswith("the run has diverged: mean loss 3.")


def test_a_run_that_loses_less_has_not():
    assert found_in([*falling(200), *[3.2] * 400]) is None


def test_a_run_that_only_rises_has_diverged_since_its_first_step():
    step, found = found_in([5.5 + 0.1 * number for number in range(100)])
    assert step <= 2 * WINDOW
    assert found.since == 1


def test_noise_around_the_first_losses_is_no_divergence():
    draw = random.Random(0)
    assert found_in([2.3 + 0.3 * draw.gauss(0, 1) for _ in range(5000)]) is None


def test_it_goes_on_from_a_checkpoint():
    losses = [*falling(200), *[4.0] * 100]
    whole = found_in(losses)
    first, second = Divergence(WINDOW), Divergence(WINDOW)
    for step, loss in enumerate(losses[:190], 1):
        first.add(step, loss)
    second.load_state_dict(first.state_dict())
    found = next((step, each) for step, loss in enumerate(losses[190:], 191) if (each := second.add(step, loss)))
    assert found == whole


@pytest.mark.parametrize("kind", [SkipGuard, RollbackGuard])
def test_the_guard_halts_for_it_only_if_fixes_are_tried_then(kind):
    verdicts = {}
    for escalate in ("halt", "whatif"):
        guard = kind(window=WINDOW, sigma=math.inf, slow="off", escalate=escalate)
        losses = [*falling(200), *[4.0] * 100]
        verdicts[escalate] = [guard.judge(reading(loss, step=step)) for step, loss in enumerate(losses, 1)]
    assert {*verdicts["halt"]} == {Verdict.APPLY}
    assert Verdict.HALT in verdicts["whatif"]
    assert guard.kind == "diverged"
    assert guard.since is not None
    assert 150 <= guard.since <= 200
    assert "has diverged" in guard.reason


def test_other_settings_begin_anew():
    guard = SkipGuard(window=WINDOW, sigma=math.inf, slow="off", escalate="whatif")
    for step, loss in enumerate([*falling(200), *[4.0] * 10], 1):
        assert guard.judge(reading(loss, step=step)) is Verdict.APPLY
    guard.reset_for_new_settings(None)
    assert {guard.judge(reading(4.0, step=step)) for step in range(211, 400)} == {Verdict.APPLY}
