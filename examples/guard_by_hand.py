"""A loop that updates its weights by hand, with the guard: `python examples/guard_by_hand.py`.

A recurrent language model whose state is carried from batch to batch, as in PyTorch's `word_language_model`. `plain` is
the loop as it was: it adds gradients to weights, and divides the rate by 4. `guarded` is the same loop with the guard.
"""

import tempfile

import torch
from torch import Tensor, nn

from stabletrain import Guard


class Language(nn.Module):
    """Predicts the next of 12 characters from those before, with an LSTM."""

    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.decoder = nn.Embedding(12, 16), nn.LSTM(16, 16), nn.Linear(16, 12)

    def forward(self, x, hidden):
        out, hidden = self.lstm(self.embedding(x), hidden)
        return self.decoder(out), hidden


def text(count: int, bad: int | None = None) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns characters, those that follow, each `[time 5, batch 4]`, and weights `[batch]`; one may hold a NaN."""
    data = torch.randint(1, 3, (5 * count + 1, 4)).cumsum(0) % 12
    weights = [torch.tensor([1.0, 1.0, torch.nan if number == bad else 1.0, 1.0]) for number in range(count)]
    return [(data[5 * at : 5 * at + 5], data[5 * at + 1 : 5 * at + 6], each) for at, each in enumerate(weights)]


def loss_of(logits: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Weighted cross-entropy."""
    return (nn.functional.cross_entropy(logits.transpose(1, 2), y, reduction="none") * weight).mean()


def plain(model: Language, batches) -> tuple[Tensor, ...]:
    """The loop without the guard; the rate falls after 20 batches."""
    lr, hidden = 1.0, (torch.zeros(1, 4, 16), torch.zeros(1, 4, 16))
    for number, (x, y, weight) in enumerate(batches):
        if number == 20:
            lr /= 4
        model.zero_grad()
        hidden = tuple(each.detach() for each in hidden)
        output, hidden = model(x, hidden)
        loss = loss_of(output, y, weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
    return hidden


def guarded(model: Language, batches, folder: str) -> tuple[Guard, tuple[Tensor, ...]]:
    """The loop with the guard."""
    lr, hidden = 1.0, (torch.zeros(1, 4, 16), torch.zeros(1, 4, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    guard = Guard(model, optimizer, max_norm=0.25, folder=folder)

    def closure(x, y, weight, hidden):
        output, hidden = model(x, hidden)
        return loss_of(output, y, weight), hidden

    for number, (x, y, weight) in enumerate(batches):
        if number == 20:
            optimizer.param_groups[0]["lr"] /= 4
        _, new_hidden = guard.step(closure, (x, y, weight, hidden))
        if guard.last.applied:  # else the state from before the batch: this one may hold a NaN
            hidden = new_hidden
    return guard, hidden


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        guard, _ = guarded(Language(), text(60, bad=40), folder)
    print(f"loss {guard.last.loss:.3f}  skipped {guard.skipped}")
