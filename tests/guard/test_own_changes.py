"""What a loop does to its state itself: it raises, loads, replaces a parameter, sets a rate to NaN."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.errors import ConfigError, TrainingHalted
from stabletrain.guard.guard import Guard
from tests.guard.given import batches, bits, network, same


def loop(tmp_path, **options):
    """Returns a model with a batch norm, its optimizer and its guard, which looks at the memory before every step."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, Guard(model, optimizer, folder=tmp_path, checksum_every=1, **options)


def batch(number=0):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(number))


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_closure_that_raises_leaves_the_buffers_as_they_were(tmp_path, error):
    model, _, guard = loop(tmp_path)

    def closure(x):
        return model(x).square().mean()

    def broken(x):
        model(x)
        raise error("in the closure")

    guard.step(closure, batch())
    before = values(model)
    with pytest.raises(error):
        guard.step(broken, batch(1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    guard.step(closure, batch(2))
    assert guard.last.applied
    assert not guard.incidents
    assert guard.machine_faults == 0


def test_an_error_in_a_later_micro_batch_gives_up_the_whole_step(tmp_path):
    model, _, guard = loop(tmp_path)
    guard.step(lambda x: model(x).square().mean(), batch())
    before = values(model)
    guard.backward(lambda x: model(x).square().mean(), batch(1))
    with pytest.raises(ZeroDivisionError):
        guard.backward(lambda x: model(x).mean() / 0 + 1 / 0, batch(2))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


LOADS = {
    "the model": lambda model, optimizer, saved: model.load_state_dict(saved[0]),
    "a module of it": lambda model, optimizer, saved: model[0].load_state_dict(
        {name[2:]: value for name, value in saved[0].items() if name.startswith("0.")}
    ),
    "the optimizer": lambda model, optimizer, saved: optimizer.load_state_dict(saved[1]),
}


@pytest.mark.parametrize("rollback", [False, True])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_what_a_loop_loads_is_no_memory_fault(tmp_path, load, rollback):
    model, optimizer, guard = loop(tmp_path, rollback=rollback)
    for number in range(3):
        guard.step(lambda x: model(x).square().mean(), batch(number))
        if number == 0:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    load(model, optimizer, saved)
    before = values(model)
    guard.step(lambda x: model(x).square().mean(), batch(3))
    assert guard.last.applied
    assert not guard.incidents
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_a_loop_tells_what_it_copies_by_hand(tmp_path):
    model, _, guard = loop(tmp_path)
    guard.step(lambda x: model(x).square().mean(), batch())
    with torch.no_grad():
        model[0].weight.copy_(torch.ones(4, 3))
    guard.state_replaced()
    guard.step(lambda x: model(x).square().mean(), batch(1))
    assert guard.last.applied
    with torch.no_grad():
        model[0].weight.copy_(torch.zeros(4, 3))
    with pytest.raises(TrainingHalted, match="not what the last update left"):  # it was not told
        guard.step(lambda x: model(x).square().mean(), batch(2))


def test_a_guarded_model_is_copied_and_pickled_without_its_guard(tmp_path):
    model, optimizer, guard = loop(tmp_path)
    guard.step(lambda x: model(x).square().mean(), batch())
    average = copy.deepcopy(model)
    average.load_state_dict(model.state_dict())
    assert not guard._loop.loads.noticed
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == model.state_dict().keys()
    copy.deepcopy(optimizer.state_dict())


def test_a_parameter_that_was_replaced_is_named_once(tmp_path, caplog):
    model, _, guard = loop(tmp_path)
    guard.step(lambda x: model(x).square().mean(), batch())
    model[0].weight = nn.Parameter(torch.ones(4, 3))
    for number in range(3):
        guard.step(lambda x: model(x).square().mean(), batch(number))
    said = caplog.text
    assert said.count("step 2: 0.weight: replaced since the optimizer was made") == 1
    assert said.count("replaced since") == 1


def test_a_frozen_parameter_is_no_replaced_one(tmp_path, caplog):
    model, _, guard = loop(tmp_path)
    guard.step(lambda x: model(x).square().mean(), batch())
    model[0].requires_grad_(False)
    guard.step(lambda x: model(x).square().mean(), batch(1))
    assert "replaced" not in caplog.text


@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay"])
def test_a_setting_of_nan_is_held_back_and_named(tmp_path, key):
    model, optimizer, guard = loop(tmp_path)
    for number in range(4):
        before = values(model)
        right, optimizer.param_groups[0][key] = optimizer.param_groups[0][key], float("nan")
        if number != 2:
            optimizer.param_groups[0][key] = right
        guard.step(lambda x: model(x).square().mean(), batch(number))
        optimizer.param_groups[0][key] = right
        assert guard.last.applied == (number != 2)
        if number == 2:
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    [incident] = guard.incidents
    assert incident.cause == "bad_setting"
    assert key in incident.verdict


@pytest.mark.parametrize("rollback", [False, True])
def test_parameters_that_are_added_are_no_memory_fault_and_are_checked_too(tmp_path, rollback):
    model, optimizer, guard = loop(tmp_path, rollback=rollback)

    def steps(count):
        for number in range(count):
            guard.step(lambda x: model(x).square().mean(), batch=batch(number))

    steps(3)
    model.append(nn.Linear(1, 1))
    optimizer.add_param_group({"params": [*model[3].parameters()]})
    steps(3)
    assert (guard.skipped, guard.machine_faults) == (0, 0)
    with torch.no_grad():
        model[3].weight += 1e-3
    if rollback:
        steps(1)
        assert (guard.skips["state"], guard.machine_faults) == (1, 1)
        steps(1)
        assert guard.last.applied, "the state that was put back has the new weights"
    else:
        with pytest.raises(TrainingHalted, match="not what the last update left"):
            steps(1)


class Interrupted(torch.optim.SGD):
    """An optimizer whose step is interrupted when `interrupts` says so."""

    interrupts = False

    def step(self, closure=None):
        if Interrupted.interrupts:
            raise KeyboardInterrupt
        return super().step(closure)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("checked", [True, False])
def test_a_step_that_an_error_ends_changes_nothing_and_is_no_memory_fault(tmp_path, monkeypatch, attached, checked):
    """Its forward pass has written the buffers, which are put back."""
    model = network()
    optimizer = Interrupted(model.parameters(), lr=1e-2)
    make = Guard.attach if attached else Guard
    guard = make(model, optimizer, folder=tmp_path, checksum_every=1, max_incidents=0, check_update=checked)

    def step(x, y):
        if not attached:
            guard.step(lambda x, y: F.cross_entropy(model(x), y), batch=(x, y))
            return
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    data = batches(4)
    step(*data[0])
    before = bits(model, optimizer)
    monkeypatch.setattr(Interrupted, "interrupts", True)
    with pytest.raises(KeyboardInterrupt):
        step(*data[1])
    monkeypatch.setattr(Interrupted, "interrupts", False)
    assert same(bits(model, optimizer), before)
    optimizer.zero_grad()
    if attached and not checked:
        optimizer.step()  # without gradients there is nothing to judge
        assert guard.last.step == 1, "the step that an error ended is not followed now"
    if not attached:
        with pytest.raises(ConfigError, match="got a gradient"):
            guard.step(lambda x, y: model(x).detach().mean() + torch.zeros((), requires_grad=True), batch=data[1])
        assert same(bits(model, optimizer), before)
    step(*data[2])
    step(*data[3])
    assert guard.last.applied
    assert guard.skipped == 0


def test_a_reading_holds_the_length_of_the_update_before(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    weights = [torch.cat([each.detach().flatten() for each in model.parameters()])]
    for _ in range(2):
        guard.step(lambda x: model(x).square().mean(), torch.randn(4, 3))
        weights.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert guard.last is not None
    assert guard.last.update == pytest.approx(float((weights[1] - weights[0]).norm()), rel=1e-3)
    assert guard.last.weights == pytest.approx(float(weights[1].norm()), rel=1e-3)
