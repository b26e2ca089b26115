"""Clipping and optimizers on tensors that several ranks share, each beside the same steps of a whole model.

    torchrun --nproc_per_node=4 -m tests.parallel.sharded <place>

The ranks share tensors of one, two, three and more rows, so that some have no row of some tensors. In `<place>`,
`rank<r>.json` maps each case to what differs, empty if nothing does, and to what clipping reported in each step.
"""

import copy
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from stabletrain.monitors.tensor_norms import measure
from stabletrain.parallel.fsdp import FSDP
from stabletrain.parallel.hsdp import HSDP
from stabletrain.parallel.ranks import (
    all_gather_tensor,
    current_ranks,
    exit_process,
    join_process_group,
    leave_process_group,
)
from stabletrain.records import GradNorms
from stabletrain.stability.after_update import AfterUpdate
from stabletrain.stability.clipping import NoClip
from stabletrain.stability.objective.output_embeddings import Centering
from stabletrain.stability.optimizers import SGD, SPAM, AdamW, StableAdamW
from stabletrain.step import apply
from tests.stability.clipping.given import TIGHT
from tests.test_no_waiting import Questions

ADAM = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}
SHOWN = AdamW(**ADAM, shows_update=True)
OPTIMIZERS: dict[str, Any] = {
    "adamw": AdamW(**ADAM),
    "cautious": AdamW(**ADAM, cautious_decay=True, decay="corrected"),
    "stable_adamw": StableAdamW(**ADAM),
    "stable_adamw_cautious": StableAdamW(**ADAM, cautious_decay=True),
    "spam": SPAM(**ADAM, theta=1.5, reset_interval=4, warmup_steps=2),
    "sgd": SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1, fused=False),
}
Case = tuple[Callable[[], NoClip], Any, AfterUpdate]
CASES: dict[str, Case] = {name: (kind, SHOWN, AfterUpdate()) for name, kind in TIGHT.items()}
CASES |= {name: (NoClip, made, AfterUpdate()) for name, made in OPTIMIZERS.items()}
CASES["update_norm_stable"] = (
    TIGHT["update_norm"],
    replace(OPTIMIZERS["stable_adamw"], shows_update=True),
    AfterUpdate(),
)
CASES["centering"] = NoClip, OPTIMIZERS["spam"], Centering()
COPIED = {
    f"hsdp {name}": name for name in ("per_module", "adagc", "update_norm_stable", "stable_adamw_cautious", "centering")
}
"""Cases that two copies of two shards have, too."""

NORMS = 1.0, 1.2, 0.9, 8.0, 1.1, 0.7, 30.0, 1.0, 1.3
"""Of the gradients, step by step."""

WITHHELD = 4
"""The step whose gradient has a NaN."""

LARGE = 7
"""The step before which one weight of the head, on one rank, becomes too large to be centred."""


class Uneven(nn.Module):
    """Tensors of one, two, three, four and seven rows; vectors, a matrix, a convolution and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.conv = nn.Conv2d(2, 3, 2)
        self.gain = nn.Parameter(torch.full((2, 1, 1), 0.5))
        self.one = nn.Linear(4, 1)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)


def give(model: nn.Module, step: int) -> None:
    """Gives every parameter its gradient of a step, or its shard of it."""
    generator = torch.Generator().manual_seed(step)
    for index, parameter in enumerate(model.parameters()):
        gradient = NORMS[step] * torch.randn(parameter.shape, generator=generator) * (1 + index % 3) / 20
        if step == WITHHELD and index == 2:
            gradient.flatten()[-1] = torch.nan
        parameter.grad = shard_like(parameter, gradient)


def shard_like(parameter: Any, whole: Tensor) -> Tensor:
    """The same values, which every rank has, sharded as a parameter is: nothing is sent."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def whole_norms(model: nn.Module, parallel: FSDP) -> GradNorms:
    """The norms of the whole gradients, from those of all shards."""
    row = parallel.gradient_row(norms := measure(model))
    rows = row.new_empty(parallel.ranks.world_size * len(row))
    all_gather_tensor(rows, row)
    return parallel.norms_from_rows(norms, rows.view(-1, len(row)))


def grow(weight: Any) -> None:
    """Makes one value of the last row large."""
    grown = torch.zeros(weight.shape)
    grown[-1, 0] = 1e17
    with torch.no_grad():
        weight.add_(shard_like(weight, grown))


def steps(model: Uneven, case: Case, norms: Callable[[nn.Module], GradNorms]) -> dict[str, Any]:
    """All steps; reports, weights and moments."""
    kind, optimizer, after_update, reports = case[0](), case[1](model), case[2], []
    for step in range(len(NORMS)):
        if step == LARGE and isinstance(after_update, Centering):
            grow(model.head.weight)
        give(model, step)
        measured = norms(model)
        gate = torch.isfinite(measured.total)
        with Questions() as questions:
            clipped = kind(model, measured, gate)
            apply(optimizer, gate, clipped.scale_update)
            after_update(model, gate)
        if case is not CASES["sgd"]:  # without its fused kernel, its gate is read on the host
            assert questions.asked == [], "the host waits for the device"
        active = -1.0 if clipped.active is None else float(clipped.active)
        reports.append(torch.tensor([float(clipped.coef), active]))
    moments = [
        (f"{name} of {index}", each)
        for index, p in enumerate(model.parameters())
        for name, each in optimizer.state[p].items()
    ]
    weights = dict(model.named_parameters())
    coef, active = torch.stack(reports).unbind(dim=1)
    return {"coef": coef, "active": active} | weights | dict(moments)


def compared(case: str, parallel: FSDP) -> dict[str, Any]:
    """Runs a case on shards and on whole tensors; returns the reports, and what differs."""
    torch.manual_seed(0)
    model = Uneven()
    whole = copy.deepcopy(model)
    parallel.shard(model)
    found = steps(model, CASES[case], lambda model: whole_norms(model, parallel))
    wanted = steps(whole, CASES[case], measure)
    differs = []
    for name, each in wanted.items():
        got = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        try:
            torch.testing.assert_close(got, each, rtol=2e-5, atol=1e-6)
        except AssertionError as error:
            differs.append(f"{name}: {error}")
    return {"differs": "\n".join(differs), "coef": found["coef"].tolist(), "active": found["active"].tolist()}


def main(place: Path) -> int:
    """Runs every case in turn."""
    torch.set_num_threads(1)
    ranks = current_ranks()
    join_process_group(ranks)
    seen = {}
    for case in CASES:
        try:
            seen[case] = compared(case, FSDP(ranks))
        except Exception:
            seen[case] = {"differs": traceback.format_exc()}
    for name, case in COPIED.items():
        seen[name] = compared(case, HSDP(ranks, 2))
    (place / f"rank{ranks.rank}.json").write_text(json.dumps(seen))
    leave_process_group()
    return 0


if __name__ == "__main__":
    exit_process(main(Path(sys.argv[1])))
