"""Faults of arithmetic: a computation comes out wrong inside a step, and right if it is done a second time."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tests.reliability.finite.fault import Fault
from tests.reliability.finite.subject import Bits, Subject


def chosen(subject: Subject, layer: bool) -> list[nn.Parameter]:
    """Returns the parameters whose gradients are damaged: one matrix, or all that are trained."""
    return [subject.matrix()] if layer else [each for each in subject.model.parameters() if each.requires_grad]


@dataclass(frozen=True)
class GradientScaled(Fault):
    """Multiplies the gradients of one matrix or of all parameters."""

    factor: float
    layer: bool = False

    def gradients(self, subject: Subject, n: int) -> None:
        for parameter in chosen(subject, self.layer):
            parameter.grad.mul_(self.factor)


@dataclass(frozen=True)
class GradientStale(Fault):
    """Uses gradients of the fault's first step again."""

    layer: bool

    def gradients(self, subject: Subject, n: int) -> None:
        found = chosen(subject, self.layer)
        if n == 0:
            subject.kept["gradients"] = [parameter.grad.clone() for parameter in found]
        for parameter, older in zip(found, subject.kept["gradients"], strict=True):
            parameter.grad.copy_(older)


@dataclass(frozen=True)
class GradientNoisy(Fault):
    """Adds noise as long as the gradient, times a factor."""

    factor: float
    layer: bool

    def gradients(self, subject: Subject, n: int) -> None:
        for number, parameter in enumerate(chosen(subject, self.layer)):
            noise = torch.randn(parameter.grad.shape, generator=subject.random(10_000 * number + n))
            length = parameter.grad.float().norm() / max(noise.norm(), 1e-30)
            parameter.grad.add_((noise * length * self.factor).to(parameter.grad.dtype))


@dataclass(frozen=True)
class GradientFlip(Fault):
    """Flips one bit of one element of one gradient in each step."""

    bit: int

    def gradients(self, subject: Subject, n: int) -> None:
        gradient = subject.matrix().grad
        place = next(subject.places(gradient, 1))
        Bits(gradient).flip_(place, self.bit)


@dataclass(frozen=True)
class GradientPart(Fault):
    """Leaves a part of the gradients out of the sum: those of the first `share` of the rows of each matrix."""

    share: float

    def gradients(self, subject: Subject, n: int) -> None:
        for parameter in subject.matrices():
            parameter.grad[: max(int(len(parameter) * self.share), 1)] = 0


@dataclass(frozen=True)
class Output(Fault):
    """Damages the output of one linear layer or convolution, in the step's first forward pass only.

    Attributes:
        damage: `element` flips a high exponent bit of one element; `tile` sets 8 x 8 elements to 0; `scaled`
            multiplies all by 1.1; `row` gives one sample the output of another.
    """

    damage: str

    def hooks(self, subject: Subject, n: int) -> list[RemovableHandle]:
        layers = [each for each in subject.model.modules() if isinstance(each, nn.Linear | nn.Conv2d)]
        layer = layers[subject.draw(len(layers))]
        return [layer.register_forward_hook(partial(self._spoil, subject, n, []))]

    def _spoil(self, subject: Subject, n: int, done: list[bool], module: nn.Module, inputs: Any, output: Tensor) -> Any:
        if done or not torch.is_grad_enabled():
            return output
        done.append(True)
        wrong = output.detach().clone().contiguous()
        DAMAGE[self.damage](wrong, subject, n)
        return output + (wrong - output).detach()  # the backward pass is right


def flip_element_(output: Tensor, subject: Subject, n: int) -> None:
    """Flips exponent bit 26, a factor of 256, up or down; in another element in each step."""
    Bits(output).flip_(subject.draw(output.numel(), 50 + n), 26)


def clear_tile_(output: Tensor, subject: Subject, n: int) -> None:
    """Clears one tile of 8 x 8 elements, of 64 x 64 in larger outputs."""
    flat = output.view(-1, output.shape[-1])
    side = 64 if flat.numel() > 2**14 else 8
    flat[:side, :side] = 0


def scale_(output: Tensor, subject: Subject, n: int) -> None:
    """Multiplies all elements by 1.1."""
    output.mul_(1.1)


def copy_row_(output: Tensor, subject: Subject, n: int) -> None:
    """Gives the first sample the output of the last."""
    output[0] = output[-1]


DAMAGE: dict[str, Callable[[Tensor, Subject, int], None]] = {
    "element": flip_element_,
    "tile": clear_tile_,
    "scaled": scale_,
    "row": copy_row_,
}


@dataclass(frozen=True)
class Update(Fault):
    """Multiplies the optimizer's update of one matrix, or of all: 0 loses it, 2 applies it twice, -1 turns it."""

    factor: float
    layer: bool = True

    def update(self, subject: Subject, n: int) -> AbstractContextManager:
        return self._around(subject)

    @contextlib.contextmanager
    def _around(self, subject: Subject) -> Iterator[None]:
        found = chosen(subject, self.layer)
        before = [parameter.detach().float().clone() for parameter in found]
        yield
        for parameter, old in zip(found, before, strict=True):
            parameter.data.copy_(old + self.factor * (parameter.detach().float() - old))
