"""Finds weights, buffers and moments that were corrupt before a step, and measures how far the weights have moved."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.buffers import masks_of
from stabletrain.forensics.facts import Damage, Drift

OUTLIER_RATIO = 1e3
"""Ratio to the older state's largest element, above which an element of a weight or moment is out of place."""

FEW_SHARE = 1e-2
"""If at most this share of a tensor's elements is bad, an update is not the reason: it would change all of them."""

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
"""Moments that are means of squares."""


MAX_MOMENT_RATIO = 100.0
"""Largest plausible m / sqrt(v); at most 1 / sqrt(1 - beta2), which is 32 for beta2 = 0.999."""


@torch.no_grad()
def damaged(
    model: nn.Module, buffers: Sequence[Tensor], optimizer: Optimizer | None, older: Mapping[str, Any] | None
) -> list[Damage]:
    """Finds values that are non-finite, negative means of squares, or a few elements that are far too large.

    `model`, `buffers` (ordered as `model.buffers()`) and the optimizer's moments are from before the step. `older` is
    a captured state to compare with.
    """
    before = {} if older is None else dict(older["model"])
    found = []
    for name, tensor in model.named_parameters():  # a mask holds -inf on purpose; it may be a frozen parameter
        mask = not tensor.requires_grad and bool(tensor.isinf().any()) and not bool(tensor.isnan().any())
        found += [] if mask else check("parameter", name, tensor, before.get(name))
    masks = masks_of(model) or [False] * len(buffers)
    for (name, _), tensor, mask in zip(model.named_buffers(), buffers, masks, strict=True):
        found += [] if mask else check("buffer", name, tensor, None)
    if optimizer is not None:
        moments = {} if older is None else older["optimizer"]["state"]
        for name, parameter in model.named_parameters():
            for moment, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
                    before_it = moments.get(name, {}).get(moment)
                    found += check(moment, name, value, before_it, optimizer.state[parameter].get("exp_avg_sq"))
    return found


def check(
    what: str, name: str, tensor: Tensor, before: Tensor | None, squares: Tensor | None = None
) -> Iterable[Damage]:
    """Checks one tensor. Large values of a first moment are accepted if its second moment, `squares`, explains them."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        yield Damage(what, name, f"{bad} of {tensor.numel()} values are not finite", few=affects_few(bad, tensor))
        return
    if what in SECOND_MOMENTS and (negative := int((tensor < 0).sum())):
        yield Damage(what, name, f"{negative} of {tensor.numel()} values are negative, but a mean of squares cannot be")
    if before is None:
        return
    largest = float(before.abs().max())
    usual = max(largest, float(tensor.abs().median()))  # if gradients grew, the whole moment grew
    bound = OUTLIER_RATIO ** (2 if what in SECOND_MOMENTS else 1) * usual if largest > 0 else math.inf
    out = tensor.abs() > bound
    if what == "exp_avg" and squares is not None and squares.shape == tensor.shape:
        out &= tensor.abs() > MAX_MOMENT_RATIO * squares.abs().sqrt()
    beyond = int(out.sum())
    if beyond and affects_few(beyond, tensor):
        words = f"{beyond} of {tensor.numel()} values are up to {float(tensor.abs().max()):.4g}; before, {largest:.4g}"
        yield Damage(what, name, words, few=True, large=True)


def affects_few(count: int, tensor: Tensor) -> bool:
    """Whether so few elements of the tensor are affected that an update cannot be the reason."""
    return count <= max(1, FEW_SHARE * tensor.numel())


@torch.no_grad()
def drift(model: nn.Module, optimizer: Optimizer | None, older: Mapping[str, Any], step: int) -> Drift | None:
    """Measures how far the weights of step number `step` have moved since the captured state `older`.

    Returns None if nothing can be compared.
    """
    before, steps = dict(older["model"]), max(step - int(older["step"]), 1)
    moved, share, grown = [], [], []
    for name, parameter in model.named_parameters():
        if name not in before or not parameter.requires_grad or not parameter.numel():
            continue
        now, then = parameter.double(), before[name].to(parameter.device).double()
        size, change = rms(then), rms(now - then)
        moved.append(change)
        if size > 0:
            share.append(change / size / steps)
            grown.append(rms(now) / size)
    if not share:
        return None
    adaptive = optimizer is not None and any("exp_avg_sq" in state for state in optimizer.state.values())
    return Drift(steps, median(moved), median(share), median(grown), adaptive)


@torch.no_grad()
def last_move(optimizer: Optimizer) -> Drift | None:
    """Returns how far Adam's last update moved the weights, from its moments; None if no parameter has both.

    The share is of the parameter's RMS after the update, so after several updates that were too long it is too small.
    """
    moved, share = [], []
    for group, parameter, ways in lengths(optimizer):
        change, size = float(group["lr"]) * ways, rms(parameter.double())
        moved.append(change)
        if size > 0:
            share.append(change / size)
    return Drift(1, median(moved), median(share), 1.0, adaptive=True) if share else None


def rms(tensor: Tensor) -> float:
    """Root mean square of the elements."""
    return float(tensor.square().mean().sqrt())


@torch.no_grad()
def staleness(model: nn.Module, gradients: Sequence[Tensor | None], optimizer: Optimizer) -> float:
    """Largest RMS(g / sqrt(v)) over the parameters, with bias-corrected v; NaN without a second moment.

    Near 1 if v follows the gradients. Source: StableAdamW, arXiv 2304.13013.
    """
    largest = math.nan
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        state = optimizer.state.get(parameter, {})
        if gradient is None or "exp_avg_sq" not in state or not float(state.get("step", 0)):
            continue
        group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), {})
        betas = group.get("betas", (0.0, 0.0))
        second = state["exp_avg_sq"].float() / (1 - betas[1] ** float(state["step"]))
        rms = float((gradient.float().square() / second.clamp(min=1e-16)).mean().sqrt())
        largest = rms if math.isnan(largest) else max(largest, rms)
    return largest


@torch.no_grad()
def update_length(optimizer: Optimizer) -> float:
    """Largest RMS(m / sqrt(v)) over the parameters, bias-corrected; NaN without such moments.

    The last update was made of these moments, so this is its length in learning rates.
    """
    return max((ways for _, _, ways in lengths(optimizer)), default=math.nan)


def lengths(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor, float]]:
    """The group, the parameter and RMS(m / sqrt(v)), bias-corrected, of each parameter with such moments."""
    for group in optimizer.param_groups:
        betas = group.get("betas", (0.0, 0.0))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            done = float(state.get("step", 0))
            if "exp_avg" not in state or "exp_avg_sq" not in state or not done:
                continue
            first = state["exp_avg"].float() / (1 - betas[0] ** done)
            second = state["exp_avg_sq"].float() / (1 - betas[1] ** done)
            yield group, parameter, rms(first / (second.sqrt() + group.get("eps", 1e-8)))
