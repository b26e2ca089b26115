"""Healthy programs: no guard withholds a step or raises an alarm. The table: `python -m tests.reliability.healthy`."""

import pytest

from tests.reliability.healthy.run import PROGRAMS, run

SHORT = {"wgan": 240, "gan": 60, "reinforce": 60}
"""Steps of the fast tier."""

HEAVY_TAILS = {"autoencoder": 1}
"""Withheld steps of programs whose data have outliers: a batch whose loss and gradient norm jump is a spike."""


@pytest.mark.parametrize(("name", "attached"), [*((name, False) for name in SHORT), ("gan", True)])
def test_no_step_of_a_short_healthy_program_is_withheld(name, attached):
    found = run(name, SHORT[name], attached=attached)
    assert (found.withheld, found.halted, found.steps, {**found.alarms}) == (0, "", SHORT[name], {})


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_step_of_a_healthy_program_is_withheld(name):
    found = run(name, 264)  # two windows of 128 steps
    assert found.withheld <= HEAVY_TAILS.get(name, 0)
    assert (found.halted, found.steps, {**found.alarms}) == ("", 264, {})
