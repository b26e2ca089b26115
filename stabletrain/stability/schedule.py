"""What the step number decides: the learning rate, and on request the weight decay and Muon's momentum.

The learning rate is `optimizer.lr` times f, the factor of a warmup times that of a schedule. `schedule.weight_decay`
says how `optimizer.weight_decay` changes over a run of T steps; the optimizer multiplies it by the learning rate:

    constant:  decay
    with_lr:   decay f, so that weights decay in proportion to f^2, as in modded-nanogpt
    cosine:    decay (r + (1 - r) (1 + cos(pi step / T)) / 2),  from decay to r decay, r = weight_decay_final_ratio

nanochat lowers the decay to 0 in this way (r = 0); DINO (Caron et al., arXiv 2104.14294) raises it from 0.04 to 0.4
(weight_decay=0.04, r = 10). Like theirs, the cosine spans the whole run, warmup included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stabletrain.errors import ConfigError

PEAK_DECAY, DECAY_WITH_LR = "peak_weight_decay", "decay_with_lr"
"""Keys of a parameter group whose weight decay has a schedule: its value by itself, and whether f multiplies it.

A checkpoint restores none of these (`checkpoint/capture.py`).
"""

PEAK_MOMENTUM, MOMENTUM_SCHEDULE = "peak_momentum", "momentum_schedule"
"""Keys of a parameter group whose momentum has a schedule: its peak, and `low`, `warmup` and `cooldown`."""


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


class Schedule:
    """What each kind of schedule must offer."""

    def factor(self, progress: float) -> float:
        """Returns the factor of the peak learning rate, in [0, 1].

        Args:
            progress: 0 at the end of the warmup, 1 at the run's end.
        """
        raise NotImplementedError


DECAY_SCHEDULES = ("constant", "with_lr", "cosine")


@dataclass(frozen=True)
class Constant(Schedule):
    """The peak learning rate to the end. Base class of all kinds here.

    Attributes:
        weight_decay: how the weight decay changes over the run: `constant`, `with_lr` or `cosine`.
        weight_decay_final_ratio: with `cosine`, the final weight decay as a fraction of the first, at least 0.
    """

    weight_decay: str = field(default="constant", kw_only=True)
    weight_decay_final_ratio: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if self.weight_decay not in DECAY_SCHEDULES:
            raise ConfigError(
                f"schedule.weight_decay={self.weight_decay} is unknown: choose {' or '.join(DECAY_SCHEDULES)}"
            )
        ratio = self.weight_decay_final_ratio
        if not 0 <= ratio < math.inf:
            raise ConfigError(
                f"schedule.weight_decay_final_ratio={ratio} is outside [0, inf): 0 lowers the weight decay to nothing, "
                "10 raises it tenfold"
            )
        if ratio and self.weight_decay != "cosine":
            raise ConfigError(
                f"schedule.weight_decay_final_ratio={ratio} does nothing with schedule.weight_decay="
                f"{self.weight_decay}; fix: schedule.weight_decay=cosine"
            )

    def factor(self, progress: float) -> float:
        """Returns 1."""
        return 1.0

    def decay_factor(self, progress: float) -> float:
        """Returns the factor of the weight decay, besides that of the learning rate.

        Args:
            progress: 0 at the first step, 1 at the run's end.
        """
        return half_cosine(self.weight_decay_final_ratio, progress) if self.weight_decay == "cosine" else 1.0


@dataclass(frozen=True)
class Cosine(Constant):
    """Half a cosine from the peak to `final_ratio` times the peak (Loshchilov and Hutter, arXiv 1608.03983).

    Attributes:
        final_ratio: final learning rate as a fraction of the peak, in [0, 1].
    """

    final_ratio: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_final_ratio(self.final_ratio)

    def factor(self, progress: float) -> float:
        """Returns 1 at progress 0, `final_ratio` at progress 1."""
        return half_cosine(self.final_ratio, progress)


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
        super().__post_init__()
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
        super().__post_init__()
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


def half_cosine(final: float, progress: float) -> float:
    """Returns half a cosine from 1 at progress 0 to `final` at progress 1."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def check_final_ratio(ratio: float) -> None:
    """Raises ConfigError unless `ratio` is in [0, 1]."""
    if not 0 <= ratio <= 1:
        raise ConfigError(f"schedule.final_ratio={ratio} is outside [0, 1]: 0.1 is customary")


@dataclass(frozen=True)
class LearningRate:
    """Warmup times schedule over a run of `total` steps: a pure function of the step number."""

    warmup: NoWarmup
    schedule: Schedule
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

    @property
    def weight_decay(self) -> str:
        """How the weight decay changes over the run; a user's own schedule may not say, and leaves it constant."""
        return self.schedule.weight_decay if isinstance(self.schedule, Constant) else "constant"

    def attach(self, groups: Sequence[dict[str, Any]]) -> None:
        """Lets each step change the weight decay of an optimizer's parameter groups, if it has a schedule.

        Raises:
            ConfigError: no group has a weight decay above 0.
        """
        if self.weight_decay == "constant":
            return
        decaying = [group for group in groups if group.get("weight_decay")]
        if not decaying:
            raise ConfigError(
                f"schedule.weight_decay={self.weight_decay} does nothing, because no parameter group of the optimizer "
                "has a weight_decay above 0; fix: schedule.weight_decay=constant, or an optimizer with weight decay"
            )
        for group in decaying:
            group |= {PEAK_DECAY: group["weight_decay"], DECAY_WITH_LR: self.weight_decay == "with_lr"}

    def set_(self, groups: Sequence[dict[str, Any]], step: int, lowered: float = 1.0) -> float:
        """Sets what the number of a step decides in an optimizer's parameter groups; returns the first one's rate.

        Momentum and the cosine of the weight decay depend on the step number alone. Weight decay that follows the
        learning rate also follows `lowered`.

        Args:
            step: counted from 0. Skipped steps count.
            lowered: further factor of the learning rate, below 1 for some steps after a rollback.
        """
        factor = self(step) * lowered
        schedule, done = self.schedule, min(1.0, step / self.total)
        decay = schedule.decay_factor(done) if isinstance(schedule, Constant) else 1.0
        for group in groups:
            group.setdefault("peak_lr", group["lr"])
            group["lr"] = group["peak_lr"] * factor
            if PEAK_DECAY in group:
                group["weight_decay"] = group[PEAK_DECAY] * decay * (factor if group[DECAY_WITH_LR] else 1.0)
            if PEAK_MOMENTUM in group:
                group["momentum"] = momentum_at(step, self.total, group[PEAK_MOMENTUM], **group[MOMENTUM_SCHEDULE])
        return groups[0]["lr"]


def momentum_at(step: int, total: int, peak: float, low: float, warmup: int, cooldown: int) -> float:
    """Returns the momentum of a step: a line from `low` to `peak`, the peak, and a line back at the run's end.

    Args:
        step: counted from 0.
        total: steps of the run.
        peak: momentum between the two lines.
        low: momentum of the first step, and at the run's end.
        warmup: steps until the peak is reached; 0 for none.
        cooldown: steps from the peak to the run's end; 0 for none.
    """
    up = step / warmup if warmup else 1.0
    down = (total - step) / cooldown if cooldown else 1.0
    return low + (peak - low) * max(0.0, min(1.0, up, down))
