"""Parameters stored in bf16: matrices and kernels take two bytes a value, and updates are rounded stochastically.

    w <- round(optimizer(w, g) in fp32),    P[round up] = (x - down) / (up - down)

bf16 has 8 bits of precision. With rounding to nearest, an update smaller than 1/256 of its weight is lost in every
step. Stochastic rounding keeps it in expectation: `E[round(x)] = x` (Gupta et al., arXiv 1502.02551, section 3; for
bf16 weights with Adam, Zamirai et al., arXiv 2010.06192).

Autocast would cast these weights to bf16 in the forward pass anyway, so forward and backward are bitwise equal to those
of `bf16`, with bf16 gradients for these weights. Embeddings, norms, biases and fp32 modules stay fp32, because autocast
does not cast them or their small differences matter. The optimizer's moments stay fp32 too. A weight and its gradient
take 2 bytes each instead of 4; fp32 copies of both exist only during the optimizer's step.

Weights that FSDP2 shards have the same values in fp32 memory: it shards all parameters of a layer in one dtype, and a
bias stays fp32. So a rank holds 4 bytes for each weight and gradient of its part, and computes the same numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import BFloat16, Float32
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.stability.optimizers.gated import gate, write_where_
from stabletrain.stability.precision.autocast import Unscaled, in_fp32_modules, with_mixin

UPPER_BITS = -(1 << 16)
"""Mask of the upper 16 bits of an fp32 value, which are its bf16 bits."""


@dataclass
class Bf16Parameters(Unscaled):
    """bf16 autocast over a model whose matrices and kernels are stored in bf16."""

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Stores the weights of `model` in bf16, in place, and makes `optimizer` round them stochastically.

        Raises:
            ConfigError: the model has no weight that can be stored in bf16.
        """
        layers = layers_to_store(model)
        if not layers:
            raise ConfigError(
                f"precision=bf16_params: {type(model).__name__} has no linear layer or convolution outside of "
                "precision.fp32_modules whose weight could be stored in bf16: use precision=bf16"
            )
        if any(hasattr(layer.weight, "to_local") for layer in layers):
            ShardRounding([layer.weight for layer in layers]).attach(optimizer)
        else:
            Rounding(store_in_bf16(layers, self.device.type)).attach(optimizer)


class Bf16Module(nn.Module):
    """Mixin for the class of a layer with a bf16 weight: computes in fp32 outside of autocast."""

    _autocast_device: str
    _conv_forward: Any
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, input: Tensor, *given: Tensor) -> Tensor:
        """Runs the layer's own forward under autocast, else the same computation with an fp32 copy of the weight.

        A head may be `given` the weight to use (`models/head.py`).
        """
        if torch.is_autocast_enabled(self._autocast_device):
            return super().forward(input, *given)
        weight, bias = (given[0] if given else self.weight).float(), self.bias
        if isinstance(self, nn.Linear):
            return F.linear(input, weight, bias)
        return self._conv_forward(input, weight, bias)


def layers_to_store(model: nn.Module) -> list[Any]:
    """Returns the linear layers and convolutions whose weight may be stored in bf16.

    Skips layers inside an fp32 module, weights that other modules share (a tied head), and subclasses of these layers,
    which may use their weight in other ways; unless they have `only_multiplies`.
    """
    wide = in_fp32_modules(model)
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    known = [m for m in model.modules() if own_class(m) in kinds or (isinstance(m, kinds) and hasattr(m, ONLY))]
    layers = [module for module in known if id(module) not in wide]
    chosen = {id(layer) for layer in layers}
    others = {p for m in model.modules() if id(m) not in chosen for p in m.parameters(recurse=False)}
    return [each for each in layers if isinstance(each.weight, nn.Parameter) and each.weight not in others]


ONLY = "only_multiplies"
"""Attribute of a subclass that uses its weight as its base class does."""


def own_class(module: nn.Module) -> type:
    """Returns a module's class from before `fully_shard`, which makes it `FSDP<class>`."""
    kind = type(module)
    return kind.__bases__[1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


def store_in_bf16(layers: Sequence[Any], device: str) -> list[nn.Parameter]:
    """Stores the weights of these layers in bf16, in place; returns each once."""
    weights: dict[nn.Parameter, None] = {}  # in the model's order
    for layer in layers:
        layer.weight.data = layer.weight.data.bfloat16()
        layer.__class__ = with_mixin(Bf16Module, type(layer), device)
        weights[layer.weight] = None
    return [*weights]


class Rounding:
    """Gives an optimizer fp32 weights and gradients during its step, and rounds the updated weights to bf16.

    A skipped step changes no bit: a bf16 value cast to fp32 rounds back to itself. The random bits come from PyTorch's
    generator, which is seeded by the step number.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self.rounded_at_random = list(weights)
        self._kept: list[tuple[Tensor, Tensor | None]] = []

    def attach(self, optimizer: Optimizer) -> None:
        """Registers `widen_` before and `round_` after every step of `optimizer`."""
        optimizer.register_step_pre_hook(self.widen_)
        optimizer.register_step_post_hook(self.round_)

    def widen_(self, *_: Any) -> None:
        """Replaces weights and gradients by fp32 copies."""
        self._kept = [(weight.data, weight.grad) for weight in self.rounded_at_random]
        for weight, (data, gradient) in zip(self.rounded_at_random, self._kept, strict=True):
            # PyTorch requires that a gradient has its weight's dtype, so clear it before the dtype changes.
            weight.grad, weight.data = None, data.float()
            weight.grad = None if gradient is None else gradient.float()

    def round_(self, *_: Any) -> None:
        """Writes the rounded weights into their bf16 memory, and restores the bf16 gradients."""
        for weight, (data, gradient) in zip(self.rounded_at_random, self._kept, strict=True):
            data.copy_(round_stochastically(weight.data))
            weight.grad, weight.data = None, data
            weight.grad = gradient
        self._kept = []


class ShardRounding:
    """Rounds the updated weights of a sharded model to values of bf16, which stay in fp32 memory.

    A rank draws random bits for its own rows, from its generator, which is seeded by step number and rank.

    Attributes:
        rounded_at_random: DTensors; each is rounded at once, to the nearest.
    """

    @torch.no_grad()
    def __init__(self, weights: Sequence[Any]) -> None:
        self.rounded_at_random = list(dict.fromkeys(weights))
        for weight in self.rounded_at_random:
            own = weight.to_local()
            own.copy_(own.bfloat16())

    def attach(self, optimizer: Optimizer) -> None:
        """Registers `round_` after every step of `optimizer`."""
        optimizer.register_step_post_hook(self.round_)

    @torch.no_grad()
    def round_(self, optimizer: Optimizer, *_: Any) -> None:
        """Rounds this rank's part of each weight, unless the step was withheld."""
        for weight in self.rounded_at_random:
            own = weight.to_local()
            # QK-clip, which acts later, may leave other values: a withheld step must not round them.
            write_where_([own], [round_stochastically(own).float()], gate(optimizer, own.device))


def round_stochastically(x: Float32[Tensor, "*shape"]) -> BFloat16[Tensor, "*shape"]:
    """Rounds `x` to one of its two neighbours in bf16, at random, with mean `x`; values that bf16 can hold stay exact.

    A finite value never becomes infinite: above bf16's largest, 3.39e38, it is rounded down. NaN and Inf are kept.
    """
    # Random noise in the 16 bits to be dropped carries into the upper 16 with the right probability. The magnitude of a
    # float grows with its bits, whatever the sign.
    bits = x.view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device)
    either, down = ((bits + noise) & UPPER_BITS).view(torch.float32), (bits & UPPER_BITS).view(torch.float32)
    rounded = torch.where(torch.isfinite(either), either, down)
    return torch.where(torch.isfinite(x), rounded, x).bfloat16()
