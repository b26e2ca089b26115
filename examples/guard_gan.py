"""A guard for each of three optimizers: `python examples/guard_gan.py`.

An InfoGAN: a discriminator, a generator, and a network that reads the code back from what the generator made, whose
optimizer moves the generator too. `plain` is the loop as it was, `guarded` the same loop with the guards.
"""

import tempfile

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.optim import Adam

from stabletrain import Guard


class Networks(nn.Module):
    """The three networks; a code is 2 of the 8 numbers that the generator gets."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
        self.reader = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))

    def told_apart(self, real: Tensor, noise: Tensor) -> Tensor:
        """Returns the loss of the discriminator."""
        return self.looks(real, 1.0) + self.looks(self.generator(noise).detach(), 0.0)

    def fooled(self, noise: Tensor) -> Tensor:
        """Returns the loss of the generator."""
        return self.looks(self.generator(noise), 1.0)

    def read_back(self, noise: Tensor) -> Tensor:
        """Returns the loss of the code."""
        return mse_loss(self.reader(self.generator(noise)), noise[:, :2])

    def looks(self, points: Tensor, real: float) -> Tensor:
        """Returns how far the discriminator is from taking points for real, or for made."""
        logits = self.discriminator(points)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def points(count: int, bad: int | None = None):
    """Yields points on a circle `[32, 2]` and noise `[32, 8]`; one batch has a point of NaN."""
    for number in range(count):
        angles = 6.283 * torch.rand(32)
        real = torch.stack([angles.cos(), angles.sin()], 1)
        real[5] = torch.nan if number == bad else real[5]
        yield real, torch.randn(32, 8)


def optimizers(model: Networks) -> list[Adam]:
    """Returns the optimizers of the discriminator, of the generator, and of code and generator."""
    code = [*model.reader.parameters(), *model.generator.parameters()]
    return [Adam(each, lr=1e-3) for each in (model.discriminator.parameters(), model.generator.parameters(), code)]


def plain(model: Networks, batches) -> list[Adam]:
    """The loop without guards."""
    d, g, c = made = optimizers(model)
    for real, noise in batches:
        d.zero_grad()
        model.told_apart(real, noise).backward()
        d.step()
        g.zero_grad()
        model.fooled(noise).backward()
        g.step()
        c.zero_grad()
        model.read_back(noise).backward()
        c.step()
    return made


def guarded(model: Networks, batches, folder: str) -> tuple[Guard, list[Adam]]:
    """The loop with a guard for each optimizer."""
    d, g, c = made = optimizers(model)
    guard_d = Guard(model, d, name="discriminator", folder=folder)
    guard_g = Guard(model, g, name="generator", folder=folder)
    guard_c = Guard(model, c, name="code", folder=folder)
    for real, noise in batches:
        guard_d.step(model.told_apart, (real, noise))
        guard_g.step(model.fooled, noise)
        guard_c.step(model.read_back, noise)
    return guard_d, made


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        guard, _ = guarded(Networks(), points(50, bad=20), folder)
    print(f"loss {guard.last.loss:.3f}  skipped {guard.skipped}")
