"""Parameters kept in bf16: matrices and kernels are stored in two bytes, and each update is rounded stochastically.

    w <- round(optimizer(w, g) in fp32),    P[round up] = (x - down) / (up - down)

bf16 has 8 bits: rounded to the nearest, an update smaller than 1/256 of its weight is lost, step after step. Rounded
up or down with the probabilities above, it arrives in the mean: `E[round(x)] = x` (Gupta et al., arXiv 1502.02551,
section 3; for bf16 weights with Adam, Zamirai et al., arXiv 2010.06192).

Autocast would cast these weights to bf16 in the forward pass anyhow, so forward and backward are those of `bf16` to the
bit, and gradients of these weights are bf16. What autocast does not cast, or whose small differences matter
(embeddings, norms, biases, fp32 modules), stays fp32, and so do the optimizer's moments. A weight and its gradient take
2 bytes each, where `bf16` takes 4; fp32 copies of both live only during the optimizer's step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import BFloat16, Float32
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.stability.precision.autocast import Fp32Module, Unscaled

LOW = -(1 << 16)
"""The 16 bits of an fp32 that bf16 has too."""


@dataclass
class Bf16Parameters(Unscaled):
    """bf16 autocast over a model whose matrices and kernels are stored in bf16."""

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Narrows the weights of `model` in place, and has every step of `optimizer` round them stochastically."""
        weights = store_in_bf16(model, self.device.type)
        if not weights:
            raise ConfigError(
                f"precision=bf16_params: {type(model).__name__} has no linear layer or convolution outside of "
                "precision.fp32_modules whose weight could be stored in bf16: use precision=bf16"
            )
        Rounding(weights).around(optimizer)


class Bf16Module(nn.Module):
    """What is mixed into the class of a layer with a bf16 weight: outside of autocast it computes in fp32."""

    _autocast_device: str
    _conv_forward: Any
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, input: Tensor) -> Tensor:
        """The layer's own forward under autocast; else the same with its weight widened."""
        if torch.is_autocast_enabled(self._autocast_device):
            return super().forward(input)
        weight, bias = self.weight.float(), self.bias
        if isinstance(self, nn.Linear):
            return F.linear(input, weight, bias)
        return self._conv_forward(input, weight, bias)


@cache
def bf16_class(kind: type[nn.Module], device: str) -> type[nn.Module]:
    """The subclass of `kind` that is narrow; one for all layers of that kind."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (Bf16Module, kind), {**names, "_autocast_device": device})


def store_in_bf16(model: nn.Module, device: str) -> list[nn.Parameter]:
    """Stores the weight of every linear layer and convolution of `model` in bf16, in place; returns these weights.

    Layers in an fp32 module, of a subclass, or that share their weight with something else (a tied head) are left
    alone."""
    wide = {id(part) for module in model.modules() if isinstance(module, Fp32Module) for part in module.modules()}
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layers = [module for module in model.modules() if type(module) in kinds and id(module) not in wide]
    chosen = {id(layer) for layer in layers}
    others = {p for m in model.modules() if id(m) not in chosen for p in m.parameters(recurse=False)}
    weights: dict[nn.Parameter, None] = {}  # in the model's order
    for layer in layers:
        if isinstance(weight := layer.weight, nn.Parameter) and weight not in others:
            weight.data = weight.data.bfloat16()
            layer.__class__ = bf16_class(type(layer), device)
            weights[weight] = None
    return [*weights]


class Rounding:
    """Hands an optimizer fp32 weights and gradients for the length of its step, and rounds what it makes of them.

    A withheld step changes nothing: an fp32 copy that the optimizer leaves as it is rounds to the very weight it came
    from. The random bits are drawn from PyTorch's generator, which each step seeds by its number.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.weights = list(weights)
        self._kept: list[tuple[Tensor, Tensor | None]] = []

    def around(self, optimizer: Optimizer) -> None:
        """Makes every step of `optimizer`, of whatever kind, run between `widen_` and `round_`."""
        optimizer.register_step_pre_hook(self.widen_)
        optimizer.register_step_post_hook(self.round_)

    def widen_(self, *_: Any) -> None:
        """Puts fp32 copies in the place of weights and gradients."""
        self._kept = [(weight.data, weight.grad) for weight in self.weights]
        for weight, (data, gradient) in zip(self.weights, self._kept, strict=True):
            weight.grad, weight.data = None, data.float()
            weight.grad = None if gradient is None else gradient.float()

    def round_(self, *_: Any) -> None:
        """Writes the rounded weights into their own memory, and puts the gradients back."""
        for weight, (data, gradient) in zip(self.weights, self._kept, strict=True):
            data.copy_(round_stochastically(weight.data))
            weight.grad, weight.data = None, data
            weight.grad = gradient
        self._kept = []


def round_stochastically(x: Float32[Tensor, "*shape"]) -> BFloat16[Tensor, "*shape"]:
    """`x` rounded to one of its two neighbours in bf16, so that its mean is `x`; what bf16 can hold stays itself.

    No finite value becomes infinite: above bf16's largest, 3.39e38, it is rounded down. NaN and Inf stay.
    """
    bits = x.view(torch.int32)  # the magnitude grows with the bits, whatever the sign
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device)
    either, down = ((bits + noise) & LOW).view(torch.float32), (bits & LOW).view(torch.float32)
    rounded = torch.where(torch.isfinite(either), either, down)
    return torch.where(torch.isfinite(x), rounded, x).bfloat16()
