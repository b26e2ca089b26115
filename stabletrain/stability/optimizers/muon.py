"""Muon for the hidden matrices, AdamW for everything else, as one optimizer.

    B <- momentum B + (1 - momentum) g
    w <- w - lr (0.2 sqrt(max(rows, columns)) orthogonal(B, or Nesterov's) + decay w)

`orthogonal` brings every singular value near 1 with `ns_steps` Newton-Schulz iterations in bf16. No direction of the
update dominates the others, and a gradient spike does not make the update larger. The factor 0.2 sqrt(...) gives the
update AdamW's usual RMS of 0.2, so that both optimizers share one learning rate and one weight decay (Liu et al., arXiv
2502.16982, section 2.2). Embeddings, the final classifier, norms and biases stay with AdamW, as in Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.stability.optimizers.gated import copies, gate, write_where_
from stabletrain.stability.parameter_roles import (
    check_moments,
    check_momentum,
    check_rates,
    classifier,
    decay_per_rate,
    decayed,
    embeddings,
)


@dataclass(frozen=True)
class Muon:
    """`torch.optim.Muon` for the hidden matrices and `torch.optim.AdamW` for the other parameters.

    Attributes:
        lr: peak learning rate of both; warmup and schedule multiply it.
        momentum: Muon's momentum, in [0, 1).
        nesterov: whether Muon uses Nesterov momentum; requires `momentum` above 0.
        ns_steps: Newton-Schulz iterations, in [1, 99].
        betas: AdamW's betas, each in [0, 1).
        eps: AdamW's eps, above 0.
        weight_decay: decoupled weight decay of both, at least 0.
        decay: `coupled` multiplies the weight decay by the learning rate, `independent` by warmup and schedule only.
    """

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_steps: int
    betas: Sequence[float]
    eps: float
    decay: str = "coupled"

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        check_moments(self.betas, self.eps)
        decay_per_rate(self.lr, self.weight_decay, self.decay)
        check_momentum(self.momentum, self.nesterov, 0.95)
        if not 1 <= self.ns_steps <= 99:
            raise ConfigError(f"optimizer.ns_steps={self.ns_steps} is outside [1, 99]: 5 is customary")

    def __call__(self, model: nn.Module) -> Optimizer:
        """Returns the optimizer over `model`'s trainable parameters.

        Raises:
            ConfigError: the model has no hidden matrix.
        """
        matrices = hidden_matrices(model)
        if not matrices:
            raise ConfigError(
                f"optimizer=muon: {type(model).__name__} has no hidden matrix (the weight of an nn.Linear other than "
                "the final classifier; convolution kernels do not count): use optimizer=sgd or optimizer=adamw"
            )
        per_rate = decay_per_rate(self.lr, self.weight_decay, self.decay)
        orthogonal = {"momentum": self.momentum, "nesterov": self.nesterov, "ns_steps": self.ns_steps}
        adaptive = {"betas": (self.betas[0], self.betas[1]), "eps": self.eps, "fused": True}
        hidden = {"params": matrices, "weight_decay": per_rate, "adjust_lr_fn": "match_rms_adamw", **orthogonal}
        rest = [group | adaptive for group in decayed(model, per_rate, leave_out=matrices)]
        return MuonAndAdamW([hidden], rest, self.lr)


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Returns the trainable weights of `nn.Linear` layers, except the classifier and weights tied to an embedding."""
    last = classifier(model)
    apart = {id(module.weight) for module in [*embeddings(model), last] if module is not None}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not last]
    weights = {linear.weight: None for linear in linears if isinstance(linear.weight, nn.Parameter)}  # each once
    return [weight for weight in weights if weight.requires_grad and id(weight) not in apart]


class MuonAndAdamW(Optimizer):
    """PyTorch's Muon and AdamW behind one list of parameter groups and one state.

    A group belongs to Muon if it has the key `ns_steps`. A hidden matrix whose update is not finite keeps its bits, and
    those of its momentum.
    """

    _step_supports_amp_scaling = True

    def __init__(self, hidden: list[dict[str, Any]], rest: list[dict[str, Any]], lr: float) -> None:
        """Takes Muon's groups (`hidden`) and AdamW's (`rest`), with the options of each optimizer."""
        own = torch.optim.Muon(hidden, lr=lr), *([torch.optim.AdamW(rest, lr=lr)] if rest else [])
        super().__init__([group for optimizer in own for group in optimizer.param_groups], {})
        self.defaults = {key: None for group in self.param_groups for key in group if key != "params"}
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Shares groups and state again: loading and copying replace them."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        # Both optimizers work on this optimizer's group dicts and state, so changes to either are seen by all.
        hidden = [group for group in self.param_groups if "ns_steps" in group]
        rest = [group for group in self.param_groups if "ns_steps" not in group]
        self._muon = torch.optim.Muon(hidden) if hidden else None
        self._adamw = torch.optim.AdamW(rest) if rest else None
        for optimizer in filter(None, (self._muon, self._adamw)):
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Updates every parameter that has a gradient; changes nothing if `found_inf` is 1."""
        if self._muon is not None:
            self._orthogonal_step(self._muon)
        if self._adamw is not None:
            self._adamw.found_inf = getattr(self, "found_inf", None)  # ty: ignore[missing-attribute]
            self._adamw.step()

    def _orthogonal_step(self, muon: torch.optim.Muon) -> None:
        weights = [p for group in muon.param_groups for p in group["params"] if p.grad is not None]
        if not weights:
            return
        for weight in weights:
            self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
        # PyTorch's Muon takes no gate, so keep a copy and restore it if the update is to be skipped.
        changed: list[Tensor] = [*weights, *(self.state[weight]["momentum_buffer"] for weight in weights)]
        before = copies(changed)
        muon.step()
        # Newton-Schulz in bf16 diverges if rounding leaves a singular value above 1.26; nothing proves that it cannot.
        largest = torch.stack([*torch._foreach_norm(changed, math.inf)]).view(2, -1)  # of each weight, of its momentum
        skipped = ~(gate(self, weights[0].device) & largest.isfinite().all(dim=0))
        for tensor, old, where in zip(changed, before, [*skipped, *skipped], strict=True):
            write_where_([tensor], [old], where)
