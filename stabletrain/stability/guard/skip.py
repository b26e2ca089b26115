"""Guards that retain no states: `NoGuard` and `SkipGuard`.

`NoGuard` applies every update, as a plain PyTorch loop does; only fp16's loss scaling skips some. `SkipGuard` skips
unsafe updates and continues with the next batch.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.monitors.rolling import Alarm
from stabletrain.monitors.update_length import NoLengths
from stabletrain.records import Detour, GradNorms, LossTerms, Reading, StepChecks, Verdict
from stabletrain.stability.guard.divergence import Divergence, NoDivergence
from stabletrain.stability.guard.limits import LARGEST, Limits
from stabletrain.stability.guard.recheck import NoRecheck, recheck_every
from stabletrain.stability.guard.retained import NoRetainedStates
from stabletrain.stability.guard.slow import NoSlowSpikes, slow_spikes
from stabletrain.stability.guard.state_check import UNKNOWN, NoStateCheck, StateCheck


def overflow_reason(reading: Reading) -> str:
    """Describes in one line an update that fp16's loss scaling skipped."""
    return f"fp16 overflow at loss scale {reading.loss_scale:g}: the scale is lowered"


@dataclass
class NoGuard:
    """Applies every update.

    Attributes:
        skips: number of skipped steps by kind; here only `overflow`, by fp16's loss scaling.
        reason: why the newest skipped step was skipped, in one line.
        kind: kind of the newest skipped step, or `slow` after a slow spike that is rolled back, or `diverged`.
        since: step at which what a halt is about began; None if it began with the halt's own skips.
        rollbacks: always 0.
        consecutive: always 0.
        escalate: what happens after a halt: here always `halt`, which is nothing.
    """

    skips: dict[str, int] = field(default_factory=lambda: {"overflow": 0})
    reason: str = ""
    kind: str = ""
    since: int | None = None
    rollbacks: int = 0
    consecutive: int = 0
    escalate: str = "halt"
    states = NoRetainedStates()
    state_check = NoStateCheck()
    recheck = NoRecheck()

    @property
    def lengths(self) -> NoLengths:
        """Measures each update: nothing, since this guard looks for no slow spikes."""
        return NoLengths()

    @property
    def rollback_before(self) -> int | None:
        """Step that a rollback has to go back before; None: to the newest healthy state."""
        return None

    @property
    def bounds(self) -> tuple[float, float]:
        """Largest loss and gradient norm that open the gate: inf."""
        return math.inf, math.inf

    @property
    def note(self) -> str:
        """Text after the guard's name in the first lines of the run: empty."""
        return ""

    @property
    def healthy(self) -> bool:
        """Returns True: this guard does not judge the state."""
        return True

    def gate(self, terms: LossTerms, norms: GradNorms, checks: StepChecks) -> Bool[Tensor, ""]:
        """Returns True, 0-d on the device of the norms: the gate is always open."""
        del terms, checks
        return torch.ones_like(norms.total, dtype=torch.bool)

    def judge(self, reading: Reading) -> Verdict:
        """Returns APPLY, or SKIP if fp16's loss scaling skipped the update."""
        if reading.applied:
            return Verdict.APPLY
        self.skips["overflow"] += 1
        self.kind, self.reason = "overflow", overflow_reason(reading)
        return Verdict.SKIP

    def judge_validation(self, step: int, loss: float) -> Verdict:
        """Returns APPLY: this guard does not judge validation losses."""
        del step, loss
        return Verdict.APPLY

    def new_alarms(self) -> list[Alarm]:
        """Returns the slow spikes found since the last call: none."""
        return []

    def at_end(self, verdict: Verdict) -> Verdict:
        """Returns the verdict on the last step unchanged."""
        return verdict

    def distrust(self, why: str) -> Verdict:
        """Returns APPLY for a corrupted state: this guard continues with it."""
        self.reason = why
        return Verdict.APPLY

    def trouble_at_end(self) -> str | None:
        """Returns None: this guard reports no trouble at the end of the run."""
        return None

    def lr_multiplier(self, step: int) -> float:
        """Returns 1: this guard does not lower the learning rate."""
        del step
        return 1.0

    def begin_anew(self, loss: float | None) -> None:
        """Does nothing: this guard remembers nothing that other settings would change."""
        del loss

    def begin_rollback(self, step: int, target: int, same_data: bool = False) -> Detour:
        """Raises NotImplementedError, because this guard never returns ROLLBACK."""
        del same_data
        raise NotImplementedError(f"{type(self).__name__} never rolls back, but was asked to, from {step} to {target}")

    def state_dict(self) -> dict:
        """Counts, and what is known of the newest skip, for the checkpoint."""
        # 0 for no step, because a checkpoint's values must have the same types as the live state's.
        return {"skips": dict(self.skips), "kind": self.kind, "reason": self.reason, "since": self.since or 0}

    def load_state_dict(self, state: dict) -> None:
        """Restores them; older versions saved only the counts."""
        self.skips = dict.fromkeys(self.skips, 0) | state["skips"]
        self.kind, self.reason = state.get("kind", ""), state.get("reason", "")
        self.since = state.get("since") or None


ESCALATIONS = ("halt", "whatif")

KINDS = ("bad_data", "nonfinite", "spike", "overflow", "state", "recheck")

CHANGED = "weights, moments or buffers are not what the last update left"
GRADIENT_DIFFERS = "the gradient came out differently when it was computed a second time"
UPDATE_DIFFERS = "the optimizer's update came out differently when it was computed a second time"


@dataclass
class SkipGuard(NoGuard):
    """Skips steps with bad data, non-finite values or spikes, and halts if the skips do not end.

    Attributes:
        sigma: standard deviations above the recent mean at which a spike begins (`limits.py`).
        window: number of applied steps from which mean and standard deviation are computed.
        max_consecutive: number of consecutive skipped steps that halts the run; fp16's overflows do not count.
        checksum_every: updates between two comparisons of the state with what the last update left (`state_check.py`);
            0 for none, None for as often as costs little.
        recheck_every: steps between two repetitions of a gradient and an update (`recheck.py`); 0 for none.
        slow: what happens after a slow spike (`slow.py`): `off`, `alarm`, or with a `RollbackGuard` `rollback`.
        slow_rate: false alarms of slow spikes in 100,000 clean steps for which their threshold is chosen.
        escalate: what happens after a halt: `halt`, or `whatif`, which tries fixes and goes on (`whatif/healing.py`).
            With `whatif` the run halts for that if it has diverged, too (`divergence.py`).
        whatif_steps: number of steps that the fixes may train, together and in the whole run.
        skips: number of skipped steps by kind.
        consecutive: consecutive skipped steps up to now.
        trouble: steps skipped as spike or non-finite, minus the steps applied after them, at least 0. The state is
            healthy at 0.
        state_check: compares the state with what the last update left.
    """

    sigma: float = 6.0
    window: int = 128
    max_consecutive: int = 100
    checksum_every: int | None = None
    recheck_every: int = 250
    slow: str = "alarm"
    slow_rate: float = 0.1
    escalate: str = "halt"
    whatif_steps: int = 4000
    skips: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    consecutive: int = 0
    trouble: int = 0
    limits: Limits = field(init=False, repr=False)
    state_check: NoStateCheck = field(init=False, repr=False)
    recheck: NoRecheck = field(init=False, repr=False)
    slow_spikes: NoSlowSpikes = field(init=False, repr=False)
    divergence: NoDivergence = field(init=False, repr=False)
    _alarms: list[Alarm] = field(init=False, repr=False, default_factory=list)

    slow_modes: ClassVar[tuple[str, ...]] = ("off", "alarm")

    def __post_init__(self) -> None:
        if self.max_consecutive < 1:
            raise ConfigError(
                f"guard.max_consecutive={self.max_consecutive} is below 1: a run could not survive a single skip; "
                "use guard=off to apply every update"
            )
        self.limits = Limits(self.sigma, self.window)
        every = self.checksum_every
        if every is not None and every < 0:
            raise ConfigError(f"guard.checksum_every={every} is below 0: 1 checks before every update, 0 never")
        self.check_state_every(UNKNOWN if every is None else every)
        if self.escalate not in ESCALATIONS:
            raise ConfigError(f"guard.escalate={self.escalate} is not one of {', '.join(ESCALATIONS)}")
        if self.whatif_steps < 1:
            raise ConfigError(
                f"guard.whatif_steps={self.whatif_steps} is below 1: no fix could be tried; use guard.escalate=halt"
            )
        self.recheck = recheck_every(self.recheck_every)
        self._look_anew()

    def _look_anew(self) -> None:
        """Begins the search for slow spikes and for divergence."""
        self.slow_spikes = slow_spikes(self.slow, self.slow_rate, self.slow_modes)
        self.divergence = Divergence(self.window) if self.escalate == "whatif" else NoDivergence()

    def check_state_every(self, updates: int) -> None:
        """Sets how often the state is compared with what the last update left; 0 for never."""
        self.state_check = StateCheck(updates) if updates else NoStateCheck()

    @property
    def lengths(self) -> NoLengths:
        """Measures each update, for the search for slow spikes."""
        return self.slow_spikes.lengths

    def gate(self, terms: LossTerms, norms: GradNorms, checks: StepChecks) -> Bool[Tensor, ""]:
        """Returns whether every measurement is within its limit, and therefore finite; 0-d, on the device."""
        limits = self.limits
        measured = (
            (terms.total.abs(), limits.loss.size),
            (terms.total, limits.loss.value),
            (norms.total, limits.norm.value),
            (checks.inputs, limits.inputs.value),
            (checks.buffers, LARGEST),
            (checks.bad_data, 0.0),
            (checks.state_changed, 0.0),
            (checks.recheck, self.recheck.limit("gradient")),
        )
        values, bounds = zip(*(each for each in measured if isinstance(each[0], Tensor)), strict=True)
        # One kernel for all differences. The sign of a difference is exact, and NaN <= 0 is False: NaN closes the gate.
        return (torch.stack(torch._foreach_sub(values, bounds)) <= 0).all()

    def judge(self, reading: Reading) -> Verdict:
        """Returns the verdict on a step and updates counts and limits."""
        if reading.applied:
            self.consecutive = 0
            self.trouble = max(self.trouble - 1, 0)
            self.limits.add(reading)
            self.recheck.learn(reading)
            if self.recheck.wrong(reading):  # the update was applied, so the weights are wrong
                self.kind = "recheck"
                return self.distrust(UPDATE_DIFFERS)
            self._alarms += self.slow_spikes.add(reading)
            found = self.divergence.add(reading.step, reading.loss)
            if found is None:
                return Verdict.APPLY
            self.kind, self.reason, self.since = "diverged", found.text, found.since
            return Verdict.HALT
        self.kind, self.reason = self.why(reading)
        self.skips[self.kind] += 1
        if self.kind == "state":
            return self.distrust(self.reason)
        if self.kind == "overflow":  # routine calibration: neither trouble nor a consecutive skip
            return Verdict.SKIP
        self.consecutive += 1
        if self.kind not in ("bad_data", "recheck"):  # these say nothing about the weights
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

    def judge_validation(self, step: int, loss: float) -> Verdict:
        """Returns APPLY; raises an alarm if validation losses have risen.

        Args:
            step: number of steps of the evaluated state.
            loss: nats per target, or whatever the objective measures.
        """
        self._alarms += self.slow_spikes.add_validation(step, loss)
        return Verdict.APPLY

    def new_alarms(self) -> list[Alarm]:
        """Returns the slow spikes found since the last call."""
        found, self._alarms = self._alarms, []
        return found

    def begin_anew(self, loss: float | None) -> None:
        """Adapts to other settings, with which the run is resumed: they get the whole patience.

        Args:
            loss: of the first batch under the other settings; None if unknown. Above the limit, all limits begin anew,
                because they would stop a run whose loss has only been defined otherwise.
        """
        self.consecutive = self.trouble = 0
        self._look_anew()
        if loss is not None and loss > self.limits.loss.value:
            self.limits = Limits(self.sigma, self.window)

    def distrust(self, why: str) -> Verdict:
        """Returns HALT for a corrupted state: this guard retains no state to restore."""
        self.reason = f"{why}: resume=auto continues from the last checkpoint; guard=rollback rolls back automatically"
        return Verdict.HALT

    @property
    def bounds(self) -> tuple[float, float]:
        """Largest loss and gradient norm that open the gate."""
        return self.limits.loss.value, self.limits.norm.value

    @property
    def note(self) -> str:
        """Text after the guard's name in the first lines of the run: when spike detection by the window begins."""
        spikes = f"its window judges spikes after {self.limits.cold_steps} updates"
        every = self.state_check.every
        state = {0: "no checksums", 1: "checksums every update"}.get(every, f"checksums every {every} updates")
        healed = f"; a halt starts a what-if of up to {self.whatif_steps:,} steps" if self.escalate == "whatif" else ""
        return f" ({'no spike detection' if math.isinf(self.sigma) else spikes}; {state}{healed})"

    @property
    def healthy(self) -> bool:
        """Whether the run is out of trouble: `trouble` is 0."""
        return self.trouble == 0

    def trouble_at_end(self) -> str | None:
        """Returns a warning if the run ended in trouble, or else None."""
        if self.healthy:
            return None
        skipped = self.consecutive or self.trouble
        return f"the run ended in trouble: {skipped} of its last steps were skipped ({self.reason})"

    def why(self, reading: Reading) -> tuple[str, str]:
        """Returns kind and reason of a skipped step."""
        if reading.state_changed:  # first: whatever else is wrong may follow from it
            return "state", CHANGED
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
        if self.recheck.wrong(reading):
            return "recheck", GRADIENT_DIFFERS
        return "spike", self.limits.passed(reading)

    def state_dict(self) -> dict:
        """Counts and windows, for the checkpoint."""
        counts = {"consecutive": self.consecutive, "trouble": self.trouble}
        series = {
            "limits": self.limits.state_dict(),
            "recheck": self.recheck.state_dict(),
            "slow_spikes": self.slow_spikes.state_dict(),
            "divergence": self.divergence.state_dict(),
        }
        return {**super().state_dict(), **counts, **series}

    def load_state_dict(self, state: dict) -> None:
        """Restores counts and windows; those that the checkpoint of another kind of guard lacks begin anew."""
        super().load_state_dict(state)
        self.consecutive = state.get("consecutive", 0)
        self.trouble = state.get("trouble", 0)
        self._alarms = []
        if "limits" in state:
            self.limits.load_state_dict(state["limits"])
        else:
            self.limits = Limits(self.sigma, self.window)
        self.recheck.load_state_dict(state.get("recheck", {}))
        self.slow_spikes.load_state_dict(state.get("slow_spikes", {}))
        self.divergence.load_state_dict(state.get("divergence", {}))
