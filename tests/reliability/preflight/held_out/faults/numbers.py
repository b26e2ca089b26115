"""Numbers near the edge, an eps of another size, softmax inputs in the hundreds, and optimizers that do not survive."""

import torch
from torch import nn

from tests.reliability.preflight.held_out.loops import Diffusion, MultiTask, PlainDiffusion, QLearning, UNet, ViT
from tests.reliability.preflight.held_out.program import planted

# ---- near_range


class RawTime(UNet):
    """The time goes into the network as it is, from 0 to 45,000."""

    def embed_time(self, t):
        return self.time((45_000 * t[:, None]).expand(-1, 8))  # here


@planted("near_range", "inputs of time.0 reach 45,000 in fp16, whose largest number is 65,504", "time")
class LargeTime(Diffusion):
    """A time of up to 45,000 is the input of a layer in fp16 whose weights are tiny."""

    def unet(self):
        model = super().unet()
        model.__class__ = RawTime
        with torch.no_grad():
            model.time[0].weight.mul_(1e-4)
        return model


# ---- eps


@planted(
    "eps",
    "the input of middle.norm2 has a variance of 1e-11, far below eps=1e-5",
    *("down.norm", "middle.norm", "up.norm"),
)
class TinyBeforeGroupNorm(PlainDiffusion):
    """Convolutions with tiny weights before GroupNorm, whose eps is far above the variance."""

    def unet(self):
        model = super().unet()
        with torch.no_grad():
            for part in (model.down, model.middle, model.up):
                for each in (*part.conv1.parameters(), *part.time.parameters()):
                    each.mul_(1e-5)  # here
        return model


# ---- softmax_inputs


@planted("softmax_inputs", "attention scores reach hundreds: scale=1 and large queries and keys", "layers")
class FusedScores(ViT):
    """`scaled_dot_product_attention` with large queries and keys and no scale: no softmax is seen by its name."""

    def build_model(self):
        model = super().build_model()
        for layer in model.layers:
            layer.scale = 1.0  # here
            with torch.no_grad():
                layer.qkv.weight[:32].mul_(30)
        return model


# ---- zero_gradient


class LARS(torch.optim.Optimizer):
    """Layer-wise rates, with no guard for a gradient of 0."""

    def __init__(self, params, lr=0.01, trust=0.02):
        super().__init__(params, {"lr": lr, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                ratio = group["trust"] * (p.norm() + 1e-3) / p.grad.norm()  # here
                p.sub_(group["lr"] * ratio * p.grad)


@planted(
    "zero_gradient", "a step with zero gradients leaves NaN: LARS.step divides by their norm", *("LARS", "optimizers.0")
)
class LayerWise(MultiTask):
    """`LARS`."""

    def create_optimizers(self):
        return [LARS(self.model.parameters(), lr=1.0)]


# ---- huge_gradient


class Orthogonal(torch.optim.Optimizer):
    """Muon, whose Newton-Schulz iteration divides by a fixed number in place of the norm."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                x = buffer.view(len(p) if p.ndim > 1 else 1, -1) / 50  # here
                for _ in range(3):
                    x = 1.5 * x - 0.5 * (x @ x.T) @ x
                p.sub_(group["lr"] * x.view_as(p))


@planted(
    "huge_gradient",
    "a step with gradients of 1e10 leaves NaN: Orthogonal.step overflows",
    *("Orthogonal", "optimizers.0"),
)
class MuonNotNormalized(QLearning):
    """`Orthogonal`."""

    def build_optimizer(self, parameters):
        return Orthogonal(parameters)


# ---- zero_weights


class Projected(torch.optim.Optimizer):
    """Momentum without the part along the weights (AdamP), with no guard for weights of 0."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                unit = p / p.norm()  # here
                p.sub_(group["lr"] * (mean - unit * (unit * mean).sum()))


@planted(
    "zero_weights",
    "a step with weights of 0 leaves NaN: Projected.step divides by their norm",
    *("Projected", "optimizers.0"),
)
class WithoutRadialPart(QLearning):
    """`Projected`, with biases that begin at random."""

    def build_optimizer(self, parameters):
        for p in parameters:
            nn.init.normal_(p, std=0.2)
        return Projected(parameters)
