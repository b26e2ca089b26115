"""A small training loop of a user's own, with and without the guard."""

import torch
import torch.nn.functional as F
from torch import nn

from stabletrain.guard.guard import Guard

CLASSES = 3


def network(seed=0):
    """A model with BatchNorm's buffers and with dropout, so that a step also changes statistics and generators."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Linear(16, CLASSES)
    )


def batches(count, size=8, seed=1):
    """Inputs and labels of `count` steps."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(CLASSES, (size,), generator=generator))
        for _ in range(count)
    ]


def bits(*objects):
    """Copies of every tensor of modules and optimizers, to compare bit for bit."""
    found = {}
    for number, each in enumerate(objects):
        state = each.state_dict()
        for name, value in state.items() if isinstance(each, nn.Module) else moments(each):
            found[f"{number}.{name}"] = value.clone() if isinstance(value, torch.Tensor) else value
    return found


def moments(optimizer):
    """The optimizer's state by parameter and name, with its groups' numbers."""
    state = optimizer.state_dict()
    for index, values in state["state"].items():
        yield from ((f"{index}.{name}", value) for name, value in values.items())
    for index, group in enumerate(state["param_groups"]):
        yield from ((f"group{index}.{name}", value) for name, value in group.items() if name != "params")


def same(before, after):
    """Whether two results of `bits` are equal, NaNs included."""
    if before.keys() != after.keys():
        return False
    return all(
        torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a.isnan(), b.isnan())
        if isinstance(a, torch.Tensor)
        else a == b
        for a, b in zip(before.values(), after.values(), strict=True)
    )


class Loop:
    """A guarded loop: model, optimizer, guard, and the closure of its step."""

    def __init__(self, folder, make=lambda p: torch.optim.AdamW(p, lr=1e-2), seed=0, **options):
        self.model = network(seed)
        self.optimizer = make(self.model.parameters())
        self.guard = Guard(self.model, self.optimizer, folder=folder, **options)

    def loss(self, x, y):
        """Cross-entropy."""
        return F.cross_entropy(self.model(x), y)

    def run(self, data, loss=None):
        """Steps through the data; returns the losses."""
        torch.manual_seed(2)
        return [float(self.guard.step(loss or self.loss, batch=batch)) for batch in data]

    def bits(self):
        """Everything that a withheld step must not change."""
        return bits(self.model, self.optimizer)
