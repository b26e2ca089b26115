"""Parts that test the diagnosis rules: written after the rules, as others write their models. See `parts.py`."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reliability.zoo.parts import Part


class SoftplusByHand(Part):
    """log(1 + exp(x)) of a large x."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        y = x.float().tanh() + (200.0 if late else 0.0)
        if self.mended:
            return F.softplus(y)
        return torch.log(1 + torch.exp(y))  # here


class DivergenceByHand(Part):
    """p log(p / q) after p has underflowed."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        p = torch.softmax(x.float().tanh() * (1e5 if late else 1.0), -1)
        if self.mended:
            p = p + 1e-8
        return (p * torch.log(p * p.shape[-1])).sum(-1, keepdim=True) + 0 * x  # here


class MaskTimesInfinity(Part):
    """(1 - mask) * -inf, which is NaN at entries with mask 1."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        keep = torch.ones(x.shape[-1])
        keep[0] = 0.0
        large = -1e4 if self.mended or not late else -math.inf
        return (x.float() + (1 - keep) * large).softmax(-1)  # here


class OwnBackward(Part):
    """A function with a custom backward, which divides by 0."""

    class Root(torch.autograd.Function):
        """sqrt(|x|)."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
            ctx.save_for_backward(x)
            ctx.eps = eps
            return x.abs().sqrt()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            (x,) = ctx.saved_tensors
            return gradient * x.sign() / (2 * x.abs().sqrt() + ctx.eps), None  # here

    def work(self, x: Tensor, late: bool) -> Tensor:
        return self.Root.apply(x.float() * (0.0 if late else 1.0), 1e-3 if self.mended else 0.0)


class TwinEigenvalues(Part):
    """Eigenvectors of equal eigenvalues: their derivative divides by the eigenvalues' difference."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        y = x.float().flatten(1)[:, :4]
        apart = torch.arange(4.0) if self.mended or not late else torch.ones(4)
        values, vectors = torch.linalg.eigh(y.T @ y * (0.0 if late else 1e-3) + torch.diag(apart))  # here
        return vectors.abs().sum() + values.sum() + 0 * x


class NothingAttended(Part):
    """Linear attention whose weights are all 0."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        p = F.relu(x.float().tanh() + (-2.0 if late else 2.0))
        total = p.sum(-1, keepdim=True)
        if self.mended:
            total = total + 1e-6
        return p / total  # here


class RemainderOfZero(Part):
    """An operation that the first rules did not cover."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        size = torch.ones(()) * (0.0 if late and not self.mended else 1.0)
        return torch.remainder(x.float(), size)  # here


class MeanOfTheChosen(Part):
    """The mean of an empty selection."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        chosen = x.float()[x.float() > (math.inf if late else -math.inf)]
        if self.mended:
            return chosen.sum() / max(chosen.numel(), 1) + 0 * x
        return chosen.mean() + 0 * x  # here


class LengthOfZero(Part):
    """x / |x| of a zero vector, as in a cosine similarity; there is no variance in it."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        x = x.float() * (0.0 if late else 1.0)
        length = x.norm(dim=-1, keepdim=True)
        if self.mended:
            length = length + 1e-6
        return x / length  # here


class CentredLength(Part):
    """(x - mean) / |x - mean|: division by a standard deviation, up to a constant factor."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        x = x.float() * (0.0 if late else 1.0)
        centred = x - x.mean(-1, keepdim=True)
        length = centred.norm(dim=-1, keepdim=True)
        if self.mended:
            length = length + 1e-6
        return centred / length  # here


class Contrast(Part):
    """exp of similarities divided by a small temperature."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        y = F.normalize(x.float().flatten(1), dim=-1)
        scores = y @ y.T / (1e-3 if late else 1.0)
        if self.mended:
            scores = scores - scores.amax(-1, keepdim=True).detach()
        return torch.log(torch.exp(scores).sum(-1)).mean() + 0 * x  # here


class RunningMaximum(Part):
    """-inf - -inf, from a running maximum before its first element."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        first = torch.full(x.shape[:-1], -1e30 if self.mended else -math.inf)
        top = first if late else torch.maximum(first, x.float().amax(-1))
        return torch.exp(first - top)[..., None] + 0 * x  # here


class WeightOfLengthZero(Part):
    """Weight normalization of a row of zeros."""

    def __init__(self, at: int, mended: bool) -> None:
        super().__init__(at, mended)
        self.register_buffer("rows", torch.eye(4))

    def work(self, x: Tensor, late: bool) -> Tensor:
        rows = self.rows * (1e-2 if self.mended else 0.0) if late else self.rows
        weight = torch._weight_norm(rows, torch.ones(4, 1), 0)  # here
        return F.linear(x.float().flatten(1)[:, :4], weight).mean() + 0 * x


class ScoresInHalf(Part):
    """Hand-written attention whose scores overflow autocast's fp16."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        y = x.float().flatten(1)[:, :16].tanh() + (150.0 if late else 1.0)
        with torch.autocast(x.device.type, enabled=torch.is_autocast_enabled(x.device.type) and not self.mended):
            scores = y @ y.T  # here
        return 1e-6 * scores.float().mean() + 0 * x


class CastOfLarge(Part):
    """An explicit cast to half that overflows in every precision of the run."""

    def work(self, x: Tensor, late: bool) -> Tensor:
        y = x.float().tanh() + (70000.0 if late else 1.0)
        return 1e-7 * (y if self.mended else y.half()).float()  # here


class CompressedGradient(Part):
    """Gradients that are cast to half and back."""

    class Send(torch.autograd.Function):
        """Identity whose gradient is rounded to half."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
            ctx.scale = scale
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return ((gradient.float() * ctx.scale).half().float() / ctx.scale).to(gradient.dtype), None  # here

    def work(self, x: Tensor, late: bool) -> Tensor:
        return self.Send.apply(x, 1e12 if late and not self.mended else 1.0)


class FailsOnce(nn.Module):
    """A kernel that returns a NaN once, but not when it is replayed."""

    def __init__(self, at: int, mended: bool) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`, once with a NaN."""
        self.calls += self.training
        return torch.where(torch.arange(x.shape[-1]) == 3, math.nan, x) if self.calls == self.at + 1 else x
