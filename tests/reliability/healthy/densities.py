"""Generative models without an opponent: VAE, flow, diffusion, and losses that fall below 0."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.reliability.healthy.adversarial import mlp, ring


def vae(steps, guard):
    """A VAE with a learned variance of its outputs (Kingma and Welling 2014)."""
    encoder, decoder = mlp(2, 4), mlp(2, 4)
    model = nn.ModuleList([encoder, decoder])
    guarded = guard(model, torch.optim.Adam(model.parameters(), lr=2e-3))

    def loss(x):
        mean, log_variance = encoder(x).chunk(2, 1)
        z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        out, log_scale = decoder(z).chunk(2, 1)
        likelihood = -0.5 * ((x - out) / log_scale.exp()).square() - log_scale - 0.5 * math.log(2 * math.pi)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
        return (divergence.sum(1) - likelihood.sum(1)).mean()

    for _ in range(steps):
        guarded.step(loss, batch=ring(128))


def flow(steps, guard):
    """Affine coupling layers (Dinh et al. 2017) on narrow data: the negative log-likelihood falls below 0."""
    layers = nn.ModuleList(mlp(1, 2, 32) for _ in range(4))
    guarded = guard(layers, torch.optim.Adam(layers.parameters(), lr=2e-3))

    def loss(x):
        logs = torch.zeros(len(x))
        for number, layer in enumerate(layers):
            kept, moved = (x[:, :1], x[:, 1:]) if number % 2 else (x[:, 1:], x[:, :1])
            scale, shift = layer(kept).chunk(2, 1)
            moved, logs = moved * scale.tanh().exp() + shift, logs + scale.tanh()[:, 0]
            x = torch.cat([kept, moved] if number % 2 else [moved, kept], 1)
        return (0.5 * x.square().sum(1) + math.log(2 * math.pi) - logs).mean()

    for _ in range(steps):
        guarded.step(loss, batch=0.05 * ring(128))


def mixture_density(steps, guard):
    """A mixture density network (Bishop 1994): y is nearly a function of x, so that likelihoods are above 1."""
    model = mlp(1, 15)
    guarded = guard(model, torch.optim.Adam(model.parameters(), lr=2e-3))

    def loss(x, y):
        weights, means, log_scales = model(x).chunk(3, 1)
        each = torch.distributions.Normal(means, log_scales.clamp(-5, 5).exp()).log_prob(y)
        return -torch.logsumexp(weights.log_softmax(1) + each, 1).mean()

    for _ in range(steps):
        x = 4 * torch.rand(128, 1) - 2
        guarded.step(loss, batch=(x, torch.sin(3 * x) + 0.02 * torch.randn_like(x)))


def diffusion(steps, guard):
    """Predicts the noise in points (Ho et al. 2020), with an exponential moving average of the weights."""
    model = mlp(3, 2)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    guarded = guard(model, torch.optim.AdamW(model.parameters(), lr=2e-3), max_norm=1.0)
    kept = torch.linspace(0.9999, 0.98, 100).cumprod(0)

    def loss(x):
        time, noise = torch.randint(100, (len(x),)), torch.randn_like(x)
        share = kept[time][:, None]
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, time[:, None] / 100], 1)), noise)

    for _ in range(steps):
        guarded.step(loss, batch=ring(128, 1.0))
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.01)


def autoencoder(steps, guard):
    """An autoencoder of features with heavy tails (Student's t, 3 degrees of freedom)."""
    model = nn.Sequential(
        nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4), nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 32)
    )
    guarded = guard(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    mixing, tails = torch.randn(4, 32), torch.distributions.StudentT(3.0)
    for _ in range(steps):
        x = tails.sample((64, 4)) @ mixing + 0.1 * torch.randn(64, 32)
        guarded.step(lambda x: F.mse_loss(model(x), x), batch=x)
