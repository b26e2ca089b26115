"""Steps of Muon, QK-clip and rounding on several ranks in one group of processes, beside those of one process.

    torchrun --nproc_per_node=4 -m tests.parallel.muon <place>

`<place>/rank<r>.json` maps each case to what a rank saw.
"""

import copy
import faulthandler
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stabletrain.guard.checks.repeats import next_tensor
from stabletrain.parallel.ddp import DDP
from stabletrain.parallel.fsdp import FSDP
from stabletrain.parallel.hsdp import HSDP
from stabletrain.parallel.ranks import (
    all_gather_tensor,
    current_ranks,
    exit_process,
    join_process_group,
    leave_process_group,
)
from stabletrain.stability.optimizers import AdamW, Muon, muon
from stabletrain.stability.precision import bf16_params
from stabletrain.stability.qkclip import LogitMeter, QKClip
from stabletrain.step import apply
from tests.parallel.worker import PATIENCE
from tests.stability.optimizers.given import ADAM, MUON

STEPS = 3
BAD = "blocks.1.weight"
"""The matrix whose second gradient is NaN in one row."""


class Uneven(nn.Module):
    """Hidden matrices whose rows do not divide among two or four ranks; one has fewer rows than there are ranks.

    Rows of 16 values fill vector registers: a kernel may round the rest of a tensor in another way.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 16)
        shapes = ((16, 9), (16, 5), (32, 16))
        self.blocks = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes)
        self.gate = nn.Linear(16, 1, bias=False)
        self.head = nn.Linear(16, 5, bias=False)

    def heads(self):
        return {self.blocks[0].weight: 3}


CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "per_head": {"per_head": True, "scale": "spectral", "nesterov": False},
    "corrected": {"decay": "corrected", "scale": "original"},
    "zero": {},
    "rank_one": {},
    "bad": {},
    "large": {},
    "withheld": {},
}
"""Settings of Muon by case; the name of a case says which gradients it has, or that directions are too large."""

COPIED = ("usual", "per_head", "bad", "withheld")
"""Cases of four ranks with two copies of two shards."""

KINDS = {"ddp": DDP, "fsdp": FSDP, "hsdp": lambda ranks: HSDP(ranks, 2)}

BOUND = 0.5
"""Of the directions of the case `large`: some rows of a matrix exceed it, and others do not."""


def gradient(case: str, name: str, weight: Tensor, step: int) -> Tensor:
    """The whole gradient of a parameter in a step, the same on every rank."""
    found = torch.randn(weight.shape)
    if case == "zero":
        return torch.zeros_like(found)
    if case == "rank_one" and found.ndim == 2:
        return torch.outer(found[:, 0], found[0])
    if case == "bad" and step == 1 and name == BAD:
        found[-1] = torch.nan
    return found


def fill(alone: nn.Module, model: nn.Module, case: str, step: int) -> None:
    """Gives both models the gradients of a step; one of them may be sharded."""
    for own, sharded in zip(alone.named_parameters(), model.parameters(), strict=True):
        own[1].grad = gradient(case, *own, step)
        sharded.grad = own[1].grad
        if isinstance(sharded, DTensor):
            mesh = sharded.device_mesh
            sharded.grad = distribute_tensor(own[1].grad, mesh, sharded.placements, src_data_rank=None)


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All weights and the momentum of the hidden matrices, whole."""
    found = {name: whole(p) for name, p in model.named_parameters()}
    kept = {name: optimizer.state[p].get("momentum_buffer") for name, p in model.named_parameters()}
    return found | {f"momentum of {name}": whole(each) for name, each in kept.items() if each is not None}


def perform(kind: str, case: str) -> dict[str, Any]:
    """What this rank saw of some steps: `equal`, the state of one process, bit for bit, by step; `finite`, by step;
    `kept`, the names of what did not change, by step; `matrices`, how many it orthogonalised; `sent`, the number of
    collectives of each step; `elsewhere`, the matrices whose update it cannot repeat.
    """
    torch.manual_seed(0)
    alone = Uneven()
    model = copy.deepcopy(alone)
    parallel = KINDS[kind](current_ranks())
    parallel.shard(model)
    reference, optimizer = (Muon(**MUON | CASES[case])(each) for each in (alone, model))
    optimizer.owners = parallel.owners
    seen: dict[str, Any] = {"equal": [], "finite": [], "kept": [], "matrices": [], "sent": []}
    for step in range(STEPS):
        fill(alone, model, case, step)
        gate, before = torch.tensor(case != "withheld" or step != 1), state_of(model, optimizer)
        bound = BOUND if case == "large" else muon.LARGEST_DIRECTION
        with patch.object(muon, "LARGEST_DIRECTION", bound):
            apply(reference, gate)
        with (
            patch.object(muon, "LARGEST_DIRECTION", bound),
            patch.object(muon, "orthogonal", side_effect=muon.orthogonal) as orthogonal,
            patch.object(distributed, "all_to_all_single", side_effect=distributed.all_to_all_single) as exchanged,
            patch("stabletrain.parallel.owners.all_gather_tensor", side_effect=all_gather_tensor) as gathered,
        ):
            apply(optimizer, gate)
        found = state_of(model, optimizer)
        expected = state_of(alone, reference)
        seen["equal"].append(all(torch.equal(found[name], each) for name, each in expected.items()))
        seen["finite"].append(all(each.isfinite().all().item() for each in found.values()))
        seen["kept"].append([name for name, each in before.items() if torch.equal(found[name], each)])
        seen["matrices"].append(orthogonal.call_count)
        seen["sent"].append(exchanged.call_count + gathered.call_count)
    elsewhere = {id(weight) for weight in optimizer.computed_elsewhere()}
    return seen | {"elsewhere": [name for name, each in model.named_parameters() if id(each) in elsewhere]}


class Attention(nn.Module):
    """Projections whose heads of three rows begin within a rank's rows."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.meter = nn.Linear(16, 9), nn.Linear(16, 9), LogitMeter(3)


def clip() -> dict[str, Any]:
    """What this rank saw of QK-clip: whether weights had the bits of one process, behind a closed and an open gate, and
    which rows were scaled.
    """
    torch.manual_seed(0)
    alone = Attention()
    model = copy.deepcopy(alone)
    FSDP(current_ranks()).shard(model)
    seen: dict[str, Any] = {"equal": [], "scaled": []}
    for gate in (False, True):
        before = whole(model.query.weight)
        for each in (alone, model):
            each.meter.max_logit.copy_(torch.tensor([0.5, 4.0, 0.0]))
            QKClip(2.0)(each, torch.tensor(gate))
        pairs = zip(alone.parameters(), model.parameters(), strict=True)
        seen["equal"].append(all(torch.equal(own, whole(sharded)) for own, sharded in pairs))
        seen["scaled"].append((whole(model.query.weight) != before).any(dim=1).nonzero().flatten().tolist())
    return seen


def rounded() -> dict[str, Any]:
    """What this rank saw of `precision=bf16_params`: whether weights begin as the nearest of bf16; whether a step takes
    each to a neighbour of what it is in fp32; whether a withheld step kept the bits that QK-clip had left; and whether
    only updates are repeated that are not rounded.
    """
    torch.manual_seed(0)
    model = Uneven()
    FSDP(current_ranks()).shard(model)
    optimizer, first = AdamW(**ADAM)(model), whole(model.gate.weight)
    bf16_params(torch.device("cpu")).attach(model, optimizer)
    nearest = torch.equal(whole(model.gate.weight), first.bfloat16().float())
    alone = Uneven()
    alone.load_state_dict({name: whole(each) for name, each in model.state_dict().items()})
    reference = AdamW(**ADAM)(alone)
    fill(alone, model, "usual", 0)
    apply(reference, torch.tensor(True))
    apply(optimizer, torch.tensor(True))
    names = [name for name, _ in model.named_parameters() if name != "embedding.weight"]
    pairs = [(whole(model.get_parameter(name)), whole(alone.get_parameter(name))) for name in names]
    near = [((found - exact).abs() <= exact.abs() * 2**-7).all().item() for found, exact in pairs]
    seen = {"bf16": all(torch.equal(found, found.bfloat16().float()) for found, _ in pairs), "near": all(near)}
    seen["nearest"] = nearest
    seen["exact"] = torch.equal(whole(model.embedding.weight), whole(alone.embedding.weight))
    with torch.no_grad():
        model.gate.weight.to_local().mul_(1 / 3)
    before = whole(model.gate.weight)
    apply(optimizer, torch.tensor(False))
    turns = [next_tensor(optimizer, turn) for turn in (None, 0, 1)]
    seen["repeated"] = all(each is not None and each[1] is model.embedding.weight for each in turns)
    return seen | {"kept": torch.equal(before, whole(model.gate.weight))}


def main(place: Path) -> int:
    """Performs every case with ddp and fsdp, and on four ranks some with hsdp."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    join_process_group(current_ranks())
    seen = {f"{kind}/{case}": perform(kind, case) for kind in ("ddp", "fsdp") for case in CASES}
    seen |= {"qkclip": clip(), "bf16_params": rounded()}
    if current_ranks().world_size == 4:
        seen |= {f"hsdp/{case}": perform("hsdp", case) for case in COPIED}
    (place / f"rank{current_ranks().rank}.json").write_text(json.dumps(seen))
    leave_process_group()
    return 0


if __name__ == "__main__":
    exit_process(main(Path(sys.argv[1])))
