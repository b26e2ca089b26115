"""The learning rate by step number: `optimizer.lr` times the factor of a warmup times the factor of a schedule."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stabletrain.errors import ConfigError


@dataclass(frozen=True)
class NoWarmup:
    """The peak learning rate from the first step on. Base class of all kinds, and what each must offer."""

    def length(self, total: int) -> int:
        """Returns the number of warmup steps in a run of `total` steps: 0."""
        return 0

    def factor(self, step: int, total: int) -> float:
        """Returns the factor of the peak learning rate, in (0, 1], at `step`, counted from 0: always 1."""
        return 1.0


@dataclass(frozen=True)
class LinearWarmup(NoWarmup):
    """A straight line from nearly 0 to the peak (Goyal et al., arXiv 1706.02677).

    Attributes:
        steps: number of warmup steps; None means 5 % of the run, as in arXiv 2309.14322.
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"warmup.steps={self.steps} is below 1: use warmup=none for no warmup")

    def length(self, total: int) -> int:
        """Returns `steps`, or 5 % of `total`."""
        return self.steps if self.steps is not None else total // 20

    def factor(self, step: int, total: int) -> float:
        """Returns `(step + 1) / length`, at most 1: above 0 at the first step, 1 at the last step of the warmup."""
        return min(1.0, (step + 1) / max(1, self.length(total)))


@dataclass(frozen=True)
class CosineWarmup(LinearWarmup):
    """Half a cosine from nearly 0 to the peak, flat at both ends.

    Same shape as the rise of `torch.optim.lr_scheduler.OneCycleLR` (Smith and Topin, arXiv 1708.07120).
    """

    def factor(self, step: int, total: int) -> float:
        """Returns `(1 - cos(pi x)) / 2`, where x is the linear warmup's factor."""
        return 0.5 * (1 - math.cos(math.pi * super().factor(step, total)))


@dataclass(frozen=True)
class Constant:
    """The peak learning rate to the end. Base class of all kinds, and what each must offer."""

    def factor(self, progress: float) -> float:
        """Returns the factor of the peak learning rate, in [0, 1]: always 1.

        Args:
            progress: 0 at the end of the warmup, 1 at the run's end.
        """
        return 1.0


@dataclass(frozen=True)
class Cosine(Constant):
    """Half a cosine from the peak to `final_ratio` times the peak (Loshchilov and Hutter, arXiv 1608.03983).

    Attributes:
        final_ratio: final learning rate as a fraction of the peak, in [0, 1].
    """

    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        check_final_ratio(self.final_ratio)

    def factor(self, progress: float) -> float:
        """Returns 1 at progress 0, `final_ratio` at progress 1."""
        return self.final_ratio + (1 - self.final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class WSD(Constant):
    """Warmup, stable, decay: the peak for most of the run, then a decay to `final_ratio` times the peak.

    Runs of different lengths can branch off one run at the peak, each with its own decay (MiniCPM, arXiv 2404.06395,
    section 4). Hägele et al. (arXiv 2405.18392, section 3) found the decay `1 - sqrt(x)` better than a straight line.

    Attributes:
        decay_share: fraction of the run after warmup that decays, in (0, 1]; 0.1 to 0.2 in the papers.
        final_ratio: final learning rate as a fraction of the peak, in [0, 1].
        shape: `sqrt` for `1 - sqrt(x)`, `linear` for a straight line.
    """

    decay_share: float = 0.2
    final_ratio: float = 0.0
    shape: str = "sqrt"

    def __post_init__(self) -> None:
        if not 0 < self.decay_share <= 1:
            raise ConfigError(
                f"schedule.decay_share={self.decay_share} is outside (0, 1]: use schedule=constant for no decay"
            )
        check_final_ratio(self.final_ratio)
        if self.shape not in ("sqrt", "linear"):
            raise ConfigError(f"schedule.shape={self.shape} is unknown: choose sqrt or linear")

    def factor(self, progress: float) -> float:
        """Returns 1 until the last `decay_share` of the run, `final_ratio` at progress 1."""
        x = max(0.0, progress - (1 - self.decay_share)) / self.decay_share
        left = 1 - (math.sqrt(x) if self.shape == "sqrt" else x)
        return self.final_ratio + (1 - self.final_ratio) * left


@dataclass(frozen=True)
class Step(Constant):
    """The peak, multiplied by `gamma` at each milestone, as He et al. train ResNets (arXiv 1512.03385, section 4.2).

    Attributes:
        milestones: fractions of the run after warmup, rising, each in (0, 1); 1/2 and 3/4 in the paper.
        gamma: factor at each milestone, in (0, 1); 0.1 in the paper.
    """

    milestones: Sequence[float] = (0.5, 0.75)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.milestones, self.milestones[1:], strict=False))
        if not self.milestones or not rising or not all(0 < share < 1 for share in self.milestones):
            raise ConfigError(
                f"schedule.milestones={list(self.milestones)} are not rising shares of the run in (0, 1): "
                "[0.5, 0.75] is customary; use schedule=constant for none"
            )
        if not 0 < self.gamma < 1:
            raise ConfigError(f"schedule.gamma={self.gamma} is outside (0, 1): 0.1 is customary")

    def factor(self, progress: float) -> float:
        """Returns `gamma` to the power of the number of milestones reached."""
        return self.gamma ** sum(progress >= milestone for milestone in self.milestones)


def check_final_ratio(ratio: float) -> None:
    """Raises ConfigError unless `ratio` is in [0, 1]."""
    if not 0 <= ratio <= 1:
        raise ConfigError(f"schedule.final_ratio={ratio} is outside [0, 1]: 0.1 is customary")


@dataclass(frozen=True)
class LearningRate:
    """Warmup times schedule over a run of `total` steps: a pure function of the step number."""

    warmup: NoWarmup
    schedule: Constant
    total: int

    def __post_init__(self) -> None:
        length = self.warmup.length(self.total)
        if length and length >= self.total:
            raise ConfigError(
                f"warmup.steps={length} >= steps={self.total}: the peak learning rate is never reached; "
                "lower warmup.steps or raise steps"
            )

    def __call__(self, step: int) -> float:
        """Returns the factor of the peak learning rate at `step`, counted from 0; constant after the run's end."""
        start = self.warmup.length(self.total)
        progress = max(0.0, step - start) / max(1, self.total - start)
        return self.warmup.factor(step, self.total) * self.schedule.factor(min(1.0, progress))
