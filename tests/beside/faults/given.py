"""Helpers of the tests of faults: a small model with steps by hand, minimal data sets, and small whole runs."""

import contextlib

import torch
from torch import nn

from stabletrain.config.checks import check
from stabletrain.config.make import Choice
from stabletrain.records import IGNORE_INDEX, Batch, TrainState
from stabletrain.tracking.metrics import read_jsonl
from stabletrain.trainer.build import build
from stabletrain.trainer.loop import train
from tests.runs import composed

NAN, INF = float("nan"), float("inf")
NEVER = 10**9
CADENCE = ["steps=12", "eval_every=6", "checkpoint.every=4", "checkpoint.keep=9", "warmup.steps=2", "log_every=1"]


class Scaled:
    """A precision that has only a loss scale."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def loss_scale(self):
        return torch.tensor(self.scale)


def fresh(optimizer=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)).to(dtype)
    make_optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    return TrainState(model, make_optimizer(model.parameters()))


def samples(tick, size=2):
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(tick))


def step(state, micro_batches=1, scale=1.0, applied=True):
    """Runs one step: gradients, then the update if `applied`."""
    state.optimizer.zero_grad(set_to_none=True)
    for part in range(micro_batches):
        (state.model(samples(state.executed_steps + part)).float().square().sum() * scale).backward()
    for parameter in state.model.parameters():
        parameter.grad.div_(scale)
    if applied:
        state.optimizer.step()
    state.step += 1
    state.executed_steps += 1


def weights(state):
    return [parameter.detach().clone() for parameter in state.model.parameters()]


def gradients(state):
    return [parameter.grad.clone() for parameter in state.model.parameters()]


def bad_elements(tensors):
    return sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors)


def differing(one, other):
    """Returns the number of elements whose bits differ between two lists of tensors."""
    return sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in zip(one, other, strict=True))


class Numbers:
    """A minimal data set that returns the same batch, in the same memory, every time."""

    def __init__(self, inputs, targets):
        self.given = Batch(inputs, targets, torch.arange(len(inputs)), [f"line {i}" for i in range(len(inputs))])

    def batch(self, step, size, split):
        return self.given


class Images(Numbers):
    num_classes = 5

    def __init__(self):
        super().__init__(torch.ones(4, 1, 3, 3), torch.tensor([0, 1, 2, 4]))


class Tokens(Numbers):
    vocab_size = 7

    def __init__(self):
        super().__init__(
            torch.ones(2, 5, dtype=torch.int64), torch.tensor([[0, 1, 2, 3, 6], [5, IGNORE_INDEX, 5, 5, 5]])
        )

    def decode(self, tokens):
        return "text"


def option(kind, *overrides):
    """Builds the object of an option as the command line does."""
    with composed(f"faults={kind}", *overrides) as cfg:
        check(cfg)
        return Choice.of(cfg, "faults").build()


@contextlib.contextmanager
def built(folder, *overrides):
    with composed(*overrides) as cfg:
        check(cfg)
        job = build(cfg, folder)
    try:
        yield job
    finally:
        job.data.batches.close()


def ran(folder, *overrides):
    """Runs a whole run; returns its job and its events."""
    with built(folder, *overrides) as job:
        train(job)
    file = folder / "events.jsonl"
    return job, read_jsonl(file) if file.exists() else []
