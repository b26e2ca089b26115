"""Two networks against each other: their losses mean little, and gradient norms grow a thousandfold."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    """Returns a network with two hidden layers."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)),
        nn.Linear(width, outputs),
    )


def ring(count: int, radius: float = 4.0) -> Tensor:
    """Returns points around eight places on a circle, `[count, 2]`."""
    angles = torch.randint(8, (count,)) * math.pi / 4
    return radius * torch.stack([angles.cos(), angles.sin()], 1) + 0.1 * torch.randn(count, 2)


def gan(steps, guard):
    """A GAN with the non-saturating loss (Goodfellow et al. 2014)."""
    generator, critic = mlp(8, 2), mlp(2, 1)
    guard_g = guard(generator, torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999)))
    guard_d = guard(critic, torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999)))
    for _ in range(steps // 2):
        fake = generator(torch.randn(64, 8)).detach()
        guard_d.step(lambda x, y: (F.softplus(-critic(x)) + F.softplus(critic(y))).mean(), batch=(ring(64), fake))
        guard_g.step(lambda z: F.softplus(-critic(generator(z))).mean(), batch=torch.randn(64, 8))


def wgan(steps, guard):
    """A WGAN whose critic's weights are clipped (Arjovsky et al. 2017): the first generator gradients are tiny."""
    generator, critic = mlp(8, 2), mlp(2, 1)
    guard_g = guard(generator, torch.optim.RMSprop(generator.parameters(), lr=5e-4))
    guard_d = guard(critic, torch.optim.RMSprop(critic.parameters(), lr=5e-4))
    for _ in range(steps // 3):
        for _ in range(2):
            fake = generator(torch.randn(64, 8)).detach()
            guard_d.step(lambda x, y: critic(y).mean() - critic(x).mean(), batch=(ring(64, 8.0), fake))
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.1, 0.1)
        guard_g.step(lambda z: -critic(generator(z)).mean(), batch=torch.randn(64, 8))


def wgan_gp(steps, guard):
    """A WGAN with gradient penalty (Gulrajani et al. 2017): the critic's loss has second derivatives."""
    generator, critic = mlp(8, 2), mlp(2, 1)
    guard_g = guard(generator, torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9)))
    guard_d = guard(critic, torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9)))

    def critic_loss(real, fake):
        between = (fake + torch.rand(len(real), 1) * (real - fake)).requires_grad_()
        [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    for _ in range(steps // 3):
        for _ in range(2):
            guard_d.step(critic_loss, batch=(ring(64), generator(torch.randn(64, 8)).detach()))
        guard_g.step(lambda z: -critic(generator(z)).mean(), batch=torch.randn(64, 8))


def infogan(steps, guard):
    """An InfoGAN (Chen et al. 2016): a third optimizer trains generator and code predictor together."""
    generator, body, judge, predict = mlp(16, 2), mlp(2, 64), nn.Linear(64, 1), nn.Linear(64, 8)
    critic, both = nn.Sequential(body, nn.LeakyReLU(0.2), judge), nn.ModuleList([generator, body, predict])
    guard_g = guard(generator, torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999)))
    guard_d = guard(critic, torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999)))
    guard_q = guard(both, torch.optim.Adam(both.parameters(), lr=1e-3, betas=(0.5, 0.999)))

    def draw():
        code = torch.randint(8, (64,))
        return torch.cat([torch.randn(64, 8), F.one_hot(code, 8)], 1), code

    def information(z, code):
        return F.cross_entropy(predict(F.leaky_relu(body(generator(z)), 0.2)), code)

    for _ in range(steps // 3):
        fake = generator(draw()[0]).detach()
        guard_d.step(lambda x, y: (F.softplus(-critic(x)) + F.softplus(critic(y))).mean(), batch=(ring(64), fake))
        guard_g.step(lambda z: F.softplus(-critic(generator(z))).mean(), batch=draw()[0])
        guard_q.step(information, batch=draw())


def cyclegan(steps, guard):
    """Two generators that undo each other, in one optimizer, and two critics in another (Zhu et al. 2017)."""
    there, back, critic_a, critic_b = mlp(2, 2), mlp(2, 2), mlp(2, 1), mlp(2, 1)
    generators, critics = nn.ModuleList([there, back]), nn.ModuleList([critic_a, critic_b])
    guard_g = guard(generators, torch.optim.Adam(generators.parameters(), lr=5e-4, betas=(0.5, 0.999)))
    guard_d = guard(critics, torch.optim.Adam(critics.parameters(), lr=5e-4, betas=(0.5, 0.999)))

    def generator_loss(a, b):
        fake_a, fake_b = back(b), there(a)
        cycle = F.l1_loss(back(fake_b), a) + F.l1_loss(there(fake_a), b)
        return (critic_a(fake_a) - 1).square().mean() + (critic_b(fake_b) - 1).square().mean() + 10 * cycle

    def critic_loss(a, b, fake_a, fake_b):
        pairs = ((critic_a, a, fake_a), (critic_b, b, fake_b))
        return sum((critic(real) - 1).square().mean() + critic(fake).square().mean() for critic, real, fake in pairs)

    for _ in range(steps // 2):
        a, b = ring(64), 3 + torch.randn(64, 2)
        guard_g.step(generator_loss, batch=(a, b))
        guard_d.step(critic_loss, batch=(a, b, back(b).detach(), there(a).detach()))
