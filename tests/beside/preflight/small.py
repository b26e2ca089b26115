"""A small loop, parts of which a test replaces."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.beside.preflight.loop import Maker


class Net(nn.Module):
    """Two layers, and between them what a test is about."""

    def __init__(self, between=None):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(6, 8), nn.Linear(8, 1), nn.Dropout(0.3)
        self.between = between or (lambda net, x: F.gelu(x))

    def forward(self, x):
        """Returns `[batch, 1]`."""
        return self.second(self.between(self, self.first(x)))


def marked(model, batch):
    """Returns the mean square over the targets above 0: their number differs from part to part."""
    x, y = batch
    kept = (y > 0).float()
    return ((model(x) - y).square() * kept).sum() / kept.sum()


def count(batch):
    """Returns the number of targets above 0."""
    return int((batch[1] > 0).sum())


def maker(model=Net, loss=marked, step=None, rows=16, optimizers=None, **parts):
    """Returns a maker of a loop.

    Args:
        model: makes the model.
        loss: of model and batch.
        step: makes the loop's step, of model, optimizers and loss; None for a step without micro-batches.
        rows: of a batch; a function of the batch's number, or one number.
        optimizers: makes the optimizers, of the model.
        parts: of the loop.
    """

    def make():
        net = model()
        made = optimizers(net) if optimizers else [torch.optim.SGD(net.parameters(), lr=0.1)]

        def batch(number, rank=0):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(rows(number) if callable(rows) else rows, 6, generator=generator)
            return x, x[:, :1] + 0.5

        def plain(batch):
            made[0].zero_grad()
            value = loss(net, batch)
            value.backward()
            made[0].step()
            return value

        own = step(net, made, lambda batch: loss(net, batch)) if step else plain
        return SimpleNamespace(
            model=net, optimizers=made, loss=lambda batch: loss(net, batch), batch=batch, step=own, **parts
        )

    return Maker(make)


def micro_batches(weight, numbers=None, *, together=False):
    """Returns a step with micro-batches and clipping.

    Args:
        weight: of a part, of the part and its batch.
        numbers: of the rows of each part, of the batch's rows; None for parts of four.
        together: whether the losses are added up before one backward call.
    """

    def made(net, optimizers, loss):
        def step(batch):
            optimizers[0].zero_grad()
            losses = []
            for chosen in (numbers or (lambda rows: torch.arange(rows).split(4)))(len(batch[0])):
                part = tuple(each[chosen] for each in batch)
                losses.append(weight(part, batch) * loss(part))
                if not together:
                    losses[-1].backward()
            if together:
                sum(losses).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            optimizers[0].step()
            return sum(losses)

        return step

    return made
