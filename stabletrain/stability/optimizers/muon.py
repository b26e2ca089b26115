"""Muon for the hidden matrices, AdamW for everything else, as one optimizer.

    W <- W - lr_t weight_decay W - 0.2 sqrt(max(rows, columns)) lr_t orthogonalised(momentum)

Every direction of a matrix is then moved alike, however its gradient is conditioned. The factor gives an update the RMS
of AdamW's, so that one learning rate serves both. PyTorch's own `torch.optim.Muon` does it, by five Newton-Schulz
iterations in bf16. Sources: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; the factor
and the weight decay from Liu et al., arXiv 2502.16982, section 2.2.

Hidden matrices are the weights of `nn.Linear` that are neither shared with an embedding nor the classifier. Embeddings,
norms, biases, the head, and convolution kernels are AdamW's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from stabletrain.errors import ConfigError
from stabletrain.stability.optimizers.groups import check_adam, check_rates, coupled_decay, decayed
from stabletrain.stability.roles import classifier, embeddings


class MuonWithAdamW(Optimizer):
    """Two optimizers that share one state and one list of groups, Muon's first."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        groups = [*muon.param_groups, *adamw.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {**muon.defaults, **adamw.defaults})
        self.param_groups = groups  # the very dictionaries that the two step with
        muon.state = adamw.state = self.state
        self._parts = muon, adamw

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Both take their step."""
        del closure
        for part in self._parts:
            part.step()


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights that Muon is for, in the model's order."""
    others = [*embeddings(model), *([] if (last := classifier(model)) is None else [last])]
    excluded = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weights = {module.weight: None for module in linears if isinstance(module.weight, nn.Parameter)}  # each once
    return [weight for weight in weights if weight.requires_grad and id(weight) not in excluded]


@dataclass(frozen=True)
class Muon:
    """Muon, with AdamW for what is no hidden matrix.

    Attributes:
        lr: peak learning rate of both.
        weight_decay: decoupled from the gradient.
        momentum: Muon's, in [0, 1).
        nesterov: Muon's momentum looks ahead.
        ns_steps: Newton-Schulz iterations, at least 1.
        betas: AdamW's.
        eps: AdamW's.
        decay: `coupled` to the learning rate, or `independent` of it; see `groups.py`.
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
        check_rates(self.lr, self.weight_decay, self.decay)
        check_adam(self.betas, self.eps)
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optimizer.momentum={self.momentum} is outside [0, 1): 0.95 is customary")
        if self.nesterov and not self.momentum:
            raise ConfigError("optimizer.nesterov=true with optimizer.momentum=0 does nothing: set a momentum")
        if not 1 <= self.ns_steps < 100:
            raise ConfigError(f"optimizer.ns_steps={self.ns_steps} is outside [1, 100): 5 is customary")

    def __call__(self, model: nn.Module) -> Optimizer:
        """The optimizer over `model`'s trained parameters.

        Raises:
            ConfigError: the model has nothing that Muon is for.
        """
        matrices = hidden_matrices(model)
        if not matrices:
            raise ConfigError(
                f"optimizer=muon: {type(model).__name__} has no hidden matrices, only kernels, norms and a classifier, "
                "which would all be AdamW's: use optimizer=adamw or optimizer=sgd"
            )
        weight_decay = coupled_decay(self.weight_decay, self.decay, self.lr)
        muon = torch.optim.Muon(
            matrices,
            lr=self.lr,
            weight_decay=weight_decay,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        rest = torch.optim.AdamW(
            decayed(model, weight_decay, without=matrices),
            lr=self.lr,
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
            fused=True,
        )
        return MuonWithAdamW(muon, rest)
