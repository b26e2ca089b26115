"""Common to all faults: planned numbers and rank; and `faults=none`."""

import pytest

from stabletrain.beside.faults import Empty, Gradient
from stabletrain.errors import ConfigError
from stabletrain.extension import NoFaults
from tests.beside.faults.given import Images, Scaled, bad_elements, fresh, gradients, option, step


@pytest.mark.parametrize("at", [[], [-1], [3, -5], [True]])
def test_invalid_numbers_are_refused(at):
    with pytest.raises(ConfigError, match="faults.at="):
        Gradient(at=at)


@pytest.mark.parametrize(
    ("value", "message"),
    [("1.5", "not a list of numbers"), ("[-1]", "-1 is not a whole number"), ("[]", "plans nothing")],
)
def test_invalid_numbers_on_the_command_line_are_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        option("gradient", f"faults.at={value}")


@pytest.mark.parametrize(
    ("planned", "here", "hit"), [(None, None, True), (0, None, True), (1, None, False), (1, "1", True)]
)
def test_a_fault_of_one_rank_hits_that_rank(monkeypatch, planned, here, hit):
    monkeypatch.delenv("RANK", raising=False)
    if here is not None:
        monkeypatch.setenv("RANK", here)
    state = fresh()
    Gradient(at=[0], rank=planned).state(state, Scaled())
    step(state)
    assert bool(bad_elements(gradients(state))) == hit
    assert (len(Empty(at=[0], rank=planned).data(Images()).batch(0, 4, "train")) == 0) == hit


def test_none_returns_every_object_and_does_not_change_the_state():
    state, off = fresh(), NoFaults()
    before = dict(vars(state.optimizer)), [dict(vars(module)) for module in state.model.modules()]
    off.state(state, Scaled())
    assert (dict(vars(state.optimizer)), [dict(vars(module)) for module in state.model.modules()]) == before
    for given in (object(), Images()):
        assert off.data(given) is off.checkpoints(given) is off.wandb(given) is given
