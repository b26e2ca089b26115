"""A variational autoencoder of handwritten digits (Kingma and Welling, arXiv 1312.6114).

    python train.py --config-dir examples/conf experiment=vae

Takes ten seconds on two CPU cores. Result: `val/loss` 0.36 nats per pixel, from 0.71 (log 2 is a coin for each pixel).

The data is scikit-learn's (1,797 images of 8 x 8 pixels), dark ink on white paper. The loss has two terms, which are
logged as `train/reconstruction` and `train/kl`.

A fault to try: `objective.from_logits=false` takes logarithms of a sigmoid, as many do, instead of the cross-entropy of
its logits. The corners are always white. After 225 steps the sigmoid rounds to 1 there, and log(1 - 1) is -inf.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from stabletrain import Batch, LossTerms


class Digits:
    """Images `[batch, 64]` with pixels in [0, 1]; the targets are the images themselves.

    Args:
        seed: seed of the order.
    """

    def __init__(self, seed: int) -> None:
        pixels = 1 - torch.from_numpy(load_digits().data).float() / 16
        order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
        self.images, self.seed = {"train": pixels[order[300:]], "val": pixels[order[:300]]}, seed

    def batches(self, size: int, split: str) -> int:
        """Returns the number of batches in one pass."""
        return -(-len(self.images[split]) // size)

    def batch(self, step: int, size: int, split: str) -> Batch:
        """Returns random images of `train`, or all of `val` in order."""
        images = self.images[split]
        if split == "train":
            generator = torch.Generator().manual_seed(self.seed * 2**32 + step)
            images = images[torch.randint(len(images), (size,), generator=generator)]
        else:
            images = images[step * size : (step + 1) * size]
        return Batch(images, images)


class Output(NamedTuple):
    """Logits of the pixels `[batch, 64]`; mean and log variance of the code, both `[batch, latent]`."""

    logits: Tensor
    mean: Tensor
    log_variance: Tensor


class VAE(nn.Module):
    """An encoder and a decoder with one hidden layer each.

    Args:
        width: units of a hidden layer.
        latent: numbers in a code.
    """

    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, images: Tensor) -> Output:
        """Draws a code for each image in training, takes its mean in evaluation, and decodes it."""
        mean, log_variance = self.encoder(images).chunk(2, dim=-1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return Output(self.decoder(mean + noise * torch.exp(log_variance / 2)), mean, log_variance)


@dataclass(frozen=True)
class ELBO:
    """The negative evidence lower bound, in nats per pixel: each term is a sum that is divided by `n_valid` pixels.

    Attributes:
        beta: weight of the KL divergence (arXiv 1804.03599).
        from_logits: false takes logarithms of probabilities, which are -inf where a probability is 0.
    """

    beta: float
    from_logits: bool

    def __call__(self, outputs: Output, batch: Batch, n_valid: Tensor) -> LossTerms:
        """Returns the reconstruction's cross-entropy plus the divergence of the code from a standard normal."""
        logits, mean, log_variance = outputs
        if self.from_logits:
            reconstruction = F.binary_cross_entropy_with_logits(logits, batch.targets, reduction="sum")
        else:
            pixels = torch.sigmoid(logits)
            reconstruction = -(batch.targets * pixels.log() + (1 - batch.targets) * (1 - pixels).log()).sum()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
        terms = {"reconstruction": reconstruction / n_valid, "kl": kl / n_valid}
        return LossTerms(terms["reconstruction"] + self.beta * terms["kl"], terms)
