"""fp8: the matrix products of linear layers in 8 bits, everything else in bf16 autocast, through torchao.

    y = (x s_x)_8 (w s_w)_8^T / (s_x s_w),    s = largest fp8 number / max|x|, over a tensor or over each of its rows

A linear layer computes three products in fp8: its output, the gradient of its input, and the gradient of its weight.
Each operand is scaled by its own largest value in every step (dynamic scaling), so a finite value never overflows. But
a value below about 2^-19 of the largest becomes 0: e4m3 has 4 bits of exponent. Weights, gradients, optimizer state and
checkpoints are those of `bf16`.

The layers' classes are changed in place, as for fp32 modules: names, hooks and tensors stay. Outside of autocast such a
layer computes as `nn.Linear` does, so an fp32 replay needs nothing else.

Source: Micikevicius et al., arXiv 2209.05433; torchao, `torchao.float8`.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.machine import hardware
from stabletrain.stability.parameter_roles import classifier
from stabletrain.stability.precision.autocast import (
    Fp32Module,
    Unscaled,
    check_patterns,
    in_fp32_modules,
    matching,
    with_mixin,
)
from stabletrain.stability.precision.modes import check_bf16

RECIPES = {
    "tensorwise": "e4m3, gradients e5m2, a scale for each tensor",
    "rowwise": "e4m3, a scale for each row",
    "rowwise_with_gw_hp": "e4m3, a scale for each row, gradients of weights in bf16",
}
"""torchao's recipes, and what they do."""

SIZE_MULTIPLE = 16
"""The kernels need sizes that are multiples of this."""


def fp8(
    device: torch.device, recipe: str, bf16_modules: Sequence[str] = (), fp32_modules: Sequence[str] = ()
) -> "Fp8Linears":
    """bf16 autocast with linear layers in fp8: with fp8 kernels where the card has them, emulated elsewhere.

    Raises:
        ConfigError: torchao is missing, the recipe is unknown, or the card has no bf16.
    """
    check_bf16("fp8", device)
    reason = hardware.fp8_reason(device)
    return Fp8Linears(
        "fp8",
        device,
        torch.bfloat16,
        why="" if hardware.has_fp8(device) else f"emulated and slow: {reason}",
        fp32_modules=fp32_modules,
        recipe=recipe,
        bf16_modules=bf16_modules,
        emulate=not hardware.has_fp8(device),
    )


@dataclass
class Fp8Linears(Unscaled):
    """bf16 autocast over a model whose linear layers compute in fp8.

    Attributes:
        recipe: one of `RECIPES`.
        bf16_modules: name patterns of the modules whose linear layers stay in bf16, besides the head.
        emulate: whether to round to fp8 and multiply in fp32, because the device has no fp8 kernels.
    """

    recipe: str = "tensorwise"
    bf16_modules: Sequence[str] = ()
    emulate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_patterns(self.bf16_modules, "bf16_modules")
        if self.recipe not in RECIPES:
            raise ConfigError(f"precision.recipe={self.recipe}: there is no such recipe; use {' or '.join(RECIPES)}")
        self._config = torchao_config(self.recipe, self.emulate)
        self._how = "; ".join(filter(None, [RECIPES[self.recipe], self.why]))
        self.why = self._how

    def wrap_fp32_modules(self, model: nn.Module) -> list[str]:
        """Makes the modules named by `fp32_modules` compute in fp32, and the other linear layers in fp8, in place.

        Returns:
            The names of the fp32 modules.

        Raises:
            ConfigError: a pattern matches no module that has a forward, or no linear layer can compute in fp8.
        """
        names = super().wrap_fp32_modules(model)
        chosen, others = choose_linears(model, self.bf16_modules)
        if not chosen:
            raise ConfigError(
                f"precision=fp8: {type(model).__name__} has no linear layer for it, besides its head: sizes must be "
                f"multiples of {SIZE_MULTIPLE}, and convolutions have no fp8; use precision=bf16"
            )
        self.convert([model.get_submodule(name) for name in chosen])
        linears = f"{len(chosen)} Linear{'' if len(chosen) == 1 else 's'}"
        self.why = f"{self._how}; {linears} in fp8, {left_out(others)}"
        return names

    def convert(self, layers: Sequence[nn.Module]) -> None:
        """Makes linear layers compute in fp8, with this recipe, in place."""
        for layer in layers:
            to_fp8_(layer, self._config, self.device.type)


class Fp8Module(nn.Module):
    """Mixin for the class of a linear layer: computes in fp8 under autocast, else as `nn.Linear`."""

    _autocast_device: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    in_features: int

    def forward(self, input: Tensor) -> Tensor:
        """Runs the layer on `[..., in_features]`."""
        device = self._autocast_device
        if not torch.is_autocast_enabled(device) or not input.numel():
            return F.linear(input, self.weight, self.bias)
        rows = input.to(torch.get_autocast_dtype(device)).reshape(-1, self.in_features)
        # The sum over the rows in the weight's gradient needs a multiple of 16 of them. Rows of zeros change no scale.
        count = rows.shape[0]
        padded = F.pad(rows, (0, 0, 0, -count % SIZE_MULTIPLE)) if count % SIZE_MULTIPLE else rows
        # The input is cast. torchao would ask for the dtype of CUDA's autocast, also on a CPU.
        with torch.autocast(device, enabled=False):
            output = super().forward(padded)
        return output[:count].reshape(*input.shape[:-1], output.shape[-1])


def to_fp8_(layer: nn.Module, config: Any, device: str) -> None:
    """Makes a linear layer compute in fp8, in place; its tensors, hooks and name stay."""
    from torchao.float8 import convert_to_float8_training

    made, plain = convert_to_float8_training(layer, config=config), vars(nn.Linear(1, 1, device="meta"))
    # torchao makes a new module, without hooks: take over only its class and its settings.
    layer.__dict__.update({key: value for key, value in vars(made).items() if key not in plain})
    layer.__class__ = with_mixin(Fp8Module, type(made), device, shown=nn.Linear)


def to_bf16_(layer: nn.Module) -> None:
    """Undoes `to_fp8_`: the layer computes in autocast's dtype again."""
    layer.__class__ = nn.Linear


def fp8_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers that compute in fp8, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Fp8Module)}


def choose_linears(model: nn.Module, patterns: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Chooses the linear layers that compute in fp8.

    Leaves out the head, layers in fp32 modules, layers in modules that match `patterns`, and sizes that are no multiple
    of 16. Subclasses of `nn.Linear` may compute in other ways, so they do not count at all.

    Returns:
        Their names, and the names of those left out with the reason, both in the model's order.

    Raises:
        ConfigError: a pattern matches no module that has a forward.
    """
    narrow = {id(part) for _, module in matching(model, patterns, "bf16_modules") for part in module.modules()}
    wide, head = in_fp32_modules(model), classifier(model)
    chosen, others = [], {}
    for name, module in model.named_modules():
        if not name or not (is_linear(module) or (module is head and isinstance(module, nn.Linear))):
            continue
        if module is head:
            others[name] = "the head"
        elif id(module) in wide:
            others[name] = "in precision.fp32_modules"
        elif id(module) in narrow:
            others[name] = "in precision.bf16_modules"
        elif module.in_features % SIZE_MULTIPLE or module.out_features % SIZE_MULTIPLE:
            others[name] = f"its size is no multiple of {SIZE_MULTIPLE}"
        else:
            chosen.append(name)
    return chosen, others


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an `nn.Linear`, perhaps in fp8 or an fp32 module, and not another subclass."""
    return type(module) is nn.Linear or (isinstance(module, nn.Linear) and isinstance(module, Fp8Module | Fp32Module))


def left_out(others: dict[str, str]) -> str:
    """How many linear layers are left out, and why."""
    reasons = dict.fromkeys(others.values())
    return f"{len(others)} left out" + (f" ({', '.join(reasons)})" if others else "")


def torchao_config(recipe: str, emulate: bool) -> Any:
    """Returns torchao's configuration of a recipe.

    Raises:
        ConfigError: torchao is not installed, or it is too old.
    """
    try:
        with silenced("torch.utils._pytree"):  # torchao 0.18 registers an enum in a way that PyTorch 2.15 deprecates
            from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise ConfigError(
            f'precision=fp8 needs torchao ({error}): pip install -e ".[fp8]" or "stabletrain[fp8]", or use '
            "precision=bf16"
        ) from None
    return replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)


@contextlib.contextmanager
def silenced(name: str) -> Any:
    """Silences the warnings of a logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
