"""The loss of a loop that is not edited: what its backward calls differentiate, of this model and of this step."""

import contextlib
import gc
import json
from dataclasses import dataclass
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint

from stabletrain.guard import backward_calls
from stabletrain.guard.guard import Guard
from stabletrain.guard.loss_graph import ForwardCall, Root, mark
from tests.guard.given import batches
from tests.reliability.attached import FAULT, STEPS, run


@dataclass
class Output:
    """An output that is no mapping and no tuple."""

    logits: Tensor
    loss: Tensor


class Returns(nn.Module):
    """A linear model that returns what `give` makes of logits, cross-entropy and an auxiliary loss."""

    def __init__(self, give):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.give = nn.Linear(4, 3), give

    def forward(self, x, y):
        logits = self.linear(x)
        return self.give(logits, F.cross_entropy(logits, y), logits.square().mean())


class Step:
    """What a loop may use in a step.

    Attributes:
        factor: of its losses; the last step's is large.
    """

    def __init__(self, model, scaler):
        self.model, self.factor, self.scaler = model, 1.0, scaler

    def scaled(self, loss):
        return loss if self.scaler is None else self.scaler.scale(loss)


def outside(s, x, y):
    loss = F.cross_entropy(s.model(x, y), y) * s.factor
    loss.backward()
    return loss


def second(s, x, y):
    loss = s.model(x, y)[1] * s.factor
    loss.backward()
    return loss


def attribute(s, x, y):
    loss = s.model(x, y).loss * s.factor
    loss.backward()
    return loss


def mixed(s, x, y):
    ce, aux = s.model(x, y)
    loss = (ce + 0.01 * aux) * s.factor
    loss.backward()
    return loss


def mixed_outside(s, x, y):
    logits, aux = s.model(x, y)
    loss = (F.cross_entropy(logits, y) + 0.01 * aux) * s.factor
    loss.backward()
    return loss


def loss_of(output):
    return output["loss"] if isinstance(output, dict) else output[1]


def accumulated(s, x, y):
    losses = [s.scaled(loss_of(s.model(*each)) * s.factor / 2) for each in zip(x.chunk(2), y.chunk(2), strict=True)]
    for loss in losses:
        loss.backward()
    scale = 1.0 if s.scaler is None else s.scaler.get_scale()
    return sum(loss.detach() / scale for loss in losses)


def one_call(s, x, y):
    """Two forward calls, one backward call."""
    first, other = (s.model(*each)[1] * s.factor / 2 for each in zip(x.chunk(2), y.chunk(2), strict=True))
    (first + other).backward()
    return first + other


def retained(s, x, y):
    ce, aux = s.model(x, y)
    (ce * s.factor).backward(retain_graph=True)
    (aux * s.factor).backward()
    return (ce + aux) * s.factor


def with_factor(s, x, y):
    loss = s.model(x, y)[1]
    loss.backward(torch.tensor(0.5 * s.factor))
    return loss * 0.5 * s.factor


def changed_after(s, x, y):
    """A loss that the loop writes to after it was differentiated."""
    loss = s.model(x, y)[1] * s.factor
    loss.backward()
    before = loss.detach().clone()
    with torch.no_grad():
        loss.mul_(100)
    return before


def listed(s, x, y):
    ce, aux = s.model(x, y)
    torch.autograd.backward([ce * s.factor, aux * s.factor])
    return (ce + aux) * s.factor


def checkpointed(s, x, y):
    """Activation checkpointing, whose backward pass calls `torch.autograd.backward` itself."""
    x = x.requires_grad_()
    loss = F.cross_entropy(checkpoint(s.model, x, y, use_reentrant=True), y) * s.factor
    loss.backward()
    return loss


CASES = {  # the step, what the model returns, and whether the loss comes from its outputs alone
    "outside": (outside, lambda logits, ce, aux: logits, False),
    "second of a tuple": (second, lambda logits, ce, aux: (logits, ce), True),
    "attribute": (attribute, lambda logits, ce, aux: Output(logits, ce), True),
    "mixed": (mixed, lambda logits, ce, aux: (ce, aux), True),
    "mixed, outside": (mixed_outside, lambda logits, ce, aux: (logits, aux), False),
    "accumulated": (accumulated, lambda logits, ce, aux: (logits, ce), True),
    "accumulated, scaled": (accumulated, lambda logits, ce, aux: {"logits": [logits], "loss": ce}, True),
    "one call": (one_call, lambda logits, ce, aux: (logits, ce), True),
    "retained": (retained, lambda logits, ce, aux: (ce, aux), False),
    "with a factor": (with_factor, lambda logits, ce, aux: (logits, ce), False),
    "changed after": (changed_after, lambda logits, ce, aux: (logits, ce), True),
    "listed": (listed, lambda logits, ce, aux: (ce, aux), False),
    "checkpointed": (checkpointed, lambda logits, ce, aux: logits, False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_what_the_loop_differentiates_and_is_computed_again_if_the_model_returns_it(tmp_path, name):
    take, give, known = CASES[name]
    model = Returns(give)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=3) if "scaled" in name else None
    guard = Guard.attach(model, optimizer, folder=tmp_path, scaler=scaler)
    step = Step(model, scaler)
    for number, batch in enumerate(batches(22)):
        step.factor = 1e4 if number == 21 else 1.0
        optimizer.zero_grad()
        loss = float(take(step, *batch).detach())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        assert guard.last.loss == loss
    assert guard.skips["spike"] == 1
    assert guard.last.update > 0, "updates are measured"
    assert guard._recorder.begun is None, "a rerun is no step of the loop"
    record = json.loads((guard.incidents[0].path / "diagnosis.json").read_text())
    assert record["replays"]["same"]["bitwise_equal_to_reading"] is (True if known else None)
    assert any("computes its loss itself" in each for each in record["not_looked_at"]) is not known


def test_of_a_loss_with_several_values_it_is_only_known_whether_they_are_finite(tmp_path):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, folder=tmp_path)
    for number, (x, y) in enumerate(batches(3)):
        optimizer.zero_grad()
        each = F.cross_entropy(model(x), y if number != 1 else torch.full_like(y, -100), reduction="none")
        (each / (0.0 if number == 1 else 8.0)).backward(torch.ones(8))
        optimizer.step()
        assert guard.last.loss == 0 or number == 1
        assert guard.last.applied is (number != 1)


def test_an_auxiliary_loss_that_comes_first_is_not_taken_for_the_loss(tmp_path):
    model = Returns(lambda logits, ce, aux: (aux, logits))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, folder=tmp_path)
    for x, y in batches(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, y)[1], y)
        loss.backward()
        optimizer.step()
        assert guard.last.loss == float(loss.detach())


# ---- several networks


class Gan:
    """Two networks, their optimizers and guards, and the losses that each should have seen."""

    def __init__(self, folder, none):
        torch.manual_seed(0)
        self.none = none
        self.g, self.d, self.q = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 2)
        self.optimizers = {name: torch.optim.SGD(getattr(self, name).parameters(), lr=1e-2) for name in "gdq"}
        self.guards = {
            name: Guard.attach(getattr(self, name), optimizer, folder=folder / name, max_incidents=0)
            for name, optimizer in self.optimizers.items()
        }
        self.real, self.z = torch.randn(8, 4), torch.randn(8, 3)

    def zero(self, *names):
        for name in names:
            self.optimizers[name].zero_grad(set_to_none=self.none)

    def step(self, name, loss):
        self.optimizers[name].step()
        assert self.guards[name].last.loss == pytest.approx(float(loss.detach()), rel=1e-6), name

    def critics(self, detached=True):
        fake = self.g(self.z)
        return F.softplus(-self.d(self.real)).mean() + F.softplus(self.d(fake.detach() if detached else fake)).mean()

    def generators(self):
        return F.softplus(-self.d(self.g(self.z))).mean()


def one_after_the_other(gan):
    gan.zero("d")
    loss = gan.critics()
    loss.backward()
    gan.step("d", loss)
    gan.zero("g")
    loss = gan.generators()
    loss.backward()
    gan.step("g", loss)


def generator_first(gan):
    gan.zero("g")
    loss = gan.generators()
    loss.backward()
    gan.step("g", loss)
    loss = gan.critics()
    gan.zero("d")  # after the forward pass
    loss.backward()
    gan.step("d", loss)


def both_before_the_steps(gan):
    gan.zero("g", "d")
    generators = gan.generators()
    generators.backward()
    gan.zero("d")
    critics = gan.critics()
    critics.backward()
    gan.step("d", critics)
    gan.step("g", generators)


def critic_is_frozen(gan):
    gan.zero("g", "d")
    critics = gan.critics()
    critics.backward()
    gan.d.requires_grad_(False)
    generators = gan.generators()
    generators.backward()
    gan.d.requires_grad_(True)
    gan.step("d", critics)
    gan.step("g", generators)


def only_its_own_inputs(gan):
    gan.zero("g", "d")
    critics, generators = gan.critics(detached=False), gan.generators()
    critics.backward(inputs=list(gan.d.parameters()), retain_graph=True)
    generators.backward(inputs=list(gan.g.parameters()))
    gan.step("d", critics)
    gan.step("g", generators)


def retained_and_dropped(gan):
    gan.zero("g", "d")
    critics = gan.critics(detached=False)
    critics.backward(retain_graph=True)
    gan.step("d", critics)
    gan.zero("g")  # the critic's loss ran through it
    generators = gan.generators()
    generators.backward()
    gan.step("g", generators)


def critic_twice_with_penalty(gan):
    for _ in range(2):
        gan.zero("d")
        between = ((gan.real + gan.g(gan.z).detach()) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(gan.d(between).sum(), between, create_graph=True)
        loss = gan.critics() + 10 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        gan.step("d", loss)
    gan.zero("g")
    loss = gan.generators()
    loss.backward()
    gan.step("g", loss)


def three_optimizers(gan):
    one_after_the_other(gan)
    gan.zero("g", "q")
    loss = F.cross_entropy(gan.q(gan.g(gan.z)), torch.arange(8) % 2)
    loss.backward()
    gan.step("g", loss)
    gan.step("q", loss)


def losses_summed(gan):
    gan.zero("g", "d")
    loss = gan.critics() + gan.generators()
    loss.backward()
    gan.step("d", loss)
    gan.step("g", loss)


ORDERS = (
    *(one_after_the_other, generator_first, both_before_the_steps, critic_is_frozen, only_its_own_inputs),
    *(retained_and_dropped, critic_twice_with_penalty, three_optimizers, losses_summed),
)


@pytest.mark.parametrize("none", [True, False], ids=["None", "zeros"])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_each_network_sees_the_losses_of_its_own_gradients(tmp_path, order, none):
    gan = Gan(tmp_path, none)
    for _ in range(4):
        order(gan)


def test_gradients_that_the_loop_zeroes_by_hand_make_the_loss_unknown(tmp_path):
    gan = Gan(tmp_path, True)
    gan.generators().backward()  # through the critic
    for parameter in gan.d.parameters():
        parameter.grad.zero_()
    gan.critics().backward()
    gan.optimizers["d"].step()
    assert gan.guards["d"].last.loss == 0


# ---- the function in the place of torch.autograd.backward


@pytest.fixture
def no_guards(monkeypatch):
    """As if no guard had been attached in this process."""
    monkeypatch.setattr(backward_calls, "_LISTENERS", WeakSet())
    own = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", own.__wrapped__ if own in backward_calls._TELLING else own)


def test_the_function_of_torch_is_back_when_the_last_guard_has_gone(no_guards):
    own = torch.autograd.backward
    models = [nn.Linear(2, 2) for _ in range(2)]
    guards = [Guard.attach(each, torch.optim.SGD(each.parameters(), lr=0.1), max_incidents=0) for each in models]
    assert torch.autograd.backward is not own
    guards[0].detach()
    assert torch.autograd.backward is not own
    del guards, models
    gc.collect()
    assert torch.autograd.backward is own


def test_another_function_there_is_respected(no_guards, monkeypatch):
    calls = []

    def other(*args, **kwargs):
        calls.append(args)
        return inner(*args, **kwargs)

    model = nn.Linear(2, 2)
    guard = Guard.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), max_incidents=0)
    inner = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", other)
    second = Guard.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), max_incidents=0)
    loss = model(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    second._loop.optimizer.step()
    assert (second.last.loss, len(calls)) == (2 * float(loss.detach()), 2), "told once of each call"
    guard.detach()
    second.detach()
    assert torch.autograd.backward is other
    guard = Guard.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), max_incidents=0)
    inner = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", other)
    guard.detach()
    assert torch.autograd.backward is other, "it has wrapped the guard's function"


def test_a_backward_pass_that_fails_is_not_counted(tmp_path):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, folder=tmp_path)
    (x, y), _ = batches(2)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    with contextlib.suppress(RuntimeError):
        loss.backward()
    optimizer.step()
    assert guard.last.loss == float(loss.detach())


# ---- which outputs


WEIGHT = torch.tensor(0.3)

ARITHMETIC = {  # from two outputs; whether it is followed
    "itself": (lambda a, b: a, True),
    "divided": (lambda a, b: a / 3, True),
    "times": (lambda a, b: 0.1 * a, True),
    "weighted": (lambda a, b: WEIGHT * a + b * WEIGHT.double(), True),
    "with alpha": (lambda a, b: torch.add(a, b, alpha=0.3), True),
    "negative": (lambda a, b: -(a + b) / 7, True),
    "cast": (lambda a, b: a.double() / 3, True),
    "one value": (lambda a, b: a[None].mean().view(1), True),
    "in place": (lambda a, b: a.clone().div_(3), True),
    "plus a constant": (lambda a, b: a + 1, False),
    "product": (lambda a, b: a * b, False),
    "inverse": (lambda a, b: 2 / a, False),
    "several values": (lambda a, b: (a * torch.ones(3)).sum(), False),
    "stacked": (lambda a, b: torch.stack([a, b]).mean(), False),
    "log": (lambda a, b: a.log(), False),
    "deep": (lambda a, b: sum([a / 2] * 100, b), False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_a_loss_is_followed_to_the_outputs_and_computed_with_the_same_bits(name, dtype):
    make, followed = ARITHMETIC[name]
    torch.manual_seed(0)
    model, owner = nn.Linear(3, 3), object()
    outputs = [model(torch.randn(2, 3)).square().mean().to(dtype) for _ in range(2)]
    call = ForwardCall(model)
    mark(outputs, call, owner)
    loss = make(*outputs)
    found = Root(loss, None, owner).parts
    assert (found is not None) is followed
    assert Root(loss, None, model).parts is None, "of another owner"
    if found is not None:
        ((of, compute),) = found
        again = compute([each.detach() for each in outputs])
        assert of is call
        assert again.dtype == loss.dtype
        assert torch.equal(again.reshape(()), loss.detach().reshape(()))


# ---- the same as guard.step


def check_both(loop, fault, steps=STEPS):
    step, attached = (run(loop, fault, kind, steps) for kind in ("step", "attached"))
    assert attached[1] == step[1]
    assert attached[0].losses[: len(step[0].losses)] == pytest.approx(step[0].losses, nan_ok=True)
    return step[1]


@pytest.mark.parametrize(
    ("loop", "fault", "steps"),
    [("logits_and_loss", "ignored_labels", FAULT + 1), ("accumulating", "other_labels", STEPS)],
)
def test_an_attached_guard_withholds_and_says_what_guard_step_does(loop, fault, steps):
    assert any(skips or alarms for skips, alarms in check_both(loop, fault, steps))


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["language_model", "actor_critic", "gan"])
def test_an_attached_guard_does_what_guard_step_does_with_other_loops_and_faults(loop):
    found = {fault: check_both(loop, fault) for fault in ("nothing", "ignored_labels", "halved_weights")}
    assert all(not skips and not alarms for skips, alarms in found.pop("nothing"))
    assert all(any(skips or alarms for skips, alarms in each) for each in found.values())


@pytest.mark.parametrize("combine", [lambda a, b: a / 2, lambda a, b: a + b / 4, lambda a, b: -a * -1.0])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_loss_is_without_the_loss_scale_however_scaled_losses_are_combined(combine, enabled, tmp_path):
    model, scaler = nn.Linear(4, 3), GradScaler("cpu", init_scale=1024.0, enabled=enabled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, folder=tmp_path, scaler=scaler)
    x, y = batches(1)[0]
    losses = F.cross_entropy(model(x), y), model(x).square().mean()
    combine(*map(scaler.scale, losses)).backward()
    scaler.step(optimizer)
    assert guard.last.loss == pytest.approx(float(combine(*losses).detach()), rel=1e-6)
