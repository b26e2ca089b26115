"""A script of two ranks with DDP, started by torchrun: the second batch of rank 1, and its first one, are bad."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.guard.given import batches, network

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    outer = DistributedDataParallel(model)
    alone = torch.nn.Linear(2, 1)
    of_alone = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches(4, seed=rank)):
        if rank == 1 and number in (0, 2):
            x[3, 0] = math.nan
        optimizer.zero_grad()
        F.cross_entropy(outer(x), y).backward()
        optimizer.step()
        if rank == 0:  # only this rank trains it: a guard that asked the other one would wait for ever
            alone(torch.ones(1, 2)).sum().backward()
            of_alone.step()
    weights = [each.detach().tolist() for each in model.parameters()]
    found = [None, None]
    dist.all_gather_object(found, weights)
    if rank == 0:
        print(found[0] == found[1], all(math.isfinite(each) for each in torch.cat(
            [parameter.detach().flatten() for parameter in model.parameters()]).tolist()))  # fmt: skip
    dist.destroy_process_group()
