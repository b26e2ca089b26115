"""What `Guard.attach` offers to an adapter, which knows its library's loop."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.guard.guard import Guard
from stabletrain.guard.policy import RollbackGuard
from tests.guard.given import batches, bits, network, same


class Loop:
    """A loop that calls a part of its model only, clips, and steps a scheduler that is older than the guard."""

    def __init__(self, folder, lr=1e-2, **options):
        self.model = nn.ModuleDict({"net": network()})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)
        self.guard = Guard.attach(self.model, self.optimizer, folder=folder, **options)

    def loss(self, x, y):
        return F.cross_entropy(self.model["net"](x), y)

    def step(self, *micro_batches, max_norm=1.0, measured=True):
        self.optimizer.zero_grad()
        for number, batch in enumerate(micro_batches):
            self.guard.before_forward(batch, first=number == 0)
            loss = self.loss(*batch) / len(micro_batches)
            loss.backward()
            self.guard.record(lambda x, y: self.loss(x, y) / len(micro_batches), batch, loss)
        if measured:
            self.guard.before_clipping()
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        if self.guard.last.applied:
            self.scheduler.step()


def with_nan(batch):
    x, y = batch
    return x.index_put((torch.tensor(5),), torch.tensor(float("nan"))), y


def test_a_loop_that_tells_of_its_micro_batches_gets_their_buffers_back_and_the_sample_named(tmp_path):
    loop = Loop(tmp_path)
    first, second, third, fourth = batches(4)
    loop.step(first, second)
    held = bits(loop.model, loop.optimizer)
    loop.step(third, with_nan(fourth))
    assert not loop.guard.last.applied
    assert same(bits(loop.model, loop.optimizer), held), "BatchNorm's statistics are in a part of the model"
    assert "sample 13" in loop.guard.incidents[0].verdict
    loop.step(third, fourth)
    assert loop.guard.last.applied


def test_a_batch_that_the_loop_changed_is_not_expected_to_give_the_same_bits(tmp_path):
    loop = Loop(tmp_path)
    batch = batches(1)[0]
    loop.guard.before_forward(batch, first=True)
    batch[0].div_(2)
    loop.guard.record(loop.loss, batch, loop.loss(*batch))
    begun, _ = loop.guard._recorder.take()
    assert any(tensor._version != version for tensor, version in begun.versions)


def test_the_norm_from_before_clipping_is_judged(tmp_path):
    measured, other = Loop(tmp_path / "a"), Loop(tmp_path / "b")
    measured.model["net"][3].p = other.model["net"][3].p = 0.0
    for batch in batches(3):
        measured.step(batch, max_norm=1e-3)
        other.step(batch, max_norm=1e-3, measured=False)
        assert measured.guard.last.grad_norm > 0.1
        assert other.guard.last.grad_norm == pytest.approx(1e-3, rel=1e-3)
    assert same(bits(measured.model), bits(other.model)), "clipping itself is the loop's"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_happens_to_the_gradients_after_that_is_seen_too(tmp_path, value):
    loop = Loop(tmp_path)
    loop.step(*batches(1))
    held = bits(loop.model, loop.optimizer)
    loop.guard.before_forward(batches(1)[0], first=True)
    loop.loss(*batches(1)[0]).backward()
    loop.guard.before_clipping()
    next(loop.model.parameters()).grad[0] = value
    loop.optimizer.step()
    assert not loop.guard.last.applied
    assert same(bits(loop.model, loop.optimizer), held)


def test_clipping_by_value_does_not_hide_an_infinite_gradient(tmp_path):
    loop = Loop(tmp_path)
    loop.loss(*batches(1)[0]).backward()
    next(loop.model.parameters()).grad[0] = float("inf")
    loop.guard.before_clipping()
    nn.utils.clip_grad_value_(loop.model.parameters(), 1.0)
    loop.optimizer.step()
    assert not loop.guard.last.applied


def test_after_detaching_the_optimizer_steps_as_before(tmp_path):
    loop = Loop(tmp_path)
    loop.step(*batches(1))
    loop.guard.detach()
    before = bits(loop.model)
    next(loop.model.parameters()).grad[0] = float("nan")
    loop.optimizer.step()
    assert not same(bits(loop.model), before)
    assert loop.guard.last.applied
    assert not loop.model._forward_hooks
    assert not loop.model._forward_pre_hooks


def test_a_rollback_restores_one_step_and_the_loops_update_then_has_the_lower_rate(tmp_path):
    policy = RollbackGuard(patience=1, snapshot_every=1, healthy_after=0, lr_factor=0.5)
    loop = Loop(tmp_path, policy=policy, max_incidents=0)
    states = []
    for batch in batches(8):
        loop.step(batch)
        states.append(bits(loop.model))
    while not loop.guard.rolled_back:
        loop.step(with_nan(batches(1)[0]))
    assert any(same(bits(loop.model), state) for state in states), "weights and buffers of one and the same step"
    seen = []
    loop.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    loop.step(*batches(1))
    assert seen == [pytest.approx(0.5e-2)]
    assert loop.optimizer.param_groups[0]["lr"] == 1e-2


def test_with_a_loss_scale_the_samples_of_a_loss_that_is_not_finite_are_searched_for(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, folder=tmp_path, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))

    def loss(x, y):
        return F.cross_entropy(model(x), y) + torch.log((x[:, 0] != 0.125).float() + 0.0).mean()

    first, (x, y) = batches(2)
    guard.step(loss, first)
    x[5, 0] = 0.125
    guard.step(loss, (x, y))
    report = (guard.incidents[0].path / "report.md").read_text()
    assert re.findall(r'"index": (\d)', report) == ["5"]
