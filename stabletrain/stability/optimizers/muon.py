"""Muon for the hidden matrices, AdamW for everything else, as one optimizer.

    B <- momentum B + (1 - momentum) g
    w <- w - lr (scale orthogonal(B, or Nesterov's) + decay w)

`orthogonal` brings every singular value near 1 with `ns_steps` Newton-Schulz iterations in bf16. No direction of the
update dominates the others, and a gradient spike does not make the update larger. Embeddings, the final classifier,
norms and biases stay with AdamW, as in Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.

`scale` depends on the shape of the matrix, m rows and n columns:

    match_rms:  0.2 sqrt(max(m, n))   AdamW's usual RMS of 0.2, so that both optimizers share one learning rate and one
                                      weight decay (Moonlight, arXiv 2502.16982, section 2.2; Kimi K2, arXiv 2507.20534)
    original:   sqrt(max(1, m / n))   Jordan's, also in nanochat and modded-nanogpt
    spectral:   sqrt(m / n)           a bounded change of the features' RMS (Bernstein, jeremybernste.in/writing/
                                      deriving-muon); the last two need learning rates of about 0.02

With `per_head`, each head's rows of the query, key and value projections are a matrix of their own: the update of one
head does not depend on the gradients of others. GLM-5 (arXiv 2602.15763) calls this Muon Split; Zhang et al., arXiv
2605.08933, compare groups of heads.

The momentum may rise from `momentum_low` in the first `momentum_warmup` steps, and fall back in the last
`momentum_cooldown` steps (modded-nanogpt: 0.85, 300 and 50). It is a function of the step number, as the learning rate
is, so that a resumed or replayed step has the same momentum; skipped steps count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import BFloat16, Bool, Float
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.parallel.owners import MatrixWork, Owners, owners_of
from stabletrain.stability.optimizers.adamw import adamw_update
from stabletrain.stability.optimizers.gated import GatedOptimizer, Update, gate, update_weights_, write_where_
from stabletrain.stability.parameter_roles import (
    NO_DECAY,
    WeightDecay,
    check_moments,
    check_momentum,
    check_rates,
    classifier,
    embeddings,
)
from stabletrain.stability.schedule import MOMENTUM_SCHEDULE, PEAK_MOMENTUM

SCALES = {"match_rms": "match_rms_adamw", "original": "original", "spectral": "spectral_unclamped"}
"""The names of `optimizer.scale`, and those of `torch.optim.Muon`, which parameter groups and checkpoints have."""


@dataclass(frozen=True)
class Muon:
    """Muon for the hidden matrices and AdamW for the other parameters.

    Attributes:
        lr: peak learning rate of both; warmup and schedule multiply it.
        momentum: Muon's momentum, in [0, 1).
        nesterov: whether Muon uses Nesterov momentum; requires `momentum` above 0.
        ns_steps: Newton-Schulz iterations, in [1, 99].
        betas: AdamW's betas, each in [0, 1).
        eps: AdamW's eps, above 0.
        weight_decay: decoupled weight decay of both, at least 0.
        decay: kind of weight decay, see `parameter_roles.py`.
        no_decay: roles of parameters without weight decay.
        cautious_decay: whether only those weights decay that the update moves towards 0 as well, see `gated.cautious`.
        scale: `match_rms`, `original` or `spectral`.
        per_head: whether each head of the query, key and value projections is orthogonalised by itself.
        momentum_low: momentum at the start of its warmup and at the end of its cooldown, in [0, momentum).
        momentum_warmup: steps in which the momentum rises from `momentum_low`; 0 for none.
        momentum_cooldown: last steps of the run, in which it falls back; 0 for none.
        shows_update: whether `clipping` scales the update. Set by the trainer.
    """

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_steps: int
    betas: Sequence[float]
    eps: float
    decay: str = "coupled"
    no_decay: Sequence[str] = NO_DECAY
    cautious_decay: bool = False
    scale: str = "match_rms"
    per_head: bool = False
    momentum_low: float = 0.85
    momentum_warmup: int = 0
    momentum_cooldown: int = 0
    shows_update: bool = False

    def __post_init__(self) -> None:
        check_rates(self.lr, self.weight_decay)
        check_moments(self.betas, self.eps)
        WeightDecay(self.weight_decay, self.decay, self.no_decay)
        check_momentum(self.momentum, self.nesterov, 0.95)
        if not 1 <= self.ns_steps <= 99:
            raise ConfigError(f"optimizer.ns_steps={self.ns_steps} is outside [1, 99]: 5 is customary")
        if self.scale not in SCALES:
            raise ConfigError(f"optimizer.scale={self.scale} is unknown: choose {' or '.join(SCALES)}")
        for name in ("momentum_warmup", "momentum_cooldown"):
            if (steps := getattr(self, name)) < 0:
                raise ConfigError(f"optimizer.{name}={steps} is below 0: use 0 for none")
        if not self.momentum_steps and self.momentum_low != 0.85:
            raise ConfigError(
                f"optimizer.momentum_low={self.momentum_low} does nothing without optimizer.momentum_warmup or "
                "optimizer.momentum_cooldown; fix: optimizer.momentum_warmup=300, or leave it out"
            )
        if self.momentum_steps and not 0 <= self.momentum_low < self.momentum:
            raise ConfigError(
                f"optimizer.momentum_low={self.momentum_low} is outside [0, optimizer.momentum={self.momentum}): the "
                "momentum rises from it; 0.85 is customary"
            )

    @property
    def momentum_steps(self) -> int:
        """Number of steps in which the momentum changes."""
        return self.momentum_warmup + self.momentum_cooldown

    def __call__(self, model: nn.Module) -> "MuonAndAdamW":
        """Returns the optimizer over `model`'s trainable parameters.

        Raises:
            ConfigError: the model has no hidden matrix; or `per_head`, and no matrix of it has heads.
        """
        matrices = hidden_matrices(model)
        if not matrices:
            raise ConfigError(
                f"optimizer=muon: {type(model).__name__} has no hidden matrix (the weight of an nn.Linear other than "
                "the final classifier; convolution kernels do not count): use optimizer=sgd or optimizer=adamw"
            )
        heads = heads_of(model) if self.per_head else {}
        if self.per_head and not heads:
            raise ConfigError(
                f"optimizer.per_head=true: no module of {type(model).__name__} has a method `heads()` that names the "
                "matrices with heads; fix: optimizer.per_head=false"
            )
        decay = WeightDecay(self.weight_decay, self.decay, self.no_decay)
        own = decay.options(decay.is_corrected("matrices"), self.lr) | self.orthogonal()
        hidden = [
            {"params": [matrix for matrix in matrices if heads.get(matrix, 1) == number], "heads": number, **own}
            for number in sorted({heads.get(matrix, 1) for matrix in matrices})
        ]
        adaptive = {"betas": (self.betas[0], self.betas[1]), "eps": self.eps, "fused": True}
        rest = [group | adaptive for group in decay.groups(model, self.lr, leave_out=matrices)]
        return MuonAndAdamW(hidden, rest, self.lr, self.cautious_decay, self.shows_update)

    def orthogonal(self) -> dict[str, Any]:
        """Returns the options of Muon's groups besides learning rate and weight decay."""
        options = {"momentum": self.momentum, "nesterov": self.nesterov, "ns_steps": self.ns_steps}
        options["adjust_lr_fn"] = SCALES[self.scale]
        if self.momentum_steps:
            lines = {"warmup": self.momentum_warmup, "cooldown": self.momentum_cooldown}
            options |= {PEAK_MOMENTUM: self.momentum, MOMENTUM_SCHEDULE: {"low": self.momentum_low, **lines}}
        return options


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Returns the trainable weights of `nn.Linear` layers, except the classifier and weights tied to an embedding."""
    last = classifier(model)
    apart = {id(module.weight) for module in [*embeddings(model), last] if module is not None}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not last]
    weights = {linear.weight: None for linear in linears if isinstance(linear.weight, nn.Parameter)}  # each once
    return [weight for weight in weights if weight.requires_grad and id(weight) not in apart]


def heads_of(model: nn.Module) -> dict[Tensor, int]:
    """Returns the matrices whose rows are those of one head after another, with their number of heads."""
    found: dict[Tensor, int] = {}
    for module in model.modules():
        if callable(heads := getattr(module, "heads", None)):
            found |= heads()
    return found


LARGEST_DIRECTION = 1e6
"""Bound of each value of an orthogonal direction; converged, all are below 1.3."""


class MuonAndAdamW(GatedOptimizer):
    """Muon and PyTorch's AdamW behind one list of parameter groups and one state.

    A group belongs to Muon if it has the key `ns_steps`. Its state is `momentum_buffer`, as in `torch.optim.Muon`. A
    hidden matrix without a finite direction keeps its bits, and those of its momentum.

    Attributes:
        owners: how the ranks divide the matrices that are whole on each of them; set by the trainer.
    """

    owners = Owners()

    def __init__(
        self,
        hidden: list[dict[str, Any]],
        rest: list[dict[str, Any]],
        lr: float,
        cautious: bool = False,
        shown: bool = False,
    ) -> None:
        """Takes Muon's groups (`hidden`) and AdamW's (`rest`), with the options of each optimizer.

        Args:
            cautious: whether weight decay is cautious.
            shown: whether `scale_update` may scale the update. Without both, AdamW is PyTorch's fused kernel.
        """
        own = torch.optim.Muon(hidden, lr=lr), *([torch.optim.AdamW(rest, lr=lr)] if rest else [])
        both = {"cautious": cautious, "shown": shown or cautious}
        super().__init__([group | both for optimizer in own for group in optimizer.param_groups], {})
        self.defaults = {key: None for group in self.param_groups for key in group if key != "params"}
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Shares groups and state again: loading and copying replace them."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        # AdamW works on this optimizer's group dicts and state, so changes to either are seen by both.
        rest = [group for group in self.param_groups if "ns_steps" not in group]
        self._adamw = torch.optim.AdamW(rest) if rest else None
        if self._adamw is not None:
            self._adamw.state = self.state

    def computed_elsewhere(self) -> list[Tensor]:
        """Returns the weights whose update this rank cannot compute by itself, or leaves to another rank."""
        return [
            each.weight
            for owners, some in self._hidden()
            for each, alone in zip(some, owners.alone([each.cost for each in some]), strict=True)
            if not alone
        ]

    def _hidden(self) -> list[tuple[Owners, list["HiddenMatrix"]]]:
        """The hidden matrices that have a gradient, and how their work is divided among the ranks."""
        found: dict[Owners, list[HiddenMatrix]] = {}
        for group in self.param_groups:
            for weight in group["params"] if "ns_steps" in group else ():
                if weight.grad is not None:
                    found.setdefault(owners_of(weight, self.owners), []).append(HiddenMatrix(weight, group))
        return [*found.items()]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # ty: ignore[incompatible-method-override]
        """Updates every parameter that has a gradient; changes nothing if `found_inf` is 1."""
        shown = any(group.get("shown", False) for group in self.param_groups)
        updates = []
        for owners, some in self._hidden():
            for each in some:
                each.begin(self.state[each.weight])
            # With several ranks, each runs Newton-Schulz for some of the matrices, and gets its rows of the others.
            for each, direction in zip(some, owners.results([each.work() for each in some]), strict=True):
                update = each.write(direction, gate(self, direction.device), shown)
                updates += [] if update is None else [update]
        rest = [group for group in self.param_groups if "ns_steps" not in group] if shown else []
        updates += [update for group in rest if (update := adamw_update(self, group)) is not None]
        update_weights_(self, updates)
        if self._adamw is not None and not shown:
            self._adamw.found_inf = getattr(self, "found_inf", None)  # ty: ignore[missing-attribute]
            self._adamw.step()


class HiddenMatrix:
    """A hidden matrix in a step of Muon; of a sharded one, this rank's rows."""

    def __init__(self, weight: Any, group: dict[str, Any]) -> None:
        self.weight, self._group, self._heads = weight, group, group.get("heads", 1)
        short, long = sorted((weight.shape[0] // self._heads, weight.shape[1]))
        # Of the products in Newton-Schulz, in multiply-adds.
        self.cost = self._heads * group["ns_steps"] * (2 * short * short * long + short**3)
        self._sharded = hasattr(weight, "to_local")

    def begin(self, state: dict[str, Any]) -> None:
        """Creates the momentum at the first step."""
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(self.weight)
        both: list[Any] = [self.weight.grad, state["momentum_buffer"]]
        self._gradient, self._before = (each.to_local() if self._sharded else each for each in both)
        self._after: Tensor | None = None

    def work(self) -> MatrixWork:
        """Returns the work of finding the direction of its update."""
        return MatrixWork(tuple(self.weight.shape), self.weight.device, self.cost, self._ahead, self._direct)

    def _momentum(self) -> Tensor:
        """The momentum with this step's gradient."""
        if self._after is None:
            self._after = self._before.lerp(self._gradient, 1 - self._group["momentum"])
        return self._after

    def _ahead(self) -> BFloat16[Tensor, "rows columns"]:
        """What Newton-Schulz is applied to."""
        momentum = self._momentum()
        ahead = self._gradient.lerp(momentum, self._group["momentum"]) if self._group["nesterov"] else momentum
        return ahead.bfloat16()

    def _direct(self, ahead: BFloat16[Tensor, "rows columns"]) -> BFloat16[Tensor, "rows columns"]:
        """Orthogonalises the whole matrix, or each of its heads."""
        heads = self._heads
        direction = orthogonal(ahead.unflatten(0, (heads, -1)) if heads > 1 else ahead, self._group["ns_steps"])
        direction = direction.flatten(end_dim=-2)
        if self._sharded:  # no rank that gets some of its rows could judge all of them
            direction = direction.where(torch.linalg.vector_norm(direction, math.inf) <= LARGEST_DIRECTION, math.nan)
        return direction

    def write(self, direction: BFloat16[Tensor, "rows columns"], gate: Bool[Tensor, ""], shown: bool) -> Update | None:
        """Writes the momentum, and the weight unless `shown`: then it returns the update that is to be subtracted."""
        weight = self.weight.to_local() if self._sharded else self.weight
        # Newton-Schulz in bf16 diverges if rounding leaves a singular value above 1.26; nothing proves that it cannot.
        # NaN and Inf in the momentum reach the direction too, so this judges both.
        able = gate
        if direction.numel():
            able = gate & (torch.linalg.vector_norm(direction, math.inf) <= LARGEST_DIRECTION)
        write_where_([self._before], [self._momentum()], able)
        self._after = None
        lr = self._group["lr"]
        rate, decay = lr * scale_of(self._group, self.weight), lr * self._group["weight_decay"]
        if not shown:
            write_where_([weight], [weight.mul(1 - decay).add_(direction, alpha=-rate)], able)
            return None
        # With the strides of the weight: the fused kernel that subtracts it reads memory in order. And what is held
        # back counts as 0 in the norm of the whole update.
        amount = torch.empty_like(weight).copy_(torch.where(able, direction, 0.0)).mul_(rate)
        return Update([self.weight], [amount], lr, decay, self._group["cautious"], (~able).float())


COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of Newton-Schulz's polynomial: a x + b x^3 + c x^5 (Jordan et al. 2024)."""

SMALLEST_NORM = 1e-7
"""Smaller norms count as this one: the direction of a zero gradient is 0, and that of a tiny one is small."""


def orthogonal(x: Float[Tensor, "*batch rows columns"], steps: int) -> BFloat16[Tensor, "*batch rows columns"]:
    """Returns matrices with the singular vectors of `x` and with singular values near 1.

    Its operations are those of `torch.optim.Muon`, bit for bit, for a single matrix. Matrices of several parameters are
    not stacked: the bits of a batched product may depend on the number of matrices, and the guard repeats the update of
    one parameter to find faults of the hardware (`guard/checks/recheck.py`).
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    y = x.bfloat16()
    y = y.mT if tall else y
    added = torch.addmm if y.ndim == 2 else torch.baddbmm
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = y @ y.mT
        y = added(y, added(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y


def scale_of(group: dict[str, Any], weight: Tensor) -> float:
    """Returns the factor of a matrix's direction; with heads, that of one head's rows."""
    rows, columns = weight.shape[0] // group.get("heads", 1), weight.shape[1]
    return {
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
        "spectral_unclamped": math.sqrt(rows / columns),
    }.get(group["adjust_lr_fn"], math.sqrt(max(1, rows / columns)))
