"""The data are not what the loop takes them for."""

import torch

from tests.reliability.preflight.held_out.loops import MultiTask, Recommender, Translation, ViT, drawn
from tests.reliability.preflight.held_out.program import planted


@planted(
    "repeated_batches",
    "all batches of an epoch are the same: the generator is made anew in each call",
    *("batch", "data"),
)
class ReseededEachCall(Recommender):
    """Rows are drawn by a generator that begins anew with the epoch's number in each call."""

    def batch(self, step, rank=0):
        g = drawn(7 * (step // 5) + rank)  # here
        rows = torch.randint(160, (16,), generator=g)
        return tuple(column[rows] for column in self.table)


@planted("repeated_batches", "a batch and the next share all rows but two", *("batch", "data", "rows"))
class SlidingWindow(Translation):
    """A batch begins two rows after the one before, not where that ends."""

    def rows(self, step, rank):
        order = torch.randperm(64, generator=drawn(1000 + step // self.epoch))[rank::2]
        return order[2 * (step % self.epoch) :][:8]  # here


@planted("ranks_same", "both ranks have the same rows in each batch, in another order", *("rank", "batch", "data"))
class ShuffledWithinBatch(Recommender):
    """A rank shuffles the rows of the batch, and all ranks have the same batch."""

    def batch(self, step, rank=0):
        order = torch.randperm(16, generator=drawn(step + 1000 * rank))
        return tuple(column[order] for column in super().batch(step, 0))  # here


@planted("shard_without_labels", "all labels of the first task are ignored on rank 1", *("rank", "target", "label"))
class OneTaskMissing(MultiTask):
    """Rank 1's shard lacks the labels of one task of two."""

    def batch(self, step, rank=0):
        x, labels, numbers = super().batch(step, rank)
        return [x, labels if rank == 0 else torch.full_like(labels, -100), numbers]  # here


@planted(
    "constant_targets", "all numbers to regress are 0: each row was centered by its own mean", *("target", "label")
)
class CenteredByRow(MultiTask):
    """Targets of one column each are centered along the wrong dimension, which leaves zeros."""

    def batch(self, step, rank=0):
        x, labels, numbers = super().batch(step, rank)
        numbers = torch.cat([each - each.mean(1, keepdim=True) for each in numbers.split(1, 1)], 1)  # here
        return [x, labels, numbers]


@planted(
    "constant_targets", "all ratings are 0: they are between 0 and 1 and were stored as integers", *("target", "label")
)
class StoredAsIntegers(Recommender):
    """Ratings between 0 and 1 become integers, and floats again."""

    def batch(self, step, rank=0):
        *rest, ratings = super().batch(step, rank)
        return (*rest, ratings.to(torch.int16).float())  # here


@planted(
    "label_range", "labels are -1 to 3 with 5 classes: -1 picks the last class, and no label is 4", *("target", "label")
)
class IndexFromTheEnd(ViT):
    """Labels begin at 0 and 1 is subtracted; the loss picks log-probabilities by index, where -1 is the last."""

    def batch(self, step, rank=0):
        images, labels = super().batch(step, rank)
        return images, labels - 1  # here

    def loss(self, batch):
        images, labels = batch
        logs = self.net(images).log_softmax(1)
        return -logs[torch.arange(len(labels)), labels].mean()


@planted("ignored_targets", "nearly all targets are ignored: the mask takes whole rows", *("target", "ignore"))
class MaskTakesRows(Translation):
    """Places after the end are to be ignored; the index takes whole rows, all but the shortest."""

    def batch(self, step, rank=0):
        batch = super().batch(step, rank)
        rows = torch.arange(8) != batch["lengths"].argmin()
        targets = batch["targets"].clone()
        targets[rows] = -100  # here
        targets[~rows] = targets[~rows].where(torch.arange(targets.shape[1]) == 0, -100)
        return {**batch, "targets": targets}


@planted("input_scale", "inputs are -2 to 1131, with mean 570: bytes were standardized as if between 0 and 1", "input")
class BytesStandardized(ViT):
    """Images of 0 to 255 get the mean and spread of images between 0 and 1."""

    def batch(self, step, rank=0):
        images, labels = super().batch(step, rank)
        return (255 * images.sigmoid() - 0.45) / 0.225, labels  # here


@planted("input_scale", "inputs[2] has a column with mean 480,000: a time in hours", *("input", "features"))
class HoursSince1970(Recommender):
    """One of several inputs has a time in hours since 1970."""

    def batch(self, step, rank=0):
        users, items, features, ratings = super().batch(step, rank)
        features = torch.cat([features[:, :2], 480_000 + 1000 * features[:, 2:]], 1)  # here
        return users, items, features, ratings
