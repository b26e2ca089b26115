"""`SkipGuard` skips unsafe updates and continues with the next batch.

In a run of `train.py`, a loss, a gradient norm or an input above its limit (`limits.py`) is a spike. In a user's loop,
nothing is known about the loss: it may be negative (densities, Boltzmann machines), may be pulled in two directions
(adversarial training), or may rise a thousandfold in the second step and fall again. There a high loss alone is no
spike (`lone_loss_is_spike`). A step is a spike if

    the gradient norm is above its limit, or
    the loss is above its limit, half a window of steps was applied, and the norm is above half of its limit

`high_norms.py` has the exceptions.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from stabletrain.errors import ConfigError
from stabletrain.guard.checks.recheck import recheck_every
from stabletrain.guard.checks.state_check import UNKNOWN, NoStateCheck, StateCheck
from stabletrain.guard.checks.update_check import NoUpdateCheck, UpdateCheck
from stabletrain.guard.policy.high_norms import NoHighNorms
from stabletrain.guard.policy.kept import KeepingGuard
from stabletrain.guard.policy.limits import KINDS, UPDATE_DIFFERS, Limits, kind_and_reason
from stabletrain.guard.policy.slow import Divergence, NoDivergence, NoSlowSpikes, slow_spikes
from stabletrain.monitors.rolling import Alarm
from stabletrain.monitors.update_length import NoLengths
from stabletrain.records import LARGEST, GradNorms, LossTerms, Reading, StepChecks, Verdict

ESCALATIONS = ("halt", "whatif")

MOST_BAD_UPDATES = 3
"""The run halts after this many updates in a row that were not finite: another batch does not repair an optimizer."""

NORM_SHARE = 0.5
"""If a high loss alone is no spike, it is one together with a gradient norm above this share of its limit."""


@dataclass
class SkipGuard(KeepingGuard):
    """Skips steps with bad data, non-finite values or spikes, and halts if the skips do not end.

    Attributes:
        sigma: standard deviations above the recent mean at which a spike begins (`limits.py`).
        window: number of applied steps from which mean and standard deviation are computed.
        max_consecutive: number of consecutive skipped steps that halts the run; fp16's overflows do not count.
        checksum_every: updates between two comparisons of the state with what the last update left (`state_check.py`);
            0 for none, None for as often as costs little.
        recheck_every: steps between two repetitions of a gradient and an update (`recheck.py`); 0 for none.
        recheck_across: `ranks` also compares a gradient with that of another rank (`neighbours.py`); `none` does not.
        check_update: whether updates of an optimizer that is not proven to be safe are checked (`update_check.py`).
        slow: what happens after a slow spike (`slow.py`): `off`, `alarm`, or with a `RollbackGuard` `rollback`.
        slow_rate: false alarms of slow spikes in 100,000 clean steps for which their threshold is chosen.
        keep: `all_but_guilty` takes a held step again without the samples at fault (`kept.py`); `none` skips it.
        escalate: what happens after a halt: `halt`, or `whatif`, which tries fixes and goes on (`whatif/healing.py`).
            With `whatif`, the run also halts if it has diverged (`slow.py`).
        whatif_steps: number of steps that the fixes may train, together and in the whole run.
        skips: number of skipped steps by kind.
        lone_loss_is_spike: whether a high loss alone is a spike; False in a user's loop.
        high_norms: high gradient norms that are accepted in a user's loop.
        state_check: compares the state with what the last update left.
        limits, slow_spikes, divergence: the statistics of applied steps.
    """

    sigma: float = 6.0
    window: int = 128
    max_consecutive: int = 100
    checksum_every: int | None = None
    recheck_every: int = 250
    recheck_across: str = "none"
    check_update: bool = True
    slow: str = "alarm"
    slow_rate: float = 0.1
    escalate: str = "halt"
    whatif_steps: int = 4000
    skips: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    lone_loss_is_spike: bool = field(init=False, repr=False, default=True)
    high_norms: NoHighNorms = field(init=False, repr=False, default_factory=NoHighNorms)
    limits: Limits = field(init=False, repr=False)
    slow_spikes: NoSlowSpikes = field(init=False, repr=False)
    divergence: NoDivergence = field(init=False, repr=False)
    _alarms: list[Alarm] = field(init=False, repr=False, default_factory=list)
    _incident: Any = field(init=False, repr=False, default=None)

    slow_modes: ClassVar[tuple[str, ...]] = ("off", "alarm")

    def __post_init__(self) -> None:
        super().__post_init__()
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
        if not isinstance(self.check_update, bool):
            raise ConfigError(f"guard.check_update={self.check_update} is neither true nor false")
        self.recheck = recheck_every(self.recheck_every, self.recheck_across)
        self.update_check = UpdateCheck() if self.check_update else NoUpdateCheck()
        self._reset_detectors()

    def _reset_detectors(self) -> None:
        """Starts the detectors of slow spikes and of divergence from an empty history."""
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
        (loss_limit, norm_limit), limits = self.bounds, self.limits
        values = [terms.total, terms.total.abs(), norms.total]
        bounds = [loss_limit, limits.loss.size if self.lone_loss_is_spike else LARGEST, norm_limit]
        within = True
        for value, bound in (
            (checks.inputs, limits.inputs.value),
            (checks.buffers, LARGEST),
            (checks.bad_data, 0.0),
            (checks.state_changed, 0.0),
            (checks.recheck, self.recheck.limit("gradient")),
        ):
            if isinstance(value, Tensor):
                values.append(value)
                bounds.append(bound)
            else:  # the host knows it, so it costs no kernel
                within = within and value <= bound
        # One kernel for all differences. The sign of a difference is exact, and NaN <= 0 is False: NaN closes the gate.
        excess = [*torch._foreach_sub(values, bounds)]
        if not self.lone_loss_is_spike:  # the gate closes only if both differences are above 0
            excess[0] = torch.minimum(excess[0], norms.total - NORM_SHARE * norm_limit)
        gate = (torch.stack(excess) <= 0).all()
        return gate if within else torch.zeros_like(gate)

    def judge(self, reading: Reading) -> Verdict:
        """Returns the verdict on a step and updates counts and limits."""
        self._alarms += self._count_kept(reading, self.window)
        return self._judge_applied(reading) if reading.applied else self._judge_skipped(reading)

    def _judge_applied(self, reading: Reading) -> Verdict:
        self._end_retry(reading.step)
        # One applied step ends a row of skips. `trouble` falls by one only, so that a run in which every other step is
        # skipped does not count as healthy.
        self.consecutive = self.bad_updates = 0
        self.trouble = max(self.trouble - 1, 0)
        high_loss = reading.loss > self.bounds[0] and reading.grad_norm > NORM_SHARE * self.limits.norm.value
        self.high_norms.note_applied(reading, self.limits, high_loss or reading.grad_norm > self.limits.norm.value)
        # Only applied steps enter the statistics: a spike must not raise the limit that has just stopped it.
        self.limits.add(reading)
        self.recheck.learn(reading)
        if self.recheck.differing_part(reading):  # the update was applied; the caller finds out whether it is a fault
            self.kind, self.reason = "recheck", UPDATE_DIFFERS
            return Verdict.APPLY
        # Last, look for faults that show only over many steps.
        self._alarms += self.slow_spikes.add(reading)
        found = self.divergence.add(reading.step, reading.loss)
        if found is None:
            return Verdict.APPLY
        self.kind, self.reason, self.since = "diverged", found.text, found.since
        return Verdict.HALT

    def _judge_skipped(self, reading: Reading) -> Verdict:
        self._begin_skip()
        differs = bool(self.recheck.differing_part(reading)) or math.isinf(reading.recheck)
        self.kind, self.reason = kind_and_reason(reading, self.limits, gradient_differs=differs)
        self.skips[self.kind] += 1
        accepted = self.high_norms.accept(self.kind, reading, self.limits)
        if self.kind == "state":  # the weights are damaged: no later step can be right
            return self.on_machine_fault(reading.step, self.reason, damaged=True)
        if self.kind == "overflow":  # routine calibration: neither trouble nor a consecutive skip
            return Verdict.SKIP
        self.consecutive += 1
        if self.kind == "update":  # neither the weights nor the data are at fault
            return self._judge_bad_update()
        if self.kind not in ("bad_data", "recheck"):  # these say nothing about the weights
            self.trouble += 1
        if accepted:  # these skips were no trouble
            self.consecutive, self.trouble = 0, max(self.trouble - accepted, 0)
        return self._skip_or_halt()

    def _judge_bad_update(self) -> Verdict:
        """Returns the verdict on an update that was not finite, and was undone."""
        self.bad_updates += 1
        if self.bad_updates < MOST_BAD_UPDATES:
            return self._skip_or_halt()
        self.reason = f"{self.reason}, in {self.bad_updates} steps in a row: other batches do not help"
        if self._incident is not None:
            self.reason += f"; {self._incident.verdict}. fix: {next(iter(self._incident.fix), 'none known')}"
        return Verdict.HALT

    def _skip_or_halt(self) -> Verdict:
        """Returns SKIP, or HALT at the last of `max_consecutive` skips in a row."""
        if self.consecutive < self.max_consecutive:
            return Verdict.SKIP
        known = () if self._incident is None else self._incident.fix
        fix = f"every batch fails on these weights; {f'fix: {known[0]}' if known else self.gentler_updates}"
        if self.kind == "bad_data":
            fix = "look at the data; events.jsonl names each sample"
        row = f"{self.option('max_consecutive')} steps in a row were skipped"
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
        """Returns the slow spikes found since the last call, and in a user's loop alarms of the gradient norm."""
        found, self._alarms = self._alarms + self.high_norms.new_alarms(), []
        return found

    def reset_for_new_settings(self, loss: float | None) -> None:
        """Adapts to the other settings with which the run is resumed: skips from before no longer count.

        Args:
            loss: of the first batch under the other settings; None if unknown. If it is above the limit, all limits are
                reset: they would stop a run in which only the definition of the loss has changed.
        """
        self.consecutive = self.trouble = 0
        self._reset_detectors()
        if loss is not None and loss > self.limits.loss.value:
            self.limits = Limits(self.sigma, self.window)

    def note_mistake(self, incident: Any) -> None:
        """Remembers the incident of the present trouble; see `forensics/handler.py`."""
        self._incident = incident

    @property
    def bounds(self) -> tuple[float, float]:
        """Limits of loss and gradient norm; none for the loss in a cold window, if a high loss alone is no spike."""
        loss = self.limits.loss
        return (loss.value if self.lone_loss_is_spike or loss.warm else LARGEST), self.high_norms.limit(self.limits)

    @property
    def note(self) -> str:
        """Text after the guard's name in the first lines of the run: when spike detection by the window begins."""
        spikes = f"its window judges spikes after {self.limits.cold_steps} updates"
        every = self.state_check.every
        state = {0: "no checksums", 1: "checksums every update"}.get(every, f"checksums every {every} updates")
        healed = f"; a halt starts a what-if of up to {self.whatif_steps:,} steps" if self.escalate == "whatif" else ""
        kept = "; a bad step is applied without its guilty samples" if self.keeps else ""
        return f" ({'no spike detection' if math.isinf(self.sigma) else spikes}; {state}{kept}{healed})"

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

    def state_dict(self) -> dict:
        """Counts and windows, for the checkpoint."""
        return super().state_dict() | {
            "limits": self.limits.state_dict(),
            "recheck": self.recheck.state_dict(),
            "slow_spikes": self.slow_spikes.state_dict(),
            "divergence": self.divergence.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores counts and windows; what the checkpoint of another kind of guard lacks is reset."""
        super().load_state_dict(state)
        self._alarms = []
        self.high_norms.reset()
        if "limits" in state:
            self.limits.load_state_dict(state["limits"])
        else:
            self.limits = Limits(self.sigma, self.window)
        self.recheck.load_state_dict(state.get("recheck", {}))
        self.slow_spikes.load_state_dict(state.get("slow_spikes", {}))
        self.divergence.load_state_dict(state.get("divergence", {}))
