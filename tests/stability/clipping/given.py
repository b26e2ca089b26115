"""Shared values of the clipping tests: a small model with given gradients, and every kind by name."""

import torch
from torch import Tensor, nn

from stabletrain.monitors.tensor_norms import measure
from stabletrain.records import Clipped
from stabletrain.stability.clipping import (
    AGC,
    AdaGC,
    NoClip,
    NormClip,
    PerModuleClip,
    UpdateNormClip,
    ValueClip,
    ZClip,
)

OPEN, CLOSED = torch.tensor(True), torch.tensor(False)

KINDS = {
    "none": NoClip,
    "norm": lambda: NormClip(1.0),
    "value": lambda: ValueClip(0.05),
    "per_module": lambda: PerModuleClip(0.5),
    "agc": AGC,
    "zclip": lambda: ZClip(max_norm=5.0, warmup_steps=5),
    "adagc": lambda: AdaGC(max_norm=5.0, warmup_steps=5),
    "update_norm": lambda: UpdateNormClip(z_threshold=1.5, warmup_steps=5),
}
"""Every option of the group; bounds and warm-ups let twelve steps of gradients around norm 1 reach each branch."""

TIGHT = {
    "none": NoClip,
    "norm": lambda: NormClip(0.05),
    "value": lambda: ValueClip(0.02),
    "per_module": lambda: PerModuleClip(0.05),
    "agc": lambda: AGC(0.01, 1e-3),
    "zclip": lambda: ZClip(max_norm=0.05, warmup_steps=2),
    "adagc": lambda: AdaGC(max_norm=0.05, warmup_steps=2),
    "update_norm": lambda: UpdateNormClip(z_threshold=1e-3, alpha=0.1, warmup_steps=2),
}
"""The same options, with bounds far below the gradient norms of the tests' tiny models, so that every one clips.

`update_norm` clips every update that is longer than those just before it.
"""


class Small(nn.Module):
    """An embedding, a convolution with a bias, a norm, a scalar gain and a classifier."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.conv = nn.Conv2d(2, 3, 2)
        self.norm = nn.LayerNorm(4)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(4, 5)


def small(seed=0) -> Small:
    """Returns the model with weights from `seed`."""
    torch.manual_seed(seed)
    return Small()


def give(model: nn.Module, norm: float, seed: int = 0) -> None:
    """Puts random gradients into `.grad`, of the given global norm."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
    length = torch.cat([g.flatten() for g in drawn]).double().norm()
    for parameter, gradient in zip(model.parameters(), drawn, strict=True):
        parameter.grad = (gradient.double() * (norm / length)).to(parameter.dtype)


def grads(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients in float64, by name."""
    return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}


def flat(model: nn.Module) -> Tensor:
    """All gradients as one float64 vector."""
    return torch.cat([g.flatten() for g in grads(model).values()])


def clip(kind, model, gate=OPEN):
    """Calls the kind as the step does."""
    return as_tensors(called(kind, model, measure(model), gate))


def called(kind, model, norms, gate=OPEN):
    """Calls the kind, then its `scale_update` as an optimizer does whose update is the gradient."""
    clipped = kind(model, norms, gate)
    if clipped.scale_update is not None:
        factor = clipped.scale_update(lambda: norms.total, gate)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= factor
    return clipped


def as_tensors(clipped):
    """Returns the report with every number as a tensor."""
    coef = torch.as_tensor(clipped.coef, dtype=torch.float32)
    active = (coef < 1).float() if clipped.active is None else torch.as_tensor(clipped.active)
    return Clipped(coef, active)


def one_step(kind, model, norm, seed=0, gate=OPEN):
    """Sets gradients of this norm and clips them."""
    give(model, norm, seed)
    return clip(kind, model, gate)


def equal_trees(one, other) -> bool:
    """Returns whether two states are bitwise equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_trees(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def tensors(tree) -> list[Tensor]:
    """Every tensor of a state."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in tensors(value)]
    return [tree] if isinstance(tree, Tensor) else []
