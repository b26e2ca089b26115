"""Shared values of the optimizer tests: settings of each kind, and a small model with every kind of parameter."""

import torch
from torch import nn

ADAM = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
SPAM_ = ADAM | {"theta": 50.0, "reset_interval": 4, "warmup_steps": 2}
MUON = ADAM | {"momentum": 0.95, "nesterov": True, "ns_steps": 5}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.head = nn.Linear(6, 7)

    def forward(self, inputs):
        return self.head(torch.relu(self.up(self.norm(self.embedding(inputs)))))
