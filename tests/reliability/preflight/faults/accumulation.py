"""The gradient of micro-batches is not that of the whole batch."""

import torch

from tests.reliability.preflight.faults.fault import Fault
from tests.reliability.preflight.loop import Data


def added(loop, shares):
    """Runs the backward pass of each share of the loss; returns their sum."""
    loss = torch.zeros(())
    for share in shares:
        loop.scaled(share).backward()
        loss += share.detach()
    return loss


# ---- a mean of means, though the numbers of targets differ


class MeanOfMeans(Fault):
    """Each micro-batch's mean is divided by their number."""

    kind, loops = "mean_of_means", ("accumulation", "gpt", "rnn")
    says = "the gradient of the micro-batches is not that of the batch: weight each by its number of targets"
    points_at, options = ("backward", "micro"), {"micro_size": 2}

    def backward(self, batch):
        parts = self.micro_batches(batch)
        return added(self, (self.loss(part) / len(parts) for part in parts))  # here


class WeightedByRows(Fault):
    """Each micro-batch's mean is weighted by its rows, not by its targets."""

    kind, loops = "mean_of_means", ("accumulation", "gpt")
    says = "the gradient of the micro-batches is not that of the batch: weight each by its number of targets"
    points_at = ("backward", "micro")

    def backward(self, batch):
        parts = self.micro_batches(batch)
        return added(self, (self.loss(part) * len(part[0]) / len(batch[0]) for part in parts))  # here


class DividedByPlaces(Fault):
    """The sum over the targets is divided by the number of places, ignored ones included."""

    kind, loops = "mean_of_means", ("accumulation", "gpt")
    says = "the gradient of the micro-batches is shorter than that of the batch: ignored targets are counted"
    points_at = ("backward", "micro")

    def backward(self, batch):
        places = batch[1].numel()
        return added(self, (self.loss(part) * self.count(part) / places for part in self.micro_batches(batch)))  # here


# ---- not divided by the number of micro-batches


class NotDivided(Fault):
    """The means of the micro-batches are added up."""

    kind, loops = "not_divided", ("accumulation", "rnn", "gpt")
    says = "the gradient is as many times too long as there are micro-batches: divide the loss"
    points_at, options = ("backward", "micro"), {"micro_size": 2}

    def backward(self, batch):
        return added(self, (self.loss(part) for part in self.micro_batches(batch)))  # here


class DividedTooLate(Fault):
    """The loss is divided after its backward pass, so that only what is logged is right."""

    kind, loops = "not_divided", ("accumulation", "gpt")
    says = "the gradient is as many times too long as there are micro-batches: divide before backward"
    points_at = ("backward", "micro")

    def backward(self, batch):
        parts, loss = self.micro_batches(batch), torch.zeros(())
        for part in parts:
            share = self.loss(part)
            self.scaled(share).backward()
            share = share / len(parts)  # here
            loss += share.detach()
        return loss


class DividedTwice(Fault):
    """The loop divides by the number of micro-batches, and a library of the user's does so too."""

    kind, loops = "not_divided", ("accumulation", "gpt")
    says = "the gradient is as many times too short as there are micro-batches: it is divided twice"
    points_at = ("backward", "micro")

    def backward(self, batch):
        parts, total = self.micro_batches(batch), self.count(batch)
        return added(self, (self.loss(part) * self.count(part) / total / len(parts) for part in parts))  # here


# ---- the last, smaller batch of an epoch


class LastDividedAsOthers(Fault):
    """The last batch has fewer micro-batches, and is divided by the usual number."""

    kind, loops = "last_partial", ("accumulation", "rnn")
    says = "the gradient of the epoch's last batch is too short: divide by its own number of micro-batches"
    points_at, options = ("backward", "micro"), {"micro_size": 2, "max_norm": 0.0}

    def backward(self, batch):
        usual = len(self.batch(0)[0])
        share = len(batch[0]) / usual
        return added(
            self,
            (share * self.loss(part) * self.count(part) / self.count(batch) for part in self.micro_batches(batch)),
        )


class LeftOver(Fault):
    """The last, incomplete group of micro-batches gets no update; its gradients stay for the next epoch."""

    kind, loops = "last_partial", ("accumulation", "rnn")
    says = "the gradient of the epoch's first batch holds that of the last one's micro-batches"
    points_at, options = ("zero_grad", "gradient", "optimizers.0"), {"micro_size": 2}
    complete = True

    def zero_grad(self):
        if self.complete:
            super().zero_grad()

    def backward(self, batch):
        self.complete = len(batch[0]) == len(self.batch(0)[0])
        return super().backward(batch)

    def update(self):
        if self.complete:  # here
            super().update()


class MeanOverUsualSize(Fault):
    """The loss is a sum, divided by the usual number of rows."""

    kind, loops = "last_partial", ("mlp", "cnn")
    says = "the loss of the epoch's last batch is too small: divide by its own number of rows"
    points_at, options = ("backward", "loss"), {"max_norm": 0.0}

    def make_data(self):
        data = super().make_data()
        return Data(*(each[:40] for each in data.tensors), size=data.size)

    def backward(self, batch):
        share = len(batch[0]) / len(self.batch(0)[0])
        return added(self, [share * self.loss(batch)])  # here
