"""Guarded loops of several ranks: every rank writes down what it saw of each.

torchrun --nproc_per_node=2 -m tests.guard.worker <place>
"""

import hashlib
import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from stabletrain.checkpoint.tree import local_part
from stabletrain.guard.guard import Guard
from stabletrain.guard.policy import RollbackGuard
from stabletrain.guard.rerun import Rerun
from stabletrain.guard.whole_weights import FSDP_HOOKS, WholeWeights
from stabletrain.parallel.ranks import current_ranks, exit_process, join_process_group, leave_process_group
from tests.guard.given import batches

STEPS = 8
BAD = 5
"""The step, from 0, at which a fault is put in."""


class Net(nn.Module):
    """Two blocks, and a weight outside of them; the result is divided by a number that a sample may make 0."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 3)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.blocks[1](torch.relu(self.blocks[0](x * self.scale))) / (x[:, :1] != 9)


def sharded(model, **options):
    """The model with its weights sharded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def hash_of(model, optimizer):
    """A hash of this rank's weights and moments."""
    digest = hashlib.sha256()
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    for tensor in tensors:
        tensor = tensor.detach()
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(tensor.nan_to_num(7.0).numpy().tobytes())
    return digest.hexdigest()


CASES = {
    "plain": {},
    "input": {"fault": math.nan},
    "operation": {"fault": 9.0},
    "backward": {"fault": 7.0},
    "spike": {"scale": 1e3},
    "clipped": {"max_norm": 0.1},
    "update": {"fragile": True},
    "rollback": {"fault": math.nan, "policy": {"patience": 1, "snapshot_every": 2, "healthy_after": 0}},
    "damaged": {"fault": math.nan, "policy": {"patience": 1, "snapshot_every": 2, "healthy_after": 0}, "damage": 4},
}


class Fragile(torch.optim.AdamW):
    """Divides by a norm that is 0 where it is `weak`: on one rank alone, as that of a shard may be."""

    weak = False

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        weight = self.param_groups[0]["params"][0]
        part = weight.to_local() if hasattr(weight, "to_local") else weight
        norm = part.norm() * (not self.weak)
        part.mul_(norm / norm)


def loss_of(logits, x, y):
    """Cross-entropy, and the mean length of the logits, whose gradient is not finite for logits of 0."""
    return F.cross_entropy(logits, y) + 0.1 * (logits * (x[:, :1] != 7)).square().sum(1).sqrt().mean()


def perform(place, kind, name, case):
    """One loop; what this rank saw of it."""
    torch.manual_seed(0)
    model = Net()
    outer = sharded(model) if kind == "fsdp" else DistributedDataParallel(model)
    optimizer = (Fragile if "fragile" in case else torch.optim.AdamW)(outer.parameters(), lr=1e-2)
    options = {"max_norm": case["max_norm"]} if "max_norm" in case else {}
    if "policy" in case:
        options["policy"] = RollbackGuard(**case["policy"])
    guard = Guard(outer, optimizer, folder=place / f"{kind}-{name}", **options)
    rank, seen = dist.get_rank(), {"readings": [], "hashes": [hash_of(model, optimizer)], "rolled_back": []}
    for step, (x, y) in enumerate(batches(STEPS, seed=10 + rank)):
        if step == BAD and rank == 1:
            x[3, 0] = case.get("fault", x[3, 0])
        scale = case.get("scale", 1.0) if step == BAD and rank == 1 else 1.0
        optimizer.weak = step == BAD and rank == 1
        if step == BAD and rank == 1 and "damage" in case:
            weight = guard._loop.states.snapshots.newest(case["damage"])["model"]["blocks.0.weight"]
            local_part(weight).fill_(math.nan)
        guard.step(lambda x, y: loss_of(outer(x), x, y) * scale, batch=(x, y))  # noqa: B023
        seen["readings"].append([repr(each) for each in guard.last])
        seen["hashes"].append(hash_of(model, optimizer))
        seen["rolled_back"].append(guard.rolled_back)
    seen["incidents"] = [each.path.name for each in guard.incidents]
    return seen


def objects(model):
    """Every parameter and hook of a model's modules, as they are."""
    each = [[m._parameters, m._forward_pre_hooks, m._forward_hooks] for m in model.modules()]
    return [(key, id(value)) for three in each for held in three for key, value in held.items()]


def whole_weights(policy):
    """The outputs of a sharded model, with FSDP2 and with whole weights on one rank at a time."""
    torch.manual_seed(0)
    model = Net()
    sharded(model, mp_policy=policy)
    parameters = [*model.parameters()]  # of an optimizer, as it is made
    x, rank, seen = batches(1, seed=3)[0][0], dist.get_rank(), {}
    with torch.no_grad():
        seen["together"] = model(x).tolist()  # it leaves the weight of the outermost module whole
    whole = WholeWeights(model)
    whole.gather()
    before = objects(model)
    rerun = Rerun(model, model, parameters, None, None, 1.0)
    for turn in range(2):
        if rank == turn:  # the other rank is not there
            with whole.in_place(rerun) as alone:
                outputs = model(x)
                outputs.float().square().sum().backward()
                seen["alone"] = outputs.tolist()
                seen["gradients"] = [parameter.grad is not None for parameter in alone.parameters]
        dist.barrier()
    seen["restored"] = objects(model) == before and all(parameter.grad is None for parameter in model.parameters())
    model.blocks[0].register_forward_hook(broken := lambda *_: None)
    broken.__module__ = FSDP_HOOKS  # a hook that is not known
    whole.gather()
    return {**seen, "why_not": whole.why_not}


def main(place):
    """Runs every case."""
    join_process_group(current_ranks())
    found = {
        f"{kind} {name}": perform(place, kind, name, case) for kind in ("ddp", "fsdp") for name, case in CASES.items()
    }
    policies = {
        "fp32": MixedPrecisionPolicy(),
        "bf16": MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32),
    }
    found |= {f"whole {name}": whole_weights(policy) for name, policy in policies.items()}
    (place / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_process(0)
