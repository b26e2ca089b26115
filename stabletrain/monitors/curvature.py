"""The shape of the loss around the weights: its Hessian's top eigenvalue, and the margin of the last update.

    v <- H v / |H v|,   lambda = v . H v,      H v = d/dw (dL/dw . v)       (Pearlmutter 1994)

Gradient descent is stable only up to lambda = 2 / lr, and long runs settle there (arXiv 2103.00065). A warmup lowers
lambda before the learning rate is high (arXiv 2110.04369). Power iteration converges to the eigenvalue of largest
absolute value, with its sign. After few iterations its absolute value is an underestimate.

The margin is how much longer the last update could have been before the loss rises: a search along the update
(arXiv 2601.16979).

    margin = min { c : L(w + c * update) > L(w) }        L: the loss of one micro-batch, in fp32; w: before the update

Below 1 the update itself raises the loss of its own batch. The learning rate times the margin is the critical learning
rate, and 2 over that is the paper's critical sharpness. Gradient descent at the edge of stability has a margin near 1.
The search costs four or five forward passes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stabletrain.machine.determinism import rng_restored
from stabletrain.monitors.forward import isolated_forward
from stabletrain.records import Batch


def top_eigenvalue(
    loss: Float[Tensor, ""], parameters: Sequence[Tensor], iterations: int, generator: torch.Generator
) -> Float[Tensor, ""]:
    """Returns the Hessian's eigenvalue of largest absolute value, in the dtype of the parameters; 0 for a linear loss.

    Args:
        loss: twice differentiable with respect to `parameters`; its graph is freed.
        parameters: leaves that require a gradient.
        iterations: Hessian-vector products, at least 1; each costs about two backward passes.
        generator: draws the initial vector; on the parameters' device.
    """
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    curved = [gradient for gradient in gradients if gradient.requires_grad]
    if not curved:
        return torch.zeros_like(loss).detach()
    vector = [torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype) for p in parameters]
    value = torch.zeros_like(loss).detach()
    for _ in range(iterations):
        length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(vector)))
        vector = [part / length.clamp(min=torch.finfo(length.dtype).tiny) for part in vector]
        along = [part for part, gradient in zip(vector, gradients, strict=True) if gradient.requires_grad]
        product = torch.autograd.grad(curved, parameters, along, retain_graph=True, materialize_grads=True)
        value = torch.stack([(v * hv).sum() for v, hv in zip(vector, product, strict=True)]).sum()
        vector = [part.detach() for part in product]
    return value.detach()


def of_loss(
    model: nn.Module, batch: Batch, loss: Callable[..., Any], iterations: int, samples: int
) -> Float[Tensor, ""]:
    """Returns the top eigenvalue for the mean loss of the first `samples` of `batch`, in fp32.

    Call it within `forward.isolated`. Runs the model in its current mode. Dropout draws one mask for all iterations.
    """
    # Aliases of the weights: no gradient reaches the model's own `.grad`.
    leaves = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters() if p.requires_grad}
    # The same initial vector every time, so that values of different steps are comparable.
    generator = torch.Generator(batch.targets.device).manual_seed(0)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        part = batch.rows(slice(0, samples)).of_step(1.0)
        outputs = isolated_forward(model, part.inputs, leaves)
        return top_eigenvalue(loss(outputs, part, part.n_valid()).total, list(leaves.values()), iterations, generator)


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
