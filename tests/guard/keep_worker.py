"""Loops of two ranks that leave samples out: every rank writes down the weights and what its guard counted.

torchrun --nproc_per_node=2 -m tests.guard.keep_worker <place>
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stabletrain.errors import ConfigError
from stabletrain.guard.guard import Guard
from stabletrain.parallel.ranks import current_ranks, exit_process, join_process_group, leave_process_group
from tests.guard.given import batches
from tests.guard.worker import Net, sharded

STEPS, BAD = 6, 3
CASES = {"one": ([5], 1), "two of a micro-batch": ([4, 6], 2), "a whole micro-batch": ([4, 5, 6, 7], 2)}
"""Rows of rank 1 that are bad, and the number of micro-batches."""


def network():
    """A model without coupling between samples, so that only the divisor matters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def perform(place, name, rows, parts):
    """One loop; what this rank saw of it."""
    model, rank = network(), dist.get_rank()
    outer = DistributedDataParallel(model)
    guard = Guard(outer, torch.optim.SGD(outer.parameters(), lr=0.1), folder=place / name, keep="all_but_guilty")
    applied = []
    for step, (x, y) in enumerate(batches(STEPS, seed=10 + rank)):
        if step == BAD and rank == 1:
            x[rows, 0] = math.nan
        for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            guard.backward(lambda x, y: F.cross_entropy(outer(x), y) / parts, batch=part)
        guard.update()
        applied.append(guard.last.applied)
    weights = [parameter.tolist() for parameter in model.parameters()]
    return {"weights": weights, "applied": applied, "counts": [guard.kept_steps, guard.samples_left_out]}


def refusal():
    """Why sharded weights are refused."""
    model = sharded(Net())
    try:
        Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), keep="all_but_guilty")
    except ConfigError as error:
        return str(error)


def main(place):
    """Runs every case."""
    join_process_group(current_ranks())
    found = {name: perform(place, name, *case) for name, case in CASES.items()} | {"refusal": refusal()}
    (place / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_process(0)
