"""The data are not what the loop takes them for."""

import torch
import torch.nn.functional as F

from tests.reliability.preflight.faults.fault import Fault
from tests.reliability.preflight.loop import IGNORED
from tests.reliability.preflight.models import Convolutions

# ---- repeated batches


class AlwaysFirst(Fault):
    """`next(iter(loader))` in every step."""

    kind, loops = "repeated_batches", ("mlp", "gpt", "contrastive", "vae")
    says = "every batch is the first one: the loop makes a new iterator in each step"
    points_at = ("batch", "data")

    def batch(self, step, rank=0):
        return super().batch(0, rank)  # here


class EachTwice(Fault):
    """Two workers of a loader each give all batches."""

    kind, loops = "repeated_batches", ("cnn", "rnn", "finetune")
    says = "every batch comes twice in a row"
    points_at = ("batch", "data")

    def batch(self, step, rank=0):
        return super().batch(step // 2, rank)  # here


class FirstTwo(Fault):
    """A loader that was cut to two batches to try it out."""

    kind, loops = "repeated_batches", ("gpt", "amp")
    says = "the first two batches come again and again"
    points_at = ("batch", "data")

    def batch(self, step, rank=0):
        return super().batch(step % 2, rank)  # here


# ---- the same data on every rank


class NoSampler(Fault):
    """Every rank has the same order: there is no distributed sampler."""

    kind, loops = "ranks_same", ("mlp", "gpt", "cnn")
    says = "both ranks have the same batches: the data are not divided among the ranks"
    points_at = ("rank", "batch", "data")

    def batch(self, step, rank=0):
        return super().batch(step)  # here


class SameEverySecond(Fault):
    """Of two sources of data, one is not divided among the ranks."""

    kind, loops = "ranks_same", ("rnn", "contrastive")
    says = "every second batch is the same on both ranks"
    points_at = ("rank", "batch", "data")

    def batch(self, step, rank=0):
        return super().batch(step, rank if step % 2 else 0)  # here


class OneBatchLater(Fault):
    """Rank 1 has rank 0's batches, one step later."""

    kind, loops = "ranks_same", ("gpt", "finetune")
    says = "rank 1 has the batches of rank 0, one step later"
    points_at = ("rank", "batch", "data")

    def batch(self, step, rank=0):
        return super().batch(step + rank)  # here


# ---- one rank's shard has no labels


class ShardWithoutLabels(Fault):
    """The file with the labels of the last shard is missing, and all its targets are ignored."""

    kind, loops = "shard_without_labels", ("gpt", "rnn")
    says = "all targets of rank 1 are ignored"
    points_at = ("rank", "target")

    def batch(self, step, rank=0):
        x, y = super().batch(step, rank)
        return x, y if rank == 0 else torch.full_like(y, IGNORED)  # here


class ShardOfOneClass(Fault):
    """Rows are sorted by label, and the last rank has one label only."""

    kind, loops = "shard_without_labels", ("cnn", "amp", "finetune")
    says = "all labels of rank 1 are the same one"
    points_at = ("rank", "target", "label")

    def batch(self, step, rank=0):
        x, y = super().batch(step, rank)
        return x, y if rank == 0 else torch.full_like(y, self.classes - 1)  # here


class ShardOfZeros(Fault):
    """The last shard was allocated and never filled: inputs and targets are 0."""

    kind, loops = "shard_without_labels", ("mlp", "contrastive")
    says = "all inputs and targets of rank 1 are 0"
    points_at = ("rank", "target", "input")

    def batch(self, step, rank=0):
        return tuple(each * (1 - rank) for each in super().batch(step, rank))  # here


# ---- constant targets


class WrongColumn(Fault):
    """The targets are read from a column of zeros."""

    kind, loops = "constant_targets", ("mlp",)
    says = "all targets are 0"
    points_at = ("target",)

    def batch(self, step, rank=0):
        x, y = super().batch(step, rank)
        return x, torch.zeros_like(y)  # here


class IntegerDivision(Fault):
    """The labels are divided as integers, by too much."""

    kind, loops = "constant_targets", ("amp", "cnn", "finetune")
    says = "all labels are 0"
    points_at = ("target", "label")

    def batch(self, step, rank=0):
        x, y = super().batch(step, rank)
        return x, y // 10  # here


class FilledTargets(Fault):
    """A mask that is inverted fills all targets with the letter for padding."""

    kind, loops = "constant_targets", ("gpt", "checkpointed", "rnn")
    says = "all targets that count are the same letter"
    points_at = ("target",)

    def batch(self, step, rank=0):
        x, y = super().batch(step, rank)
        return x, y.masked_fill(y != IGNORED, 0)  # here


# ---- labels out of range


class FromOne(Fault):
    """Labels begin at 1, and the head has one class more so that no error is raised."""

    kind, loops = "label_range", ("cnn",)
    says = "no label is 0: labels are 1 to 5 with 6 classes"
    points_at = ("target", "label", "head")

    def make_model(self):
        return Convolutions(self.classes + 1)

    def batch(self, step, rank=0):
        x, y = super().batch(step, rank)
        return x, y + 1  # here


class NoneOfThem(Fault):
    """Labels begin at 1; made one-hot by comparison, the last class is a row of zeros."""

    kind, loops = "label_range", ("amp",)
    says = "label 4 is out of range of 4 classes: its one-hot row is 0, and it has no loss"
    points_at = ("target", "label")

    def batch(self, step, rank=0):
        x, y = super().batch(step, rank)
        return x, y + 1  # here

    def criterion(self, batch):
        x, y = batch
        return F.cross_entropy(self.network(x).float(), (y[:, None] == torch.arange(self.classes)).float())


class FirstIgnored(Fault):
    """1 is subtracted from labels that begin at 0; -1 is what the loss ignores."""

    kind, loops = "label_range", ("finetune",)
    says = "labels are -1 to 1 with 3 classes: a third is ignored, and no label is 2"
    points_at = ("target", "label")

    def batch(self, step, rank=0):
        x, y = super().batch(step, rank)
        return x, y - 1  # here

    def criterion(self, batch):
        x, y = batch
        return F.cross_entropy(self.network(x).float(), y, ignore_index=-1)


# ---- nearly all targets ignored

WHOLE = {"micro_size": 0}


class PromptTooLong(Fault):
    """The prompt's mask leaves one target in a batch."""

    kind, loops, options = "ignored_targets", ("gpt", "checkpointed"), WHOLE
    says = "95 of 96 targets are ignored"
    points_at = ("target", "ignore")

    def batch(self, step, rank=0):
        x, y = super().batch(step, rank)
        kept = torch.zeros_like(y, dtype=torch.bool)
        kept[0, 0] = True
        return x, y.masked_fill(~kept, IGNORED)  # here


class AnswersCutOff(Fault):
    """The texts are cut before their answers: only the first of a batch keeps two targets."""

    kind, loops, options = "ignored_targets", ("rnn", "gpt"), WHOLE
    says = "all rows but one have no target"
    points_at = ("target", "ignore")

    def batch(self, step, rank=0):
        x, y = super().batch(step, rank)
        y = y.clone()
        y[1:], y[0, 2:] = IGNORED, IGNORED  # here
        return x, y


class WrongIdentity(Fault):
    """The mask keeps one place of the last row, in place of all but one."""

    kind, loops, options = "ignored_targets", ("accumulation", "checkpointed"), WHOLE
    says = "nearly all targets are ignored"
    points_at = ("target", "ignore")

    def batch(self, step, rank=0):
        x, y = super().batch(step, rank)
        place = torch.arange(y.numel()).view(y.shape)
        return x, y.masked_fill(place != y.numel() - y.shape[1], IGNORED)  # here


# ---- inputs far from zero mean and unit spread


class Bytes(Fault):
    """Images are not divided by 255."""

    kind, loops = "input_scale", ("cnn", "finetune")
    says = "inputs are 0 to 255, with mean 128 and spread 40: divide by 255 and standardize"
    points_at = ("input",)

    def batch(self, step, rank=0):
        x, y = super().batch(step, rank)
        return (40 * x + 128).clamp(0, 255).round(), y  # here


class OneLargeColumn(Fault):
    """One column, a time in seconds, was not standardized."""

    kind, loops = "input_scale", ("mlp", "contrastive")
    says = "column 7 of the inputs has mean 20000: standardize it"
    points_at = ("input",)

    def batch(self, step, rank=0):
        x, y = super().batch(step, rank)
        x = x.clone()
        x[:, 7] = 20000 + 100 * x[:, 7]  # here
        return x, y


class StandardizedTwice(Fault):
    """Inputs are standardized twice, the second time as bytes."""

    kind, loops = "input_scale", ("finetune", "vae")
    says = "inputs have mean -2 and spread 0.01: they are standardized twice"
    points_at = ("input",)

    def batch(self, step, rank=0):
        x, *y = super().batch(step, rank)
        return (x / 255 - 0.45) / 0.225, *y  # here
