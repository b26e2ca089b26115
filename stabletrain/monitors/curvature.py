"""Top eigenvalue of the loss's Hessian, by power iteration with exact Hessian-vector products.

    v <- H v / |H v|,   lambda = v . H v,      H v = d/dw (dL/dw . v)       (Pearlmutter 1994)

Gradient descent is stable only up to lambda = 2 / lr, and long runs settle there (arXiv 2103.00065). A warmup lowers
lambda before the learning rate is high (arXiv 2110.04369). Power iteration converges to the eigenvalue of largest
absolute value, with its sign. After few iterations its absolute value is an underestimate.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

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
