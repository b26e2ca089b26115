"""Checks that what is not finite anywhere closes the gate: a loss with finite gradients, or a buffer alone.

In each way to guard a loop and each precision, a withheld step leaves weights, moments and every buffer as they were:
saved or not, written in place or replaced, floating-point or a counter.
"""

import json
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.guard.guard import Guard
from tests.guard.given import batches, bits, same

MASK = torch.tensor([0.0, 0.0, -math.inf])


class Statistics(nn.Module):
    """A model with every kind of buffer; `write` is added to two of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("in_place", torch.zeros(3), persistent=False)
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("mask", MASK.clone())
        self.write = {}

    def forward(self, x):
        self.calls += 1
        self.in_place.mul_(0.9).add_(self.write.get("in_place", 1.0))
        self.replaced = self.replaced * 0.9 + self.write.get("replaced", 1.0)
        self.mask = torch.full((3,), -math.inf)  # a mask may be made anew
        return self.last(F.relu(self.norm(self.first(x))))


def smoothed(logits, y):
    """Loss Inf, gradients finite: label smoothing over a class that is masked."""
    return F.cross_entropy(logits + MASK.to(logits.dtype), y.clamp(max=1), label_smoothing=0.1)


def ignored(logits, y):
    """Loss NaN, gradients exactly 0: no target counts."""
    return F.cross_entropy(logits, torch.full_like(y, -100))


def log_of_negative(logits, y):
    """Loss NaN, gradients finite."""
    return torch.log(logits.float().mean(0) - 50).mean()


LOSSES = {
    smoothed: ("unsafe_op", "aten._log_softmax", "masked_logits"),
    ignored: ("bad_label", "aten.nll_loss_forward", "mean_of_nothing"),
    log_of_negative: ("unsafe_op", "aten.log", "log_of_negative"),
}
WAYS = ("step", "update", "closure", "returns", "outside")
PRECISIONS = ("fp32", "bf16", "fp16", "scaler")
CASES = [
    (way, precision)
    for way in WAYS
    for precision in PRECISIONS
    # an attached loop has its own precision, and a scaler takes no closure
    if not (precision == "fp16" and way not in ("step", "update")) and (way, precision) != ("closure", "scaler")
]


def is_fast(way, precision):
    """Whether a case runs always: each way, and each precision, once."""
    return (way, precision) in {
        ("step", "bf16"),
        ("step", "fp16"),
        ("update", "scaler"),
        ("closure", "fp32"),
        ("returns", "fp32"),
        ("outside", "fp32"),
    }


def with_each(values):
    """Returns the cases, each with one of three values: a way or precision of three cases or more meets all three."""
    values = [*values]
    return [(way, precision, values[(number + (number > 6)) % 3]) for number, (way, precision) in enumerate(CASES)]


class Trained(nn.Module):
    """A model that returns its loss."""

    def __init__(self):
        super().__init__()
        self.inner = Statistics()

    def forward(self, x, y, loss):
        return loss(self.inner(x), y)


class Guarded:
    """A loop that is guarded in one of `WAYS`, with or without a scaler."""

    def __init__(self, folder, way, precision):
        self.way, self.model = way, Trained() if way == "returns" else Statistics()
        self.statistics = getattr(self.model, "inner", self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if precision == "scaler" else None
        self.autocast = torch.autocast("cpu", torch.bfloat16) if precision in ("bf16", "scaler") else nullcontext()
        if way in ("step", "update"):
            given = {"scaler": self.scaler} if self.scaler else {"precision": precision}
            self.guard = Guard(self.model, self.optimizer, folder=folder, **given)
        else:
            self.guard = Guard.attach(self.model, self.optimizer, folder=folder, scaler=self.scaler)

    def step(self, batch, loss=F.cross_entropy):
        """Two micro-batches, the second with this loss; of a single one in `guard.step` and of a closure."""
        losses = [loss] if self.way in ("step", "closure") else [F.cross_entropy, loss]
        if self.way == "step":
            return self.guard.step(lambda x, y: loss(self.model(x), y), batch=batch)
        if self.way == "update":
            for each in losses:
                self.guard.backward(lambda x, y: each(self.model(x), y) / 2, batch=batch)  # noqa: B023
            return self.guard.update()
        self.optimizer.zero_grad()
        if self.way == "closure":
            return self.optimizer.step(lambda: self.differentiated(batch, loss))
        for each in losses:
            self.differentiated(batch, each)
        if self.scaler is None:
            return self.optimizer.step()
        self.scaler.step(self.optimizer)
        return self.scaler.update()

    def differentiated(self, batch, loss):
        """The loop's own forward and backward pass."""
        x, y = batch
        with self.autocast:
            value = self.model(x, y, loss) if self.way == "returns" else loss(self.model(x), y)
        (value if self.scaler is None else self.scaler.scale(value)).backward()
        return value

    def state(self):
        """Bits of everything that a withheld step must not change."""
        buffers = {name: tensor.clone() for name, tensor in self.model.named_buffers()}
        return bits(self.model, self.optimizer) | buffers

    def buffers(self):
        """The buffers themselves, not copies."""
        return [id(tensor) for tensor in self.model.buffers()]

    def record(self):
        """The newest incident's `diagnosis.json`."""
        return json.loads((self.guard.incidents[-1].path / "diagnosis.json").read_text())


def withheld(loop, data, **spoilt):
    """Trains two steps, and a third that must be withheld and change nothing; then one that is applied."""
    for batch in data[:2]:
        loop.step(batch)
        assert loop.guard.last.applied
    before, buffers = loop.state(), loop.buffers()
    loop.step(data[2], **spoilt)
    assert not loop.guard.last.applied
    assert same(before, loop.state())
    assert buffers == loop.buffers(), "the tensors themselves"
    loop.statistics.write = {}
    loop.step(data[3])
    assert loop.guard.last.applied
    assert not same(before, loop.state())


@pytest.mark.slow(unless=lambda way, precision: is_fast(way, precision))
@pytest.mark.parametrize(
    ("way", "precision", "loss"), with_each(LOSSES), ids=lambda each: getattr(each, "__name__", None)
)
def test_a_loss_that_is_not_finite_is_withheld_although_its_gradients_are(tmp_path, way, precision, loss):
    loop = Guarded(tmp_path, way, precision)
    withheld(loop, batches(4), loss=loss)
    assert loop.guard.skips["nonfinite"] == 1
    record, (cause, op, why) = loop.record(), LOSSES[loss]
    if way in ("step", "update", "returns"):
        assert (record["cause"], record["origin"]["op"], record["origin"]["why"]) == (cause, op, why)
        assert record["origin"]["source"].startswith(__file__)
    else:  # only the forward pass can be run again
        assert (record["cause"], record["origin"]) == ("unknown", None)
        assert record["verdict"].endswith("not in the forward pass, so in the loop's loss or in the backward pass")
        assert record["fix"] == ["look at the loop's loss; with guard.step or guard.record, the operation is named"]


@pytest.mark.slow(unless=lambda way, precision: is_fast(way, precision))
@pytest.mark.parametrize(
    ("way", "precision", "written"), with_each([("in_place", math.inf), ("replaced", math.nan), ("in_place", 1e30)])
)
def test_a_buffer_that_is_not_finite_is_withheld_although_loss_and_gradients_are(tmp_path, way, precision, written):
    where, value = written
    loop = Guarded(tmp_path, way, precision)
    data = batches(4)
    for batch in data[:2]:
        loop.step(batch)
    before, buffers = loop.state(), loop.buffers()
    loop.statistics.write = {where: value}
    loop.step(data[2])
    assert not loop.guard.last.applied
    assert math.isfinite(loop.guard.last.loss)
    assert math.isfinite(loop.guard.last.grad_norm)
    assert same(before, loop.state())
    assert buffers == loop.buffers()
    record = loop.record()
    assert record["cause"] == "unsafe_op"
    assert f"in the buffer {'inner.' if way == 'returns' else ''}{where}" in record["verdict"]
    loop.statistics.write = {}
    loop.step(data[3])
    assert loop.guard.last.applied


@pytest.mark.slow(unless=lambda way, write: (way in ("step", "returns")) == bool(write))
@pytest.mark.parametrize("way", ["step", "update", "returns", "outside"])
@pytest.mark.parametrize("write", [{}, {"in_place": math.inf}], ids=["", "and a buffer"])
def test_an_overflow_that_the_scaler_skips_puts_every_buffer_back(tmp_path, way, write):
    loop = Guarded(tmp_path, way, "scaler")
    data = batches(4)
    for batch in data[:2]:
        loop.step(batch)
    before, buffers = loop.state(), loop.buffers()
    hook = loop.statistics.first.weight.register_hook(lambda gradient: gradient * math.inf)
    loop.statistics.write = write
    loop.step(data[2])
    hook.remove()
    loop.statistics.write = {}
    assert loop.guard.last.overflow
    assert not loop.guard.last.applied
    assert same(before, loop.state())
    assert buffers == loop.buffers()
    assert loop.scaler.get_scale() == 512.0
    assert not loop.guard.incidents, "an overflow is routine"
    loop.step(data[3])
    assert loop.guard.last.applied


class Buffered(nn.Module):
    """A linear model with a buffer that `change` may replace."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("extra", torch.zeros(3))
        self.change = lambda module: None

    def forward(self, x):
        self.change(self)
        return self.linear(x)


@pytest.mark.parametrize("when", ["at first", "between steps", "in a forward pass"])
def test_a_mask_closes_no_gate_and_is_no_damage(tmp_path, when):
    model = Buffered()

    def add(module):
        if not hasattr(module, "mask"):
            module.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))

    if when == "at first":
        add(model)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)

    def loss(x, y):
        return F.cross_entropy(model(x), y)

    data = batches(5)
    guard.step(loss, batch=data[0])
    if when == "between steps":
        add(model)
    model.change = add
    for batch in data[1:3]:
        guard.step(loss, batch=batch)
        assert guard.last.applied
    model.mask = torch.full((8, 8), -math.inf).triu(1)  # a longer sequence
    guard.step(loss, batch=data[3])
    assert guard.last.applied
    guard.step(lambda x, y: ignored(model(x), y), batch=data[4])
    assert not guard.last.applied
    assert guard.incidents[0].cause == "bad_label"


def test_a_buffer_that_was_finite_is_no_mask_when_it_is_replaced(tmp_path):
    model = Buffered()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)
    model.change = lambda module: setattr(module, "extra", torch.full((3,), math.inf))
    guard.step(lambda x, y: F.cross_entropy(model(x), y), batch=batches(1)[0])
    assert not guard.last.applied
    assert model.extra.isfinite().all()


def test_losses_that_the_loop_does_not_train_on_are_not_judged(tmp_path):
    model, criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
    each = nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, folder=tmp_path)
    (x, y), (other, _) = batches(2)
    unlabelled = torch.full_like(y, -100)
    for before_it in (
        lambda: criterion(model(x), unlabelled).detach() if not model.training else None,
        lambda: criterion(torch.randn(8, 3), unlabelled),  # depends on no parameter
    ):
        model.eval()
        before_it()  # an evaluation with gradients on
        model.train()
        optimizer.zero_grad()
        criterion(model(other), y).backward()
        optimizer.step()
        assert guard.last.applied
    optimizer.zero_grad()
    values = each(model(x) + MASK, y)  # the loop leaves out what is not finite
    values[values.isfinite()].mean().backward()
    optimizer.step()
    assert guard.last.applied


def test_a_loss_of_a_function_is_seen(tmp_path):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, folder=tmp_path)
    x, y = batches(1)[0]
    ignored(model(x), y).backward()
    optimizer.step()
    assert not guard.last.applied
