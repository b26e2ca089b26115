"""Skip: a step that is not to be trusted changes nothing, and the next batch is next."""

import math
from dataclasses import dataclass, field

from jaxtyping import Bool
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.records import GradNorms, LossTerms, Reading, Verdict, Vitals
from stabletrain.stability.guard.limits import LARGEST, Limits
from stabletrain.stability.guard.off import NoGuard, overflow_reason

KINDS = ("bad_data", "nonfinite", "spike", "overflow")


@dataclass
class SkipGuard(NoGuard):
    """Withholds updates from bad data, of non-finite values and of spikes, and halts when that does not end.

    Attributes:
        sigma: standard deviations above the recent mean from which on a loss or a gradient norm is a spike.
        window: applied steps that mean and deviation are taken from.
        max_consecutive: so many skipped steps in a row halt the run (fp16's routine overflows are not counted).
        skips: skipped steps so far, by kind.
        consecutive: skipped steps in a row, up to now.
        trouble: skips for spikes and non-finite values less the applied steps after them, at least 0: so many clean
            steps are still to come before the state may be called healthy.
    """

    sigma: float = 6.0
    window: int = 128
    max_consecutive: int = 100
    skips: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    consecutive: int = 0
    trouble: int = 0
    limits: Limits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_consecutive < 1:
            raise ConfigError(
                f"guard.max_consecutive={self.max_consecutive} is below 1: a run could not survive a single skip; "
                "use guard=off to apply every update"
            )
        self.limits = Limits(self.sigma, self.window)

    def gate(self, terms: LossTerms, norms: GradNorms, vitals: Vitals) -> Bool[Tensor, ""]:
        """Open where everything measured is within its limit, and so finite; 0-d, on the device."""
        limits = self.limits
        within = (terms.total.abs() <= limits.loss.value) & (norms.total <= limits.norm.value)
        within &= (vitals.inputs <= limits.inputs.value) & (vitals.buffers <= LARGEST)
        return within & ~vitals.bad_data

    def judge(self, reading: Reading) -> Verdict:
        """What to do about a step that is over."""
        if reading.applied:
            self.consecutive = 0
            self.trouble = max(self.trouble - 1, 0)
            self.limits.add(reading)
            return Verdict.APPLY
        self.kind, self.reason = self.why(reading)
        self.skips[self.kind] += 1
        if self.kind == "overflow":
            return Verdict.SKIP
        self.consecutive += 1
        if self.kind != "bad_data":  # which says nothing of the weights
            self.trouble += 1
        if self.consecutive < self.max_consecutive:
            return Verdict.SKIP
        fix = "lower optimizer.lr, lengthen warmup.steps, or try precision=fp32"
        fix = (
            "look at the data; events.jsonl names each sample"
            if self.kind == "bad_data"
            else f"every batch fails on these weights; {fix}"
        )
        row = f"guard.max_consecutive={self.max_consecutive} steps in a row were skipped"
        self.reason = f"{self.reason}, and {row}: {fix}"
        return Verdict.HALT

    def distrust(self, why: str) -> Verdict:
        """What to do about a state that has gone wrong without a step's fault: the run halts, what is saved is good."""
        self.reason = f"{why}: resume=auto goes on from the last checkpoint; guard=rollback goes back by itself"
        return Verdict.HALT

    @property
    def bounds(self) -> tuple[float, float]:
        """The largest loss and gradient norm that are let through."""
        return self.limits.loss.value, self.limits.norm.value

    @property
    def healthy(self) -> bool:
        """Whether the state may be called so, as far as the guard knows."""
        return self.trouble == 0

    def trouble_at_end(self) -> str | None:
        """What a person must know of how the run ended; None if it ended well."""
        if self.healthy:
            return None
        skipped = self.consecutive or self.trouble
        return f"the run ended in trouble: of its last steps {skipped} were skipped ({self.reason})"

    def why(self, reading: Reading) -> tuple[str, str]:
        """Kind and reason of a step that was withheld."""
        if reading.bad_data:
            return "bad_data", "the batch holds data that cannot be trained on"
        if reading.overflow:
            return "overflow", overflow_reason(reading)
        measured = (
            ("loss", reading.loss),
            ("gradient norm", reading.grad_norm),
            ("norm of the buffers", reading.buffers),
        )
        for what, value in measured:
            if not math.isfinite(value):
                return "nonfinite", f"{what} is {value}"
        return "spike", self.limits.passed(reading)

    def state_dict(self) -> dict:
        """Counts and windows, for the checkpoint."""
        counts = {"consecutive": self.consecutive, "trouble": self.trouble}
        return {"skips": dict(self.skips), **counts, "limits": self.limits.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Counts and windows, from a checkpoint; one that another guard wrote may lack some, which start afresh."""
        super().load_state_dict(state)
        self.consecutive = state.get("consecutive", 0)
        self.trouble = state.get("trouble", 0)
        if "limits" in state:
            self.limits.load_state_dict(state["limits"])
