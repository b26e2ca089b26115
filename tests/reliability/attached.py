"""The same loops and faults once through `guard.step` and once with `Guard.attach`: what each guard withholds and says.

    python -m tests.reliability.attached

Each loop is written as people write one, with its loss in the loop, in the model, or divided for micro-batches. A fault
begins at step `FAULT`. The table counts the runs in which the guard withheld steps or raised alarms.
"""

import argparse
import logging
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.errors import TrainingHalted
from stabletrain.guard.guard import Guard

STEPS, FAULT = 270, 150


class Plain(nn.Sequential):
    """A small network; the loop computes its loss."""

    def __init__(self, outputs=4):
        super().__init__(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, outputs))


class Recurrent(nn.Module):
    """A recurrent language model."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(8, 12), nn.GRU(12, 24, batch_first=True), nn.Linear(24, 8)

    def forward(self, tokens):
        return self.head(self.cell(self.embed(tokens))[0])


class WithLoss(nn.Module):
    """A model that returns `(logits, loss)`."""

    def __init__(self):
        super().__init__()
        self.inner = Plain()

    def forward(self, x, y):
        logits = self.inner(x)
        return logits, F.cross_entropy(logits, y)


@dataclass
class Way:
    """A guarded way to train: `step` or `attached`.

    Attributes:
        kind: one of the two.
        folder: of the guards' incidents; None to explain none.
        guards: of the loop.
        losses: the losses of the steps, as the loop sees them.
        scale: factor of the losses, which a fault changes.
    """

    kind: str
    folder: str | None = None
    guards: list = field(default_factory=list)
    losses: list = field(default_factory=list)
    scale: float = 1.0

    def guard(self, model, optimizer, **options):
        """Returns a function that takes a step: of the closure's loss on each of its micro-batches."""
        make = Guard if self.kind == "step" else Guard.attach
        explained = {"max_incidents": 0} if self.folder is None else {"folder": self.folder}
        guard = make(model, optimizer, **explained, **options)
        self.guards.append(guard)

        def step(closure, *micro_batches):
            share = self.scale / len(micro_batches)
            if self.kind == "step":
                for batch in micro_batches:
                    guard.backward(lambda *batch: closure(*batch) * share, batch)
                self.losses.append(float(guard.update()))
                return
            optimizer.zero_grad()
            total = 0.0
            for batch in micro_batches:
                loss = closure(*batch) * share
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            self.losses.append(float(total))

        return step


def labelled(number, size=32):
    """Inputs and labels that can be learnt, of one step."""
    drawn = torch.Generator().manual_seed(number)
    x = torch.randn(size, 6, generator=drawn)
    return x, x[:, :3].argmax(1)


def classifier(way):
    """A classifier, with `F.cross_entropy` in the loop."""
    model = Plain()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = way.guard(model, optimizer)
    return [model], [optimizer], lambda batch: step(lambda x, y: F.cross_entropy(model(x), y), batch)


def accumulating(way):
    """The same in two micro-batches."""
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    step = way.guard(model, optimizer)
    closure = lambda x, y: F.cross_entropy(model(x), y)  # noqa: E731
    return [model], [optimizer], lambda batch: step(closure, *zip(*(each.chunk(2) for each in batch), strict=True))


def logits_and_loss(way):
    """A model that returns `(logits, loss)`."""
    model = WithLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = way.guard(model, optimizer)
    return [model], [optimizer], lambda batch: step(lambda x, y: model(x, y)[1], batch)


def language_model(way):
    """A recurrent language model."""
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = way.guard(model, optimizer)

    def closure(x, y):
        tokens = (4 * x.nan_to_num()[:, :1].abs()).long().clamp(max=3) + torch.arange(6) % 5
        wanted = tokens[:, 1:] if y.max() < 3 else 7 - tokens[:, 1:]
        wanted = wanted.where(y[:, None] >= 0, -100)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), wanted.flatten()) * (1 + 0 * x.sum())

    return [model], [optimizer], lambda batch: step(closure, batch)


def actor_critic(way):
    """An actor and a critic with one optimizer each; the critic's loss is judged."""
    actor, critic = Plain(), Plain(1)
    optimizers = [torch.optim.Adam(each.parameters(), lr=3e-3) for each in (actor, critic)]
    step_a, step_c = way.guard(actor, optimizers[0], loss="policy"), way.guard(critic, optimizers[1])

    def step(batch):
        x, y = batch
        gained = (y == 0).float() if y.min() >= 0 else torch.full((len(y),), torch.nan)
        step_c(lambda x, g: F.mse_loss(critic(x)[:, 0], g), (x, gained))
        advantage = gained - critic(x)[:, 0].detach()
        step_a(lambda x, g: -(actor(x).log_softmax(1)[:, 0] * g).mean(), (x, advantage))

    return [actor, critic], optimizers, step


def gan(way):
    """A GAN with a third network that reads the generator's code."""
    generator, critic, reader = nn.Linear(6, 6), Plain(1), Plain()
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (generator, critic, reader)]
    step_g, step_d, step_q = (way.guard(*each) for each in zip((generator, critic, reader), optimizers, strict=True))

    def step(batch):
        x, y = batch
        z = torch.randn(len(x), 6)
        fake = generator(z).detach()
        step_d(lambda x, fake: (F.softplus(-critic(x)) + F.softplus(critic(fake))).mean(), (x, fake))
        step_g(lambda z: F.softplus(-critic(generator(z))).mean(), (z,))
        step_q(lambda fake, y: F.cross_entropy(reader(fake), y), (fake, y))

    return [generator, critic, reader], optimizers, step


LOOPS = {each.__name__: each for each in (classifier, accumulating, logits_and_loss, language_model, actor_critic, gan)}


def nothing(way, models, optimizers, number, batch):
    """No fault."""
    return batch


def rising_rate(way, models, optimizers, number, batch):
    """A learning rate that is a hundred times too high."""
    if number == FAULT:
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] *= 100
    return batch


def other_labels(way, models, optimizers, number, batch):
    """Labels that mean something else."""
    x, y = batch
    return (x, (y + 1) % 4) if number >= FAULT else batch


def ignored_labels(way, models, optimizers, number, batch):
    """Twice a batch without any label: the loss is NaN, and of cross-entropy the gradients are 0."""
    x, y = batch
    return (x, torch.full_like(y, -100)) if number in (FAULT, FAULT + 20) else batch


def large_loss(way, models, optimizers, number, batch):
    """Twice a loss a thousand times too large."""
    way.scale = 1e3 if number in (FAULT, FAULT + 20) else 1.0
    return batch


def bad_input(way, models, optimizers, number, batch):
    """Twice a NaN in the batch."""
    x, y = batch
    return (x.index_fill(0, torch.tensor(3), torch.nan), y) if number in (FAULT, FAULT + 20) else batch


def halved_weights(way, models, optimizers, number, batch):
    """Weights that something else halves."""
    if number == FAULT:
        with torch.no_grad():
            for parameter in (each for model in models for each in model.parameters()):
                parameter.mul_(0.5)
    return batch


FAULTS = {
    each.__name__: each
    for each in (nothing, rising_rate, other_labels, ignored_labels, large_loss, bad_input, halved_weights)
}


def run(loop, fault, kind, steps=STEPS, folder=None):
    """Runs a loop; returns the way, with its guards, and for each guard its skips and the kinds of its alarms."""
    torch.manual_seed(0)
    way = Way(kind, folder)
    models, optimizers, step = LOOPS[loop](way)
    try:
        for number in range(steps):
            step(FAULTS[fault](way, models, optimizers, number, labelled(number)))
    except TrainingHalted:
        pass
    if kind == "attached":
        for guard in way.guards:
            guard.detach()  # else it is told of every backward call of later loops until Python collects it
    return way, [
        ({kind: count for kind, count in guard.skips.items() if count}, sorted({each.kind for each in guard.alarms}))
        for guard in way.guards
    ]


def main() -> None:
    """Runs all loops with all faults in both ways, and prints what was found."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    logging.disable(logging.WARNING)
    alarms, withheld = dict.fromkeys(("step", "attached"), 0), dict.fromkeys(("step", "attached"), 0)
    print("| loop | fault | `guard.step` | attached |\n|---|---|---|---|")
    for loop in LOOPS:
        for fault in FAULTS:
            cells = {}
            for kind in alarms:
                way, found = run(loop, fault, kind)
                way.guards.clear()
                alarms[kind] += sum(len(kinds) for _, kinds in found)
                withheld[kind] += sum(sum(skips.values()) for skips, _ in found)
                cells[kind] = "; ".join(
                    ", ".join([*(f"{each} {count}" for each, count in skips.items()), *kinds]) or "-"
                    for skips, kinds in found
                )
            print(f"| {loop} | {fault} | {cells['step']} | {cells['attached']} |", flush=True)
    print(f"\nalarms: {alarms}; withheld: {withheld}")


if __name__ == "__main__":
    main()
