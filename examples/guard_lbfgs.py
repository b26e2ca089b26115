"""LBFGS with the guard: `python examples/guard_lbfgs.py`.

A small regression. `plain` is the loop as it was, `guarded` the same loop with the guard: LBFGS evaluates the loss
several times in a step, and keeps its weights and its curvature from before the step if anything in it is not finite.
"""

import tempfile

import torch
from torch import nn

from stabletrain import Guard


def network() -> nn.Module:
    """A function of 3 numbers."""
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))


def samples(count: int, bad: int | None = None):
    """Yields inputs `[64, 3]` and targets `[64, 1]`; one batch has a target of NaN."""
    for number in range(count):
        x = torch.randn(64, 3)
        y = x.sin().sum(1, keepdim=True)
        yield x, torch.where(torch.arange(64)[:, None] == 7, torch.nan, y) if number == bad else y


def plain(model: nn.Module, batches) -> torch.optim.Optimizer:
    """The loop without the guard."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    for x, y in batches:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return optimizer


def guarded(model: nn.Module, batches, folder: str) -> tuple[Guard, torch.optim.Optimizer]:
    """The loop with the guard."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    guard = Guard(model, optimizer, folder=folder)
    for x, y in batches:

        def closure(x, y):
            return nn.functional.mse_loss(model(x), y)

        guard.step(closure, (x, y))
    return guard, optimizer


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        guard, _ = guarded(network(), samples(30, bad=10), folder)
    print(f"loss {guard.last.loss:.4f}  skipped {guard.skipped}")
