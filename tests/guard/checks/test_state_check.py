"""The check of the state between two updates, by hand: what it finds, when it compares, and how often by default."""

import pytest
import torch
from torch import nn

from stabletrain.buffers import buffers_of
from stabletrain.errors import ConfigError
from stabletrain.guard.checks.state_check import UNKNOWN, NoStateCheck, StateCheck, default_every
from stabletrain.guard.policy import RollbackGuard, SkipGuard
from stabletrain.records import TrainState


def trained():
    """Returns a state after one update, with moments and buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    state = TrainState(model, torch.optim.AdamW(model.parameters()))
    model(torch.randn(6, 4)).square().sum().backward()
    state.optimizer.step()
    state.step = state.executed_steps = 1
    return state


def checked(state, change):
    """Returns what the check says of a change between two updates, and the tensors it names."""
    check = StateCheck(1)
    check.after_update(state, buffers_of(state.model).save())
    with torch.no_grad():
        change(state)
    said = check.before_update(state, buffers_of(state.model).save())
    return float(said), [f"{each.what} {each.name}" for each in check.changes(state.model)]


def moment(state, name):
    return state.optimizer.state[state.model[0].weight][name]


CHANGES = {
    "parameter 0.weight": lambda state: state.model[0].weight.view(torch.int32)[0, 0].bitwise_xor_(1),
    "exp_avg 0.weight": lambda state: moment(state, "exp_avg")[1, 1].mul_(1.01),
    "exp_avg_sq 0.weight": lambda state: moment(state, "exp_avg_sq").mul_(1 + 2**-20),
    "step 0.weight": lambda state: moment(state, "step").add_(1),
    "buffer 1.running_var": lambda state: state.model[1].running_var[3].add_(1e-6),
    "parameter 2.weight": lambda state: state.model[2].weight.copy_(state.model[2].weight.flip(0).clone()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found_and_its_tensor_named(name):
    said, names = checked(trained(), CHANGES[name])
    assert said == 1
    assert name in names
    if not name.startswith("buffer"):  # small tensors share rows, so neighbours may be named with it
        assert not any(each.startswith("buffer") for each in names)


def test_an_unchanged_state_is_not_reported():
    assert checked(trained(), lambda state: state.model(torch.randn(3, 4, generator=torch.Generator()))) != (0, [])
    assert checked(trained(), lambda state: state.model.eval()(torch.ones(3, 4))) == (0, [])


def test_an_older_state_that_was_put_back_is_not_compared():
    state, check = trained(), StateCheck(1)
    check.after_update(state, buffers_of(state.model).save())
    state.step -= 1
    with torch.no_grad():
        state.model[0].weight.zero_()
    assert check.before_update(state, buffers_of(state.model).save()) == 0
    assert check.holds(state)


def test_only_every_so_many_updates_are_checked():
    state, check = trained(), StateCheck(3)
    found = []
    for step in range(2, 8):
        state.step = state.executed_steps = step
        check.after_update(state, buffers_of(state.model).save())
        with torch.no_grad():
            state.model[0].weight.add_(1)
        found.append(float(check.before_update(state, buffers_of(state.model).save())))
    assert found == [0, 1, 0, 0, 1, 0]  # after updates 3 and 6


def test_a_saved_state_must_have_its_checksums_when_it_is_put_back():
    state, check = trained(), StateCheck(1)
    reference = check.reference(state)
    assert check.restored(state, reference)
    moment(state, "exp_avg")[0, 0] += 1
    assert not check.restored(state, reference)
    assert check.restored(state, None)


def test_how_often_is_checked_by_default():
    step_flops = 6 * 124e6 * 2**19  # GPT-2 at 0.5 million tokens
    assert default_every(12 * 124e6, step_flops, "cuda") == 1
    assert default_every(12 * 124e6, step_flops / 64, "cuda") == 24
    assert default_every(1e6, None, "cpu") == UNKNOWN


def test_guards_choose_the_check():
    assert isinstance(SkipGuard(checksum_every=0).state_check, NoStateCheck)
    assert SkipGuard(checksum_every=0).state_check.every == 0
    assert RollbackGuard(checksum_every=7).state_check.every == 7
    with pytest.raises(ConfigError, match="guard.checksum_every=-1 is below 0"):
        SkipGuard(checksum_every=-1)


def test_the_checksums_of_an_older_state_are_its_own():
    check, state = StateCheck(1), trained()
    older = check.reference(state)
    with torch.no_grad():
        state.model[0].weight.add_(1.0)
    state.step = state.executed_steps = 2
    check.after_update(state, buffers_of(state.model).save())
    with torch.no_grad():
        state.model[0].weight.sub_(1.0)
    state.step = state.executed_steps = 1
    assert check.restored(state, check.reference(state))
    assert check.reference(state).at == older.at
