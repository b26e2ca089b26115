"""The guard: which updates may reach the weights, and what the loop does about those that did not.

`gate` runs on the device, within the step, and must not read from the host; `judge` runs on the host, on the numbers
of a step that is over, and keeps the guard's own memory. A non-finite loss or gradient norm always closes the gate.

fp16's routine overflow (the loss is finite, the scaled gradients are not, and the loss scale can still fall) is counted
apart: it is how the scale is calibrated, and no fault.
"""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.records import GradNorms, LossTerms, Reading, Verdict


def overflow_reason(reading: Reading) -> str:
    """One line for people about an update that fp16's loss scaling withheld."""
    return f"fp16 overflow at loss scale {reading.loss_scale:g}: the scale is lowered"


@dataclass
class NoGuard:
    """Every update reaches the weights, as in a bare PyTorch loop; only fp16's own loss scaling withholds some.

    Attributes:
        skips: steps that loss scaling withheld, by kind (`overflow`).
        reason: why the last update was withheld, for people.
    """

    skips: dict[str, int] = field(default_factory=lambda: {"overflow": 0})
    reason: str = ""

    def gate(self, terms: LossTerms, norms: GradNorms) -> Bool[Tensor, ""]:
        """Always open."""
        del terms
        return torch.ones_like(norms.total, dtype=torch.bool)

    def judge(self, reading: Reading) -> Verdict:
        """APPLY, or SKIP where loss scaling withheld the update."""
        if reading.applied:
            return Verdict.APPLY
        self.skips["overflow"] += 1
        self.reason = overflow_reason(reading)
        return Verdict.SKIP

    def state_dict(self) -> dict:
        """Counts, for the checkpoint."""
        return {"skips": dict(self.skips)}

    def load_state_dict(self, state: dict) -> None:
        """Counts, from a checkpoint."""
        self.skips = self.skips | state["skips"]


@dataclass
class SkipGuard:
    """Withholds the update of a step whose loss or gradient norm is not finite, and halts when that does not end.

    Attributes:
        max_consecutive: so many skipped steps in a row halt the run (fp16's routine overflows are not counted).
        skips: skipped steps so far, by kind (`nonfinite`, `overflow`).
        consecutive: skipped steps in a row, up to now.
        reason: why the last verdict was not APPLY, for people.
    """

    max_consecutive: int
    skips: dict[str, int] = field(default_factory=lambda: {"nonfinite": 0, "overflow": 0})
    consecutive: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        if self.max_consecutive < 1:
            raise ConfigError(
                f"guard.max_consecutive={self.max_consecutive} is below 1: a run could not survive a single skip; "
                "use guard=off to apply every update"
            )

    def gate(self, terms: LossTerms, norms: GradNorms) -> Bool[Tensor, ""]:
        """Open where loss and gradient norm are finite; 0-d, on the device."""
        return torch.isfinite(terms.total) & torch.isfinite(norms.total)

    def judge(self, reading: Reading) -> Verdict:
        """What to do about a step that is over."""
        if reading.applied:
            self.consecutive = 0
            return Verdict.APPLY
        if reading.overflow:
            self.skips["overflow"] += 1
            self.reason = overflow_reason(reading)
            return Verdict.SKIP
        self.skips["nonfinite"] += 1
        self.consecutive += 1
        what = "loss" if not math.isfinite(reading.loss) else "gradient norm"
        value = reading.loss if what == "loss" else reading.grad_norm
        self.reason = f"{what} is {value}"
        if self.consecutive < self.max_consecutive:
            return Verdict.SKIP
        self.reason = (
            f"{what} is {value}, and guard.max_consecutive={self.max_consecutive} steps in a row were skipped: "
            "every batch fails on these weights; lower optimizer.lr, lengthen warmup.steps, or try precision=fp32"
        )
        return Verdict.HALT

    def state_dict(self) -> dict:
        """Counts, for the checkpoint."""
        return {"skips": dict(self.skips), "consecutive": self.consecutive}

    def load_state_dict(self, state: dict) -> None:
        """Counts, from a checkpoint."""
        self.skips = self.skips | state["skips"]
        self.consecutive = state.get("consecutive", 0)
