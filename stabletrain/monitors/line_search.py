"""How much longer the last update could have been before the loss rises: a search along the update (arXiv 2601.16979).

    margin = min { c : L(w + c * update) > L(w) }        L: the loss of one micro-batch, in fp32; w: before the update

Below 1 the update itself raises the loss of its own batch. The learning rate times the margin is the critical learning
rate, and 2 over that is the paper's critical sharpness. Gradient descent at the edge of stability, where the Hessian's
top eigenvalue is 2 / lr, has a margin near 1. The search costs four or five forward passes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stabletrain.machine.determinism import rng_restored
from stabletrain.monitors.forward import isolated_forward
from stabletrain.records import Batch

LOWEST, HIGHEST = -4, 7
"""Powers of two between which the search looks, neither included: 1/16 and 128 times the update."""


SAMPLES = 32
"""Samples of the micro-batch on which the loss is computed, at most."""


def margin(rise: Callable[[float], float]) -> float:
    """Returns the smallest factor at which the loss rises, by bisection over powers of two: at most four calls.

    Args:
        rise: `L(w + c * update) - L(w)` of a factor c; NaN counts as a rise.

    Returns:
        a factor: between the last two powers of two, where the straight line between both rises is 0. The ends of the
        range are not tried: 1/16 if the loss rises at 1/8, 128 if it does not rise at 64.
    """
    low, high = LOWEST, HIGHEST
    rises: dict[int, float] = {}
    while high - low > 1:
        middle = (low + high) // 2
        rises[middle] = rise(2.0**middle)
        low, high = (middle, high) if rises[middle] <= 0 else (low, middle)
    if high not in rises:  # no rise at 64
        return 2.0**high
    if low not in rises or not math.isfinite(rises[high]):
        return 2.0**low
    return 2.0**low * (1 + rises[low] / (rises[low] - rises[high]))


def along_update(
    model: nn.Module, before: dict[str, Tensor], batch: Batch, loss: Callable[..., Any]
) -> Callable[[float], float]:
    """Returns `L(w + c * update) - L(w)` as a function of c. Call both within `forward.isolated`.

    Every call draws the same dropout masks, and waits for the device.

    Args:
        model: after the update.
        before: the trained parameters before it, by name; not sharded.
        batch: one micro-batch; its first samples are used.
        loss: without label smoothing and the like; see `stability/objective/`.
    """
    device = batch.targets.device
    start = {name: p.float() for name, p in before.items()}
    update = {name: p.detach().float() - start[name] for name, p in model.named_parameters() if name in start}
    part = batch.rows(slice(0, SAMPLES)).of_step(1.0)
    n_valid = part.n_valid()

    def loss_at(factor: float) -> float:
        weights = {name: torch.add(start[name], update[name], alpha=factor) for name in start}
        with torch.no_grad(), torch.autocast(device.type, enabled=False), rng_restored(model):
            return loss(isolated_forward(model, part.inputs, weights), part, n_valid).total.item()

    base = loss_at(0.0)
    return lambda factor: loss_at(factor) - base
