"""A loop written by hand, in which each test changes a part; and what a check says of it."""

import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.beside.preflight.loop import Maker

ROWS = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


class Plain:
    """Regression in batches of four rows, an epoch of three; in fp16 if it has a scaler."""

    epoch, max_norm, scale = 3, 0.0, 0.0

    def __init__(self):
        torch.manual_seed(0)
        self.position = 0
        self.model = self.make_model()
        self.optimizers = self.make_optimizers()
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in self.optimizers]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale) if self.scale else None

    def make_model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def make_optimizers(self):
        return [torch.optim.SGD(self.model.parameters(), lr=0.1)]

    def batch(self, step, rank=0):
        rows = ROWS[step % 3 * 4 :][:4]
        return rows, rows[:, :1]

    def next_batch(self):
        self.position += 1
        return self.batch(self.position - 1)

    def loss(self, batch):
        x, y = batch
        with torch.autocast("cpu", torch.float16, enabled=self.scaler is not None):
            return F.mse_loss(self.model(x).float(), y)

    def step(self, batch):
        self.zero_grad()
        loss = self.backward(batch)
        self.clip()
        self.update()
        self.schedule()
        return loss

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, batch):
        loss = self.loss(batch)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    def clip(self):
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        if self.max_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def update(self):
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def schedule(self):
        for scheduler in self.schedulers:
            scheduler.step()


def said(check, loop):
    """Returns what a check says of a loop's class: its only finding."""
    [found] = check(Maker(loop))
    return found


def source(found):
    """Returns the text of the line that a finding names."""
    file, _, number = found.line.rpartition(":")
    with open(file) as lines:
        return lines.read().splitlines()[int(number) - 1].strip()
