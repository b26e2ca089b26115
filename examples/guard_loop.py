"""A training loop of one's own with the guard: `python examples/guard_loop.py`.

A small network learns to read digits. One batch holds a NaN, and for one batch the loss takes the logarithm of 0. Both
steps are withheld and explained; the training goes on.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

from stabletrain import Guard


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, written in an unsafe way: a softmax may round to 0, and log(0) is -inf."""
    return -torch.softmax(logits, -1)[range(len(labels)), labels].log().mean()


def main(folder: str) -> Guard:
    """Trains for 100 steps; incidents are written to `folder`."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x_all, y_all = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    guard = Guard(model, optimizer, folder=folder, max_norm=1.0, rollback=True)
    for step in range(100):
        rows = torch.randint(len(x_all), (32,))
        x, y = x_all[rows].clone(), y_all[rows]
        if step == 40:
            x[7, 12] = torch.nan
        if step == 60:
            x = x * 1e3  # as if the division above was forgotten
        loss = guard.step(lambda x, y: loss_of(model(x), y), batch=(x, y))
        if guard.last.applied:
            schedule.step()
        if step % 20 == 19:
            print(f"step {step + 1:3}  loss {loss:.3f}  skipped {guard.skipped}")
    return guard


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
