"""Images, graphs and pairs: supervised and self-supervised."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.reliability.healthy.adversarial import mlp


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        """Returns images of the same shape."""
        return F.relu(x + self.body(x))


def resnet(steps, guard):
    """A ResNet on random images whose labels are learned by heart, with momentum and weight decay."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Block(8), nn.AvgPool2d(2), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 10),
    )  # fmt: skip
    images, labels = torch.randn(128, 3, 8, 8), torch.randint(10, (128,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    guarded = guard(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(128, (32,))
        guarded.step(lambda x, y: F.cross_entropy(model(x), y), batch=(images[chosen], labels[chosen]))
        if guarded.last.applied:
            schedule.step()


def graph(steps, guard):
    """A graph network on the whole graph, with dropout, Adam and L2 weight decay (Kipf and Welling 2017)."""
    communities = torch.randint(4, (200,))
    same = communities[:, None] == communities
    linked = (torch.rand(200, 200) < torch.where(same, 0.08, 0.01)).float()
    linked = ((linked + linked.T) > 0).float() + torch.eye(200)
    adjacency = linked / linked.sum(1, keepdim=True).sqrt() / linked.sum(0).sqrt()
    features, known = torch.randn(200, 64) + 0.5 * F.one_hot(communities, 64), torch.rand(200) < 0.2
    first, second = nn.Linear(64, 16), nn.Linear(16, 4)
    model = nn.ModuleList([first, second])
    guarded = guard(model, torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4))

    def loss(x):
        hidden = F.dropout(F.relu(adjacency @ first(F.dropout(x, 0.5))), 0.5)
        return F.cross_entropy((adjacency @ second(hidden))[known], communities[known])

    for _ in range(steps):
        guarded.step(loss, batch=features)


def contrastive(steps, guard):
    """SimCLR's loss (Chen et al. 2020) at a low temperature, on two noisy views of each sample."""
    encoder = mlp(16, 8)
    guarded = guard(encoder, torch.optim.AdamW(encoder.parameters(), lr=2e-3, weight_decay=1e-2))

    def loss(one, two):
        z = F.normalize(encoder(torch.cat([one, two])), dim=1)
        alike = (z @ z.T / 0.1).fill_diagonal_(-torch.inf)
        return F.cross_entropy(alike, torch.arange(2 * len(one)).roll(len(one)))

    for _ in range(steps):
        x = torch.randn(64, 16)
        guarded.step(loss, batch=(x + 0.2 * torch.randn_like(x), x + 0.2 * torch.randn_like(x)))


def physics(steps, guard):
    """Solves u'' = -9 sin(3x) from its residual: the loss has third derivatives, and its scale is large."""
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    guarded = guard(model, torch.optim.Adam(model.parameters(), lr=2e-3))
    ends = torch.tensor([[0.0], [torch.pi]])

    def loss(x):
        x = x.requires_grad_()
        u = model(x)
        [slope] = torch.autograd.grad(u.sum(), x, create_graph=True)
        [bend] = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (bend + 9 * torch.sin(3 * x)).square().mean() + 100 * model(ends).square().mean()

    for _ in range(steps):
        guarded.step(loss, batch=torch.pi * torch.rand(64, 1))
