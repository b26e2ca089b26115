"""Training loops as scripts write them: a class for each kind, with a model, optimizers and a step.

`train` runs one, with or without a bad batch, and returns the bits of all weights, moments and buffers.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.guard.given import CLASSES, batches, bits, network


class Plain:
    """A model with BatchNorm and dropout; Adam."""

    def __init__(self):
        self.model = network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.parts = [self.model, self.optimizer]

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def step(self, x, y):
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        self.optimizer.step()


class Clipped(Plain):
    """Clipping by the norm, and a schedule that was made before the first step."""

    def __init__(self):
        super().__init__()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def step(self, x, y):
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()


class Accumulated(Plain):
    """Two micro-batches a step."""

    def step(self, x, y):
        for rows in (slice(0, 4), slice(4, 8)):
            (self.loss(x[rows], y[rows]) / 2).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Bf16(Plain):
    """Autocast."""

    def loss(self, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(self.model(x), y)


class Scaled(Plain):
    """A `GradScaler`; it is made after the optimizer."""

    def __init__(self):
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def step(self, x, y):
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(x, y)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Closure(Plain):
    """The optimizer is given a closure."""

    def step(self, x, y):
        def closure():
            self.optimizer.zero_grad()
            loss = self.loss(x, y)
            loss.backward()
            return loss

        self.optimizer.step(closure)


class TwoNetworks(Plain):
    """Two networks in one optimizer: no module holds both."""

    def __init__(self):
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, CLASSES)
        self.optimizer = torch.optim.AdamW([*self.encoder.parameters(), *self.head.parameters()], lr=1e-2)
        self.parts = [self.encoder, self.head, self.optimizer]

    def loss(self, x, y):
        return F.cross_entropy(self.head(self.encoder(x)), y)


class InParts(Plain):
    """A model whose parts are called one by one, with a weight of its own."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
            self.head = nn.Linear(6, CLASSES)
            self.scale = nn.Parameter(torch.ones(()))

    def __init__(self):
        torch.manual_seed(0)
        self.model = self.Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.parts = [self.model, self.optimizer]

    def loss(self, x, y):
        return F.cross_entropy(self.model.head(self.model.body(x)) * self.model.scale, y)


class Tensors(Plain):
    """Bare tensors: no module is called."""

    def __init__(self):
        torch.manual_seed(0)
        self.weight, self.bias = torch.randn(4, CLASSES, requires_grad=True), torch.zeros(CLASSES, requires_grad=True)
        self.optimizer = torch.optim.RMSprop([self.weight, self.bias], lr=1e-2)
        self.parts = [self, self.optimizer]

    def state_dict(self):
        return {"weight": self.weight, "bias": self.bias}

    def load_state_dict(self, state):
        with torch.no_grad():
            self.weight.copy_(state["weight"])
            self.bias.copy_(state["bias"])

    def loss(self, x, y):
        return F.cross_entropy(x @ self.weight + self.bias, y)


class Adversarial:
    """Two networks with an optimizer each, and a learnt temperature with a third."""

    def __init__(self):
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
        self.critic = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
        self.temperature = nn.Parameter(torch.zeros(()))
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=1e-3)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), lr=1e-3)
        self.of_temperature = torch.optim.SGD([self.temperature], lr=1e-2)
        self.optimizer = self.of_critic
        self.parts = [self.generator, self.critic, self.of_generator, self.of_critic, self.of_temperature]

    def step(self, x, y):
        noise = torch.randn_like(x)
        self.of_critic.zero_grad()
        real, fake = self.critic(x), self.critic(self.generator(noise).detach())
        (F.softplus(-real).mean() + F.softplus(fake).mean()).backward()
        self.of_critic.step()
        self.of_generator.zero_grad()
        score = self.critic(self.generator(noise))
        F.softplus(-score).mean().backward()
        self.of_generator.step()
        self.of_temperature.zero_grad()
        (self.temperature.exp() * score.detach().mean()).backward()
        self.of_temperature.step()


KINDS = {
    kind.__name__: kind
    for kind in (
        Plain, Clipped, Accumulated, Bf16, Scaled, Closure, TwoNetworks, InParts, Tensors, Adversarial,
    )
}  # fmt: skip


def train(kind, bad=(), held=(), steps=9):
    """Trains; returns the bits at the end, and the loop.

    Args:
        kind: a class of this file.
        bad: numbers of the steps, from 1, whose batch holds a NaN.
        held: steps after which everything is put back, as if they had not been.
    """
    torch.manual_seed(0)
    loop = kind()
    torch.manual_seed(1)
    for number, (x, y) in enumerate(batches(steps), 1):
        if number in bad:
            x = x.clone()
            x[2, 1] = math.nan
        before = [copy.deepcopy(part.state_dict()) for part in loop.parts]
        loop.step(x, y)
        if number in held:
            for part, state in zip(loop.parts, before, strict=True):
                part.load_state_dict(state)
    found = {f"{at}.{name}": value for at, part in enumerate(loop.parts) for name, value in part_bits(part).items()}
    return found, loop


def part_bits(part):
    """The bits of a part; the last of several parts that are one dict."""
    if isinstance(part, nn.Module | torch.optim.Optimizer):
        return bits(part)
    return {name: value.detach().clone() for name, value in part.state_dict().items()}
