"""A script that trains, in this process and in others.

With `bad`, a spawned process meets a bad batch, and this one nothing but bad batches.
"""

import math
import multiprocessing
import pickle
import sys

import torch
import torch.nn.functional as F
from torch import nn

from tests.guard.given import batches


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(F.dropout(torch.relu(self.norm(self.first(x))), 0.1))


def train(bad=()):
    """The weights of the last layer after four steps."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        F.cross_entropy(model(x * math.nan if number in bad else x), y).backward()
        optimizer.step()
    return pickle.loads(pickle.dumps(model)).last.bias.tolist()


if __name__ == "__main__":
    if sys.argv[1] == "well":
        print(train())
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print(pool.map(train, [()]))
    else:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print([math.isfinite(each) for each in pool.map(train, [(2,)])[0]], flush=True)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            optimizer.zero_grad()
            (model(torch.ones(4, 4)).sum() * math.nan).backward()
            optimizer.step()
