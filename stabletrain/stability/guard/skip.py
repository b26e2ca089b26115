"""Guards that keep no states: off, which withholds nothing but fp16's overflow, and skip.

No guard: every update reaches the weights, as in a bare PyTorch loop; only fp16's loss scaling withholds some.

Skip: a step that is not to be trusted changes nothing, and the next batch is next.
"""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.records import Detour, GradNorms, LossTerms, Reading, StepChecks, Verdict
from stabletrain.stability.guard.limits import LARGEST, Limits
from stabletrain.stability.guard.retained import NoRetainedStates


def overflow_reason(reading: Reading) -> str:
    """One line for people about an update that fp16's loss scaling withheld."""
    return f"fp16 overflow at loss scale {reading.loss_scale:g}: the scale is lowered"


@dataclass
class NoGuard:
    """Every update reaches the weights.

    Attributes:
        skips: steps that loss scaling withheld, by kind (`overflow`).
        reason: why the last update was withheld, for people.
        kind: the kind of the last step that was withheld.
        rollbacks: how often an older state was put back.
    """

    skips: dict[str, int] = field(default_factory=lambda: {"overflow": 0})
    reason: str = ""
    kind: str = ""
    rollbacks: int = 0
    consecutive: int = 0
    states = NoRetainedStates()

    @property
    def bounds(self) -> tuple[float, float]:
        """The largest loss and gradient norm that are let through: none are kept back."""
        return math.inf, math.inf

    @property
    def healthy(self) -> bool:
        """Whether the state may be called so, as far as the guard knows: it knows nothing against it."""
        return True

    def gate(self, terms: LossTerms, norms: GradNorms, checks: StepChecks) -> Bool[Tensor, ""]:
        """Always open."""
        del terms, checks
        return torch.ones_like(norms.total, dtype=torch.bool)

    def judge(self, reading: Reading) -> Verdict:
        """APPLY, or SKIP where loss scaling withheld the update."""
        if reading.applied:
            return Verdict.APPLY
        self.skips["overflow"] += 1
        self.kind, self.reason = "overflow", overflow_reason(reading)
        return Verdict.SKIP

    def at_end(self, verdict: Verdict) -> Verdict:
        """The verdict on the last step of the run: as on any other."""
        return verdict

    def distrust(self, why: str) -> Verdict:
        """What to do about a state that has gone wrong without a step's fault: nothing, it is trained on."""
        self.reason = why
        return Verdict.APPLY

    def trouble_at_end(self) -> str | None:
        """What a person must know of how the run ended: nothing."""
        return None

    def lr_multiplier(self, step: int) -> float:
        """1: nobody lowers the learning rate."""
        del step
        return 1.0

    def begin_rollback(self, step: int, target: int, same_data: bool = False) -> Detour:
        """Never asked for."""
        del same_data
        raise NotImplementedError(f"{type(self).__name__} gave no verdict of a rollback from {step} to {target}")

    def state_dict(self) -> dict:
        """Counts, for the checkpoint."""
        return {"skips": dict(self.skips)}

    def load_state_dict(self, state: dict) -> None:
        """Counts, from a checkpoint."""
        self.skips = self.skips | state["skips"]


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

    def gate(self, terms: LossTerms, norms: GradNorms, checks: StepChecks) -> Bool[Tensor, ""]:
        """Open where everything measured is within its limit, and so finite; 0-d, on the device."""
        limits = self.limits
        within = (terms.total.abs() <= limits.loss.value) & (norms.total <= limits.norm.value)
        within &= (checks.inputs <= limits.inputs.value) & (checks.buffers <= LARGEST)
        return within & ~checks.bad_data

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
