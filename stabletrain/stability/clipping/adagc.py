"""AdaGC: each tensor's gradient is shortened to little more than its own recent norms.

    g_i <- g_i * min(1, growth * gamma_i / |g_i|),      gamma_i <- beta gamma_i + (1 - beta) |g_i|

with the clipped |g_i|. In the first `warmup_steps` steps the whole gradient is clipped to `max_norm` instead, and
gamma_i is the least clipped norm so far: the average then starts from the calm steps, not from those after init.
Source: Wang et al., arXiv 2502.11034.

A gamma only grows by `beta + (1 - beta) growth` a step, 0.1 % with the paper's numbers, so what enters it decides for
long: a norm that is not finite, is 0 or belongs to a withheld step enters nothing, nor does that step count. A tensor
whose gradient is missing in a step keeps its gamma; one that has none yet is clipped with the whole gradient.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float32
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.records import Clipped, GradNorms
from stabletrain.stability.clipping.factors import counts, in_parts, shortening, whole


@dataclass
class AdaGC:
    """AdaGC.

    Attributes:
        max_norm: largest L2 norm over all parameters during the warm-up, lambda_abs in the paper.
        growth: a norm may be so many times its tensor's gamma, lambda_rel in the paper.
        beta: how much of its gamma a step keeps.
        warmup_steps: steps of global clipping at the start.
    """

    max_norm: float = 1.0
    growth: float = 1.05
    beta: float = 0.98
    warmup_steps: int = 100
    _seen: Tensor | None = field(default=None, init=False, repr=False)
    _gamma: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ConfigError(
                f"clipping.max_norm={self.max_norm} is not above 0: 1.0 is customary, "
                "clipping=none switches clipping off"
            )
        if not self.growth > 1:
            raise ConfigError(
                f"clipping.growth={self.growth} is not above 1: no norm could ever rise again; 1.05 is customary"
            )
        if not 0 <= self.beta < 1:
            raise ConfigError(f"clipping.beta={self.beta} is outside [0, 1): 0.98 is customary")
        if self.warmup_steps < 1:
            raise ConfigError(
                f"clipping.warmup_steps={self.warmup_steps} is below 1: without a warm-up there is no norm to "
                "compare with; 100 is customary"
            )

    @torch.no_grad()
    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Scales every `.grad` in place by its tensor's factor; takes the norms in where `gate` is open.

        `active` is the share of tensors clipped: during the warm-up all or none.
        """
        named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        if not named:
            return whole(torch.ones_like(norms.total))
        names = [name for name, _ in named]
        seen, gamma = self._on(norms.each.device, names)
        warming, known = seen < self.warmup_steps, gamma > 0
        together = shortening(norms.total, self.max_norm).expand_as(gamma)
        factors = torch.where(warming | ~known, together, shortening(norms.each, self.growth * gamma))
        torch._foreach_mul_([gradient for _, gradient in named], list(factors.unbind()))
        after = norms.each * factors
        taken = gate & counts(norms.total)
        least = torch.where(known, torch.minimum(gamma, after), after)
        averaged = torch.where(known, self.beta * gamma + (1 - self.beta) * after, after)
        moved = torch.where(warming, least, averaged)
        self._gamma |= zip(names, torch.where(taken & counts(after), moved, gamma).unbind(), strict=True)
        self._seen = seen + taken
        return in_parts(norms, after, factors)

    def _on(self, device: torch.device, names: list[str]) -> tuple[Tensor, Float32[Tensor, " n"]]:
        """Steps taken in (int64), and each named tensor's gamma (0: none yet), on the norms' device."""
        seen = torch.zeros((), dtype=torch.int64, device=device) if self._seen is None else self._seen.to(device)
        none = torch.zeros((), device=device)
        return seen, torch.stack([self._gamma.get(name, none).to(device) for name in names])

    def state_dict(self) -> dict:
        """Statistics by the parameters' names, for the checkpoint; empty before the first step."""
        if self._seen is None:
            return {}
        return {"seen": self._seen, "names": list(self._gamma), "gamma": torch.stack(list(self._gamma.values()))}

    def load_state_dict(self, state: dict) -> None:
        """Statistics, from a checkpoint; one of another kind has none of these: they start afresh."""
        self._seen = state["seen"] if "gamma" in state else None
        self._gamma = dict(zip(state["names"], state["gamma"].unbind(), strict=True)) if "gamma" in state else {}
