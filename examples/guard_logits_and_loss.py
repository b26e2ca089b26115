"""A model that returns `(logits, loss)`, guarded by one line: `python examples/guard_logits_and_loss.py`.

`plain` is the loop as it was, with micro-batches and clipping; `guarded` is the same loop with an attached guard, which
finds the loss among what the model returns.
"""

import tempfile

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stabletrain import Guard


class Language(nn.Module):
    """Predicts the next of 32 tokens from the present one."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits `[batch, time, 32]`, and the loss; `weight` `[batch]` weighs the samples."""
        logits = self.head(self.table(tokens)) * self.scale
        each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        return logits, (each.mean(1) * weight).mean()


def text(count: int, bad: int | None = None):
    """Yields tokens `[2, 8, 12]`, targets and weights `[2, 8]` of two micro-batches; one has a weight of NaN."""
    for number in range(count):
        tokens = torch.randint(32, (2, 8, 13))
        weights = torch.ones(2, 8)
        weights[1, 3] = torch.nan if number == bad else 1.0
        yield tokens[..., :-1], tokens[..., 1:], weights


def plain(model: Language, batches) -> torch.optim.Optimizer:
    """The loop without the guard."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        for tokens, targets, weight in zip(*batch, strict=True):
            _, loss = model(tokens, targets, weight)
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return optimizer


def guarded(model: Language, batches, folder: str) -> tuple[Guard, torch.optim.Optimizer]:
    """The loop with the guard."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = Guard.attach(model, optimizer, folder=folder)
    for batch in batches:
        optimizer.zero_grad()
        for tokens, targets, weight in zip(*batch, strict=True):
            _, loss = model(tokens, targets, weight)
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return guard, optimizer


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        guard, _ = guarded(Language(), text(50, bad=20), folder)
    print(f"loss {guard.last.loss:.3f}  skipped {guard.skipped}")
    for line in guard.incidents[0].lines:
        print(line)
