"""ZClip: the whole gradient is shortened where its norm stands out from the norms before it.

    z = (|g| - mean) / (std + 1e-6)
    |g| <- mean + z_threshold^2 std / z   where z > z_threshold,      then   |g| <- min(|g|, max_norm)

The further out a norm is, the nearer to the mean it is cut. `mean` and `std` are those of the first `warmup_steps`
norms, then moving averages: `mean <- alpha mean + (1 - alpha) |g|`, `std^2 <- alpha std^2 + (1 - alpha) (|g| - mean)^2`
with the new mean. Until then only `max_norm` bounds the gradient. Source: Kumar et al., arXiv 2504.02507.

The norm that enters the statistics is the one that the optimizer gets, after both bounds. The authors' code enters the
norm before `max_norm`, and those of the warm-up unclipped, so that one spike there leaves the threshold useless for
hundreds of steps; where `max_norm` is not reached the two are the same. A norm that is not finite, is 0 or belongs to a
withheld step enters nothing: NaN would stay in the mean for ever, and every comparison with it is false.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float32
from torch import Tensor, nn

from stabletrain.errors import ConfigError
from stabletrain.records import Clipped, GradNorms
from stabletrain.stability.clipping.factors import counts, multiply_, shortening, whole


@dataclass
class ZClip:
    """ZClip.

    Attributes:
        max_norm: largest L2 norm over all parameters, whatever the statistics say.
        z_threshold: standard deviations above the mean from which on a norm is cut.
        alpha: how much of the statistics a step keeps.
        warmup_steps: norms that are only collected, before the first is judged by its z.
    """

    max_norm: float = 1.0
    z_threshold: float = 2.5
    alpha: float = 0.97
    warmup_steps: int = 25
    _statistics: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, usual in (("max_norm", 1.0), ("z_threshold", 2.5)):
            if not (value := getattr(self, name)) > 0:
                raise ConfigError(
                    f"clipping.{name}={value} is not above 0: {usual} is customary, clipping=none switches clipping off"
                )
        if not 0 < self.alpha < 1:
            raise ConfigError(f"clipping.alpha={self.alpha} is outside (0, 1): 0.97 is customary")
        if self.warmup_steps < 2:
            raise ConfigError(
                f"clipping.warmup_steps={self.warmup_steps} is below 2: one norm has no spread; 25 is customary"
            )

    @torch.no_grad()
    def __call__(self, model: nn.Module, norms: GradNorms, gate: Bool[Tensor, ""]) -> Clipped:
        """Scales every `.grad` in place by `coef`; takes the norm into its statistics where `gate` is open."""
        norm = norms.total
        seen, mean, var = self._on(norm.device)
        std = var.sqrt()
        z = (norm - mean) / (std + 1e-6)
        stands_out = (seen >= self.warmup_steps) & (z > self.z_threshold)
        bound = torch.where(stands_out, mean + self.z_threshold**2 * std / z, self.max_norm).clamp(max=self.max_norm)
        factor = shortening(norm, bound)
        multiply_(model, factor)
        self._take(norm * factor, gate & counts(norm))
        return whole(factor)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """How many norms were taken (int64), their mean and variance (fp32), on the norms' device."""
        if not self._statistics:
            zero = torch.zeros((), device=device)
            self._statistics = {"seen": torch.zeros_like(zero, dtype=torch.int64), "mean": zero, "var": zero}
        moved = {name: value.to(device) for name, value in self._statistics.items()}
        self._statistics = moved
        return moved["seen"], moved["mean"], moved["var"]

    def _take(self, norm: Float32[Tensor, ""], taken: Bool[Tensor, ""]) -> None:
        """Moves the statistics towards `norm` where `taken`; while they warm up, all norms weigh the same."""
        seen, mean, var = (self._statistics[name] for name in ("seen", "mean", "var"))
        warming = seen < self.warmup_steps
        weight = torch.where(warming, 1.0 / (seen + 1), 1.0 - self.alpha)
        new_mean = mean + weight * (norm - mean)
        # the exact update of a population variance, or the authors' moving one
        square = (norm - new_mean) * torch.where(warming, norm - mean, norm - new_mean)
        new_var = var + weight * (square - var)
        self._statistics = {
            "seen": seen + taken,
            "mean": torch.where(taken, new_mean, mean),
            "var": torch.where(taken, new_var, var),
        }

    def state_dict(self) -> dict:
        """Statistics, for the checkpoint; empty before the first step."""
        return dict(self._statistics)

    def load_state_dict(self, state: dict) -> None:
        """Statistics, from a checkpoint; one of another kind has none of these: they start afresh."""
        names = ("seen", "mean", "var")
        self._statistics = {name: state[name] for name in names} if names[1] in state else {}
