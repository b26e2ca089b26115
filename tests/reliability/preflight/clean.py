"""The clean programs, of which no check may say that something is wrong.

The ten loops; variants of them that look like a fault and are none, each with a line on what looks like one; and the
healthy programs of this project.
"""

import contextlib
import copy
import functools
import math
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reliability.healthy.run import PROGRAMS
from tests.reliability.preflight.faults.fault import Program, become
from tests.reliability.preflight.loop import IGNORED, Data, Loop
from tests.reliability.preflight.loops import (
    AMP,
    CNN,
    LOOPS,
    MLP,
    RNN,
    TIME,
    VAE,
    Accumulation,
    Checkpointed,
    Contrastive,
    FineTune,
    SmallGPT,
)
from tests.reliability.preflight.models import GPT, Recurrent, Regression


class FullBatch(MLP):
    """Every batch is the whole data: repeated batches, and an epoch of one batch."""

    def make_data(self):
        return Data(*super().make_data().tensors, size=40)


class ZeroHead(MLP):
    """A head that begins at 0: the gradients of all other layers are exactly 0 in the first step."""

    def make_model(self):
        model = super().make_model()
        nn.init.zeros_(model.head.weight)
        return model


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of two small matrices (LoRA)."""

    def __init__(self, frozen: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output, adapted."""
        return self.frozen(x) + self.up(self.down(x))


class LoRA(MLP):
    """Frozen layers with adapters: most parameters are in no group, and the gradient of `down` is 0 at first."""

    def make_model(self):
        model = super().make_model()
        model.first, model.second = Adapted(model.first), Adapted(model.second)
        return model

    def make_optimizers(self):
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizers, self.schedulers = [torch.optim.AdamW(trained, lr=1e-2)], []


class FrozenInGroup(FineTune):
    """The optimizer got all parameters, frozen ones included: they get no gradient, on purpose."""

    def make_optimizers(self):
        self.optimizers, self.schedulers = [torch.optim.AdamW(self.model.parameters(), lr=1e-3)], []


class FrozenNorms(CNN):
    """BatchNorm in eval mode with frozen weights, as detectors are fine-tuned: a part in eval mode."""

    def make_model(self):
        model = super().make_model()
        for part in (model.bn1, model.bn2):
            part.requires_grad_(False).eval()
        return model


class UnitImages(CNN):
    """Images between 0 and 1 that are not standardized."""

    def make_data(self):
        data = super().make_data()
        return Data(data.tensors[0].sigmoid(), data.tensors[1], size=data.size)


class NormOfMicroBatches(CNN):
    """BatchNorm with micro-batches: each has statistics of its own, so the gradient is not that of the whole batch."""

    micro_size = 4


class EvenMeans(Accumulation):
    """A mean of means with as many targets in every micro-batch: it is the mean."""

    def make_data(self):
        tokens = super().make_data().tensors[0]
        return Data(tokens, tokens % self.classes, size=8)

    def backward(self, batch):
        parts, loss = self.micro_batches(batch), torch.zeros(())
        for part in parts:
            share = self.loss(part) / len(parts)
            share.backward()
            loss += share.detach()
        return loss


class SumOfLosses(Accumulation):
    """Sums of the micro-batches' losses, and the gradients divided by the number of targets after the last."""

    def backward(self, batch):
        total, loss = self.count(batch), torch.zeros(())
        for part in self.micro_batches(batch):
            share = self.loss(part) * self.count(part)
            share.backward()
            loss += share.detach()
        for parameter in self.model.parameters():
            parameter.grad.div_(total)
        return loss / total


class MaskedTokens(SmallGPT):
    """A masked language model: 85 % of the targets are ignored."""

    micro_size = 0

    def make_data(self):
        tokens = super().make_data().tensors[0]
        chosen = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(1)) < 0.15
        return Data(tokens.masked_fill(chosen, 0), tokens.masked_fill(~chosen, IGNORED), size=8)


class MatricesApart(SmallGPT):
    """Two optimizers, for matrices and for the rest, with no parameter in both."""

    def make_optimizers(self):
        parameters = [*self.model.parameters()]
        self.optimizers = [
            torch.optim.SGD([each for each in parameters if each.ndim >= 2], lr=0.05, momentum=0.9),
            torch.optim.AdamW([each for each in parameters if each.ndim < 2], lr=3e-3),
        ]
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.99) for each in self.optimizers]


class CompiledGPT(SmallGPT):
    """A model that is compiled, by a backend that changes nothing."""

    def make_optimizers(self):
        super().make_optimizers()
        torch.compiler.reset()
        self.compiled, self.network = True, torch.compile(self.model, backend="eager")


class Truncated(Recurrent):
    """The hidden state is detached in the middle of the window."""

    def forward(self, tokens):
        half = tokens.shape[1] // 2
        first, hidden = self.gru(self.embed(tokens[:, :half]))
        second, _ = self.gru(self.embed(tokens[:, half:]), hidden.detach())
        return self.head(self.dropout(torch.cat([first, second], 1)))


class TruncatedRNN(RNN):
    """Truncated backpropagation: a `detach` that is meant."""

    def make_model(self):
        model = super().make_model()
        become(model, Truncated)
        return model


class Quantized(VAE):
    """Latent variables rounded, with a straight-through gradient: it is not that of the loss, on purpose."""

    def criterion(self, batch):
        [x] = batch
        mean, log_variance = self.model.encode(x)
        z = self.model.latent(mean, log_variance, self.noise)
        out = self.model.decoder(z + (z.round() - z).detach())
        return (out - x).square().sum(1).mean() + 0.01 * (mean.square().mean() + log_variance.square().mean())


class FirstOverflows(AMP):
    """A loss scale that is too large at first: the first step is skipped, as it should be."""

    init_scale, skipped = 2.0**20, False

    def update(self):
        before = self.scaler.get_scale()
        super().update()
        self.skipped = self.scaler.get_scale() < before

    def schedule(self):
        if not self.skipped:
            super().schedule()


class StopGradient(Contrastive):
    """One of two views is detached, in turn (SimSiam): a `detach` that is meant."""

    def criterion(self, batch):
        one, two = (self.model.image(each).float() for each in batch)
        alike = (
            F.cosine_similarity(self.model.text(one), two.detach()),
            F.cosine_similarity(self.model.text(two), one.detach()),
        )
        return -(alike[0] + alike[1]).mean() / 2

    def make_model(self):
        model = super().make_model()
        model.text = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        del model.log_scale
        return model


class EpochSchedule(FineTune):
    """A scheduler that steps once an epoch: not in the first two steps."""

    every = 3


class Experts(Regression):
    """A second layer for rows whose fourth number is large; the first batch of the data has none."""

    def forward(self, x):
        chosen = x[:, 3:4] > 1.5
        x = F.gelu(self.first(x))
        if bool(chosen.any()):
            x = torch.where(chosen, F.gelu(self.second(x)), x)
        return self.head(x)


class RareExpert(MLP):
    """A layer that some batches do not use: then it has no gradient."""

    def make_model(self):
        model = super().make_model()
        become(model, Experts)
        return model


class LargeEps(CNN):
    """RMSprop with eps=1e-3, as for Inception and EfficientNet."""

    def make_optimizers(self):
        self.optimizers = [torch.optim.RMSprop(self.model.parameters(), lr=1e-3, momentum=0.9, eps=1e-3)]


class ZeroedAfter(MLP):
    """Gradients are zeroed at the end of the step, not at its beginning."""

    def step(self, batch):
        loss = self.backward(batch)
        self.clip()
        self.update()
        self.schedule()
        super().zero_grad()
        return loss


class SkipsNotFinite(MLP):
    """Skips a step that is not finite, and zeroes its gradients."""

    def update(self):
        if all(each.grad.isfinite().all() for each in self.model.parameters()):
            super().update()


class ConstantSchedule(MLP):
    """A scheduler whose learning rate does not change."""

    def make_optimizers(self):
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=1e-2)]
        self.schedulers = [torch.optim.lr_scheduler.LambdaLR(self.optimizers[0], lambda step: 1.0)]


class Untied(SmallGPT):
    """A head of its own, which was never tied."""

    def make_model(self):
        model = super().make_model()
        model.head.weight = nn.Parameter(0.2 * torch.randn_like(model.embed.weight))
        return model


class Evaluates(RNN):
    """An evaluation after each step, in eval mode, which is left again."""

    def average(self):
        self.model.eval()
        with torch.no_grad():
            self.loss(self.batch(0))
        self.model.train()


class Weighted(CNN):
    """Few classes and labels that are mostly one class, with weights in the loss."""

    def make_data(self):
        images, labels = super().make_data().tensors
        return Data(images, labels.masked_fill(torch.arange(len(labels)) % 5 > 0, 0), size=16)

    def criterion(self, batch):
        x, y = batch
        return F.cross_entropy(self.network(x), y, weight=torch.tensor([0.25, 1.0, 1.0, 1.0, 1.0]))


class LargeVocabulary(SmallGPT):
    """A vocabulary of which most letters never occur in a batch, with one row in each micro-batch."""

    micro_size, vocabulary = 1, 300

    def make_model(self):
        return GPT(self.vocabulary, TIME)


class LearntScale(Contrastive):
    """Similarities times 100, the most that CLIP allows: large inputs of a softmax, as after long training."""

    def make_model(self):
        model = super().make_model()
        nn.init.constant_(model.log_scale, math.log(100))
        return model


class Residual(MLP):
    """A residual that is to be 0: constant targets, made in the loss."""

    def criterion(self, batch):
        x, y = batch
        residual = self.network(x).float() - y
        return F.mse_loss(residual, torch.zeros_like(residual))


class Discriminator(MLP):
    """Real rows are to be 1 and shuffled ones 0: two losses whose targets are constant."""

    def criterion(self, batch):
        x, _ = batch
        real, fake = self.network(x), self.network(x.roll(1, 0) * x.roll(1, 1).sign())
        ones, zeros = torch.ones_like(real), torch.zeros_like(fake)
        return F.binary_cross_entropy_with_logits(real, ones) + F.binary_cross_entropy_with_logits(fake, zeros)


class Distilled(AMP):
    """A frozen teacher within the model, in eval mode, used without gradients and in no group."""

    def make_model(self):
        model = super().make_model()
        model.teacher = copy.deepcopy(model).requires_grad_(False).eval()
        return model

    def make_optimizers(self):
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizers, self.schedulers = [torch.optim.AdamW(trained, lr=1e-2)], []

    def criterion(self, batch):
        x, y = batch
        logits = self.network(x).float()
        with torch.no_grad():
            soft = self.model.teacher(x + 0.1).float().softmax(1)
        return F.cross_entropy(logits, y) + F.cross_entropy(logits, soft)


class Plateau(MLP):
    """A scheduler that lowers the learning rate when the loss stops falling: it steps once an epoch, with the loss."""

    def make_optimizers(self):
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=1e-2)]
        self.schedulers = [torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizers[0])]

    def schedule(self):
        pass

    def step(self, batch):
        loss = super().step(batch)
        if self.position % self.epoch == 0:
            self.schedulers[0].step(loss)
        return loss


VARIANTS: list[tuple[type[Loop], dict]] = [
    *((each, {}) for each in (FullBatch, ZeroHead, LoRA, FrozenInGroup, FrozenNorms, UnitImages, NormOfMicroBatches)),
    *(
        (each, {})
        for each in (EvenMeans, SumOfLosses, MaskedTokens, MatricesApart, CompiledGPT, TruncatedRNN, Quantized)
    ),
    *(
        (each, {})
        for each in (FirstOverflows, StopGradient, EpochSchedule, RareExpert, LargeEps, ZeroedAfter, SkipsNotFinite)
    ),
    *((each, {}) for each in (ConstantSchedule, Untied, Evaluates, Weighted, LargeVocabulary)),
    *((each, {}) for each in (LearntScale, Residual, Discriminator, Distilled, Plateau)),
    *((each, {"precision": "fp16"}) for each in (CNN, SmallGPT, Checkpointed)),
    *((each, {"precision": "bf16"}) for each in (MLP, CNN, SmallGPT, VAE)),
    (MLP, {"ema": True, "max_norm": 0.0}),
    (SmallGPT, {"micro_size": 3}),
]


class Recorded(Exception):
    """The program has taken as many steps as were asked for."""


class Recorder:
    """Takes a guard's place in a healthy program: trains, and records batches and closure of the first network.

    Args:
        model, optimizer, max_norm: as for `Guard`.
        records: whether this is the first guard of the program.
        steps: how many it takes before it ends the program.
    """

    def __init__(self, model, optimizer, max_norm=0.0, records=True, steps=0):
        self.steps = steps
        self.model, self.optimizer, self.max_norm, self.records = model, optimizer, max_norm or 0.0, records
        self.start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        self.batches, self.last = [], self
        self.applied = True

    def step(self, closure, batch=None):
        """Trains one step."""
        if self.records and len(self.batches) == self.steps:
            self.closure = closure
            raise Recorded
        batch = batch if isinstance(batch, tuple) else (batch,)
        self.batches.append(copy.deepcopy(tuple(each.detach() for each in batch)))
        self.optimizer.zero_grad()
        closure(*batch).backward()
        if self.max_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()


class RecordedData:
    """Batches that were recorded, on one rank; a program whose batch is always the same has epochs of one batch."""

    def __init__(self, batches):
        whole = all(all(map(torch.equal, each, batches[0])) for each in batches)
        self.batches = batches[:1] if whole else batches

    def __len__(self):
        return len(self.batches)

    def batch(self, step, rank=0):
        """Returns the batch of a step; they begin anew after the last."""
        return tuple(each.clone() for each in self.batches[step % len(self.batches)])


def recorded(program, steps):
    """Runs a healthy program for so many steps of its first network; returns what recorded them."""
    random.seed(0)
    torch.manual_seed(0)
    guards = []

    def guard(model, optimizer, max_norm=0.0, **_):
        guards.append(Recorder(model, optimizer, max_norm, not guards, steps))
        return guards[-1]

    with contextlib.suppress(Recorded):
        PROGRAMS[program](1000, guard)
    return guards[0]


@functools.cache
def batches_of(program):
    """Returns the batches of a healthy program's first steps."""
    return recorded(program, 6).batches


class Healthy(Loop):
    """The first network of a healthy program, with its batches, its loss and its optimizer."""

    ranks, program = 1, ""

    def make_data(self):
        batches = batches_of(self.program)
        self.recorder = recorded(self.program, 0)
        return RecordedData(batches)

    def make_model(self):
        self.recorder.model.load_state_dict(self.recorder.start[0])
        return self.recorder.model

    def make_optimizers(self):
        optimizer = self.recorder.optimizer
        optimizer.load_state_dict(self.recorder.start[1])
        self.optimizers, self.max_norm = [optimizer], self.recorder.max_norm

    def criterion(self, batch):
        return self.recorder.closure(*batch)


CLEAN: list[Program] = [
    *(Program(name, loop, {}) for name, loop in LOOPS.items()),
    *(
        Program("/".join([loop.__name__, *(f"{name}={value}" for name, value in options.items())]), loop, options)
        for loop, options in VARIANTS
    ),
    *(Program(f"healthy/{name}", Healthy, {"program": name}) for name in PROGRAMS),
]
"""Every clean program."""
