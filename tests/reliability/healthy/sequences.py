"""Sequences: a recurrent language model, a transformer with warmup, and translation."""

import torch
import torch.nn.functional as F
from torch import nn

TEXT = " ".join(f"{a} plus {b} is {a + b}." for a in range(40) for b in range(20))
LETTERS = sorted(set(TEXT))
TOKENS = torch.tensor([LETTERS.index(letter) for letter in TEXT])


def windows(count, length):
    """Returns inputs and targets at random places of the text, `[count, length]` each."""
    starts = torch.randint(len(TOKENS) - length - 1, (count, 1)) + torch.arange(length + 1)
    return TOKENS[starts[:, :-1]], TOKENS[starts[:, 1:]]


def rnn(steps, guard):
    """An LSTM language model that clips its gradients."""
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(len(LETTERS), 32),
            "lstm": nn.LSTM(32, 64, batch_first=True),
            "head": nn.Linear(64, len(LETTERS)),
        }
    )
    guarded = guard(model, torch.optim.Adam(model.parameters(), lr=5e-3), max_norm=1.0)

    def loss(x, y):
        return F.cross_entropy(model["head"](model["lstm"](model["embed"](x))[0]).flatten(0, 1), y.flatten())

    for _ in range(steps):
        guarded.step(loss, batch=windows(16, 24))


def transformer(steps, guard):
    """A post-norm transformer with linear warmup and inverse square root decay (Vaswani et al. 2017)."""
    embed, place, head = nn.Embedding(len(LETTERS), 32), nn.Embedding(24, 32), nn.Linear(32, len(LETTERS))
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model, mask = nn.ModuleList([embed, place, body, head]), nn.Transformer.generate_square_subsequent_mask(24)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, (50 / (step + 1)) ** 0.5))
    guarded = guard(model, optimizer)

    def loss(x, y):
        hidden = body(embed(x) + place.weight, mask=mask, is_causal=True)
        return F.cross_entropy(head(hidden).flatten(0, 1), y.flatten(), label_smoothing=0.1)

    for _ in range(steps):
        guarded.step(loss, batch=windows(16, 24))
        if guarded.last.applied:
            schedule.step()


def seq2seq(steps, guard):
    """A GRU encoder and decoder that reverse sequences of random length, with padding that does not count."""
    embed, encoder, decoder = nn.Embedding(12, 32), nn.GRU(32, 64, batch_first=True), nn.GRU(32, 64, batch_first=True)
    head = nn.Linear(64, 12)
    model = nn.ModuleList([embed, encoder, decoder, head])
    guarded = guard(model, torch.optim.Adam(model.parameters(), lr=3e-3))

    def loss(source, target):
        _, state = encoder(embed(source))
        before = F.pad(target[:, :-1], (1, 0), value=1)
        logits = head(decoder(embed(before), state)[0])
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)

    for _ in range(steps):
        length = int(torch.randint(3, 9, ()))
        source = torch.randint(2, 12, (32, length))
        guarded.step(loss, batch=(F.pad(source, (0, 8 - length)), F.pad(source.flip(1), (0, 8 - length))))
