"""Optimizers whose step is not finite on zero gradients, on huge ones, or on weights that are 0."""

import torch
from torch import Tensor

from tests.reliability.preflight.faults.fault import Fault


class Own(torch.optim.Optimizer):
    """An optimizer of a user's own: `change` returns what is added to a parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.change(parameter, parameter.grad, self.state[parameter]), alpha=-group["lr"])

    def change(self, weight: Tensor, gradient: Tensor, state: dict) -> Tensor:
        """Returns the direction of the step."""
        raise NotImplementedError


class Uses(Fault):
    """A loop with an optimizer of the user's own."""

    optimizer: type[Own]
    lr = 1e-2

    def make_optimizers(self):
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizers, self.schedulers = [self.optimizer(parameters, self.lr)], []


# ---- 0 / 0 on zero gradients


class AdamWithoutEps(Own):
    """Adam, with no eps."""

    def change(self, weight, gradient, state):
        mean = state.setdefault("mean", torch.zeros_like(weight)).lerp_(gradient, 0.1)
        square = state.setdefault("square", torch.zeros_like(weight)).lerp_(gradient.square(), 0.01)
        return mean / square.sqrt()  # here


class Normalized(Own):
    """A step of one length."""

    def change(self, weight, gradient, state):
        return gradient / gradient.norm()  # here


class Factored(Own):
    """Second moments by row and column, as in Adafactor, with no eps."""

    def change(self, weight, gradient, state):
        square = gradient.square()
        if gradient.ndim < 2:
            return gradient / (square.sqrt() + 1e-8)
        rows, columns = square.flatten(1).mean(1), square.flatten(1).mean(0)
        return gradient / (rows[:, None] * columns / rows.mean()).sqrt().view_as(gradient)  # here


class NoEps(Uses):
    """`AdamWithoutEps`."""

    kind, loops, optimizer = "zero_gradient", ("mlp", "vae"), AdamWithoutEps
    says = "a step with zero gradients leaves NaN: AdamWithoutEps.change divides 0 by 0"
    points_at = ("AdamWithoutEps", "optimizers.0")


class UnitStep(Uses):
    """`Normalized`."""

    kind, loops, optimizer = "zero_gradient", ("gpt", "contrastive"), Normalized
    says = "a step with zero gradients leaves NaN: Normalized.change divides by a norm of 0"
    points_at = ("Normalized", "optimizers.0")


class RowsAndColumns(Uses):
    """`Factored`."""

    kind, loops, optimizer = "zero_gradient", ("mlp", "finetune"), Factored
    says = "a step with zero gradients leaves NaN: Factored.change divides by a mean of 0"
    points_at = ("Factored", "optimizers.0")


# ---- overflow on huge gradients


class FourthPower(Own):
    """Divides by the fourth root of the mean fourth power."""

    def change(self, weight, gradient, state):
        fourth = state.setdefault("fourth", torch.zeros_like(weight)).lerp_(gradient.pow(4), 0.1)  # here
        return gradient / (fourth.sqrt().sqrt() + 1e-4)


class ExponentialWeight(Own):
    """Weights the step by a softmax of the gradients' sizes, written by hand."""

    def change(self, weight, gradient, state):
        size = gradient.abs().exp()  # here
        return gradient * size / size.sum()


class HalfMoments(Own):
    """Keeps the second moment in fp16, to save memory."""

    def change(self, weight, gradient, state):
        square = state.setdefault("square", torch.zeros_like(weight, dtype=torch.float16))
        square.mul_(0.9).add_((0.1 * gradient.square()).half())  # here
        return gradient / (square.float().sqrt() + 1e-3)


class Quartic(Uses):
    """`FourthPower`."""

    kind, loops, optimizer = "huge_gradient", ("mlp", "cnn"), FourthPower
    says = "a step with gradients of 1e10 leaves Inf in the state: FourthPower.change overflows"
    points_at = ("FourthPower", "optimizers.0")


class BySize(Uses):
    """`ExponentialWeight`."""

    kind, loops, optimizer = "huge_gradient", ("mlp", "accumulation"), ExponentialWeight
    says = "a step with gradients of 1e10 leaves NaN: ExponentialWeight.change overflows"
    points_at = ("ExponentialWeight", "optimizers.0")


class SmallState(Uses):
    """`HalfMoments`."""

    kind, loops, optimizer = "huge_gradient", ("gpt", "vae"), HalfMoments
    says = "a step with gradients of 1e10 leaves Inf in the state: HalfMoments.change overflows in fp16"
    points_at = ("HalfMoments", "optimizers.0")


# ---- division by weights that are 0


class TrustRatio(Own):
    """A layer-wise rate, with the ratio the wrong way round."""

    def change(self, weight, gradient, state):
        return 1e-3 * gradient * gradient.norm() / weight.norm()  # here


class KeepsNorm(Own):
    """Steps, and restores the norm of the weights."""

    def change(self, weight, gradient, state):
        moved = weight - 0.1 * weight.norm() * gradient
        return weight - moved * (weight.norm() / moved.norm())  # here


class RelativeStep(Own):
    """Bounds the norm of the step relative to the weights."""

    def change(self, weight, gradient, state):
        relative = gradient / weight  # here
        return weight * relative / (relative.norm() / 100).clamp(min=1)


class ByWeightNorm(Uses):
    """`TrustRatio`."""

    kind, loops, optimizer = "zero_weights", ("mlp", "accumulation"), TrustRatio
    says = "a step with weights of 0 leaves Inf: TrustRatio.change divides by their norm"
    points_at = ("TrustRatio", "optimizers.0")


class NormRestored(Uses):
    """`KeepsNorm`."""

    kind, loops, optimizer, lr = "zero_weights", ("mlp", "contrastive"), KeepsNorm, 1.0
    says = "a step with weights of 0 leaves NaN: KeepsNorm.change divides by the norm of what it moved"
    points_at = ("KeepsNorm", "optimizers.0")


class Relative(Uses):
    """`RelativeStep`."""

    kind, loops, optimizer = "zero_weights", ("mlp", "vae"), RelativeStep
    says = "a step with weights of 0 leaves NaN: RelativeStep.change divides by them"
    points_at = ("RelativeStep", "optimizers.0")
