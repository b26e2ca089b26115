"""Ten training loops as people write them, each a few milliseconds a step on a CPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from tests.reliability.healthy.sequences import LETTERS, TOKENS
from tests.reliability.preflight.loop import IGNORED, Data, Loop
from tests.reliability.preflight.models import GPT, Autoencoder, Convolutions, Recurrent, Regression, Towers

TIME = 12


def drawn(seed):
    """Returns a generator, so that a loop's data do not depend on anything else."""
    return torch.Generator().manual_seed(seed)


def sentences(rows, uneven):
    """Returns pieces of text and their next letters, `[rows, TIME]` each; uneven ones end early."""
    generator = drawn(5)
    starts = torch.randint(len(TOKENS) - TIME - 1, (rows, 1), generator=generator) + torch.arange(TIME + 1)
    inputs, targets = TOKENS[starts[:, :-1]], TOKENS[starts[:, 1:]].clone()
    if uneven:
        lengths = torch.randint(2, TIME + 1, (rows, 1), generator=generator)
        targets[torch.arange(TIME) >= lengths] = IGNORED
    return inputs, targets


def next_letter(logits, targets):
    """Returns the mean cross-entropy over the targets that count."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def warmup(optimizer, steps=10):
    """Returns a scheduler that raises the learning rate linearly."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / steps, 1.0))


def decayed(model):
    """Returns parameter groups: matrices with weight decay, the rest without."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    return [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]


class MLP(Loop):
    """Regression with AdamW, linear warmup and clipping."""

    max_norm = 1.0

    def make_data(self):
        x = torch.randn(40, 8, generator=drawn(1))
        return Data(x, x[:, :1] * x[:, 1:2] + x[:, 2:3].sin(), size=8)

    def make_model(self):
        return Regression()

    def make_optimizers(self):
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=1e-2)]
        self.schedulers = [warmup(self.optimizers[0])]

    def criterion(self, batch):
        x, y = batch
        return F.mse_loss(self.network(x).float(), y)


class CNN(Loop):
    """Images, BatchNorm, Nesterov momentum, a cosine schedule, and an average of the weights."""

    classes, ema = 5, True

    def make_data(self):
        generator = drawn(2)
        labels = torch.randint(self.classes, (48,), generator=generator)
        patterns = torch.randn(self.classes, 1, 8, 8, generator=generator)
        return Data(patterns[labels] + 0.5 * torch.randn(48, 1, 8, 8, generator=generator), labels, size=8)

    def make_model(self):
        return Convolutions(self.classes)

    def make_optimizers(self):
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
        self.optimizers, self.schedulers = [optimizer], [lr_scheduler.CosineAnnealingLR(optimizer, 20)]

    def criterion(self, batch):
        x, y = batch
        return F.cross_entropy(self.network(x).float(), y)


class SmallGPT(Loop):
    """A GPT with tied head, dropout, two parameter groups, and sentences of uneven length in two micro-batches."""

    max_norm, micro_size, classes = 1.0, 4, len(LETTERS)

    def make_data(self):
        return Data(*sentences(64, uneven=True), size=8)

    def make_model(self):
        return GPT(self.classes, TIME)

    def make_optimizers(self):
        self.optimizers = [torch.optim.AdamW(decayed(self.model), lr=3e-3, betas=(0.9, 0.95))]
        self.schedulers = [warmup(self.optimizers[0])]

    def criterion(self, batch):
        tokens, targets = batch
        return next_letter(self.network(tokens), targets)


class RNN(Loop):
    """A GRU language model with a tied head and a learning rate that falls by steps; its last batch is smaller."""

    max_norm, classes = 1.0, len(LETTERS)

    def make_data(self):
        return Data(*sentences(40, uneven=True), size=8)

    def make_model(self):
        return Recurrent(self.classes)

    def make_optimizers(self):
        self.optimizers = [torch.optim.Adam(self.model.parameters(), lr=5e-3)]
        self.schedulers = [lr_scheduler.StepLR(self.optimizers[0], step_size=2, gamma=0.5)]

    def criterion(self, batch):
        tokens, targets = batch
        return next_letter(self.network(tokens), targets)


class VAE(Loop):
    """A VAE that draws its noise from a generator of its own, which a checkpoint holds."""

    def __init__(self, **options: Any) -> None:
        self.noise = drawn(3)
        super().__init__(**options)

    def make_data(self):
        generator = drawn(4)
        return Data(torch.randn(64, 3, generator=generator) @ torch.randn(3, 10, generator=generator) / 3**0.5, size=16)

    def make_model(self):
        return Autoencoder(10)

    def make_optimizers(self):
        self.optimizers = [torch.optim.Adam(self.model.parameters(), lr=2e-3)]
        self.schedulers = [lr_scheduler.ExponentialLR(self.optimizers[0], 0.9)]

    def criterion(self, batch):
        [x] = batch
        out, mean, log_variance = self.network(x, self.noise)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return ((out.float() - x).square().sum(1) + divergence).mean()

    def save(self):
        return {**super().save(), "noise": self.noise.get_state()}

    def load(self, state):
        super().load(state)
        self.noise.set_state(state["noise"])


class AMP(MLP):
    """A classifier in fp16 with a `GradScaler`, and clipping after `unscale_`."""

    precision, max_norm, classes = "fp16", 0.5, 4

    def make_data(self):
        x = torch.randn(64, 8, generator=drawn(6))
        return Data(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long(), size=16)

    def make_model(self):
        return Regression(outputs=self.classes)

    def criterion(self, batch):
        x, y = batch
        return F.cross_entropy(self.network(x).float(), y)


class Accumulation(Loop):
    """Labels of tokens, in up to four micro-batches with uneven numbers of targets; the last batch has two."""

    micro_size, classes = 2, 6

    def make_data(self):
        generator = drawn(7)
        tokens = torch.randint(20, (40, 10), generator=generator)
        labels = (tokens % self.classes).masked_fill(
            torch.rand(40, 10, generator=generator) > torch.rand(40, 1, generator=generator), IGNORED
        )
        labels[:, 0] = tokens[:, 0] % self.classes  # at least one target a row
        return Data(tokens, labels, size=8)

    def make_model(self):
        return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, self.classes))

    def make_optimizers(self):
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)]
        self.schedulers = [lr_scheduler.PolynomialLR(self.optimizers[0], 50)]

    def criterion(self, batch):
        tokens, labels = batch
        return next_letter(self.network(tokens), labels)


class Checkpointed(SmallGPT):
    """A GPT whose blocks are recomputed in the backward pass, with dropout."""

    micro_size = 0

    def make_data(self):
        return Data(*sentences(48, uneven=False), size=8)

    def make_model(self):
        model = GPT(self.classes, TIME)
        model.checkpointed = True
        return model


class Contrastive(Loop):
    """Pairs of views, two encoders and a learned temperature, in bf16; there are no targets."""

    precision = "bf16"

    def make_data(self):
        generator = drawn(8)
        x = torch.randn(64, 12, generator=generator)
        return Data(*(x + 0.3 * torch.randn(64, 12, generator=generator) for _ in range(2)), size=16)

    def make_model(self):
        return Towers(12)

    def make_optimizers(self):
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=2e-3)]
        self.schedulers = [lr_scheduler.LinearLR(self.optimizers[0], 0.1, total_iters=10)]

    def criterion(self, batch):
        scores = self.network(*batch)
        right = torch.arange(len(scores))
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


class FineTune(Loop):
    """A frozen body in eval mode, a trained convolution, and a new head with a learning rate of its own."""

    classes = 3

    def make_data(self):
        generator = drawn(9)
        labels = torch.randint(self.classes, (48,), generator=generator)
        patterns = torch.randn(self.classes, 1, 8, 8, generator=generator)
        return Data(patterns[labels] + 0.5 * torch.randn(48, 1, 8, 8, generator=generator), labels, size=8)

    def make_model(self):
        model = Convolutions(10)  # pretrained on other classes
        for part in (model.conv1, model.bn1):
            part.requires_grad_(False).eval()
        model.head = nn.Linear(16, self.classes)
        return model

    def make_optimizers(self):
        model = self.model
        groups = [
            {"params": [*model.conv2.parameters(), *model.bn2.parameters()], "lr": 1e-3},
            {"params": [*model.head.parameters()], "weight_decay": 0.0},
        ]
        self.optimizers = [torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.05)]
        self.schedulers = [lr_scheduler.CosineAnnealingLR(self.optimizers[0], 20)]

    def criterion(self, batch):
        x, y = batch
        return F.cross_entropy(self.network(x).float(), y)


LOOPS = {
    "mlp": MLP,
    "cnn": CNN,
    "gpt": SmallGPT,
    "rnn": RNN,
    "vae": VAE,
    "amp": AMP,
    "accumulation": Accumulation,
    "checkpointed": Checkpointed,
    "contrastive": Contrastive,
    "finetune": FineTune,
}
